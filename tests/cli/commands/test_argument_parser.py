"""What is misspelled is answered with the nearest."""

import pytest
from treadle.cli.commands.runs import main


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "40")


def test_a_misspelled_subcommand_is_answered_with_the_nearest(capsys):
    assert main(["shw"]) == 2
    assert "Did you mean 'show'?" in capsys.readouterr().err
