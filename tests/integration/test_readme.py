"""README.md and docs/ hold what they say: their code and command lines run, the files and tests they name exist.

A block of code is run by what stands behind its language:

    python              a script, on its own, from an empty folder
    python ranks=N      in N processes; those of one document are one script, top to bottom
    python NAME.py      a file for the command lines of the document
    yaml NAME.yaml      the same
    bash                each line is a command, in a folder with these files
    bash together       the lines at the same time, as if on several machines: node1, ... are this one
    bash fails          commands that end with another status than 0
    text says           lines of what the block before it prints, each in this order; `...` stands for anything

`<!-- not run: reason -->` before a block leaves it out. `<!-- make test-all -->` leaves one to `make test-all`: for
blocks that take more than some three seconds.
"""

import importlib
import importlib.util
import linecache
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import clean_environment, programs, python, run, script

import treadle

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- (?:not run: *(.*?)|make test-all) *-->\n+)?```(\w+)([^\n]*)\n(.*?)```", re.DOTALL)
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Block:
    """A block of a document.

    Attributes:
        name: document and number, for people.
        document: its path in docs/, or README.md.
        how: what stands behind the language.
        reason: why it is not run, where it is not.
        long: whether `make test-all` alone runs it.
        says: what it is said to print.
    """

    name: str
    document: str
    language: str
    how: str
    text: str
    reason: str | None
    long: bool = False
    says: str = ""

    @property
    def case(self):
        """The block as a case of a test."""
        return pytest.param(self, id=self.name, marks=[pytest.mark.exhaustive] if self.long else [])


def blocks_of(document):
    found = []
    path = document.relative_to(ROOT / "docs" if document.is_relative_to(ROOT / "docs") else ROOT).as_posix()
    for number, match in enumerate(BLOCK.finditer(document.read_text())):
        long = bool(match[1]) and match[2] is None
        block = Block(f"{path}-{number}", path, match[3], match[4].strip(), match[5], match[2], long)
        if (block.language, block.how) == ("text", "says"):
            found[-1] = Block(**{**vars(found[-1]), "says": block.text})
        else:
            found.append(block)
    return found


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
RUN = [block for block in BLOCKS if block.reason is None]
SCRIPTS = [block for block in RUN if block.language == "python" and not block.how]
COMMANDS = [block for block in RUN if block.language == "bash"]
IN_RANKS = sorted({(block.document, int(block.how[6:])) for block in RUN if block.how.startswith("ranks=")})


def holds(printed, says):
    """See that each line of `says` stands in `printed`, one after the other; "..." stands for anything."""
    position = 0
    for line in says.splitlines():
        for text in line.split("...") if line.strip() else ():
            start = printed.find(text, position)
            assert start >= 0, f"missing: {text}\nsaid:\n{says}\nprinted:\n{printed}"
            position = start + len(text)


def test_every_block_says_how_it_is_run():
    for block in BLOCKS:
        assert block.reason is None or len(block.reason) > 10, f"{block.name}: say why it is not run"
        if block.language == "python":
            assert re.fullmatch(r"|ranks=\d|\w+\.py", block.how), block.name
        if block.language == "bash":
            assert block.how in ("", "together", "fails", "examples"), block.name
    assert len(SCRIPTS) > 3
    assert len(COMMANDS) > 3
    assert len(IN_RANKS) > 0


@pytest.mark.parametrize("block", [block.case for block in SCRIPTS])
def test_python_block_runs(block):
    done = script(block.text, env=ON_CPU)
    assert done.returncode == 0, done.stderr
    holds(done.stdout + done.stderr, block.says)


def in_ranks(document, folder):
    """Runs blocks of a document as one script, in this process."""
    os.chdir(folder)
    names = {"__name__": "__main__"}
    for block in RUN:
        if block.document != document or not block.how.startswith("ranks="):
            continue
        # Found by inspect, as the lines of a file are; the message of an error names the block.
        linecache.cache[block.name] = len(block.text), None, block.text.splitlines(keepends=True), block.name
        exec(compile(block.text, block.name, "exec"), names)


