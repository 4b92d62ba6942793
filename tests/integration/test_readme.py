"""README.md and docs/ hold what they say: their code and command lines run, the files and tests they name exist.

The figures and pictures of README.md are those of benchmarks/RESULTS.md.

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
blocks that take more than some three seconds. Before one of the blocks in ranks, it leaves all of the document's.
"""

import difflib
import importlib
import importlib.util
import inspect
import linecache
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.house import ALL_ROOMS, ROOT, load_script
from support.processes import clean_environment, programs, python, run, script
from treadle.common.peer_names import Answer
from treadle.engine.checkpoint import store
from treadle.tools.migrate import find_counterpart

import treadle

check_reference = load_script(".ci/check_reference.py")
make_images = load_script("docs/make_images.py")
make_migration = load_script(".ci/make_migration.py")
peers = load_script("benchmarks/peers.py")
README = (ROOT / "README.md").read_text()
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
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
        elif block.language != "text" or "." not in block.how:  # else the output of an example: test_examples
            found.append(block)
    return found


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
RUN = [block for block in BLOCKS if block.reason is None]
SCRIPTS = [block for block in RUN if block.language == "python" and not block.how]
COMMANDS = [block for block in RUN if block.language == "bash"]
IN_RANKS = sorted({(block.document, int(block.how[6:])) for block in RUN if block.how.startswith("ranks=")})
LONG_IN_RANKS = {block.document for block in RUN if block.how.startswith("ranks=") and block.long}


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


@pytest.mark.long
@pytest.mark.parametrize("block", [block.case for block in SCRIPTS])
def test_python_block_runs(block):
    done = script(block.text, env=ON_CPU)
    assert done.returncode == 0, done.stderr
    holds(done.stdout + done.stderr, block.says)


def in_ranks(document, folder):
    """Runs blocks of a document as one script, in this process, and returns their names."""
    os.chdir(folder)
    names = {"__name__": "__main__"}
    blocks = [block for block in RUN if block.document == document and block.how.startswith("ranks=")]
    for block in blocks:
        # Found by inspect, as the lines of a file are; the message of an error names the block.
        linecache.cache[block.name] = len(block.text), None, block.text.splitlines(keepends=True), block.name
        exec(compile(block.text, block.name, "exec"), names)
    return [block.name for block in blocks]


@pytest.mark.parametrize(
    ("document", "world"),
    [
        pytest.param(document, world, id=document, marks=pytest.mark.exhaustive if document in LONG_IN_RANKS else ())
        for document, world in IN_RANKS
    ],
)
def test_python_blocks_run_in_ranks(document, world, tmp_path):
    first, *others = run(in_ranks, world, document, str(tmp_path))
    assert first
    assert others == [first] * (world - 1)


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


@pytest.mark.long
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


def text_of(document, name):
    """The file of this name that a document shows."""
    (block,) = [block for block in RUN if (block.document, block.how) == (document, name)]
    return block.text


