"""`docs/architecture.md` says how the house is: its rooms and the files to open for a step, a save and a resume."""

import re
from pathlib import Path

import pytest
from house import picture

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_FILES = {"One optimizer step": 5, "One save": 9, "One resume": 10, "The order of samples": 6}


def section(title):
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_rooms_are_those_of_the_code():
    assert section("Rooms").split("```text\n")[1].split("\n```")[0] == picture()


@pytest.mark.parametrize("title", MOST_FILES)
def test_few_files_are_to_be_opened(title):
    listed = re.findall(r"^(\d+)\. `([\w/]+\.py)`: ", section(title), re.MULTILINE)
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    assert 3 <= len(listed) <= MOST_FILES[title]


def test_every_file_and_folder_that_is_named_exists():
    named = re.findall(r"`([\w/]+/(?:\w+\.(?:py|md))?)`", PAGE)
    assert len(named) > 40
    assert [name for name in named if not (ROOT / name).exists()] == []
