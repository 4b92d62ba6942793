"""Which samples of the dataset a batch holds, for who asks. Nobody else pays for it."""

from __future__ import annotations

from collections import deque
from typing import Any

from .loader import Loader
from .order import ShardedBatches


def note_indices(loader: Loader) -> None:
    """Have a loader note, from its next epoch on, what its sampler yielded for each batch of this process."""
    if isinstance(loader, Loader) and isinstance(loader._plan, ShardedBatches):
        loader._plan.noted = deque()


def batch_indices(loader: Loader) -> list[Any] | None:
    """What the sampler yielded for the batch that the loader yielded last: the indices of its samples.

    Empty for a stand-in, whose sample is another process's; None for a stream, which has no indices, and where they
    are not noted.
    """
    plan = getattr(loader, "_plan", None)
    if not isinstance(plan, ShardedBatches) or plan.noted is None:
        return None
    ahead = len(plan.micros)  # that workers read already
    while len(plan.noted) > ahead + 1:
        plan.noted.popleft()
    return plan.noted[0]
