"""Base class of all profilers, and a profiler that measures nothing."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...common.messages import announce, nearest
from ...common.validation import check_path


class Profiler:
    """Base class of profilers, which measure named actions. Subclasses implement `start` and `stop`.

    The Trainer measures the actions of its loop, such as ``"forward"`` and each hook; see docs/profiling.md. Actions
    may be nested. In a step, such as ``training_step``, use ``with self.trainer.profiler.profile("attention"):`` to
    measure an additional action.

    Args:
        dirpath: Directory of the profiler's files. Default: the run's log directory or, without a Trainer, the current
            directory.
        filename: Text to include in the names of the profiler's files, as in ``fit-FILENAME-0.txt``. If it is set,
            each process writes its report to a file. Otherwise, rank zero logs its report. Default: None.

    Attributes:
        device: The device of the run; None until a Trainer sets it.
        model: The task of the Trainer; None outside of its stages.
        advice: Suggestions for making actions faster, by action name.

    Raises:
        TypeError: If ``dirpath`` or ``filename`` is neither a string nor a path.

    Examples:
        >>> import time
        >>> from treadle.profilers import Profiler
        >>> class Counter(Profiler):
        ...     started = 0
        ...     def start(self, action_name):
        ...         self.started += 1
        >>> profiler = Counter()
        >>> with profiler.profile("sleep"):
        ...     time.sleep(0.01)
        >>> profiler.started
        1
    """

    device: torch.device | None = None
    model: nn.Module | None = None
    _stage: str | None = None
    _rank: int | None = None

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        for name, value in (("dirpath", dirpath), ("filename", filename)):
            if value is not None:
                check_path(name, value)
        self.dirpath = dirpath
        self.filename = filename
        self.advice: dict[str, str] = {}

    # -- methods to define ---------------------------------------------------------------------------------------

    def start(self, action_name: str) -> None:
        """Begin measuring an action. The base class does nothing.

        Args:
            action_name: The name of the action.
        """

    def stop(self, action_name: str) -> None:
        """End the measurement of an action. The base class does nothing.

        Args:
            action_name: The name that `start` received.
        """

    def step(self) -> None:
        """Mark the end of an optimizer step or, outside of ``fit``, of a batch. The base class does nothing."""

    def summary(self) -> str:
        """Return the report as text; "" if there is nothing to report."""
        return ""

    # -- methods to call -----------------------------------------------------------------------------------------

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """Return a context manager that measures its block as an action: ``with profiler.profile("augment"): ...``.

        Args:
            action_name: The name of the action, which the context also yields.
        """
        return self._profile(action_name)

    @contextmanager
    def _profile(self, action_name: str) -> Iterator[str]:
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def profile_iterable(self, iterable: Any, action_name: str) -> Iterator[Any]:
        """Yield the items of an iterable, and measure the time spent waiting for each of them.

        Args:
            iterable: The iterable to measure.
            action_name: The name of the action.

        Yields:
            The items of ``iterable``, unchanged.
        """
        iterator = iter(iterable)
        while True:
            self.start(action_name)
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self.stop(action_name)
            yield item

    def describe(self) -> None:
        """Log the report on rank zero or, if ``filename`` is set, append each process's report to its own file."""
        text = self.summary()
        if not text:
            return
        if self.filename is None:
            announce(text)
            return
        with self.path_for(".txt").open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    # -- called by the Trainer -----------------------------------------------------------------------------------

    @property
    def needs_directory(self) -> bool:
        """True if the profiler writes files, so `setup` needs a directory. Always True in the base class."""
        return True

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Prepare for a stage. If ``dirpath`` is not set, set it to ``log_dir``. Later stages keep this directory.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            local_rank: Rank to include in file names; None to omit it. The Trainer passes the global rank, or None if
                the world size is one.
            log_dir: Directory of the profiler's files if ``dirpath`` is not set.
        """
        self._stage, self._rank = stage, local_rank
        self.dirpath = self.dirpath or log_dir
        self._begin()

    def _begin(self) -> None:
        """Discard the measurements before a stage. The base class has none."""

    def teardown(self, stage: str | None) -> None:
        """Clean up at the end of a stage, after `describe`. The base class does nothing.

        Args:
            stage: The stage.
        """

    @property
    def local_rank(self) -> int:
        """Rank of this process, as passed to `setup`; 0 if it was None."""
        return self._rank or 0

    def path_for(self, ending: str, part: str = "") -> Path:
        """Return a path such as ``dirpath/STAGE-FILENAME-RANK-PART.txt``, and create its directory.

        Components of the name that are not set are omitted.

        Args:
            ending: The suffix of the file name, including the dot.
            part: Last component of the name, such as the name of an action. Default: "", which omits it.
        """
        words = [self._stage, self.filename, None if self._rank is None else str(self._rank), part]
        name = re.sub(r"[^\w.+-]+", "_", "-".join(str(word) for word in words if word)) or "profile"
        directory = Path(self.dirpath or ".")
        directory.mkdir(parents=True, exist_ok=True)
        return directory / (name + ending)


class PassThroughProfiler(Profiler):
    """Profiler that measures nothing. It is the Trainer's default.

    Examples:
        >>> from treadle.profilers import PassThroughProfiler
        >>> with PassThroughProfiler().profile("anything") as name:
        ...     print(name)
        anything
    """

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """Return a context manager that measures nothing; see `Profiler.profile`.

        Args:
            action_name: The name of the action, which the context yields.
        """
        return nullcontext(action_name)

    def profile_iterable(self, iterable: Any, action_name: str) -> Iterator[Any]:
        """Return an iterator over an iterable without measuring it; see `Profiler.profile_iterable`.

        Args:
            iterable: The iterable to iterate over.
            action_name: Unused.
        """
        return iter(iterable)

    @property
    def needs_directory(self) -> bool:
        """Always False, because this profiler does not write files."""
        return False


def find_running(running: Sequence[tuple[Any, ...]], action_name: str) -> int:
    """Return the index of the last running action with a name, which is the first item of each entry.

    Args:
        running: The running actions, the outermost first.
        action_name: The name that ``stop`` received.

    Raises:
        ValueError: If no action with this name is running.
    """
    for place in range(len(running) - 1, -1, -1):
        if running[place][0] == action_name:
            return place
    raise ValueError(
        f"stop({action_name!r}) was called, but no action with this name is running. Call start({action_name!r}) first."
    )


_NAMES = {
    "simple": "SimpleProfiler",
    "advanced": "AdvancedProfiler",
    "pytorch": "PyTorchProfiler",
    "events": "EventProfiler",
}


def choose_profiler(profiler: Any) -> Profiler:
    """Return the profiler that the argument of ``Trainer(profiler=...)`` selects.

    Args:
        profiler: ``"simple"``, ``"advanced"``, ``"pytorch"``, ``"events"``, a `Profiler` object, or None for a
            `PassThroughProfiler`.

    Raises:
        ValueError: If the name is unknown.
        TypeError: If ``profiler`` has the wrong type.
    """
    if profiler is None:
        return PassThroughProfiler()
    if isinstance(profiler, Profiler):
        return profiler
    if not isinstance(profiler, str):
        hint = f" Pass {profiler.__name__}()." if isinstance(profiler, type) and issubclass(profiler, Profiler) else ""
        raise TypeError(f"profiler={profiler!r} must be a profiler's name, a treadle.profilers.Profiler or None.{hint}")
    name = profiler.lower()
    if name not in _NAMES:
        hint = " TPUs are not supported." if name == "xla" else nearest(name, _NAMES)
        raise ValueError(f"profiler={profiler!r} is not one of {', '.join(_NAMES)}.{hint}")
    # Imported only when it is requested, because torch.profiler and cProfile take time to import.
    made: Profiler = getattr(importlib.import_module(f".{name}", __package__), _NAMES[name])()
    return made
