"""What is misspelled is answered with the nearest."""

from treadle.cli.commands.runs import main


def test_a_misspelled_subcommand_is_answered_with_the_nearest(capsys):
    assert main(["shw"]) == 2
    assert "Did you mean 'show'?" in capsys.readouterr().err
