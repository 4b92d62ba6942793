"""Masks of packed rows: attention within each document is that of the document alone."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

from treadle.data import make_flex_mask, make_sdpa_mask, pack


@pytest.mark.long
@pytest.mark.parametrize("causal", [True, False])
def test_masks_keep_documents_apart(causal):
    rows = [row["seq_idx"] for row in pack([list(range(count)) for count in (1, 3, 5, 7, 9, 11)], 16)]
    seq_idx = torch.stack(rows)
    query, key, value = torch.randn(3, len(rows), 2, 16, 8).unbind()
    attended = F.scaled_dot_product_attention(query, key, value, make_sdpa_mask(seq_idx, causal))
    for row, numbers in enumerate(rows):
        for number in numbers.unique():
            of_one = [part[row][:, numbers == number] for part in (query, key, value)]
            alone = F.scaled_dot_product_attention(*of_one, is_causal=causal)
            torch.testing.assert_close(attended[row][:, numbers == number], alone)
    with warnings.catch_warnings(action="ignore"):  # that it is not compiled
        flexible = flex_attention(query, key, value, block_mask=make_flex_mask(seq_idx, causal))
    torch.testing.assert_close(flexible, attended)
