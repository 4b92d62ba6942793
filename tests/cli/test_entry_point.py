"""Commands that packages register in the entry-point group ``treadle.commands``."""

import argparse
import re
import sys
import types

import pytest

import treadle
from treadle.__main__ import main


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a command that works, one whose module raises, and one with the name of a command of Treadle."""
    info = tmp_path / "polish-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: polish\nVersion: 1.0\n")
    commands = ["[treadle.commands]", "polish = polish_command", "scratch = scratch_command", "fit = polish_command"]
    (info / "entry_points.txt").write_text("\n".join(commands))
    (tmp_path / "scratch_command.py").write_text("import a_package_that_is_missing\n")

    parser = argparse.ArgumentParser()
    parser.add_argument("--wax")
    polish = types.SimpleNamespace(
        SUMMARY="make it shine",
        main=lambda arguments: print(arguments) or 7,
        run_for_script=lambda arguments, program, *rest: print(arguments, program.split()[-1], *rest) or 8,
        build_parser=lambda: parser,
    )
    monkeypatch.setitem(sys.modules, "polish_command", polish)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_registered_command_is_listed_completed_and_run(package, capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line.split(maxsplit=1) for line in lines if "polish" in line) == ["polish", "make it shine"]
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert names == sorted(names)
    assert main(["polish", "--wax", "2"]) == 7
    assert capsys.readouterr().out == "['--wax', '2']\n"
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert "polish" in script
    assert "--wax" in script
    assert main(["polsh"]) == 2
    assert "unknown command 'polsh'. Did you mean 'polish'?" in capsys.readouterr().err


def test_a_command_that_cannot_be_loaded_is_named_with_its_error(package, capsys):
    error = "scratch_command, which raises ModuleNotFoundError: No module named 'a_package_that_is_missing'"
    assert main(["scratch"]) == 1
    text = capsys.readouterr().err
    assert text == f"treadle: the command 'scratch' can't be loaded: the package polish registers {error}\n"
    assert main(["--help"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  scratch"))
    assert line.endswith(f"can't be loaded: the package polish registers {error}")


def test_a_script_offers_registered_commands(package, capsys):
    with pytest.raises(SystemExit, match="8"):
        treadle.cli.run(defaults={"seed": 1}, arguments=["polish", "a=1"])
    assert re.fullmatch(r"\['a=1'\] polish \[.*\] None None {'seed': 1}\n", capsys.readouterr().out)
    with pytest.raises(SystemExit, match="1"):
        treadle.cli.run(arguments=["scratch"])
    assert "the command 'scratch' can't be loaded" in capsys.readouterr().err


def test_a_package_does_not_replace_a_command(package, capsys):
    assert main(["fit", "--help"]) == 0
    assert "train a task" in capsys.readouterr().out.lower()
