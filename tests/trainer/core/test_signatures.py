"""What arguments are for, by docstrings."""

import cli_samples
import torch
from treadle.trainer.core.signatures import described

import treadle


def test_words_of_docstrings():
    words = described(cli_samples.Line)
    assert words["backbone"] == "what maps four numbers to two; a linear layer by default."
    assert described(torch.nn.Linear)["in_features"] == "size of each input sample"
    assert "learning rate" in described(torch.optim.AdamW)["lr"]
    assert (
        described(treadle.Trainer)["limit_val_batches"]
        == "Maximum number (int) or fraction (float) of batches of each validation dataloader. Default: all batches."
    )
