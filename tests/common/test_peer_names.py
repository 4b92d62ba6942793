"""The tables of the peers' names: every line leads somewhere, and every refusal says what to use."""

import importlib

import pytest
from treadle.common.peer_names import Answer, list_paths, read_names


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


def test_a_mirrored_module_has_our_own_names_too() -> None:
    from treadle.compat import callbacks
    from treadle.compat.callbacks import ModelCheckpoint
    from treadle.compat.utils import gather
    from treadle.utils.operations import gather as same_gather

    assert callbacks.ModelCheckpoint is ModelCheckpoint
    assert gather is same_gather
