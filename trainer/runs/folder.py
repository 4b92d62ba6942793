"""Folder of one run, ``runs/<name>/<number>``: its settings, its state, its logs and checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...common.messages import name_type
from ...common.mirror import flush, local_folder
from ...common.remote_path import AnyPath, RemotePath, absolute, as_path
from .file_names import CHECKPOINTS, CONFIG, CURVES, DESCRIPTIONS, ENVIRONMENT, ERROR, LOCK, RECORD
from .index import WAITING, read
from .lock import RunLock

if TYPE_CHECKING:
    from ...callbacks import Callback, ModelCheckpoint, RunReport
    from ...callbacks.reporting import Points, RunRecord
    from ...strategies import World

_MOST_POINTS = 256  # a curve keeps twice as many points, for display; the loggers have every value


class RunFolder:
    """Folder of one run, locked so that only one job at a time can use it.

    All processes of the job must create this object. Ranks other than zero record only errors.

    Use the object in a ``with`` block. The outcome of the block is recorded as the outcome of the run.

    Besides the files of the loggers, the folder contains:

    .. code-block:: text

        run.json          state of the run, its best and its last values
        curves.json       curves of ``trainer.history``, thinned out
        config.yaml       configuration; see `write_config`
        environment.json  versions, git revision, hardware
        checkpoints/      checkpoints
        report.html       report of the run
        error.json        first error of any process, if an error ended the run
        lock              holder of the folder; see `RunLock`

    Attributes:
        path: Path or URL of the folder, the same on all processes.
        lock: Lock on the folder; None except on rank zero.
        companion: Path of the function that returns a callback for this run, recorded by the program that prepared the
            run (see `prepare`); None if there is none.

    Examples:
        >>> import tempfile
        >>> import treadle as tl
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> from treadle.runs import RunFolder
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with RunFolder.create(directory, "digits") as folder:
        ...         trainer = tl.Trainer(
        ...             **folder.flags({"max_steps": 1, "accelerator": "cpu", "devices": 1, "barebones": True})
        ...         )
        ...         trainer.fit(BoringModel())
        ...     folder.path.parent.name, folder.path.name
        ('digits', '1')
    """

    def __init__(self, path: AnyPath, lock: RunLock | None, facts: dict[str, Any]) -> None:
        self.path = path
        self.lock = lock
        self.companion: str | None = None
        self._facts = facts
        self._earlier_seconds = float(facts.get("seconds", 0.0))
        self._began = time.monotonic()
        self._previous_files: dict[str, bytes] | None = None  # the files of a continued run
        self._previous_config: Path | None = None  # where the configuration among them is saved
        self._watch: RunRecord | None = None

    @classmethod
    def create(
        cls, directory: str | Path = "runs", name: str = "default", settings: Mapping[str, Any] | None = None
    ) -> RunFolder:
        """Create the run folder with the next free number in ``directory/name``.

        Several jobs may call this method concurrently.

        Args:
            directory: Directory that contains all runs, or a URL such as ``s3://bucket/runs``. Default: ``"runs"``.
            name: Name of the run's group, which is the name of the parent folder. Default: ``"default"``.
            settings: Flags of the Trainer. ``accelerator``, ``devices`` and ``num_nodes`` determine the processes of
                the job. Missing processes are launched. They run the same script and must also reach this call.

        Returns:
            The run folder, locked by this job.

        Raises:
            ValueError: If an argument is invalid.
            TypeError: If an argument has the wrong type.
            OSError: If the folder cannot be created.
            SystemExit: After processes that this call launched have ended.
        """
        check_name(name)
        world = _open_world(settings)
        lock: RunLock | None = None
        facts: dict[str, Any] = {}
        path: AnyPath = Path()
        with world.failing_together():
            if world.is_main:
                path, lock = _claim(_resolve_path(directory) / name)
                facts = {"format": 1, "name": name, "number": int(path.name), "began": time.time()}
        return cls._begin(world, path, lock, facts)

    @classmethod
    def open(cls, path: str | Path, settings: Mapping[str, Any] | None = None) -> RunFolder:
        """Continue the run of an existing folder.

        If the Trainer created with `flags` starts no training epoch and no stage other than ``fit``, the files that
        describe the run are restored at the end of the ``with`` block. A waiting run (see `prepare`) is treated as a
        new run.

        Args:
            path: Path or URL of the folder.
            settings: See `create`.

        Returns:
            The run folder, locked by this job.

        Raises:
            ValueError: If the path is not a run's folder, another job has locked the folder, or a flag is invalid.
            TypeError: If a flag has the wrong type.
            OSError: If the folder cannot be written to.
            SystemExit: After processes that this call launched have ended.
        """
        world = _open_world(settings)
        lock: RunLock | None = None
        facts: dict[str, Any] = {}
        earlier: dict[str, bytes] | None = {}
        folder_path = _resolve_path(path)
        with world.failing_together():
            if world.is_main:
                read(folder_path)  # before a write to a folder that may not be a run's
                lock = _lock(folder_path)
                run = read(folder_path)
                files = [file for name in DESCRIPTIONS if (file := local_folder(folder_path) / name).is_file()]
                earlier = {file.name: file.read_bytes() for file in files}
                # An unreadable record must not make the checkpoints next to it unusable.
                facts = {"format": 1, "name": run.name, "number": run.number, "began": run.began or time.time()}
                facts |= run.facts
                if run.state == WAITING:
                    earlier, facts["began"] = None, time.time()
                else:
                    facts |= {"resumed": time.time(), "ended": None, "note": None, "error": None}
        return cls._begin(world, folder_path, lock, facts, earlier)

    @classmethod
    def prepare(cls, path: Path, config: str, facts: Mapping[str, Any]) -> None:
        """Create the folder of a run that another process will start with `open`.

        Until then, the state of the run is ``"waiting"``. Only one process at a time may call this method.

        Args:
            path: Path of the folder. It must end in the run's number, such as ``runs/default/1``.
            config: The run's configuration, as YAML.
            facts: Metadata of the run by name, as in `record`. ``companion`` names a function, such as
                ``"package.module.function"``. When a command opens the folder, it calls the function with the
                `RunFolder`. The function returns None or a callback with a method `conclude`, which is called after
                ``fit``.

        Raises:
            ValueError: If the folder's name is not a number.
            OSError: If the folder cannot be created or written to.
        """
        if not (path.name.isascii() and path.name.isdigit()):
            raise ValueError(f"path={str(path)!r} must end in the run's number, such as runs/default/1.")
        path.mkdir(parents=True, exist_ok=True)
        named = {"format": 1, "name": path.parent.name, "number": int(path.name), "began": time.time()}
        folder = cls(path, None, {})
        folder._write(CONFIG, config)
        record = {**named, **facts, "state": WAITING}
        folder._write(RECORD, json.dumps(_make_plain(record), indent=2, ensure_ascii=False))

    @classmethod
    def _begin(
        cls,
        world: World,
        path: AnyPath,
        lock: RunLock | None,
        facts: dict[str, Any],
        earlier: dict[str, bytes] | None = None,
    ) -> RunFolder:
        agreed_path, companion, is_new = world.broadcast((str(path), facts.get("companion"), earlier is None))
        folder = cls(as_path(agreed_path), lock, facts)
        folder.companion = companion
        folder._previous_files = None if is_new else earlier
        try:
            with world.failing_together():
                if lock is not None:
                    from ...common.messages import announce
                    from ...engine import environment

                    folder._write(ENVIRONMENT, json.dumps(environment(), indent=2, ensure_ascii=False))
                    folder.record({"state": "running", "host": lock.holder.host, "pid": lock.holder.pid})
                    announce(f"run {path.parent.name}/{path.name}: {path}")
        except BaseException:
            folder.release()
            raise
        return folder

    # -- for a Trainer -------------------------------------------------------------------------------------------

    def flags(self, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the flags of a Trainer that writes its files to this folder: ``Trainer(**folder.flags(settings))``.

        A logger, a `ModelCheckpoint` and a `RunReport` are added if they are missing and no flag disables them. A
        `ModelCheckpoint` or `RunReport` in ``settings`` writes to this folder, unless its ``dirpath`` is set. If no
        `ModelCheckpoint` keeps the latest checkpoint, the first one that saves full checkpoints also keeps a
        ``last.ckpt``. Set ``save_last=False`` to prevent this.

        Args:
            settings: Flags of the Trainer to complete. Default: none.

        Raises:
            ValueError: If ``default_root_dir`` is a different folder, a callback writes to the folder of another run,
                or a callback is listed twice.
            TypeError: If ``callbacks`` contains anything other than callbacks.
        """
        from ...callbacks.reporting import RunRecord

        self._watch = RunRecord(self.record)
        flags = dict(settings or {})
        root = flags.get("default_root_dir")
        if root is not None and _resolve_path(root) != self.path:
            raise ValueError(
                f"default_root_dir={os.fspath(root)!r} contradicts the folder of this run, {self.path}. Remove "
                "default_root_dir. To change the directory of all runs, set run.dir in the configuration, or pass "
                "directory to RunFolder.create."
            )
        flags["default_root_dir"] = str(self.path)
        plain = not flags.get("barebones")
        if plain and flags.get("logger") in (None, True):
            from ...loggers import TensorBoardLogger

            flags["logger"] = TensorBoardLogger(str(self.path), name="", version="")
        flags["callbacks"] = [*self._complete_callbacks(flags, plain), self._watch]
        return flags

    def _complete_callbacks(self, flags: Mapping[str, Any], plain: bool) -> list[Callback]:
        from ...callbacks import ModelCheckpoint, OnExceptionCheckpoint, RunReport
        from ..default_callbacks import as_callbacks

        callbacks = as_callbacks("callbacks", flags.get("callbacks"))
        saves = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
        reports = [callback for callback in callbacks if isinstance(callback, RunReport)]
        for checkpoint_callback in saves:
            checkpoint_callback.dirpath = self._place(checkpoint_callback) or str(self.path / CHECKPOINTS)
        for report in reports:
            report.dirpath = self._place(report) or str(self.path)
        steady = [callback for callback in saves if not isinstance(callback, OnExceptionCheckpoint)]
        # A resume should not fall back to the best checkpoint.
        if not any(callback.keeps_newest for callback in steady):
            for saver in [callback for callback in steady if not callback.save_weights_only][:1]:
                saver.keep_last_by_default()
        if plain and flags.get("enable_checkpointing") is not False and not steady:
            callbacks.append(ModelCheckpoint(str(self.path / CHECKPOINTS)))
        if plain and flags.get("enable_report") is not False and not reports:
            callbacks.append(RunReport(str(self.path)))
        return callbacks

    def _place(self, callback: ModelCheckpoint | RunReport) -> Any:
        """Return a callback's ``dirpath``. Raise a ValueError if it or its parent is the folder of another run."""
        if callback.dirpath is not None:
            place = _resolve_path(callback.dirpath)
            for folder in (place, place.parent):
                if folder != self.path and (folder / RECORD).is_file():
                    raise ValueError(
                        f"this {type(callback).__name__} writes to {folder}, the folder of another run. Create a new "
                        "callback for each run, or change its dirpath."
                    )
        return callback.dirpath

    # -- contents ------------------------------------------------------------------------------------------------

    def write_config(self, text: str) -> None:
        """Write the run's configuration, as YAML. Only rank zero writes it.

        If a run continues with a different configuration, the previous one is kept as ``config.1.yaml``. If this
        file exists, the next free number is used.

        Args:
            text: The configuration as YAML.
        """
        if self.lock is None:
            return
        if (old := (self._previous_files or {}).get(CONFIG)) is not None and old != text.encode():
            files = self._files
            free = next(name for n in itertools.count(1) if not (files / (name := f"config.{n}.yaml")).exists())
            self._write(free, old)
            self._previous_config = files / free
        self._write(CONFIG, text)

    def record(self, facts: Mapping[str, Any], charts: Mapping[str, Mapping[str, Points]] | None = None) -> None:
        """Record the state of the run in ``run.json``, and its curves in ``curves.json``.

        Args:
            facts: The changed entries by name, such as ``state``, ``steps`` or ``best``. Values are plain data.
            charts: Charts by title. A chart maps the name of each curve to its steps and values. Default: None, which
                leaves ``curves.json`` unchanged.
        """
        state = facts.get("state", "running")
        if state.startswith("failed"):
            self._note_first({name: facts[name] for name in ("state", "error") if name in facts})
        if self.lock is None:
            return
        if facts.get("state") == "running":
            self._drop_error()  # the error of an earlier session no longer applies
        spent = {"seconds": self._earlier_seconds + time.monotonic() - self._began, "updated": time.time()}
        earlier = {name: self._facts.get(name, {}) for name in ("metrics", "digests")}
        self._facts.update({**facts, **spent})
        self._facts |= {name: {**values, **facts.get(name, {})} for name, values in earlier.items()}
        best = self._facts.get("best") or {}
        saved = as_path(best.get("checkpoint") or ".")
        if self.path in saved.parents:  # a relative path, because the folder may be moved
            inside = str(saved)[len(str(self.path)) + 1 :]
            self._facts["best"] = {**best, "checkpoint": inside.replace(os.sep, "/")}
        if charts is not None:
            drawn = {
                title: {name: _thin_curve(*points) for name, points in lines.items()} for title, lines in charts.items()
            }
            self._write(CURVES, json.dumps({"format": 1, "charts": drawn}, separators=(",", ":")), durable=False)
        self._write(RECORD, json.dumps(_make_plain(self._facts), indent=2, ensure_ascii=False), durable=False)

    def finish(self, state: str = "finished", **facts: Any) -> None:
        """Record how the run ended, and release the folder.

        Args:
            state: ``"finished"``, ``"interrupted"`` or ``"failed: <Error>"``. Default: ``"finished"``.
            facts: Further entries to record, as in `record`.
        """
        try:
            self.record({"ended": self._facts.get("ended") or time.time(), **facts, "state": state})
            flush(self.path)
        finally:
            self.release()

    def discard(self) -> None:
        """Remove the folder if it contains nothing but the lock and the files that describe the run.

        Only rank zero removes the folder.
        """
        files = (*DESCRIPTIONS, LOCK)
        if self.lock is not None and set(os.listdir(self._files)) <= set(files):
            self.release()
            self.lock = None
            for name in files:
                (self._files / name).unlink(missing_ok=True)
            flush(self.path)
            if isinstance(self.path, Path):
                self.path.rmdir()

    def _put_back(self, earlier: Mapping[str, bytes]) -> None:
        if self.lock is not None:
            for name in DESCRIPTIONS:
                if name in earlier:
                    self._write(name, earlier[name])
                else:
                    (self._files / name).unlink(missing_ok=True)
            if self._previous_config is not None:
                self._previous_config.unlink(missing_ok=True)
            flush(self.path)
            self.release()

    def release(self) -> None:
        """Release the folder, so that another job can continue the run."""
        if self.lock is not None:
            self.lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Record how the block ended, and release the folder. Errors are not suppressed.

        If the Trainer of a continued run has begun nothing, the run's files are restored instead.
        """
        from ...callbacks.reporting import describe_error

        if self._previous_files is not None and self._watch is not None and not self._watch.began:
            self._put_back(self._previous_files)
            return
        if isinstance(error, SystemExit) and not error.code:
            error = None
        state = str(self._facts.get("state"))
        end = {"state": "finished" if state == "running" else state} if error is None else describe_error(error)
        try:
            self.finish(**end)
        except OSError as refused:
            from ...common.messages import warn

            warn(f"the end of the run could not be recorded in {self.path}: {refused.strerror or refused}.")

    def _note_first(self, facts: Mapping[str, Any]) -> None:
        """Record an error, unless another process has already recorded one, which is probably its cause."""
        text = json.dumps(facts, ensure_ascii=False).encode(errors="replace")
        with contextlib.suppress(OSError):
            if isinstance(self.path, RemotePath):
                (self.path / ERROR).write_bytes(text, exclusive=True)
                return
            with open(self.path / ERROR, "xb") as file:
                file.write(text)

    def _drop_error(self) -> None:
        (self._files / ERROR).unlink(missing_ok=True)
        if isinstance(self.path, RemotePath):  # each process writes to the store itself
            with contextlib.suppress(OSError):
                (self.path / ERROR).unlink()

    @property
    def _files(self) -> Path:
        return local_folder(self.path)

    def _write(self, name: str, content: str | bytes, durable: bool = True) -> None:
        """Write a file atomically with a rename, so that a reader sees either the old or the new content."""
        from ...engine.checkpoint import filesystem

        part = self._files / f".{name}.tmp"
        try:
            part.unlink(missing_ok=True)  # an existing one may be a link to another file
            filesystem.write_bytes(part, content if isinstance(content, bytes) else content.encode(errors="replace"))
            if durable:
                filesystem.fsync(part)
            filesystem.replace(part, self._files / name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def check_name(name: Any) -> str:
    """Return ``name`` unchanged if it is a valid name for the folder of a group of runs.

    Raises:
        TypeError: If the name is not a string.
        ValueError: If the name is not valid for a folder.
    """
    rule = "it becomes the name of a folder"
    if not isinstance(name, str):
        raise TypeError(f"name={name!r} must be a string, not {name_type(name)}: {rule}.")
    if not name or name != name.strip() or name.startswith(".") or re.search(r'[\x00-\x1f\x7f/\\:*?"<>|]', name):
        raise ValueError(
            f"name={name!r} cannot be the name of a run: {rule}, so it must not be empty, begin with a dot, begin or "
            'end with a space, or contain a control character or any of / \\ : * ? " < > |.'
        )
    if len(os.fsencode(name)) > 200:
        raise ValueError(f"name={name[:20]!r}... has {len(os.fsencode(name))} bytes, but may have at most 200: {rule}.")
    return name


def _claim(home: AnyPath) -> tuple[AnyPath, RunLock]:
    """Create and lock the run folder with the next free number. Concurrent jobs get different folders."""
    if isinstance(home, RemotePath):
        number = max((int(entry) for entry in home.names() if entry.isascii() and entry.isdigit()), default=0) + 1
        while True:
            with contextlib.suppress(ValueError):  # another job was faster
                return home / str(number), RunLock(home / str(number))
            number += 1
    folder = _make_numbered(home)
    return folder, _lock(folder)


def _make_numbered(home: Path) -> Path:
    try:
        home.mkdir(parents=True, exist_ok=True)
        number = max((int(entry) for entry in os.listdir(home) if entry.isascii() and entry.isdigit()), default=0) + 1
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(home / str(number))
                return home / str(number)
            number += 1
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"cannot create a run's folder in {home}: {reason}. Choose a writable directory."
        raise OSError(error.errno, text) from error


def _lock(folder: AnyPath) -> RunLock:
    try:
        return RunLock(folder)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot lock {folder / LOCK}: {error.strerror or error}. Make sure that this file can be written.",
        ) from error


def _open_world(settings: Mapping[str, Any] | None) -> World:
    """Open the job's `World` as a Trainer with these flags would, launching processes if necessary."""
    from ...strategies import open_world

    flag_names = ("accelerator", "devices", "num_nodes")
    return open_world(**{name: settings[name] for name in flag_names if settings and settings.get(name) is not None})


def _resolve_path(path: str | Path | RemotePath) -> AnyPath:
    """Expand ``~`` and environment variables in a path, and make the path absolute."""
    return path if isinstance(path, RemotePath) else absolute(os.path.expandvars(os.path.expanduser(str(path))))


def _thin_curve(steps: Any, values: Any) -> dict[str, Any]:
    from ...callbacks.reporting import thin_points

    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    drawn_steps, drawn = thin_points(points, _MOST_POINTS)
    return {"steps": drawn_steps, "values": [float(f"{v:.7g}") for v in drawn], "missing": len(steps) - len(points)}


def _make_plain(value: Any) -> Any:
    """Return values as data for strict JSON. Numbers that are not finite, and other objects, become text."""
    if isinstance(value, Mapping):
        return {str(name): _make_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
