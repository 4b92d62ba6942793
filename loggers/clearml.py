"""`ClearMLLogger`: sends metrics, hyperparameters and checkpoints to ClearML."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from ..common.messages import warn
from ..common.optional import require
from ..common.validation import check_bool
from .service_logger import ServiceLogger, check_options
from .values import flatten

FAILED = "failed"
SUBSETS = ("train", "val", "test", "eval")


class ClearMLLogger(ServiceLogger):
    """Logger that sends metrics, hyperparameters and checkpoints to ClearML or writes them to files.

    Install with ``pip install clearml``. Rank zero begins a task on first use. The task stays open after a successful
    fit, so later fits continue it. Call `finish` to end it. A task that you have already started is used, unless
    ``task_id`` selects another task.

    ``train_loss`` becomes the series ``train`` of the plot ``loss``. The prefixes ``val_``, ``test_`` and ``eval_`` are
    treated in the same way. A value that is not finite is not plotted, because ClearML would report it as 0.

    Args:
        project_name: Project of the task. Default: the environment variable ``CLEARML_PROJECT``, or
            ``"treadle_logs"``.
        task_name: Name of the task. Default: the environment variable ``CLEARML_TASK``, or ``"training"``.
        task_id: ID of the task to continue. Default: a new task.
        offline: Write files instead of sending data. They are written to the folder ``offline`` in
            ``CLEARML_CACHE_DIR`` (by default ``~/.clearml/cache``). To send them later, call
            ``Task.import_offline_session``. Offline mode applies to the whole process. Default: False.
        tags: Tags of the task. Default: none.
        prefix: Text before every metric's name, as ``prefix-name``. Default: none.
        log_model: Upload checkpoints; those at a URL are skipped. ``"all"`` uploads each checkpoint when it is saved.
            True uploads the kept checkpoints at the end of the fit or, with ``ModelCheckpoint(save_top_k=-1)``, each
            checkpoint when it is saved. Default: False.
        strict: Raise errors from the logger instead of disabling it with a warning. Default: False.
        **kwargs: Arguments of ``Task.init``, such as ``task_type`` and ``output_uri``.

    Raises:
        ModuleNotFoundError: If ClearML is not installed.
        TypeError, ValueError: If an argument is invalid.

    Examples:
        >>> from treadle.loggers import ClearMLLogger
        >>> ClearMLLogger("digits", task_name="baseline", offline=True).name
        'digits'
    """

    closes_with_stage = False

    def __init__(
        self,
        project_name: str | None = None,
        task_name: str | None = None,
        task_id: str | None = None,
        offline: bool = False,
        tags: list[str] | None = None,
        prefix: str = "",
        log_model: bool | str = False,
        strict: bool = False,
        **kwargs: Any,
    ) -> None:
        require("ClearMLLogger", "clearml", extra="clearml")
        texts = {"project_name": project_name, "task_name": task_name, "task_id": task_id}
        project = project_name or os.environ.get("CLEARML_PROJECT") or "treadle_logs"
        super().__init__(project, task_id, texts, prefix=prefix, log_model=log_model, strict=strict)
        check_options("clearml.Task.init", kwargs)
        self._offline = check_bool("offline", offline)
        # This logger reports scalars and checkpoints; ClearML's own hooks would report them a second time.
        own = {"auto_connect_frameworks": {"pytorch": False, "tensorboard": False}, "tags": tags}
        name = task_name or os.environ.get("CLEARML_TASK") or "training"
        self._options = {"task_name": name, **own, **kwargs}

    def _open(self) -> Any:
        from clearml import Task

        if self._offline:
            Task.set_offline(True)
        task: Any = Task.current_task()
        if task is not None:
            if self._version == task.id or (self._version is None and not self._is_of_a_logger(task)):
                self._version = task.id
                return task
            task.close()  # ClearML has one task at a time, and it can be continued by its ID
        _make_gentle(Task)
        # Steps are counted from the start of training, including in a continued task.
        resumption = {"continue_last_task": 0} if self._version is not None else {}
        reused = {"reuse_last_task_id": self._version or False, **resumption}
        task = Task.init(project_name=self._name, **{**reused, **self._options})
        # Its handlers close the task, and with it the process, before a checkpoint could be saved.
        Task._remove_signal_hooks()
        if self._version is not None:
            _untag(task)
        self._version = task.id
        return task

    def _is_closed(self, run: Any) -> bool:
        from clearml import Task

        return run is not Task.current_task()

    def _write_row(self, run: Any, row: dict[str, float], step: int) -> None:
        logger = run.get_logger()
        for name, value in row.items():
            if not math.isfinite(value):
                warn(f"ClearML cannot plot {name}={value}, because it is not finite. The value is reported as text.")
                logger.report_text(f"{name}={value} at step {step}", print_console=False)
                continue
            start, _, metric = name.partition("_")
            title, series = (metric, start) if start in SUBSETS and metric else (name, name)
            logger.report_scalar(title=title, series=series, value=value, iteration=step)

    def _write_params(self, run: Any, params: dict[str, Any]) -> None:
        run.update_parameters({f"hparams/{name}": value for name, value in flatten(params)})

    def _write_checkpoint(self, run: Any, path: str, aliases: list[str], facts: dict[str, Any]) -> None:
        metadata = {name: str(value) for name, value in flatten({**facts, "aliases": ",".join(aliases)})}
        run.upload_artifact(Path(path).name, artifact_object=Path(path), metadata=metadata, wait_on_upload=True)

    def save(self) -> None:
        """Wait until all data is sent or written."""
        run = self._find_open_run()
        if run is not None:
            run.flush(wait_for_uploads=True)

    def _close(self, run: Any, failed: bool) -> None:
        if failed:
            run.add_tags([FAILED])  # an offline task has no status
        run.close()
        if failed:
            run.mark_failed(status_reason="The fit, validation, test or prediction failed.", force=True)


def _make_gentle(task_class: Any) -> None:
    """Configure ``Task.init`` so that it neither seeds RNGs nor forks the training process."""
    from clearml.config import config

    task_class.set_random_seed(None)
    if config.get("development.report_use_subprocess", None) is None:
        # By default ClearML forks this process with the locks and pipes of its other threads: the end of a task
        # then waits for up to 5 minutes.
        task_class._report_subprocess_enabled = False


def _untag(task: Any) -> None:
    tags = task.get_tags() or []
    if FAILED in tags:
        task.set_tags([tag for tag in tags if tag != FAILED])
