"""The tables of the peers' names: every line leads somewhere, and every refusal says what to use."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from treadle.common.peer_names import Answer, list_paths, read_names

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", list_paths(), ids=lambda path: path or "(root)")
def test_every_name_of_a_table(path: str) -> None:
    module = importlib.import_module(f"treadle.compat.{path}".rstrip("."))
    for name, home in read_names(path).items():
        if not isinstance(home, Answer):
            assert getattr(module, name) is not None
            continue
        assert not hasattr(module, name)
        assert " " in home, f"{name}: !{home} is no sentence, and no key of [answers]"
        with pytest.raises(ImportError, match=r"instead|[Uu]se |remove the "):
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


def test_fabrics_modules() -> None:
    from treadle.compat import loggers
    from treadle.compat.fabric.loggers import CSVLogger
    from treadle.compat.fabric.utilities import rank_zero_only
    from treadle.compat.fabric.utilities.cloud_io import get_filesystem
    from treadle.compat.fabric.utilities.data import has_len, sized_len
    from treadle.compat.fabric.utilities.types import _PATH, Optimizable

    assert issubclass(CSVLogger, loggers.CSVLogger)
    assert rank_zero_only.rank == 0
    assert get_filesystem(ROOT).isdir(str(ROOT))
    assert get_filesystem("memory://a").protocol == "memory"
    assert isinstance(ROOT, _PATH)
    assert isinstance(torch.optim.SGD([torch.zeros(1, requires_grad=True)]), Optimizable)
    assert (has_len([1]), sized_len(iter([1]))) == (True, None)
    with pytest.warns(UserWarning, match="length 0"):
        assert has_len([])
