"""The folder of one run, ``runs/<name>/<number>``: what it was made with, how it stands, its logs and checkpoints."""

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

from ...common.mirror import flush, local_folder
from ...common.remote_path import AnyPath, RemotePath, absolute, as_path
from .file_names import CHECKPOINTS, CONFIG, CURVES, DESCRIPTIONS, ENVIRONMENT, ERROR, LOCK, RECORD
from .index import WAITING, read
from .lock import RunLock
from .remote_lock import RemoteLock

if TYPE_CHECKING:
    from ...callbacks import Callback, ModelCheckpoint, RunReport
    from ...callbacks.reporting import Points, RunRecord
    from ...strategies import World

_MOST_POINTS = 256  # twice as many are kept of a curve, for a look at it; the loggers have every value


class RunFolder:
    """The folder of one run, which one job at a time may have. All processes of the job make it, rank zero writes.

    Use it in a ``with`` block: what ends the block is what the run ended with.

    .. code-block:: text

        run.json          how it stands, its best and its last values
        curves.json       the curves of ``trainer.history``, thinned out
        config.yaml       what `write_config` was given
        environment.json  versions, git revision, hardware
        checkpoints/      and what the loggers write, and report.html
        error.json        the first error of any process, where one ended the run
        lock              who works on it; see `RunLock`

    Attributes:
        path: The folder, or its URL, the same on all processes. What is written to a URL is uploaded beside the
            training.
        lock: Held until `release`, or until the process ends; None on other processes than rank zero.
        trial: The run's number among the trials of a sweep, the same on all processes; None if it is no trial.
    """

    def __init__(self, path: AnyPath, lock: RunLock | RemoteLock | None, facts: dict[str, Any]) -> None:
        self.path = path
        self.lock = lock
        self.trial: int | None = None
        self._facts = facts
        self._before = float(facts.get("seconds", 0.0))
        self._began = time.monotonic()
        self._previous_files: dict[str, bytes] | None = None  # the files of a run that is gone on with
        self._previous_config: Path | None = None  # where the configuration among them is kept
        self._watch: RunRecord | None = None

    @classmethod
    def create(
        cls, directory: str | Path = "runs", name: str = "default", settings: Mapping[str, Any] | None = None
    ) -> RunFolder:
        """Take the next free number below ``directory/name``. Many jobs may do so at once.

        Args:
            directory: Above all runs, or a URL such as ``s3://bucket/runs``; made if it is not there.
            name: What runs that belong together have in common; the name of a folder.
            settings: The Trainer's flags, whose ``accelerator``, ``devices`` and ``num_nodes`` say which processes the
                job has; those that are missing are started, as a Trainer would. Call it where they may run it too.

        Raises:
            ValueError: The name can't be that of a folder.
            OSError: The folder can't be made; the text says where.
        """
        check_name(name)
        world = _open_world(settings)
        lock: RunLock | RemoteLock | None = None
        facts: dict[str, Any] = {}
        path: AnyPath = Path()
        with world.together():
            if world.is_main:
                path, lock = _claim(_resolve_path(directory) / name)
                facts = {"format": 1, "name": name, "number": int(path.name), "began": time.time()}
        return cls._begin(world, path, lock, facts)

    @classmethod
    def open(cls, path: str | Path, settings: Mapping[str, Any] | None = None) -> RunFolder:
        """Go on in a folder that is there. Should it never come to training, its files will be as they were.

        A run that is waiting, see `prepare`, is begun like a new one.

        Args:
            path: The folder.
            settings: See `create`.

        Raises:
            ValueError: It is not a run's folder, or another job holds it.
            OSError: It can't be written to.
        """
        world = _open_world(settings)
        lock: RunLock | RemoteLock | None = None
        facts: dict[str, Any] = {}
        earlier: dict[str, bytes] | None = {}
        folder_path = _resolve_path(path)
        with world.together():
            if world.is_main:
                read(folder_path)  # before anything is written into a folder that may be someone else's
                lock = _lock(folder_path)
                run = read(folder_path)
                files = [file for name in DESCRIPTIONS if (file := local_folder(folder_path) / name).is_file()]
                earlier = {file.name: file.read_bytes() for file in files}
                # A record that can't be read is no reason to lose the checkpoints that stand beside it.
                facts = {"format": 1, "name": run.name, "number": run.number, "began": run.began or time.time()}
                facts |= run.facts
                if run.state == WAITING:
                    earlier, facts["began"] = None, time.time()
                else:
                    facts |= {"resumed": time.time(), "ended": None, "note": None, "error": None}
        return cls._begin(world, folder_path, lock, facts, earlier)

    @classmethod
    def prepare(cls, path: Path, config: str, facts: Mapping[str, Any]) -> None:
        """Write the folder of a run that another process will begin with `open`; until then the run is waiting.

        Only one process may do so at a time. What a killed one has left half done is written anew.

        Args:
            path: The folder; its name is the run's number.
            config: The run's configuration, as YAML.
            facts: What is known of the run, by name, as `record` takes it.

        Raises:
            OSError: The folder can't be written.
        """
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
        lock: RunLock | RemoteLock | None,
        facts: dict[str, Any],
        earlier: dict[str, bytes] | None = None,
    ) -> RunFolder:
        agreed_path, trial = world.broadcast((str(path), facts.get("trial")))
        folder = cls(as_path(agreed_path), lock, facts)
        folder.trial = trial
        folder._previous_files = earlier
        try:
            with world.together():
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

    # -- what a Trainer needs ------------------------------------------------------------------------------------

    def flags(self, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The flags of a Trainer that keeps all it writes in this folder: ``Trainer(**folder.flags(settings))``.

        A `RunRecord` is added; a logger, a `ModelCheckpoint` and a `RunReport` where a Trainer would have them by
        default. Those that were given stay, and get their place here unless they have one. Where no `ModelCheckpoint`
        keeps the newest checkpoint, the first one keeps a ``last.ckpt`` too, unless it has ``save_last=False``.

        Args:
            settings: The flags so far.

        Raises:
            ValueError: ``default_root_dir`` names another place, or a callback writes into another run's folder.
        """
        from ...callbacks.reporting import RunRecord

        self._watch = RunRecord(self.record)
        flags = dict(settings or {})
        root = flags.get("default_root_dir")
        if root is not None and _resolve_path(root) != self.path:
            raise ValueError(
                f"default_root_dir={os.fspath(root)!r}, but what this run writes goes into its folder, {self.path}. "
                "Leave default_root_dir out; where runs' folders stand is said when they are made."
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
        """Where a callback was told to write, which may not be another run's folder: it would write over that."""
        if callback.dirpath is not None:
            place = _resolve_path(callback.dirpath)
            for folder in (place, place.parent):
                if folder != self.path and (folder / RECORD).is_file():
                    raise ValueError(
                        f"this {type(callback).__name__} has its place in {folder}, the folder of another run. "
                        "Make a new one for each run, or give it a dirpath of its own."
                    )
        return callback.dirpath

    # -- what is in it -------------------------------------------------------------------------------------------

    def write_config(self, text: str) -> None:
        """Keep what the run was configured with, as YAML. Where it goes on, what it began with is ``config.1.yaml``."""
        if self.lock is None:
            return
        if (old := (self._previous_files or {}).get(CONFIG)) is not None and old != text.encode():
            files = self._files
            free = next(name for n in itertools.count(1) if not (files / (name := f"config.{n}.yaml")).exists())
            self._write(free, old)
            self._previous_config = files / free
        self._write(CONFIG, text)

    def record(self, facts: Mapping[str, Any], charts: Mapping[str, Mapping[str, Points]] | None = None) -> None:
        """Note how the run stands.

        Args:
            facts: What has changed, by name: ``state``, ``steps``, ``best``, ... Values are plain. Of other processes
                than rank zero an error alone is noted.
            charts: Steps and values of the curves of each chart, by name; None where they have not changed.
        """
        state = facts.get("state", "running")
        if state.startswith("failed"):
            self._note_first({name: facts[name] for name in ("state", "error") if name in facts})
        if self.lock is None:
            return
        if facts.get("state") == "running":
            self._drop_error()  # what was before is over
        spent = {"seconds": self._before + time.monotonic() - self._began, "updated": time.time()}
        metrics = self._facts.get("metrics", {})
        self._facts.update({**facts, **spent})
        self._facts["metrics"] = {**metrics, **facts.get("metrics", {})}
        best = self._facts.get("best") or {}
        saved = as_path(best.get("checkpoint") or ".")
        if self.path in saved.parents:  # it may be moved with the folder
            inside = str(saved)[len(str(self.path)) + 1 :]
            self._facts["best"] = {**best, "checkpoint": inside.replace(os.sep, "/")}
        if charts is not None:
            drawn = {
                title: {name: _thin_curve(*points) for name, points in lines.items()} for title, lines in charts.items()
            }
            self._write(CURVES, json.dumps({"format": 1, "charts": drawn}, separators=(",", ":")), durable=False)
        self._write(RECORD, json.dumps(_make_plain(self._facts), indent=2, ensure_ascii=False), durable=False)

    def finish(self, state: str = "finished", **facts: Any) -> None:
        """Note how the run ended, and let go of the folder.

        Args:
            state: ``"finished"``, ``"interrupted"`` or ``"failed: <Error>"``.
            facts: Further facts to note, as `record` takes them.
        """
        try:
            self.record({"ended": self._facts.get("ended") or time.time(), **facts, "state": state})
            flush(self.path)
        finally:
            self.release()

    def discard(self) -> None:
        """Remove the folder, unless there is more in it than what a run has from its beginning."""
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
        """Leave the folder as it was found."""
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
        """Let go of the folder; another job may go on in it."""
        if self.lock is not None:
            self.lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Note what ended the block, if that is not known, and let go of the folder. An error goes its way."""
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

            warn(f"how the run ended could not be written into {self.path}: {refused}")

    def _note_first(self, facts: Mapping[str, Any]) -> None:
        """Keep what failed if nothing has on any process: the other errors may follow from it."""
        text = json.dumps(facts, ensure_ascii=False).encode(errors="replace")
        with contextlib.suppress(OSError):
            if isinstance(self.path, RemotePath):
                (self.path / ERROR).write_bytes(text, exclusive=True)
                return
            with open(self.path / ERROR, "xb") as file:
                file.write(text)

    def _drop_error(self) -> None:
        (self._files / ERROR).unlink(missing_ok=True)
        if isinstance(self.path, RemotePath):  # where each process writes it by itself
            with contextlib.suppress(OSError):
                (self.path / ERROR).unlink()

    @property
    def _files(self) -> Path:
        """Where this process writes what is in the folder."""
        return local_folder(self.path)

    def _write(self, name: str, content: str | bytes, durable: bool = True) -> None:
        """Write a file in one move: whoever reads it sees the old or the new one."""
        from ...engine.checkpoint import filesystem

        part = self._files / f".{name}.tmp"
        try:
            part.unlink(missing_ok=True)  # what is there may be a link to a file that is not ours
            filesystem.write_bytes(part, content if isinstance(content, bytes) else content.encode(errors="replace"))
            if durable:
                filesystem.fsync(part)
            filesystem.replace(part, self._files / name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def check_name(name: Any) -> str:
    """Raise a ValueError if ``name`` can't be that of runs, which is that of a folder."""
    rule = "it becomes the name of a folder"
    if not isinstance(name, str):
        raise TypeError(f"name={name!r} must be a string, not a {type(name).__name__}: {rule}.")
    if not name or name != name.strip() or name.startswith(".") or re.search(r'[\x00-\x1f\x7f/\\:*?"<>|]', name):
        raise ValueError(
            f"name={name!r} can't be the name of a run: {rule}, so it may not be empty, begin with a dot, begin or end "
            'with a space, or contain any of / \\ : * ? " < > |.'
        )
    if len(os.fsencode(name)) > 200:
        raise ValueError(f"name={name[:20]!r}... is {len(os.fsencode(name))} bytes long, 200 at most: {rule}.")
    return name


def _claim(home: AnyPath) -> tuple[AnyPath, RunLock | RemoteLock]:
    """Make the next free number's folder, and lock it. Making it is the claim, which one job alone can do."""
    if isinstance(home, RemotePath):
        number = max((int(entry) for entry in home.names() if entry.isascii() and entry.isdigit()), default=0) + 1
        while True:
            with contextlib.suppress(ValueError):  # another job was faster
                return home / str(number), RemoteLock(home / str(number))
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
        text = f"can't make a run's folder in {home}: {reason}. Choose a directory that can be written to."
        raise OSError(error.errno, text) from error


def _lock(folder: AnyPath) -> RunLock | RemoteLock:
    try:
        return RemoteLock(folder) if isinstance(folder, RemotePath) else RunLock(folder)
    except OSError as error:
        raise OSError(error.errno, f"can't lock {folder / LOCK}: {error.strerror or error}.") from error


def _open_world(settings: Mapping[str, Any] | None) -> World:
    """The job's processes, those that a Trainer with these flags has."""
    from ...strategies import open_world

    flag_names = ("accelerator", "devices", "num_nodes")
    return open_world(**{name: settings[name] for name in flag_names if settings and settings.get(name) is not None})


def _resolve_path(path: str | Path | RemotePath) -> AnyPath:
    return path if isinstance(path, RemotePath) else absolute(os.path.expandvars(os.path.expanduser(str(path))))


def _thin_curve(steps: Any, values: Any) -> dict[str, Any]:
    from ...callbacks.reporting import thin_points

    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    drawn_steps, drawn = thin_points(points, _MOST_POINTS)
    return {"steps": drawn_steps, "values": [float(f"{v:.7g}") for v in drawn], "missing": len(steps) - len(points)}


def _make_plain(value: Any) -> Any:
    """Facts as strict JSON has them, which has no number that is not finite."""
    if isinstance(value, Mapping):
        return {str(name): _make_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
