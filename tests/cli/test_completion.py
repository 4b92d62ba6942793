"""The words that a shell is told to complete, and whether the shells take the scripts."""

import inspect
import shutil
import subprocess
import sys

import pytest
from treadle.cli.completion import SHELLS, list_settings
from treadle.cli.entry_point import COMMANDS

import treadle
from treadle.__main__ import main

# As bash does on Tab: it calls the function that is registered for the command, with the words of the line.
BASH = """
complete_line() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    $(complete -p treadle | sed 's/.*-F \\([^ ]*\\).*/\\1/') treadle "${!#}" "" 2>/dev/null
    echo "${COMPREPLY[@]}"
}
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(capsys):
    assert main(["completion", "bash"]) == 0
    found = {
        "treadle f": ["fit"],
        "treadle completion z": ["zsh"],
        "treadle fit --c": ["--config"],
        "treadle fit trainer.max_e": ["trainer.max_epochs="],
        "treadle fit run.name=a trainer.callbacks+=EarlyS": ["trainer.callbacks+=EarlyStopping"],
        "treadle fit trainer.barebones=": [f"trainer.barebones={value}" for value in ("", "false", "true")],
    }
    script = capsys.readouterr().out + BASH + "\n".join(f"complete_line {line}" for line in found)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert dict(zip(found, map(str.split, done.stdout.splitlines()), strict=True)) == found, done.stderr


def test_every_flag_of_the_trainer_is_offered():
    assert {f"trainer.{name}=" for name in inspect.signature(treadle.Trainer).parameters} <= set(list_settings())


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_the_commands(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [command for command in COMMANDS if command not in script] == []
    if shell in ("bash", "zsh", "fish") and shutil.which(shell) is not None:
        check = ["-n"] if shell != "fish" else ["--no-execute"]
        subprocess.run([shell, *check], input=script, text=True, check=True, capture_output=True)


def test_what_is_wrong(capsys, monkeypatch):
    assert main(["completion", "csh"]) == 2
    assert "invalid choice: 'csh' (choose from" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["completion", "--help"])
    assert "treadle completion fish | source" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "Run pip install 'treadle[completion]'" in capsys.readouterr().err
