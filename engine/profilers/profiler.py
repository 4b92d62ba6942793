"""The base of every profiler, and the one that measures nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...common.messages import announce
from ...common.validation import check_path


class Profiler:
    """Measures named actions. Subclass it and write `start` and `stop`.

    The Trainer measures what its loop does: ``"data"``, ``"transfer"``, ``"forward"``, ``"backward"``, ``"optimizer"``,
    ``"validation"``, ``"checkpoint"``, each hook (``"hook EMA.on_train_batch_end"``), and more; see docs/profiling.md.
    Actions may lie within each other. In a step, ``with self.trainer.profiler.profile("attention"):`` adds one.

    Args:
        dirpath: the directory of the files it writes; by default the run's log directory.
        filename: write the report to a file of this name, one for each process, rather than show it.

    Attributes:
        device: where the run computes; None without a Trainer.
        model: the task of the run; None without a Trainer.
        advice: what could make an action faster, by its name.
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

    # -- what you write ------------------------------------------------------------------------------------------

    def start(self, action_name: str) -> None:
        """An action begins."""

    def stop(self, action_name: str) -> None:
        """It is over."""

    def step(self) -> None:
        """An optimizer step is over, with all that belongs to it; in an evaluation: a batch."""

    def summary(self) -> str:
        """What was measured, in words."""
        return ""

    # -- what you call -------------------------------------------------------------------------------------------

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """Measure a block: ``with profiler.profile("augment"): ...``."""
        return self._profile(action_name)

    @contextmanager
    def _profile(self, action_name: str) -> Iterator[str]:
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def profile_iterable(self, iterable: Any, action_name: str) -> Iterator[Any]:
        """Measure how long each item of an iterable is waited for."""
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
        """Show the report on rank zero or, with a ``filename``, write each process's to its file."""
        text = self.summary()
        if not text:
            return
        if self.filename is None:
            announce(text)
            return
        path = self.path_for(".txt")
        with path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    # -- what the Trainer calls ----------------------------------------------------------------------------------

    @property
    def needs_directory(self) -> bool:
        """Whether it writes files, so that `setup` has to name a directory."""
        return True

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """A stage begins.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            local_rank: this process's rank, which file names then have. The Trainer gives its rank among all, so that
                no two write one file; None in a run of one process.
            log_dir: where to write if no ``dirpath`` was given.
        """
        self._stage, self._rank = stage, local_rank
        self.dirpath = self.dirpath or log_dir

    def teardown(self, stage: str | None) -> None:
        """A stage is over, and the report is out."""

    @property
    def local_rank(self) -> int:
        """This process's rank, as `setup` was told."""
        return self._rank or 0

    def path_for(self, ending: str, part: str = "") -> Path:
        """Return the file for this stage and process: ``dirpath/fit-name-0-part.txt``. Makes the directory.

        A run of one process leaves the rank out.

        Args:
            ending: how the name ends, with its dot.
            part: what it is of, where a process writes several.
        """
        words = [self._stage, self.filename, None if self._rank is None else str(self._rank), part]
        name = re.sub(r"[^\w.+-]+", "_", "-".join(str(word) for word in words if word)) or "profile"
        directory = Path(self.dirpath or ".")
        directory.mkdir(parents=True, exist_ok=True)
        return directory / (name + ending)


class PassThroughProfiler(Profiler):
    """Measures nothing: what ``trainer.profiler`` is where none was asked for."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """See `Profiler.profile`."""
        return nullcontext(action_name)

    def profile_iterable(self, iterable: Any, action_name: str) -> Iterator[Any]:
        """See `Profiler.profile_iterable`."""
        return iter(iterable)

    @property
    def needs_directory(self) -> bool:
        """See `Profiler.needs_directory`."""
        return False
