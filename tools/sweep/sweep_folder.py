"""Folder of a sweep: its description, a folder for each trial, and a lock for each process that works on it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
import uuid
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...cli.config import ConfigError
from ...engine.weights import write_atomically
from ...trainer.runs import CONFIG, RECORD, RunFolder, RunLock, holder, index
from .sweep_file import Sweep, list_changes

DESCRIPTION = "sweep.json"
REPORT = "report.html"
_PRIVATE = ".sweep"
_POLL = 0.1  # seconds between two attempts to get a lock that another process holds


class SweepFolder:
    """Folder of a sweep, in which several processes on several machines may work at the same time.

    .. code-block:: text

        1/, 2/, ...   the run folders of the trials
        study.db      Optuna's study (study.log if storage is journal; neither if it is a URL)
        sweep.json    the sweep without ``storage``, with its defaults filled in, in the format of a sweep file
        report.html   a report of the sweep
        .sweep/       a lock for deciding what runs next, and one for each process that works on the sweep

    Attributes:
        token: Unique name of this process's lock, a folder in ``.sweep/``.
    """

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.path = sweep, sweep.folder
        self.token = uuid.uuid4().hex
        self._private = self.path / _PRIVATE
        self._lock: RunLock | None = None

    # -- processes -----------------------------------------------------------------------------------------------

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within a ``with`` block, hold the lock that marks this process as working on the sweep."""
        own = self._private / self.token
        try:
            own.mkdir(parents=True)
            self._lock = RunLock(own)
        except OSError as error:
            raise ConfigError(
                f"can't write to {self.path}: {error.strerror or error}. Set run.dir to another folder."
            ) from error
        try:
            yield
        finally:
            self._lock.release()
            shutil.rmtree(own, ignore_errors=True)

    def find_host(self, token: str) -> str | None:
        """Return the name of the machine whose process holds the lock ``token``; None if the process is not alive."""
        occupant = holder(self._private / token) if token else None
        return None if occupant is None else occupant.host

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Hold the lock for deciding which trial starts or continues. Wait while another process holds it."""
        lock = None
        while lock is None:
            try:
                lock = RunLock(self._private)
            except ValueError:  # another process holds the lock
                time.sleep(_POLL)
        try:
            yield
        finally:
            lock.release()

    def forget_the_dead(self) -> None:
        """Remove the locks of processes that were killed. Requires the lock of `deciding`."""
        for entry in self._private.iterdir():
            if entry.is_dir() and entry.name != self.token and self.find_host(entry.name) is None:
                shutil.rmtree(entry, ignore_errors=True)

    # -- description ---------------------------------------------------------------------------------------------

    def is_new(self) -> bool:
        """Return whether the sweep is new. Requires the lock of `deciding`.

        Raises:
            ConfigError: If the folder contains other runs, or a sweep that cannot be continued with these settings.
        """
        file = self.path / DESCRIPTION
        anew = (
            f"To start over, give the sweep another name (name: ..., or name=... on the command line), or delete "
            f"{os.path.relpath(self.path)}."
        )
        if file.is_file():
            try:
                before = json.loads(file.read_text(encoding="utf-8"))
                changes = list_changes(before, self.sweep.describe())
            except (ValueError, AttributeError) as error:
                raise ConfigError(f"{file} can't be read: {error}. {anew}") from error
            if changes:
                raise ConfigError(
                    f"{self.sweep.file}: the sweep {self.sweep.name!r} was started with other settings:\n  "
                    + "\n  ".join(changes)
                    + f"\n{anew}"
                )
            return False
        if self.has_runs():
            raise ConfigError(
                f"{self.sweep.file}: {os.path.relpath(self.path)} contains runs that are not trials of a sweep. Give "
                "the sweep another name (name: ..., or name=... on the command line)."
            )
        return True

    def write_description(self) -> None:
        """Write the sweep's settings, which `is_new` compares. Requires the lock of `deciding`."""
        self.write(DESCRIPTION, json.dumps(self.sweep.describe(), indent=2, ensure_ascii=False))

    def has_runs(self) -> bool:
        """Return whether the folder contains any run folders."""
        return any(entry.name.isdigit() for entry in self.path.iterdir())

    def write(self, name: str, text: str) -> None:
        """Write a file in the sweep's folder atomically, so readers see either the old or the new file."""
        write_atomically(self.path / name, lambda part: Path(part).write_text(text, encoding="utf-8", errors="replace"))

    # -- folders of trials ---------------------------------------------------------------------------------------

    def choose_number(self, trial: int, taken: Container[int | None]) -> int:
        """Return the number of a trial's run folder: the trial's number counted from 1, or the next free number."""
        free = (number for number in itertools.count(trial + 1) if number not in taken)
        return next(number for number in free if self._may_take(self.path / str(number), trial))

    def _may_take(self, path: Path, trial: int) -> bool:
        if not path.exists():
            return True
        try:
            return index.read(path).facts.get("trial") == trial
        except ValueError:  # not a run's folder, but one that a killed process left incomplete
            return {entry.name for entry in path.iterdir()} <= {CONFIG, f".{CONFIG}.tmp", f".{RECORD}.tmp"}

    def prepare(self, number: int, trial: int, config: str, parameters: Mapping[str, Any]) -> None:
        """Write the run folder of a trial, unless it exists already. Requires the lock of `deciding`."""
        path = self.path / str(number)
        with contextlib.suppress(ValueError):
            if index.read(path).facts.get("trial") == trial:
                return
        companion = f"{__package__}.trial_of"
        RunFolder.prepare(path, config, {"trial": trial, "parameters": dict(parameters), "companion": companion})
