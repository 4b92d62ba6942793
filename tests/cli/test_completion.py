"""What a shell is told to complete, and that the shells take the scripts."""

import shutil
import subprocess
import sys

import pytest
from treadle.cli.completion import SCRIPTS, list_candidates

from treadle.__main__ import main


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: {class_path: a.B, init_args: {lr: 1, net: {width: 2}}}\n")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("treadle f", ["fit"]),
        ("treadle completion z", ["zsh"]),
        ("treadle fit --c", ["--config"]),
        ("treadle fit --config ", []),  # files, which the shell knows
        ("treadle fit tr", ["trainer."]),
        ("treadle fit trainer.max_e", ["trainer.max_epochs="]),
        ("treadle fit trainer.strategy=fsdp", ["trainer.strategy=fsdp", "trainer.strategy=fsdp_cpu_offload"]),
        ("treadle fit trainer.barebones=", ["trainer.barebones=false", "trainer.barebones=true"]),
        ("treadle fit trainer.callbacks+=EarlyS", ["trainer.callbacks+=EarlyStopping"]),
        ("treadle fit -c run.yaml model.", ["model.class=", "model.lr=", "model.net."]),
        ("treadle fit --config=run.yaml model.net.", ["model.net.width="]),
        ("treadle fit -c none.yaml model.x", []),
        ("treadle fit 'open", []),
        ("treadle launch tr", []),
    ],
)
def test_candidates(line, found):
    assert list_candidates(line) == found


def test_bash_gets_what_stands_behind_the_equals_sign():
    assert list_candidates("treadle fit trainer.strategy=fsdp_", in_parts=True) == ["fsdp_cpu_offload"]


def test_nothing_waits_for_torch():
    source = (
        "import sys; from treadle.cli.completion import list_candidates as c; c('treadle fit -c run.yaml trainer.'); "
    )
    done = subprocess.run(
        [sys.executable, "-c", source + "print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("shell", SCRIPTS)
def test_scripts(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "treadle completion words" in script
    if shutil.which(shell) is not None:
        check = ["-n"] if shell != "fish" else ["--no-execute"]
        subprocess.run([shell, *check], input=script, text=True, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path):
    """As bash does on Tab: it calls the function with the line so far."""
    line = "treadle fit trainer.strategy=fsdp_c"
    lines = [
        f'treadle() {{ {sys.executable} -m treadle "$@"; }}',
        'eval "$(treadle completion bash)"',
        f"COMP_LINE={line!r} COMP_POINT={len(line)}",
        "_treadle 2>/dev/null",
        'echo "${COMPREPLY[@]}"',
    ]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.stdout.split() == ["fsdp_cpu_offload"], done.stderr


def test_unknown_shell(capsys):
    assert main(["completion", "csh"]) == 2
    assert "'csh' is not one of bash, zsh, fish" in capsys.readouterr().err
    assert main(["completion", "--help"]) == 0
