"""A script with a command line of its own."""

import sys
from pathlib import Path

import cli_samples
import pytest
import torch
from support.command_runs import by_hand
from support.processes import script

import treadle

pytestmark = pytest.mark.usefixtures("here")


def test_a_script_becomes_a_command_line(here, capsys):
    done = treadle.cli.run(
        cli_samples.Line,
        cli_samples.Points,
        defaults={"trainer": {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}},
        arguments=["fit", "model.lr=0.02", "trainer.max_epochs=2"],
    )
    assert torch.equal(done.model.net.weight, by_hand())
    assert done.trainer.current_epoch == 2
    for arguments, status, words in (
        (["fit", "model.lrr=1"], 2, "Line has no argument 'lrr'"),
        (["fit", "--help"], 0, "usage: python"),
        (["fit", "--help", "model"], 0, "Fits a line."),
        (["fti"], 2, "'fti' is not one of fit, validate, test, predict"),
        ([], 2, "a command is missing"),
    ):
        with pytest.raises(SystemExit) as raised:
            treadle.cli.run(cli_samples.Line, cli_samples.Points, arguments=arguments)
        assert raised.value.code == status
        said = capsys.readouterr()
        assert words in said.out + said.err


SCRIPT = """
from cli_samples import Line, Points
from treadle import cli

if __name__ == "__main__":
    done = cli.run(Line, Points)
    done.trainer.print("lr", done.model.lr)
"""


@pytest.mark.slow
def test_a_script_in_processes():
    words = ["fit", "trainer.devices=2", "trainer.accelerator=cpu", "trainer.max_epochs=1", "model.lr=0.5"]
    done = script(SCRIPT, *words, env={"PYTHONPATH": str(Path(cli_samples.__file__).parent)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("lr 0.5") == 1


def test_a_script_does_not_print_json(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["digits.py", "fit", "--json"])
    with pytest.raises(SystemExit, match=r"digits.py: --json is an option of `treadle`, because a script prints text"):
        treadle.cli.run()
