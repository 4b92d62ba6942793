"""`CometLogger`: sends metrics, hyperparameters and checkpoints to Comet."""

from __future__ import annotations

import os
import secrets
import sys
from typing import Any

from ..common.optional import require
from ..common.validation import check_bool
from .service_logger import ServiceLogger, check_options

OLD_NAMES = {"project_name": "project", "experiment_name": "name", "save_dir": "offline_directory"}
"""Current names of arguments, by their names in older versions of Lightning's and Comet's loggers."""


class CometLogger(ServiceLogger):
    """Logger that sends metrics, hyperparameters and checkpoints to Comet or writes them to archives.

    Install with ``pip install comet_ml``. Rank zero begins an experiment on first use. The experiment stays open after
    a successful fit, so later fits continue it. Call `finish` to end it. A process has one experiment at a time, so a
    second logger ends the experiment of the first.

    In offline mode, an archive is written each time the experiment ends. Send it with ``comet upload``.

    Args:
        api_key: API key of the account. Default: the environment variable ``COMET_API_KEY``, or the key in Comet's
            configuration file.
        workspace: Workspace of the experiment. Default: ``COMET_WORKSPACE``, or the account's workspace.
        project: Project of the experiment. Default: ``COMET_PROJECT_NAME``, or ``"Uncategorized"``, as in Comet.
        experiment_key: Key of the experiment to continue. A key consists of 32 to 50 letters and digits. Default:
            ``COMET_EXPERIMENT_KEY``, or a new key.
        mode: ``"get_or_create"``, ``"get"`` (the experiment must exist) or ``"create"`` (it must not exist). Default:
            ``COMET_START_MODE``, or ``"get_or_create"``.
        online: Whether to send the data; if False, it is only written to archives. Default:
            ``COMET_START_ONLINE``, or True.
        prefix: Text before every metric's name, as ``prefix_name``. Default: none.
        log_model: Upload checkpoints; those at a URL are skipped. ``"all"`` uploads each checkpoint when it is saved.
            True uploads the kept checkpoints at the end of the fit or, with ``ModelCheckpoint(save_top_k=-1)``, each
            checkpoint when it is saved. Default: False.
        strict: Raise errors from the logger instead of disabling it with a warning. Default: False.
        **kwargs: Arguments of ``comet_ml.ExperimentConfig``, such as ``name``, ``tags`` and ``offline_directory``.

    Raises:
        ModuleNotFoundError: If comet_ml is not installed.
        TypeError, ValueError: If an argument is invalid.

    Examples:
        >>> from treadle.loggers import CometLogger
        >>> logger = CometLogger(project="digits", online=False)  # opens no experiment before something is logged
        >>> logger.name
        'digits'
    """

    closes_with_stage = False

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: str | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        log_model: bool | str = False,
        strict: bool = False,
        **kwargs: Any,
    ) -> None:
        require("CometLogger", "comet_ml", extra="comet")
        for old, new in OLD_NAMES.items():
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
        project = kwargs.pop("project", project)
        if "offline" in kwargs:
            online = not check_bool("offline", kwargs.pop("offline"))
        kwargs.pop("rest_api_key", None)  # Comet's own key is used for both
        if online is not None:
            check_bool("online", online)
        texts = {"api_key": api_key, "workspace": workspace, "project": project, "mode": mode}
        texts["experiment_key"] = experiment_key
        key = experiment_key or os.environ.get("COMET_EXPERIMENT_KEY")
        super().__init__(project, key, texts, prefix=prefix, log_model=log_model, strict=strict, separator="_")
        _set_up_import(offline=online is False)
        check_options("comet_ml.ExperimentConfig", kwargs)
        self._start: dict[str, Any] = {"api_key": api_key, "workspace": workspace, "online": online}
        self._mode = mode
        self._config_options = {"display_summary_level": 0, **kwargs}

    @property
    def save_dir(self) -> str | None:
        """The argument ``offline_directory``; None if it was not passed."""
        directory = self._config_options.get("offline_directory")
        return None if directory is None else os.fspath(directory)

    def _open(self) -> Any:
        _set_up_import(offline=self._start["online"] is False)
        import comet_ml

        config = comet_ml.ExperimentConfig(**self._config_options)
        key = str(self._version or "") or secrets.token_hex(16)
        running = comet_ml.get_running_experiment()
        if running is not None and running.get_key() != key:
            # A process has one experiment at a time. Comet would end the other without waiting for its writing thread
            # (`_on_end(wait=False)`), which loses what that thread has not written yet.
            running.end()
        experiment = comet_ml.start(
            project_name=self._name, experiment_key=key, mode=self._mode, experiment_config=config, **self._start
        )
        self._version = experiment.get_key()
        self._mode = None  # "create" must hold for the first time only
        experiment.log_other("Created from", "treadle")
        return experiment

    def _is_closed(self, run: Any) -> bool:
        return bool(run.ended)

    def _write_row(self, run: Any, row: dict[str, float], step: int) -> None:
        epoch = self._pop_epoch(row)
        run.log_metrics(row, step=step, epoch=epoch)

    def _write_params(self, run: Any, params: dict[str, Any]) -> None:
        run.log_parameters(params, nested_support=True)

    def _write_checkpoint(self, run: Any, path: str, aliases: list[str], facts: dict[str, Any]) -> None:
        run.log_model(f"model-{self._version}", path, metadata={**facts, "aliases": aliases})

    def save(self) -> None:
        """Wait until all data is sent or written."""
        run = self._find_open_run()
        if run is not None:
            run.flush()

    def _close(self, run: Any, failed: bool) -> None:
        if failed:
            run.add_tag("failed")
        run.log_other("status", "failed" if failed else "finished")
        # Offline, `end` drops the newest message if the writing thread has taken it and not yet written it.
        run.log_other("Created from", "treadle")
        run.end()


def _set_up_import(offline: bool) -> None:
    """Set environment variables for the import of ``comet_ml``, unless it is already imported. Set values are kept.

    By default, ``comet_ml`` would patch other packages and log automatically what this logger already receives.
    """
    if "comet_ml" not in sys.modules:
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")
        if offline:
            os.environ.setdefault("COMET_ERROR_TRACKING_ENABLE", "0")
