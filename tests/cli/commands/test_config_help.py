"""Help about commands and about what a configuration may hold."""

import pytest

from treadle.__main__ import main

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["usage: treadle fit", "--config FILE", "--from-run RUN", "lr_scheduler", "~KEY"]),
        (["--help", "trainer"], ["max_epochs: int or null; default null", "Epochs to train; -1 sets no limit"]),
        (["--help", "EarlyStopping"], ["monitor: text; required", "treadle.callbacks.early_stopping", "patience: int"]),
        (["--help", "cli_samples.Line"], ["Fits a line.", "lr: float; default 0.01\n      the learning rate."]),
        (["--config", "run.yaml", "--help", "model"], ["cli_samples.Line", "backbone: Module or null"]),
        (["optimizer=AdamW", "--help", "optimizer"], ["weight_decay: float", "default [0.9, 0.999]"]),
        (["--help", "cli_samples.Many"], ["mode: 'min' or 'max'", "hidden: int; required", "color: 'RED' or 'BLUE'"]),
    ],
    ids=str,
)
def test_help(arguments, words, capsys):
    assert main(["fit", *arguments]) == 0
    said = capsys.readouterr().out
    assert [word for word in words if word not in said] == [], said
    assert max(map(len, said.splitlines())) < 180


@pytest.mark.parametrize("columns", [70, 80, 100])
def test_help_fits_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["fit", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert "lr_scheduler" in "".join(lines)


def test_help_about_nothing(capsys):
    assert main(["fit", "--help", "EarlyStoping"]) == 2
    assert "'EarlyStopping'?" in capsys.readouterr().err
    assert main(["fit", "--help", "model"]) == 2
    assert "names no class for 'model'" in capsys.readouterr().err
