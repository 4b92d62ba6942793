"""Copies of a Trainer, made by pickle or deepcopy, which leave out what belongs to the process, and of states."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any, Self

# A copy creates these on first use, so that loading one starts no process and joins no process group.
_OF_PROCESS = ("accelerator", "preemption", "checkpointer")
_OF_STAGE = ("stage", "hooks", "sources", "steps", "last_step", "opened_checkpoint", "profiled")


def copy_state(state: Any) -> Any:
    """Return a deep copy of a state, which may hold clones of parameters or other results of operations."""
    try:
        return copy.deepcopy(state)
    except RuntimeError:  # deepcopy refuses tensors with a history of gradients; pickle leaves the history out
        return pickle.loads(pickle.dumps(state))


class Copyable:
    """Base class of `Trainer`, whose copies get flags, callbacks, loggers, logged values, counters, task and data."""

    def connect(self) -> None:
        """Create the objects that belong to this process."""
        raise NotImplementedError

    def __copy__(self) -> Self:  # a shallow copy shares everything
        copied = type(self).__new__(type(self))
        copied.__dict__.update(vars(self))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in _OF_PROCESS}
        return state | dict.fromkeys(_OF_STAGE) | {"lr_scheduler_configs": []}

    if not TYPE_CHECKING:  # so that type checkers still report unknown attributes

        def __getattr__(self, name: str) -> Any:
            if name in _OF_PROCESS and "logbook" in vars(self):
                self.connect()
            return object.__getattribute__(self, name)  # raises the AttributeError of a name or property
