"""README.md and docs/ hold what they say: their code runs, and the commands, files and tests they name exist."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import clean_environment, script

import treadle

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- not run: *(.*?) *-->\n+)?```(\w+)[^\n]*\n(.*?)```", re.DOTALL)


def blocks(language):
    """Every block of a language that is to be run, as (document, number in it, text)."""
    found = []
    for document in DOCUMENTS:
        matches = [match for match in BLOCK.finditer(document.read_text()) if match[3] == language]
        found += [
            pytest.param(match[4], id=f"{document.name}-{number}")
            for number, match in enumerate(matches)
            if not match[1]
        ]
    return found


def python_blocks_of_readme():
    return [match[4] for match in BLOCK.finditer(README) if match[3] == "python"]


def test_a_block_is_left_out_only_with_a_reason():
    for document in DOCUMENTS:
        for match in BLOCK.finditer(document.read_text()):
            assert match[1] is None or len(match[2]) > 10, f"{document.name}: say why it is not run"


@pytest.mark.parametrize("source", blocks("python"))
def test_python_block_runs(source):
    done = script(source, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [0, 1], ids=["trainer", "own-loop"])
def test_readme_example_runs_on_two_processes(number, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(python_blocks_of_readme()[number])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean_environment({"CUDA_VISIBLE_DEVICES": ""}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # Rank zero's words, once: the last line is a measured accuracy in both examples.
    assert done.stdout.count("tensor(") == (1 if number == 0 else 5)
    checkpoint = tmp_path / "checkpoint" if number else next(tmp_path.glob("treadle_logs/*/checkpoints/*.ckpt"))
    assert (checkpoint / "manifest.json").exists()


def test_shell_commands_exist():
    lines = [
        line.split("#")[0].split()
        for match in BLOCK.finditer(README)
        if match[3] == "bash"
        for line in match[4].splitlines()
    ]
    commands = [words for words in lines if words]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = [words[1] for words in commands if words[0] == "make"]
    assert {"demo", "test"} <= set(made) <= set(targets)
    for words in commands:
        assert words[0] in ("make", "pip", "python", "torchrun"), words


def test_named_files_exist():
    for document in DOCUMENTS:
        text = document.read_text()
        named = re.findall(r"\b(?:examples|tests|docs)/[\w/]+\.\w+", text) + re.findall(r"\]\(([\w./]+)\)", text)
        for name in named:
            assert (ROOT / name).exists(), f"{document.name} names {name}"


def test_folders_are_the_installed_packages():
    rows = re.findall(r"^\| `(\w+)/` \|.*\| `([\w.]+)` \|$", README, re.MULTILINE)
    assert len(rows) == 6
    for folder, name in rows:
        assert Path(importlib.import_module(name).__path__[0]).resolve() == ROOT / folder
    documented = {folder for folder, _ in rows}
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert packages == documented


def test_each_promise_is_there_and_names_tests_that_exist():
    rows = dict(re.findall(r"^\| (G\d+) \|.*\| ([^|]*) \|$", README, re.MULTILINE))
    assert list(rows) == [f"G{number}" for number in range(1, 16)]
    for promise, today in rows.items():
        tests = re.findall(r"`([\w/]+\.py)::(test_\w+)`", today)
        if today == "planned":
            continue
        assert today.startswith(("held: ", "in part: ")), promise
        assert tests, promise
        for file, name in tests:
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{promise}: {file}::{name}"


def missing(name):
    """Whether `name`, as the status section writes it, is really not there."""
    if match := re.fullmatch(r"(Trainer|Accelerator)\((\w+)=\)", name):
        return match[2] not in getattr(treadle, match[1]).__init__.__kwdefaults__
    if match := re.fullmatch(r"Accelerator\.(\w+)", name):
        return not hasattr(treadle.Accelerator, match[1])
    if match := re.fullmatch(r"treadle\.(\w+)", name):
        return not hasattr(treadle, match[1]) and importlib.util.find_spec(name) is None
    if match := re.fullmatch(r'strategy="(\w+)"', name):
        return match[1] not in treadle.strategies.strategy_names()
    return name == "automatic_optimization = False"


def test_what_the_status_calls_missing_is_missing():
    names = re.findall(r"`([^`]+)`", README.split("Not there yet:")[1])
    assert len(names) > 10
    assert [name for name in names if not missing(name)] == []


def test_the_readme_stays_short():
    assert len(README.splitlines()) < 200
