"""The summary of a model as rich's table."""

import re

from support.callback_runs import Example, fit
from treadle.callbacks import ModelSummary, RichModelSummary, RichProgressBar

from treadle import Trainer


def test_rich(tmp_path, capsys):
    fit(tmp_path, RichModelSummary(header_style="red"), task=Example(), max_steps=1)
    text = capsys.readouterr().err
    assert re.search(r"net\s+│ Linear │\s+3 │ train │\s+12 │ \[3, 2\] │ \[3, 1\]", text), text
    assert "3 parameters: 3 trainable" in text


def test_beside_a_rich_bar_the_default_is_a_rich_table():
    def kinds(*callbacks):
        trainer = Trainer(accelerator="cpu", devices=1, logger=False, callbacks=list(callbacks))
        return [type(callback) for callback in trainer.callbacks if isinstance(callback, ModelSummary)]

    assert kinds(RichProgressBar()) == [RichModelSummary]
    assert kinds(RichProgressBar(), ModelSummary()) == kinds() == [ModelSummary]
