"""The tables of the peers' names: every line leads somewhere, and every refusal says what to use."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from treadle.common.peer_names import PEERS, Elsewhere, read_names, read_table

ROOT = Path(__file__).parents[2]
PATHS = sorted({path for peer in PEERS for path in read_table(peer).keys() - {"answers"}})


def test_the_modules_are_those_of_the_tables() -> None:
    check = [sys.executable, str(ROOT / ".ci" / "make_compat.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("", 0)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path or "(root)")
def test_every_name_of_a_table(path: str) -> None:
    module = importlib.import_module(f"treadle.compat.{path}".rstrip("."))
    for name, home in read_names(path).items():
        if not isinstance(home, Elsewhere):
            assert getattr(module, name) is not None
            continue
        assert not hasattr(module, name)
        assert " " in home, f"{name}: !{home} is no sentence, and no key of [answers]"
        with pytest.raises(ImportError, match="instead|[Uu]se "):
            exec(f"from {module.__name__} import {name}", {})


def test_what_nobody_has() -> None:
    with pytest.raises(ImportError, match="Did you mean 'PartialState'"):
        exec("from treadle.state import PartialStates", {})
    with pytest.raises(AttributeError, match="Did you mean 'Trainer'"):
        importlib.import_module("treadle").Traner  # noqa: B018


def test_a_mirrored_module_has_our_own_names_too() -> None:
    from treadle.compat import callbacks
    from treadle.compat.callbacks import ModelCheckpoint
    from treadle.compat.utils import gather

    from treadle.utils.operations import gather as same_gather

    assert callbacks.ModelCheckpoint is ModelCheckpoint
    assert gather is same_gather
