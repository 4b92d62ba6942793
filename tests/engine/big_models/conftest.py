"""Fixtures of big models."""

import pytest
import torch
from support.language_model import LanguageModel


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    return LanguageModel().eval()
