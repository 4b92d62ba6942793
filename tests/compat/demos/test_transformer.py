"""Lightning's small transformer and its data; expected values are those of lightning 2.6.6."""

import pytest
import torch
from treadle.compat.demos.transformer import Transformer, WikiText2


def test_the_transformer_of_the_demos_has_lightnings_numbers(tmp_path) -> None:
    torch.manual_seed(0)
    transformer = Transformer(10, ninp=8, nhead=2, nhid=8, dropout=0.0)
    words = torch.arange(8).view(2, 4)
    assert transformer(words, words).sum().item() == pytest.approx(-196.79595947265625, rel=1e-5)
    (tmp_path / "wikitext-2.txt").write_text("a b\nb c\n")
    text = WikiText2(tmp_path, block_size=2, download=False)
    # a b <eos> b c <eos>
    assert (text.vocab_size, len(text)) == (4, 2)
    assert [part.tolist() for part in text[1]] == [[2, 1], [1, 3]]
