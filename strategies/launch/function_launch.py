"""Launch of the processes of a strategy such as ``"ddp_spawn"``, which run a function."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in each process, with the environment variables of its rank, and return rank zero's result.

        With ``"spawn"``, it must be a function of a module.

        Raises:
            ValueError: If the processes cannot be started, or the arguments cannot be sent to them.
            RuntimeError: If a process fails. The message contains its traceback, signal or exit status.
        """
        call = self._pickle((function, args)) if self.start_method == "spawn" else (function, args)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "result"
            run_in_processes(_run, (call, path), self.count, self.start_method)
            # Written by this process's own child, in a folder that only this user can write to.
            return pickle.loads(path.read_bytes())

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


def _run(call: Any, path: Path) -> None:
    function, args = pickle.loads(call) if isinstance(call, bytes) else call  # by this process's parent
    result = function(*args)
    if os.environ["RANK"] == "0":
        path.write_bytes(pickle.dumps(result))
