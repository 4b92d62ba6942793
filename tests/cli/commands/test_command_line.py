"""Options of the commands: their spellings, and what is wrong with them."""

import subprocess
import sys
import time

import pytest
import torch
from support.command_runs import by_hand, weights
from treadle.cli.commands import command_line

from treadle.__main__ import main

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.long
def test_every_command_takes_every_spelling_of_a_run(here, capsys):
    for name in ("one", "two"):
        assert main(["fit", "--config", "run.yaml", f"run.name={name}", "trainer.max_epochs=1"]) == 0
    assert main(["fit", "--config", "run.yaml", "run.name=two", "model.lr=0.04", "trainer.max_epochs=1"]) == 0
    (saved,) = (here / "runs" / "two" / "2" / "checkpoints").glob("*.ckpt")
    for said in ("2", "two/2", "runs/two/2", "runs/two/2/", str(saved), "runs/two/2/config.yaml"):
        capsys.readouterr()
        assert main(["runs", "show", said]) == 0
        assert capsys.readouterr().out.startswith("two/2  finished")
        assert main(["fit", "--from-run", said, "--print-config"]) == 0
        assert "lr: 0.04" in capsys.readouterr().out
        assert main(["validate", "--from-run", said, "trainer.enable_progress_bar=false"]) == 0
    for command in (["runs", "show", "1"], ["fit", "--from-run", "1"]):
        assert main(command) == 2
        assert "1 is the number of several runs: one/1, two/1. Also pass the name" in capsys.readouterr().err
    assert main(["fit", "--from-run", "2", "ckpt_path=last", "trainer.max_epochs=2"]) == 0
    assert sorted(str(path.relative_to(here / "runs")) for path in here.glob("runs/*/*")) == ["one/1", "two/1", "two/2"]
    (here / "runs").rename(here / "elsewhere")
    assert main(["fit", "--from-run", "two/2", "run.dir=elsewhere", "--print-config"]) == 0
    assert "lr: 0.04" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trainer.max_epochs=-3"], ["treadle fit: command line: trainer.max_epochs", "max_epochs=-3", "-1"]),
        (["trainer.callbacks+={class: EarlyStopping, monitor: a, mode: up}"], ["callbacks.0: EarlyStopping", "'up'"]),
        (["run.name=a/b"], ["command line: run: name='a/b'"]),
        (["run.dir=/dev/null/runs"], ["command line: run: cannot create a run's folder"]),
        (["trainer.default_root_dir=x"], ["trainer.default_root_dir", "the folder of this run"]),
        (["model.lrr=1", "seed=x"], ["treadle fit: 2 problems:\n  command line: model.lrr", "\n  command line: seed"]),
        (["ckpt_path=nowhere"], ["command line: ckpt_path: ckpt_path='nowhere' does not exist"]),
        (["trainer.plugins=[1]"], ["command line: trainer.plugins: plugins="]),
        (["--from-run", "nowhere"], ["--from-run nowhere", "no run 'nowhere'", "default/3"]),
        (["--from-run", "7"], ["--from-run 7", "there are no runs in runs"]),
        (["--from-run", "\x1b]0;title\x07"], ["--from-run ?]0;title?"]),
    ],
    ids=str,
)
def test_errors_are_words_and_status_2(arguments, words, here, capsys):
    assert main(["fit", "--config", "run.yaml", *arguments]) == 2
    assert list(here.glob("runs/*/*")) == []
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == [], said
    assert "Traceback" not in said


def test_lightnings_spelling(here):
    assert main(["fit", "--config=run.yaml", "--trainer.max_epochs", "1", "--model.lr=0.5", "--print_config"]) == 0
    assert main(["fit", "--config", "run.yaml", "--trainer.max_epochs=1", "--model.init_args.lr", "0.02"]) == 0
    assert torch.equal(weights("runs/default/1"), by_hand(epochs=1))


@pytest.mark.parametrize(("wrong", "right"), [("train", "fit"), ("evaluate", "validate"), ("fti", "fit")])
def test_a_command_of_another_name(wrong, right, capsys):
    assert main([wrong]) == 2
    assert f"unknown command {wrong!r}. Did you mean {right!r}?" in capsys.readouterr().err


def test_words_come_at_once():
    """Without torch, which alone takes a second and more."""
    lines = [["--help"], ["fit", "--help"], ["fit", "--config", "none.yaml"], ["completion", "bash"]]
    source = f"import sys; from treadle.__main__ import main; [main(line) for line in {lines}]\n"
    command = [sys.executable, "-c", source + "assert 'torch' not in sys.modules"]
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    assert time.perf_counter() - began < 5 * len(lines)  # 0.1 s each on an idle machine


def test_errors_are_said_once(monkeypatch, capsys):
    """By rank zero; the others wait until their launcher ends them, and speak if it does not."""
    waited = []
    monkeypatch.setattr(command_line.time, "sleep", lambda seconds: waited.append(seconds or capsys.readouterr().err))
    for rank, local_rank in (("0", "0"), ("1", "1"), ("2", "0"), (None, "1")):
        for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        assert main(["fit", "--config", "none.yaml"]) == 2
        assert "none.yaml: the file does not exist" in capsys.readouterr().err
    assert waited == ["", 6.0, 3.0, 3.0]
