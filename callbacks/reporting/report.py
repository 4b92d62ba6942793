"""`RunReport`: writes an HTML page about the run."""

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
from ..lr_finder import LearningRateFinder

if TYPE_CHECKING:
    from ...trainer import TaskModule, Trainer
    from .html import Failure, Page


class RunReport(BestEffortCallback):
    """Callback that writes a self-contained HTML page about the run.

    The page can be opened in any browser, without a network connection. It shows the curves of `trainer.history`, the
    time spent on each activity, the settings, the checkpoints, the environment and any error that ended the run.

    Rank zero writes the page at the end of each stage, even if the stage failed. It also writes the page after epochs
    and validations, at most once every ``every_seconds`` seconds. Nothing is written before training begins.

    Args:
        dirpath: Path or URL of the page's folder. Default: the run's folder.
        filename: Name of the file. Default: ``"report.html"``.
        every_seconds: Minimum number of seconds between two writes during training. Default: 60.0.

    Attributes:
        path: Path of the page; None if it has not been written.

    Raises:
        ValueError, TypeError: If ``every_seconds`` is invalid.

    Examples:
        >>> import os, tempfile
        >>> import treadle as tl
        >>> from treadle.callbacks import RunReport
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> report = RunReport()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report.dirpath = folder
        ...     trainer = tl.Trainer(
        ...         max_steps=1,
        ...         accelerator="cpu",
        ...         devices=1,
        ...         logger=False,
        ...         enable_checkpointing=False,
        ...         enable_progress_bar=False,
        ...         callbacks=report,
        ...     )
        ...     trainer.fit(BoringModel())
        ...     os.listdir(folder)
        ['report.html']
    """

    after_task = 3  # after the other callbacks, whose results it shows

    def __init__(
        self, dirpath: str | Path | None = None, filename: str = "report.html", every_seconds: float = 60.0
    ) -> None:
        self.dirpath = dirpath
        self.filename = filename
        self.every_seconds = check_number("every_seconds", every_seconds, 0.0)
        self.path: AnyPath | None = None
        self._written = 0.0
        self._begun = False
        self._samples, self._seconds = 0, 0.0  # samples and seconds of training when fit began
        self._endings: dict[str, tuple[str, bool]] = {}  # for each stage since fit began
        self._failures: list[Failure] = []
        # Those of fit, because later stages may have another task.
        self._hyperparameters: dict[str, dict[str, str]] = {}
        self._title = ""
        self._resumed_from: str | None = None
        self._last_losses: dict[str, Any] = {}  # lines of a chart

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Reset the page for a new ``fit``."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self._begun = False
            self._seconds = trainer.history.spent.get("training", 0.0)
            self._endings, self._failures, self._last_losses = {}, [], {}

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Record the hyperparameters, and allow the page to be written."""
        self._begun = True
        self._hyperparameters = {
            "Hyperparameters": collect_hyperparameters(pl_module),
            "Data module's hyperparameters": collect_hyperparameters(trainer.datamodule),
        }
        self._title = type(pl_module).__name__
        self._resumed_from = None if trainer.ckpt_path is None else str(trainer.ckpt_path)
        self._samples = trainer.progress.samples  # includes those of the checkpoint that fit resumes from
        self._written = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Write the page if it is due."""
        self._write_if_due(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Write the page if it is due."""
        self._write_if_due(trainer)

    def on_exception(self, trainer: Trainer, pl_module: TaskModule, exception: BaseException) -> None:
        """Record the error for the page."""
        from ...engine.preemption import Preempted

        interrupted = trainer.interrupted or isinstance(exception, Preempted)
        name = "interrupted" if interrupted else f"failed: {type(exception).__name__}"
        self._endings[str(trainer.stage)] = name, False
        if trainer.stage == "fit" and self._begun and trainer.is_global_zero:
            self._last_losses = self._safely(collect_last_losses, trainer) or {}
        if not interrupted:
            from .html import Failure

            message = "".join(traceback.format_exception_only(exception)).strip()
            trace = "".join(traceback.format_exception(exception))
            self._failures.append(Failure(str(trainer.stage), message, format_user_frames(exception), trace))

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Write the page if training has begun."""
        if self._begun and trainer.is_global_zero:
            self._endings.setdefault(stage, (describe_ending(trainer, stage), True))
            state, well = zip(*self._endings.values(), strict=True)
            self._safely(self._write, trainer, ", ".join(state), all(well))

    def _write_if_due(self, trainer: Trainer) -> None:
        if self._begun and trainer.is_global_zero and time.monotonic() - self._written >= self.every_seconds:
            self._safely(self._write, trainer, "under way", None)

    def _write(self, trainer: Trainer, state: str, ended_well: bool | None) -> None:
        """Write the page atomically, so that a reader never sees a partial page."""
        place = as_path(self.dirpath or trainer.logbook.directory(trainer.default_root_dir))
        folder = local_folder(place)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.filename
        part = path.with_name(path.name + ".tmp")
        try:
            part.unlink(missing_ok=True)  # an existing one may be a link to another file
            part.write_text(self.page(trainer, state, ended_well).render(), encoding="utf-8", errors="replace")
            os.replace(part, path)  # a reader never sees a partial file
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        self.path, self._written = place / self.filename, time.monotonic()

    def page(self, trainer: Trainer, state: str, ended_well: bool | None) -> Page:
        """Return the content of the page to write. Override this method to add content.

        Args:
            trainer: The Trainer.
            state: State of the run as the page shows it, such as ``"under way"`` or ``"finished"``.
            ended_well: Whether the run succeeded; None while it is running.
        """
        # Imported when a page is written, so that importing this file stays fast.
        from ...engine import environment
        from ...engine.profilers import SimpleProfiler
        from .html import LEARNING_RATE, Page, format_number

        history = trainer.history
        history.tick()
        tiles, charts = _make_tiles(trainer, self._samples, self._seconds), build_charts(trainer)
        rates = [values for _, values in charts.get(LEARNING_RATE, {}).values()]
        if len(rates) == 1 and len(set(rates[0])) == 1:  # a number says more than a flat line
            del charts[LEARNING_RATE]
            tiles[LEARNING_RATE] = format_number(rates[0][0])
        if self._last_losses:
            charts = {"loss of the last steps": self._last_losses, **charts}
        changed, defaults = split_settings(trainer)
        texts = {}
        if ended_well is not None and isinstance(trainer.profiler, SimpleProfiler):
            texts["Profile"] = trainer.profiler.summary()
        return Page(
            title=self._title,
            state=state,
            ended_well=ended_well,
            notes=[f"written {time.strftime('%Y-%m-%d %H:%M:%S')}", *trainer.decided.splitlines()],
            tiles=tiles,
            charts=charts,
            times={part: (seconds, history.waits[part]) for part, seconds in history.spent.items()},
            verdict=judge_times(history.spent, history.waits.get("training", 0.0)),
            tables={
                "Checkpoints": _list_checkpoints(trainer, self._resumed_from),
                **self._hyperparameters,
                "Settings": changed,
                "Environment": environment(),
            },
            folded={"Settings": (f"{len(defaults)} defaults", defaults)},
            failures=self._failures,
            texts=texts,
        )


def describe_ending(trainer: Trainer, stage: str) -> str:
    """Return the outcome of a stage that raised no error, such as ``"finished"``."""
    if stage != "fit":
        return f"{stage} done"
    early = (callback for callback in trainer.early_stopping_callbacks if callback.stopping_reason_message)
    return "finished" if (callback := next(early, None)) is None else f"stopped early by {type(callback).__name__}"


def _make_tiles(trainer: Trainer, samples: int, seconds: float) -> dict[str, str]:
    """Return key figures by name.

    ``samples`` and ``seconds`` are the values from before this ``fit``. The throughput excludes them.
    """
    from .html import format_duration, format_number

    progress, history = trainer.progress, trainer.history
    tiles = {
        "optimizer steps": f"{progress.step:,}",
        "epochs": f"{progress.epoch:,}",
        "samples": f"{progress.samples:,}",
        "since the resume" if samples and not seconds else "total time": format_duration(sum(history.spent.values())),
    }
    if progress.samples > samples and (spent := history.spent.get("training", 0.0) - seconds) > 0:
        tiles["samples per second of training"] = format_number((progress.samples - samples) / spent)
    if progress.skipped:
        tiles["steps skipped because not finite"] = f"{progress.skipped:,}"
    if (best := find_best(trainer)) is not None:
        tiles[f"best {best['metric']}"] = format_number(best["value"])
    return tiles


def build_charts(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return the steps and values of each curve, by title of the chart and name of the curve."""
    from .html import LEARNING_RATE, THROUGHPUT, group_names

    history = trainer.history
    logged = [name for name in history if name not in history.rates]
    # A monitor's rates are those that the steps were taken with, and the values that tables show.
    rates = {name: history.get(name, curve) for name, curve in history.rates.items()}
    charts = {title: {name: history[name].points() for name in names} for title, names in group_names(logged).items()}
    extra_charts = {
        LEARNING_RATE: rates,
        THROUGHPUT: {"training, all processes": history.throughput},
    }
    finders = [callback for callback in trainer.callbacks if isinstance(callback, LearningRateFinder)]
    for curve in (finder.optimal_lr for finder in finders if finder.optimal_lr is not None):
        lrs, losses = curve.results["lr"], curve.results["loss"]
        title = f"learning rate search, {lrs[0]:.1e} to {lrs[-1]:.1e}"
        charts[title] = {"smoothed loss": (list(range(len(losses))), losses)}
        if (best := curve._optimal_idx) is not None:
            charts[title][f"suggested: {lrs[best]:.3g}"] = ([best], [losses[best]])
    for title, curves in extra_charts.items():
        points = {name: curve.points() for name, curve in curves.items() if len(curve)}
        if points:
            charts[title] = {**charts.get(title, {}), **points}
    return charts


def collect_last_losses(trainer: Trainer) -> dict[str, Any]:
    """Return the curve of this process's losses of the last steps, also of steps that were not logged, by its name."""
    accelerator, progress = trainer.accelerator, trainer.progress
    agreement, size = accelerator.accumulation.agreement, accelerator.gradient_accumulation_steps
    losses = [float(loss) for loss in agreement.recent_losses]
    if not losses or trainer.task is None or not trainer.task.automatic_optimization:
        return {}
    last_step = agreement.next_place[0] if agreement.next_place else 0  # taken, or refused
    unfinished = progress.batch % size  # micro-batches of a step that was not taken
    by_step: dict[int, list[float]] = {}
    for age, loss in enumerate(reversed(losses)):
        step = last_step + 1 if age < unfinished else last_step - (age - unfinished) // size
        by_step.setdefault(step, []).append(loss)
    steps = sorted(by_step)
    name = "loss" if trainer.world_size == 1 else "loss of rank 0"
    return {name: (steps, [sum(by_step[step]) / len(by_step[step]) for step in steps])}


_ADVICE = {
    "checkpoints": "ModelCheckpoint(every_n_epochs=...), or train_time_interval=..., saves less often.",
    "validation": "Trainer(check_val_every_n_epoch=...), or limit_val_batches=..., validates less.",
    "waiting for training batches": "DataLoader(num_workers=...) prepares them in other processes.",
    "setup": "",
}
_MUCH = 0.4  # share of the time that is worth a sentence


def judge_times(spent: Mapping[str, float], waited: float) -> str:
    """Return a sentence about the activity other than training that took most of the time, or ``""``.

    Args:
        spent: Seconds by activity.
        waited: Seconds of training that were spent waiting for batches.
    """
    total = sum(spent.values())
    shares = {name: seconds for name, seconds in spent.items() if name in _ADVICE}
    shares["waiting for training batches"] = waited
    if shares.get("setup", 0.0) < 60:  # a run of a few seconds
        shares.pop("setup", None)
    name = max(shares, key=lambda name: shares[name])
    if not total or shares[name] < _MUCH * total:
        return ""
    return f"{100 * shares[name] / total:.0f} % of the time went to {name}. {_ADVICE[name]}".rstrip()


def find_best(trainer: Trainer) -> dict[str, Any] | None:
    """Return the best value and its metric from a `ModelCheckpoint` or else an `EarlyStopping`, if there is one."""
    for saved in trainer.checkpoint_callbacks:
        if saved.monitor and saved.best_model_score is not None:
            best = {"metric": saved.monitor, "mode": saved.mode, "value": float(saved.best_model_score)}
            return {**best, "checkpoint": saved.best_model_path}
    for stop in trainer.early_stopping_callbacks:
        if math.isfinite(value := float(stop.best_score)):
            return {"metric": stop.monitor, "mode": stop.mode, "value": value}
    return None


def format_user_frames(error: BaseException) -> str:
    """Return the traceback of an error's root cause, without Treadle's and torch's frames."""
    root_cause = error
    while root_cause.__cause__ is not None:  # the first cause is more informative
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


def _list_checkpoints(trainer: Trainer, resumed_from: str | None) -> dict[str, str]:
    rows = {} if resumed_from is None else {"resumed from": resumed_from}
    for saved in trainer.checkpoint_callbacks:
        best = f"best {saved.monitor}" if saved.monitor else "latest"
        for name, path in ((best, saved.best_model_path), ("last", saved.last_model_path)):
            if path:
                rows[name if rows.get(name, path) == path else f"{name}, of {type(saved).__name__}"] = path
    return rows


def collect_hyperparameters(owner: Any) -> dict[str, str]:
    """Return hyperparameters by name, formatted as text."""
    if owner is None or not owner.log_hyperparameters:
        return {}
    left_out = {name: f"not stored: {words}" for name, words in owner.stored_hparams().left_out.items()}
    return {**flatten_settings(owner.plain_hparams()), **left_out}


def split_settings(trainer: Trainer) -> tuple[dict[str, str], dict[str, str]]:
    """Return the Trainer's flags that were set, and those that have their defaults, by name and formatted as text."""
    settings = flatten_settings(trainer.settings)
    changed = {name: text for name, text in settings.items() if name in trainer.changed_settings}
    return changed, {name: text for name, text in settings.items() if name not in changed}


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings by dotted name, formatted as text of limited length."""
    lines: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            lines |= flatten_settings(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else repr(value)
            lines[f"{prefix}{name}"] = text if len(text) <= 1000 else f"{text[:1000]}... ({len(text):,} characters)"
    return lines
