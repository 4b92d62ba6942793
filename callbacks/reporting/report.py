"""A page about the run, in its folder."""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.mirror import local_folder
from ...common.remote_path import AnyPath, as_path
from ...common.validation import check_number
from ..best_effort import BestEffortCallback

if TYPE_CHECKING:
    from ...trainer import TaskModule, Trainer
    from .html import Failure, Page


class RunReport(BestEffortCallback):
    """Write ``report.html`` into the run's folder: one file that any browser opens, without a server or a network.

    It shows the error that ended it, if one did, the curves of `trainer.history`, learning rates, throughput, where the
    time went, what was decided, checkpoints, the hyperparameters of the task and data module that were trained, the
    flags that were set and the defaults of the others, the environment, and the profile if there is one. Rank zero
    writes it once training has begun: when a stage ends, however it ends, and when an epoch or a validation ends, so
    that the page of a run that is under way, or was killed, is there too.

    Args:
        dirpath: The folder, or its URL. Default: the run's, as for `ModelCheckpoint`.
        filename: The file's name.
        every_seconds: Seconds between two writes, at least, while a run is under way.

    Attributes:
        path: What was written last, None before.

    Raises:
        ValueError: For an interval below 0.
    """

    after_task = 3  # what others did at the same time is in it

    def __init__(
        self, dirpath: str | Path | None = None, filename: str = "report.html", every_seconds: float = 60.0
    ) -> None:
        self.dirpath = dirpath
        self.filename = filename
        self.every_seconds = check_number("every_seconds", every_seconds, 0.0)
        self.path: AnyPath | None = None
        self._written = 0.0
        self._begun = False
        self._samples, self._seconds = 0, 0.0  # of training, when fit began
        self._endings: dict[str, tuple[str, bool]] = {}  # of each stage that ran since fit began
        self._failures: list[Failure] = []
        self._hyperparameters: dict[str, dict[str, str]] = {}  # of fit: later stages may have another task or data

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """A new fit, a new page; another stage adds to it."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._begun = False
            self._seconds = trainer.history.spent.get("training", 0.0)
            self._endings, self._failures = {}, []

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """From here on there is something to show."""
        self._begun = True
        self._hyperparameters = {
            "Hyperparameters": _collect_hyperparameters(pl_module),
            "Data module's hyperparameters": _collect_hyperparameters(trainer.datamodule),
        }
        self._samples = trainer.progress.samples  # with those of the checkpoint that fit goes on from
        self._written = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Write, if that is long ago."""
        self._write_if_due(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Write, if that is long ago."""
        self._write_if_due(trainer)

    def on_exception(self, trainer: Trainer, pl_module: TaskModule, exception: BaseException) -> None:
        """Keep the error."""
        from ...engine.preemption import Preempted

        interrupted = trainer.interrupted or isinstance(exception, Preempted)
        name = "interrupted" if interrupted else f"failed: {type(exception).__name__}"
        self._endings[str(trainer.stage)] = name, False
        if not interrupted:
            from .html import Failure

            message = "".join(traceback.format_exception_only(exception)).strip()
            trace = "".join(traceback.format_exception(exception))
            self._failures.append(Failure(str(trainer.stage), message, format_user_frames(exception), trace))

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Write how it ended."""
        if self._begun and trainer.is_global_zero:
            self._endings.setdefault(stage, (describe_ending(trainer, stage), True))
            state, well = zip(*self._endings.values(), strict=True)
            self._safely(self._write, trainer, ", ".join(state), all(well))

    def _write_if_due(self, trainer: Trainer) -> None:
        if self._begun and trainer.is_global_zero and time.monotonic() - self._written >= self.every_seconds:
            self._safely(self._write, trainer, "under way", None)

    def _write(self, trainer: Trainer, state: str, ended_well: bool | None) -> None:
        place = as_path(self.dirpath or trainer.logbook.directory(trainer.default_root_dir))
        folder = local_folder(place)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.filename
        part = path.with_name(path.name + ".tmp")
        try:
            part.unlink(missing_ok=True)  # what is there may be a link to a file that is not ours
            part.write_text(self.page(trainer, state, ended_well).render(), encoding="utf-8", errors="replace")
            os.replace(part, path)  # whoever has it open never sees half of it
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        self.path, self._written = place / self.filename, time.monotonic()

    def page(self, trainer: Trainer, state: str, ended_well: bool | None) -> Page:
        """What the page shows; override it to add to it.

        Args:
            trainer: Whose run it is about.
            state: How it stands, in a word.
            ended_well: Whether that is good; None while it is under way.
        """
        # A page is written long after the import, which need not wait for what draws it.
        from ...engine import environment
        from ...engine.profilers import SimpleProfiler
        from .html import Page

        history, task = trainer.history, trainer.task
        history.tick()
        settings = _flatten_settings(trainer.settings)
        defaults = {name: text for name, text in settings.items() if name not in trainer.changed_settings}
        texts = {}
        if ended_well is not None and isinstance(trainer.profiler, SimpleProfiler):
            texts["Profile"] = trainer.profiler.summary()
        return Page(
            title=type(task).__name__,
            state=state,
            ended_well=ended_well,
            notes=[f"written {time.strftime('%Y-%m-%d %H:%M:%S')}", *trainer.decided.splitlines()],
            tiles=_make_tiles(trainer, self._samples, self._seconds),
            charts=build_charts(trainer),
            times={part: (seconds, history.waits[part]) for part, seconds in history.spent.items()},
            tables={
                "Checkpoints": _list_checkpoints(trainer),
                **self._hyperparameters,
                "Settings": {name: text for name, text in settings.items() if name in trainer.changed_settings},
                "Environment": environment(),
            },
            folded={"Settings": (f"{len(defaults)} as they are by default", defaults)},
            failures=self._failures,
            texts=texts,
        )


def describe_ending(trainer: Trainer, stage: str) -> str:
    """How a stage ended, without an error."""
    if stage != "fit":
        return f"{stage} done"
    early = (callback for callback in trainer.early_stopping_callbacks if callback.stopping_reason_message)
    return "finished" if (callback := next(early, None)) is None else f"stopped early by {type(callback).__name__}"


def _make_tiles(trainer: Trainer, samples: int, seconds: float) -> dict[str, str]:
    """A few numbers. Times are those of this process, so the rate is of what came after so many samples and seconds."""
    from .html import format_duration, format_number

    progress, history = trainer.progress, trainer.history
    tiles = {
        "optimizer steps": f"{progress.step:,}",
        "epochs": f"{progress.epoch:,}",
        "samples": f"{progress.samples:,}",
        "since it was resumed" if samples and not seconds else "in all": format_duration(sum(history.spent.values())),
    }
    if progress.samples > samples and (spent := history.spent.get("training", 0.0) - seconds) > 0:
        tiles["samples per second of training"] = format_number((progress.samples - samples) / spent)
    if progress.skipped:
        tiles["steps left out as not finite"] = f"{progress.skipped:,}"
    if (best := find_best(trainer)) is not None:
        tiles[f"best {best['metric']}"] = format_number(best["value"])
    return tiles


def build_charts(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """What was logged, then the learning rates and the throughput."""
    from .html import group_names

    history = trainer.history
    logged = [name for name in history if name not in history.rates]  # a monitor may log those too
    charts = {title: {name: history[name].points() for name in names} for title, names in group_names(logged).items()}
    extra_charts = {
        "learning rate": history.rates,
        "samples per second": {"training, all processes": history.throughput},
    }
    for title, curves in extra_charts.items():
        points = {name: curve.points() for name, curve in curves.items() if len(curve)}
        if points:
            charts[title] = {**charts.get(title, {}), **points}
    return charts


def find_best(trainer: Trainer) -> dict[str, Any] | None:
    """The best value that a callback watches for, a `ModelCheckpoint` before an `EarlyStopping`; None without one."""
    for saved in trainer.checkpoint_callbacks:
        if saved.monitor and saved.best_model_score is not None:
            best = {"metric": saved.monitor, "mode": saved.mode, "value": float(saved.best_model_score)}
            return {**best, "checkpoint": saved.best_model_path}
    for stop in trainer.early_stopping_callbacks:
        if math.isfinite(value := float(stop.best_score)):
            return {"metric": stop.monitor, "mode": stop.mode, "value": value}
    return None


def format_user_frames(error: BaseException) -> str:
    """Where an error happened in code that is neither ours nor torch's, as in a traceback; "" where that is nowhere."""
    root_cause = error
    while root_cause.__cause__ is not None:  # the first cause tells more than what was raised from it
        root_cause = root_cause.__cause__
    package = __name__.partition(".")[0]
    frames = [
        summary
        for (frame, _), summary in zip(
            traceback.walk_tb(root_cause.__traceback__), traceback.extract_tb(root_cause.__traceback__), strict=True
        )
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in (package, "torch")
    ]
    return "".join(traceback.format_list(frames)).rstrip()


def _list_checkpoints(trainer: Trainer) -> dict[str, str]:
    """Where they are."""
    rows = {} if trainer.ckpt_path is None else {"went on from": str(trainer.ckpt_path)}
    for saved in trainer.checkpoint_callbacks:
        best = f"best {saved.monitor}" if saved.monitor else "newest"
        for name, path in ((best, saved.best_model_path), ("last", saved.last_model_path)):
            if path:
                rows[name if rows.get(name, path) == path else f"{name}, of {type(saved).__name__}"] = path
    return rows


def _collect_hyperparameters(owner: Any) -> dict[str, str]:
    """Those that loggers may have: ``save_hyperparameters(logger=False)`` keeps them from files for people."""
    if owner is None or not owner.log_hyperparameters:
        return {}
    left_out = {name: f"not stored: {words}" for name, words in owner.stored_hparams().left_out.items()}
    return {**_flatten_settings(owner.plain_hparams()), **left_out}


def _flatten_settings(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Nested settings, one line each; what is long is cut."""
    lines: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            lines |= _flatten_settings(value, f"{before}{name}.")
        else:
            text = value if isinstance(value, str) else repr(value)
            lines[f"{before}{name}"] = text if len(text) <= 1000 else f"{text[:1000]}... ({len(text):,} characters)"
    return lines
