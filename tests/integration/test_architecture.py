"""`docs/architecture.md` says how the house is: its rooms and the files to open for a step, a save and a resume."""

import ast
import re
import sys
from pathlib import Path

import pytest
from support.house import files, is_package, picture, tree
from support.models import Line, loader
from support.trainers import make_trainer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_FILES = {"One optimizer step": 5, "One save": 9, "One resume": 10, "The order of samples": 6}
# Files that are tested by files of other names alone. The figure may only fall; of 354 that run code.
MOST_ELSEWHERE = 20


def section(title):
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_rooms_are_those_of_the_code():
    assert section("Rooms").split("```text\n")[1].split("\n```")[0] == picture()


@pytest.mark.parametrize("title", MOST_FILES)
def test_few_files_are_to_be_opened(title):
    listed = re.findall(r"^(\d+)\. `([\w/]+\.py)`: ", section(title), re.MULTILINE)
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    assert 3 <= len(listed) <= MOST_FILES[title]


@pytest.mark.parametrize("story", ["save", "resume"])
def test_the_counts_of_files_that_run_are_those_of_the_page(story):
    named = re.search(r"(\d+) files run\b[^.]*?(\d+) of them\s+do\s+not", section(f"One {story}"))
    assert [int(count) for count in named.groups()] == [MOST_RUN[story], MOST_RUN[f"{story} beyond a new fit"]]


def test_every_file_and_folder_that_is_named_exists():
    named = re.findall(r"`([\w/]+/(?:\w+\.(?:py|md))?)`", PAGE)
    assert len(named) > 40
    assert [name for name in named if not (ROOT / name).exists()] == []


def runs_code(module):
    """Whether a file has a function with a statement, unlike tables, faces and abstract classes."""
    functions = (node for node in ast.walk(tree(module)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    last = (ast.unparse(node.body[-1]) for node in functions if node.name != "__getattr__")
    return any(statement[0] not in "\"'" and statement not in ("pass", "...") for statement in last)


def test_tests_stand_where_what_they_test_does():
    elsewhere = []
    for module in files():
        folder, _, name = module.replace(".", "/").rpartition("/")
        file = ROOT / "tests" / folder / f"test_{name.lstrip('_')}.py"
        if not is_package(module) and runs_code(module) and not file.exists():
            elsewhere.append(module)
    assert len(elsewhere) <= MOST_ELSEWHERE, elsewhere


# Files of Treadle whose functions run in one optimizer step, in one save, and in the start of a resumed fit, up to its
# first step: all of them, and those that do not run in the start of a new fit (71 files). They may only fall.
MOST_RUN = {"step": 7, "save": 30, "save beyond a new fit": 10, "resume": 84, "resume beyond a new fit": 13}


def test_few_files_run(tmp_path):
    names = {str(path): module for module, path in files().items()}
    run = set()

    def record_file(frame, event, argument):
        if event == "call" and (module := names.get(frame.f_code.co_filename)) is not None:
            run.add(module)

    def watch(on):
        sys.setprofile(record_file if on else None)

    def make(on_batch, **options):
        task = Line()
        task.on_train_batch_start = lambda batch, batch_idx: on_batch(batch_idx)
        made = make_trainer(**options)
        run.clear()
        return task, made

    def start(ckpt_path=None, **options):
        """The files that run between the call and the first step."""
        task, made = make(lambda batch_idx: watch(False), **options)
        watch(True)
        made.fit(task, loader(8), ckpt_path=ckpt_path)
        return set(run), made

    def save(made):
        run.clear()
        watch(True)
        made.save_checkpoint(tmp_path / "c.ckpt")
        watch(False)
        return set(run)

    for _ in range(2):  # the first time, files run because they are imported
        fresh, made = start()
        saved, resumed = save(made), start(tmp_path / "c.ckpt", max_epochs=2)[0]
    task, made = make(lambda batch_idx: watch(batch_idx == 1))  # from the second batch to the third
    made.fit(task, loader(8))
    found = {"step": set(run), "save": saved, "resume": resumed}
    found |= {"save beyond a new fit": saved - fresh, "resume beyond a new fit": resumed - fresh}
    counted = {story: len(modules) for story, modules in found.items()}
    assert {story: count for story, count in counted.items() if count > MOST_RUN[story]} == {}, found
