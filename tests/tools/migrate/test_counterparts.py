"""Names without a counterpart are named, with the tables' answer."""

from textwrap import dedent

import pytest
from support.migrated import migrate_twice
from treadle.common.peer_names import Answer
from treadle.tools.migrate import counterparts
from treadle.tools.migrate.python_source import migrate_source


def test_names_without_a_counterpart_stay_and_are_named():
    old = """
    from accelerate.utils import (  # helpers
        gather,  # all
        warp_drive,  # none
        # seeds
        set_seed,
        flux,  # none either
    )  # noqa: F401
    from accelerate.utils import flux, set_seed  # once more
    if True: from accelerate.utils import set_seed, flux
    """
    new = """
    from treadle.utils import (  # helpers
        gather,  # all
        # seeds
        set_seed,
    )  # noqa: F401
    from accelerate.utils import (
        warp_drive,  # none
        flux,  # none either
    )  # noqa: F401
    from treadle.utils import set_seed
    from accelerate.utils import flux  # once more
    if True: from treadle.utils import set_seed; from accelerate.utils import flux
    """
    text = "accelerate.utils.{} has no counterpart in Treadle."
    found = {(line, text.format(name)) for line, name in [(4, "warp_drive"), (7, "flux"), (9, "flux"), (10, "flux")]}
    assert migrate_twice(dedent(old)) == (dedent(new), found)


def test_attributes_without_a_counterpart_are_named():
    old = """
    import lightning as L, accelerate.commands.flight
    import lightning.pytorch.callbacks as callbacks
    import lightning.pytorch.quantum as q
    L.pytorch.strategies.WarpStrategy()
    L.fabric.warp, callbacks.Warp
    """
    new, found = migrate_twice(dedent(old))
    assert new == dedent("""
    import treadle as L, accelerate.commands.flight
    import treadle.callbacks as callbacks
    import lightning.pytorch.quantum as q
    L.strategies.WarpStrategy()
    L.warp, callbacks.Warp
    """)
    assert {(line, text.removesuffix(" has no counterpart in Treadle.")) for line, text in found} == {
        (2, "accelerate.commands.flight"),
        (4, "lightning.pytorch.quantum"),
        (5, "lightning.pytorch.strategies.WarpStrategy"),
        (6, "lightning.fabric.warp"),
        (6, "lightning.pytorch.callbacks.Warp"),
    }


@pytest.fixture
def answers(monkeypatch):
    """Answers in the place of the tables'."""
    answers = {"strategies": {"WarpStrategy": Answer("use FSDP instead.")}}
    monkeypatch.setattr(counterparts, "read_names", lambda path: answers.get(path, {}))
    counterparts.find_counterpart.cache_clear()
    yield
    counterparts.find_counterpart.cache_clear()


@pytest.mark.parametrize(
    "source",
    [
        "from lightning.pytorch.strategies import WarpStrategy\n",
        "from lightning.pytorch.strategies import *; WarpStrategy\n",
        "import lightning.pytorch as pl; pl.strategies.WarpStrategy\n",
    ],
)
def test_an_answer_of_the_tables_is_what_is_said(source, answers):
    _, findings = migrate_source(source, "file.py")
    (finding,) = findings
    assert str(finding) == "file.py:1: lightning.pytorch.strategies.WarpStrategy: use FSDP instead."
