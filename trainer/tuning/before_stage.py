"""Searches that precede a stage, and their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...callbacks import BatchSizeFinder, Callback, LearningRateFinder
from ...common.messages import announce, warn
from ...engine.checkpoint import OpenCheckpoint, load_into_memory, open_callback_states
from .batch_size_search import BatchSizeSearch
from .lr_search import LRSearch

if TYPE_CHECKING:
    from ..trainer import Trainer


def run_searches(trainer: Trainer) -> None:
    """Run the finders among the callbacks: batch sizes first, because a learning rate suits only one batch size.

    The stage is set up, but the model is not built or placed yet. With ``fast_dev_run``, no search runs. In a resumed
    ``fit``, the results are restored from the checkpoint instead.
    """
    searches: list[BatchSizeSearch | LRSearch] = [
        BatchSizeSearch(trainer, callback) for callback in trainer.callbacks if isinstance(callback, BatchSizeFinder)
    ]
    if trainer.stage == "fit":
        searches += [LRSearch(trainer, c) for c in trainer.callbacks if isinstance(c, LearningRateFinder)]
    for search in searches:
        if trainer.fast_dev_run:
            announce(f"{type(search.finder).__name__} does not search with fast_dev_run")
        elif trainer.stage != "fit" or trainer.opened_checkpoint is None:
            search.run()
        elif _restore(search.finder, trainer.opened_checkpoint):
            search.apply()


def _restore(finder: Callback, opened: OpenCheckpoint) -> bool:
    """Restore a finder's result from a checkpoint and return True; if it has none, warn and return False."""
    state = load_into_memory(open_callback_states(opened)["callbacks"].get(finder.state_key), {}, {})
    if state is None:
        name = type(finder).__name__
        warn(
            f"{opened.path} was saved without {name}, so the run continues with the current settings and without a "
            "search."
        )
        return False
    finder.load_state_dict(state)
    return True