@pytest.mark.parametrize(("document", "world"), IN_RANKS, ids=[document for document, _ in IN_RANKS])
def test_python_blocks_run_in_ranks(document, world, tmp_path):
    run(in_ranks, world, document, str(tmp_path))


def commands(block):
    """The command lines of a block, as lists of words, without remarks."""
    text = block.text.replace("\\\n", " ")
    lines = [re.split(r"\s#\s", f" {line}")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def start(line, folder):
    """Starts a command line; its `node1` is this machine, and its `python` and `treadle` start at once."""
    path = os.pathsep.join(map(str, (programs(), Path(sys.executable).parent, os.environ["PATH"])))
    return subprocess.Popen(
        ["bash", "-c", re.sub(r"\bnode\d+\b", "127.0.0.1", line)],
        cwd=folder,
        env=clean_environment({**ON_CPU, "PATH": path}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def folder(tmp_path, request):
    """A folder with the files of the block's document, or with the examples."""
    shown = request.node.callspec.params["block"]
    if shown.how == "examples":
        shutil.copytree(ROOT / "examples", tmp_path, ignore=shutil.ignore_patterns("runs"), dirs_exist_ok=True)
    document = shown.document
    for block in RUN:
        if block.document == document and block.how.endswith((".py", ".yaml")):
            (tmp_path / block.how).write_text(block.text)
    return tmp_path


@pytest.mark.parametrize("block", [block.case for block in COMMANDS])
def test_command_lines_run(block, folder):
    lines = commands(block)
    assert lines
    groups = [lines] if block.how == "together" else [[line] for line in lines]
    printed = ""
    for group in groups:
        started = [start(line, folder) for line in group]
        try:
            for line, process in zip(group, started, strict=True):
                text, _ = process.communicate(timeout=120)
                assert (process.returncode != 0) is (block.how == "fails"), f"{line}\n{text}"
                printed += text
        finally:
            for process in started:
                process.kill()
    holds(printed, block.says)


@pytest.mark.parametrize("number", [0, 1], ids=["trainer", "own-loop"])
def test_readme_example_runs_on_two_processes(number, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPTS[number].text)
    # One of both as a user starts it: three interpreters, each of which imports torch.
    command = [python() if number else sys.executable, "-m", "treadle", "launch", "--nproc-per-node", "2", str(path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(ON_CPU), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    # Rank zero's words, once: the last line is a measured accuracy in both examples.
    assert done.stdout.count("tensor(") == (1 if number == 0 else 5)
    checkpoint = tmp_path / "checkpoint" if number else next(tmp_path.glob("treadle_logs/*/checkpoints/*.ckpt"))
    assert (checkpoint / "manifest.json").exists()


def test_commands_that_are_not_run_exist():
    lines = [line.split() for block in BLOCKS if block.language == "bash" for line in commands(block)]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = [words[1] for words in lines if words[0] == "make"]
    assert {"demo", "test"} <= set(made) <= set(targets)


def test_named_files_exist():
    for document in DOCUMENTS:
        text = document.read_text()
        for name in re.findall(r"\b(?:benchmarks|examples|tests|docs)/[\w/]+\.\w+", text):
            assert (ROOT / name).exists(), f"{document.name} names {name}"
        for name in re.findall(r"\]\(([\w./]+)\)", text):
            assert (document.parent / name).exists(), f"{document.name} links to {name}"


def test_folders_are_the_installed_packages():
    rows = re.findall(r"^\| `(\w+)/` \|.*\| `([\w.]+)` \|$", README, re.MULTILINE)
    assert len(rows) == 10
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
    if match := re.fullmatch(r"treadle (\w+)", name):
        return match[1] not in importlib.import_module("treadle.__main__").COMMANDS
    if match := re.fullmatch(r"trainer\.(\w+)", name):
        return not hasattr(treadle.Trainer, match[1])
    return False


def test_what_the_status_calls_missing_is_missing():
    names = re.findall(r"`([^`]+)`", README.split("Not there yet:")[1])
    assert names
    assert [name for name in names if not missing(name)] == []


def test_the_readme_stays_short():
    assert len(README.splitlines()) < 220