@pytest.mark.parametrize("own_loop", [False, True], ids=["trainer", "own-loop"])
def test_first_examples_run_on_two_processes(own_loop, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(text_of("start/own_loop.md", "train.py") if own_loop else text_of("README.md", "train.py"))
    command = [python(), "-m", "treadle", "launch", "--nproc-per-node", "2", str(path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(ON_CPU), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    # Rank zero's words, once: a measured accuracy per epoch in both examples, and the Trainer's last metrics.
    printed = done.stdout + done.stderr
    assert len(re.findall(r"accuracy 0\.\d+", printed)) == (5 if own_loop else 6)
    checkpoint = tmp_path / "checkpoint" if own_loop else next(tmp_path.glob("treadle_logs/*/checkpoints/*.ckpt"))
    store.verify(checkpoint)


def test_the_diff_is_the_one_between_both_loops():
    plain, own = (text_of("start/own_loop.md", name).splitlines() for name in ("plain_loop.py", "own_loop.py"))
    (block,) = [block for block in BLOCKS if (block.document, block.language) == ("README.md", "diff")]
    shown = block.text.splitlines()
    changes = [line for line in difflib.ndiff(plain, own) if line[0] in "+-" and line[1:].strip()]
    assert [line for line in shown if line[0] in "+-"] == [line[0] + line[2:] for line in changes]
    assert sum(line[0] == "+" for line in shown) == 5
    for lines, sign in ((plain, "-"), (own, "+")):
        wanted = [line[1:] for line in shown if line[0] in f" {sign}"]
        assert [line for line in lines if line in wanted] == wanted


def test_the_landing_page_shows_what_the_readme_shows():
    shown = [
        [block.text for block in BLOCKS if block.document == document and block.language in ("python", "diff")]
        for document in ("README.md", "index.md")
    ]
    assert len(shown[0]) == 2
    assert shown[0] == shown[1]


def test_figures_are_those_that_were_measured():
    measured = make_images.read_overhead()
    claims = dict(zip(README_FIGURES, re.search(CLAIM, README, re.DOTALL).groups(), strict=True))
    assert {name: float(figure) for name, figure in claims.items()} == {name: measured[name] for name in claims}
    assert f"{measured[README_FIGURES[0]] - 1:.0%} overhead" in README
    landing_page = " ".join((ROOT / "docs" / "index.md").read_text().split())
    assert f"takes {measured[README_FIGURES[0]] - 1:.0%} more time" in landing_page
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| ([\d.]+) µs \| ([\d.]+) \| (?:(\d+) µs)? ?\|$", page, re.MULTILINE)
    assert [float(ratio) for _, ratio, _ in rows] == list(measured.values())
    loop = float(rows[0][0])
    for time, _, added in rows[1:]:
        assert f" | {time} | " in make_images.RESULTS.read_text()
        assert int(added) == max(0, round(float(time) - loop))


README_FIGURES = ("Treadle Trainer, everything on", "Lightning, everything on", "Treadle Accelerator", "Accelerate")
CLAIM = (
    r"takes\s+([\d.]+) times as long as .*With Lightning, it takes ([\d.]+) times .*"
    r"`Accelerator` takes\s+as\s+long\s+as\s+without\s+it\s+\(([\d.]+)\s+times\);.*"
    r"with\s+Accelerate,\s+it\s+takes\s+([\d.]+)\s+times\s+as\s+long\."
)


def test_pictures_are_drawn_from_the_figures():
    for file, text in make_images.draw_all().items():
        assert (make_images.IMAGES / file).read_text() == text, f"run docs/make_images.py: {file}"


def test_the_count_of_names_is_the_recorded_one():
    known = names = 0
    for modules in make_migration.read_peer_names().values():
        for module, listed in modules.items():
            homes = [find_counterpart(module, name) for name in listed]
            names += len(homes)
            known += sum(home is not None and not isinstance(home, Answer) for home in homes)
    assert f"{known} of the {names} public names" in README.replace("\n  ", " ")
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    assert f"Of these {names} names, {known} have a counterpart" in page


def test_every_public_name_is_in_the_reference_and_has_a_docstring():
    assert check_reference.find_faults() == []


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
        for name in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text):
            assert (document.parent / name).exists(), f"{document.name} links to {name}"


def list_anchors(page):
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_comparison_is_what_its_programs_measure():
    table = README.partition("## How it compares")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| [")]
    claimed = peers.read_table(README)
    assert list(claimed) == [re.fullmatch(r"\[(.+)\]\(.+\)", name)[1] for name, *_ in lines] == list(peers.ROWS)
    for name, *cells, program in lines:
        title, page, anchor = re.fullmatch(r"\[(.+)\]\(([\w./-]+)(?:#([\w-]+))?\)", name).groups()
        assert cells == claimed[title]
        assert len(list(filter(None, cells))) == len(peers.LIBRARIES), title
        assert (ROOT / page).exists(), title
        assert anchor is None or anchor in list_anchors(ROOT / page), f"{title}: no heading #{anchor} in {page}"
        file = peers.ROWS[title][0]
        assert program == f"[{file.removesuffix('.py')}](benchmarks/peers/{file})"
        assert (ROOT / "benchmarks/peers" / file).exists(), title


def test_what_agents_are_told_exists():
    """AGENTS.md is short, its targets and files exist, and its order of the rooms is that of the layers."""
    text = (ROOT / "AGENTS.md").read_text()
    assert len(text.splitlines()) <= 60
    named = set(re.findall(r"`([^`\n]+)`", text))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = {name.split()[1] for name in named if name.startswith("make ")}
    assert {"install", "quick", "test"} <= made <= targets
    paths = {word for name in named for word in name.split() if "/" in word and not word.startswith(".venv")}
    assert len(paths) > 10
    for path in paths:
        assert (ROOT / path).exists(), path
    order = re.search(r"`compat` > [`\w >]+", " ".join(text.split()))[0]
    assert re.findall(r"`(\w+)`", order) == [room for room in reversed(ALL_ROOMS) if f"`{room}`" in order]


def test_folders_are_the_installed_packages():
    page = (ROOT / "docs" / "contributing.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \|.*\| `([\w.]+)` \|$", page, re.MULTILINE)
    assert len(rows) == 11
    for folder, name in rows:
        assert Path(importlib.import_module(name).__path__[0]).resolve() == ROOT / folder
    documented = {folder for folder, _ in rows}
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert packages == documented


def test_each_promise_is_there_and_names_tests_that_exist():
    page = (ROOT / "docs" / "guarantees.md").read_text()
    rows = dict(re.findall(r"^\| (G\d+) \|.*\| ([^|]*) \|$", page, re.MULTILINE))
    assert list(rows) == [f"G{number}" for number in range(1, 16)]
    for promise, today in rows.items():
        tests = re.findall(r"`([\w/]+\.py)::(test_\w+)`", today)
        if today == "planned":
            continue
        assert today.startswith(("held: ", "in part: ")), promise
        assert tests, promise
        for file, name in tests:
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{promise}: {file}::{name}"


def test_the_readme_stays_short():
    assert len(README.splitlines()) < 220


def test_each_flag_of_the_trainer_has_its_place():
    """The reference of the Trainer explains each flag, in the order of its signature, and states its default."""
    arguments = inspect.getdoc(treadle.Trainer).partition("\nArgs:\n")[2].partition("\n\n")[0]
    flags = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", arguments, re.MULTILINE))
    assert list(flags) == [*inspect.signature(treadle.Trainer).parameters, "unknown"]
    assert [name for name, text in flags.items() if not re.search(r"\bDefault:\s", text)] == ["unknown"]
