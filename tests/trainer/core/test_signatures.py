"""What arguments are for, by docstrings."""

import cli_samples
import torch
from treadle.trainer.core.signatures import described, signature

import treadle


def test_words_of_docstrings():
    words = described(cli_samples.Line)
    assert words["backbone"] == "what maps four numbers to two; a linear layer by default."
    assert described(torch.nn.Linear)["in_features"] == "size of each input sample"
    assert "learning rate" in described(torch.optim.AdamW)["lr"]
    assert "of batches of each validation dataloader" in described(treadle.Trainer)["limit_val_batches"]


def test_variadic_arguments_that_a_class_hands_on_are_those_of_its_base():
    class Stack(torch.nn.Sequential):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    assert list(signature(Stack).arguments) == list(signature(torch.nn.Sequential).arguments) == ["args"]
