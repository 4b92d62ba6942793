"""`NeptuneLogger`: a logger with Neptune's interface that writes to GoodSeed."""

from __future__ import annotations

import math
import os
import secrets
from pathlib import Path
from typing import Any

from ..common.messages import warn
from ..common.optional import require
from ..common.validation import check_bool
from ._services import ServiceLogger, check_options
from .values import flatten

STORAGES = {"async": "cloud", "sync": "cloud", "offline": "local", "debug": "disabled"}
"""GoodSeed's storage for each of Neptune's modes."""


class NeptuneLogger(ServiceLogger):
    """Logger with Neptune's interface that writes to GoodSeed (``pip install goodseed``).

    Neptune's service has been shut down. This class accepts the arguments of Lightning's ``NeptuneLogger``.

    Rank zero begins a run on first use. The run is closed after each stage and reopened on the next use. NaN values
    are skipped with a warning. Checkpoints are not uploaded; only their paths and the best score are recorded.

    Args:
        api_key: API key for GoodSeed. If a key is set, runs are also sent to GoodSeed's server, unless ``mode`` or
            ``GOODSEED_STORAGE`` disables this. Default: ``GOODSEED_API_KEY``.
        project: Project of the run, in the form ``"workspace/project"``. Default: ``GOODSEED_PROJECT``, or
            ``"treadle_logs"``.
        name: Name of a new run. Default: ``"Untitled"``.
        run: A ``goodseed`` run that has already begun. Default: the run that ``with_id``, ``custom_id`` or
            ``GOODSEED_RUN_ID`` identifies, or a new run.
        log_model_checkpoints: Record the paths of the latest and the best checkpoint, and the best score. Checkpoints
            at a URL are skipped. Default: True.
        prefix: Text before the path of every metric and hyperparameter, as ``prefix/path``. Default: ``"training"``.
        strict: Raise errors from the logger instead of disabling it with a warning. Default: False.
        **neptune_run_kwargs: Arguments of ``goodseed.Run``, such as ``tags``, ``description`` and ``capture_stdout``,
            and ``with_id``, ``custom_id`` and ``mode`` of ``neptune.init_run``. ``with_id`` is the ID of a run to
            continue. ``custom_id`` sets the ID of the run. ``mode="async"`` and ``mode="sync"`` send the run to
            GoodSeed's server and require an ``api_key``. ``mode="offline"`` only writes local files. ``mode="debug"``
            stores nothing. ``goodseed_home`` sets the directory of the local files. Default: ``GOODSEED_HOME``, or
            ``~/.goodseed``.

    Raises:
        ModuleNotFoundError: If GoodSeed is not installed.
        TypeError, ValueError: If an argument is invalid.

    Example:
        >>> from treadle.loggers import NeptuneLogger
        >>> logger = NeptuneLogger(project="team/digits", mode="offline", name="baseline")
        >>> logger.name
        'team/digits'
    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        project: str | None = None,
        name: str | None = None,
        run: Any = None,
        log_model_checkpoints: bool = True,
        prefix: str = "training",
        strict: bool = False,
        **neptune_run_kwargs: Any,
    ) -> None:
        require("NeptuneLogger", "goodseed", extra="neptune")
        options = dict(neptune_run_kwargs)
        api_key = options.pop("api_token", api_key) or os.environ.get("GOODSEED_API_KEY")
        mode = options.pop("mode", None)
        if mode is not None and mode not in STORAGES:
            raise ValueError(f"mode={mode!r} must be one of {', '.join(map(repr, STORAGES))}.")
        with_id, custom_id = options.pop("with_id", None), options.pop("custom_id", None)
        check_options("goodseed.Run", options)
        storage = STORAGES[mode] if mode is not None else os.environ.get("GOODSEED_STORAGE")
        own_id = None if run is None else run.run_id
        super().__init__(
            name=project or os.environ.get("GOODSEED_PROJECT") or "treadle_logs",
            version=own_id or with_id or custom_id or os.environ.get("GOODSEED_RUN_ID"),
            prefix=prefix,
            log_model="all" if check_bool("log_model_checkpoints", log_model_checkpoints) else False,
            strict=strict,
            separator="/",
            texts={"api_key": api_key, "project": project, "name": name, "with_id": with_id, "custom_id": custom_id},
        )
        self._must_exist = with_id is not None
        self._run_name = name or "Untitled"
        self._options = {"api_key": api_key, "storage": storage or ("cloud" if api_key else "local"), **options}
        if run is not None:
            self._adopt(run)

    def _open(self) -> Any:
        from goodseed.neptune import Run

        # GoodSeed draws its IDs from Python's generator, so runs with the same seed would get the same ID.
        run_id = str(self._version or "") or secrets.token_hex(6)
        if self._must_exist or self._find_file(run_id).exists():
            self._mark_as_ended(run_id)
            run = Run(project=self._name, resume_run_id=run_id, **self._options)
        else:
            run = Run(project=self._name, run_id=run_id, name=self._run_name, **self._options)
        self._version, self._must_exist = run.run_id, True
        return run

    def _find_file(self, run_id: str) -> Path:
        from goodseed.config import get_run_db_path

        if self._options.get("log_dir"):
            return Path(self._options["log_dir"], f"{run_id}.sqlite")
        return get_run_db_path(self._name, run_id, self._options.get("goodseed_home"))

    def _mark_as_ended(self, run_id: str) -> None:
        """Mark a run as failed if a killed process left it as running, because GoodSeed would not continue it."""
        from goodseed.storage import read_run_meta, write_run_meta

        file = self._find_file(run_id)
        if file.exists() and read_run_meta(file).get("status") == "running":
            write_run_meta(file, "status", "failed")

    def _is_closed(self, run: Any) -> bool:
        return bool(run._closed)

    def _write_row(self, run: Any, row: dict[str, float], step: int) -> None:
        missing = [name for name, value in row.items() if math.isnan(value)]
        for name in missing:
            warn(f"GoodSeed cannot store {name}={row[name]}, so the value is omitted.")
        run.log_metrics({name: value for name, value in row.items() if name not in missing}, step=step)

    def _write_params(self, run: Any, params: dict[str, Any]) -> None:
        for name, value in flatten(params):
            run[f"{self._prefix}hyperparams/{name}"] = str(value) if isinstance(value, list | dict) else value

    def _write_checkpoint(self, run: Any, path: str, aliases: list[str], facts: dict[str, Any]) -> None:
        run[f"{self._prefix}model/last_model_path"] = path
        if "best" in aliases:
            run[f"{self._prefix}model/best_model_path"] = path
            run[f"{self._prefix}model/best_model_score"] = facts["score"]

    def _upload_waiting(self) -> None:
        """Do nothing, because paths are recorded as soon as the checkpoints are saved."""

    def _close(self, run: Any, failed: bool) -> None:
        run.close(status="failed" if failed else "finished")
