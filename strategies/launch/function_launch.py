"""Launch of the processes of a strategy such as ``"ddp_spawn"``, which run a function."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .notebook import run_in_processes


@dataclass(frozen=True)
class FunctionLaunch:
    """Number of processes that run a function, and how they start.

    Args:
        strategy: Name of the strategy, for error messages.
        count: Number of processes.
        start_method: ``"spawn"`` or ``"fork"``; see ``multiprocessing``.
    """

    strategy: str
    count: int
    start_method: str

    def run(self, function: Callable[..., Any], *args: Any) -> None:
        """Run a function of a module in each process, with the environment variables of its rank.

        Raises:
            ValueError: If the processes cannot be started, or the arguments cannot be sent to them.
            RuntimeError: If a process fails. The message contains its traceback, signal or exit status.
        """
        if self.start_method == "spawn":
            function, args = _call_pickled, (self._pickle((function, args)),)
        run_in_processes(function, args, self.count, self.start_method)

    def _pickle(self, call: Any) -> bytes:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise RuntimeError(
                f"strategy={self.strategy!r} starts processes that import the main script, and the script starts the "
                "run again while it is imported. Put the run under `if __name__ == '__main__':`, or use strategy='ddp'."
            )
        fork = self.strategy.replace("spawn", "fork")
        try:
            # Not with multiprocessing's own pickler, which would let the processes share the memory of tensors.
            pickled = pickle.dumps(call)
        except Exception as error:
            raise ValueError(
                f"strategy={self.strategy!r} sends the task, its data and the callbacks to new processes, but they "
                f"can't be pickled: {error}. Define classes and functions at the top level of a module, or use "
                f"strategy={fork!r}, which sends nothing."
            ) from error
        if b"__main__" in pickled and not getattr(sys.modules["__main__"], "__file__", None):
            raise ValueError(
                f"strategy={self.strategy!r} starts processes that import the main script, but this session has none "
                f"and defines classes or functions that the run uses. Move them into a module, or use "
                f"strategy={fork!r}."
            )
        return pickled


def _call_pickled(call: bytes) -> None:
    function, args = pickle.loads(call)  # by this process's parent
    function(*args)
