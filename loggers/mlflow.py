"""Metrics, hyperparameters and checkpoints for MLflow."""

from __future__ import annotations

import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..common.optional import is_installed, require
from ..common.validation import check_bool
from ._services import Uploads, check_arguments
from .logger import Logger, Params, process_rank, rank_zero_experiment
from .values import as_mapping, as_metrics, check_step, flatten, plain

FILES = "file:"
DATABASES = ("sqlite", "mysql", "postgresql", "mssql")
METRICS_AT_ONCE, PARAMS_AT_ONCE = 1000, 100  # what one request of MLflow may hold
WRITES_AT_ONCE = 100  # that may be under way with synchronous=False
END = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}
NAME_TAG = "mlflow.runName"


class MLFlowLogger(Logger):
    """Sends metrics, hyperparameters and checkpoints to MLflow (``pip install mlflow``).

    One run on rank 0, begun when something is logged or `run_id` is read there. Several fits continue it: it is
    ``RUNNING`` while something is logged, and ``FINISHED`` or ``FAILED`` after each.

    Args:
        experiment_name: What the run belongs to; created if missing. Default: ``"treadle_logs"``.
        run_name: What the run is called. Default: MLflow makes up a name.
        tracking_uri: A server's address, a database (``sqlite:///mlflow.db``) or ``file:`` and a directory. Default:
            ``MLFLOW_TRACKING_URI``, or files in ``save_dir``. Newer versions of MLflow write files only if
            ``MLFLOW_ALLOW_FILE_STORE=true`` is in the environment.
        tags: Of the run, by name.
        save_dir: Directory for files where no address is given. Default: ``./mlruns``.
        log_model: Upload checkpoints as artifacts: True those that are kept, when a fit ends; ``"all"`` each as it is
            saved. Default: False.
        prefix: Put before every metric's name, as ``prefix-name``. Default: nothing.
        artifact_location: Where artifacts of a new experiment go. Default: MLflow chooses.
        run_id: A run to continue. Default: a new one.
        synchronous: Whether each call waits until it is written; False writes in the background, and `finalize`
            waits. Default: MLflow's own setting.
        strict: Let a failure end the run. Default: False, which warns once and goes on without this logger.

    Raises:
        ModuleNotFoundError: MLflow, or what it needs for a database, is not installed.
        TypeError: An argument has the wrong type.
        ValueError: The installed MLflow does not write files, or arguments contradict each other.
    """

    def __init__(
        self,
        experiment_name: str = "treadle_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = "./mlruns",
        log_model: bool | str = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
        strict: bool = False,
    ) -> None:
        require("MLFlowLogger", "mlflow", extra="mlflow")
        self.strict = check_bool("strict", strict)
        texts = {"experiment_name": experiment_name, "run_name": run_name, "tracking_uri": tracking_uri}
        check_arguments(log_model, {**texts, "prefix": prefix, "run_id": run_id})
        if run_name is not None and (tags or {}).get(NAME_TAG, run_name) != run_name:
            raise ValueError(f"run_name={run_name!r} contradicts tags[{NAME_TAG!r}]={tags[NAME_TAG]!r}: drop one")  # type: ignore[index]
        directory = os.path.expandvars(os.path.expanduser(os.fspath(save_dir or "./mlruns")))
        self._tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or FILES + directory
        _check_store(self._tracking_uri)
        self._experiment_name = experiment_name
        self._experiment_id: str | None = None
        self._run_name = run_name
        self._version = run_id
        self.tags = tags
        self._log_model = log_model
        self._prefix = f"{prefix}-" if prefix else ""
        self._artifact_location = artifact_location
        self._wait = {} if synchronous is None else {"synchronous": synchronous}
        self._client: Any = None
        self._reset()

    def _reset(self) -> None:
        """Forget what belongs to an open run."""
        self._client = None
        self._running = False
        self._last_step = -1
        self._params: dict[str, str] = {}
        self._writes: list[Any] = []
        self._uploads = Uploads(self._log_model)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which continues the run by its id."""
        self.save()
        return {name: value for name, value in self.__dict__.items() if name not in ("_client", "_writes", "_uploads")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self._experiment_name

    @property
    def save_dir(self) -> str | None:
        """Directory of all experiments, None if they are not in files."""
        return self._tracking_uri.removeprefix(FILES) if self._tracking_uri.startswith(FILES) else None

    @property
    def run_id(self) -> str | None:
        """The run's id, on rank 0; the first read begins the run. ``version`` is the same and begins nothing."""
        _ = self.experiment
        return self._version  # type: ignore[return-value]

    @property
    def experiment_id(self) -> str | None:
        """The experiment's id, on rank 0; the first read begins the run."""
        _ = self.experiment
        return self._experiment_id

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The ``MlflowClient``; the first read begins the run, or finds the one to continue."""
        if self._client is None:
            from mlflow.tracking import MlflowClient

            client = MlflowClient(self._tracking_uri)
            if self._version is None:
                self._begin(client)
            else:
                self._continue(client)
            self._client = client
        return self._client

    def _begin(self, client: Any) -> None:
        from mlflow.tracking.context.registry import resolve_tags

        self._experiment_id = self._find_experiment(client)
        # What MLflow itself adds to every run: user, script, commit.
        tags = resolve_tags(self.tags)
        run = client.create_run(self._experiment_id, tags=tags, run_name=self._run_name)
        self._version, self._running = run.info.run_id, True

    def _find_experiment(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        experiment = client.get_experiment_by_name(self._experiment_name)
        if experiment is None:
            try:
                return str(client.create_experiment(self._experiment_name, artifact_location=self._artifact_location))
            except MlflowException:
                experiment = client.get_experiment_by_name(self._experiment_name)
                if experiment is None:  # it was not another job that created it in between
                    raise
        if self._artifact_location not in (None, experiment.artifact_location):
            warnings.warn(
                f"artifact_location={self._artifact_location!r} is not used: experiment {self._experiment_name!r} "
                f"exists, and its artifacts go to {experiment.artifact_location}",
                stacklevel=4,
            )
        return str(experiment.experiment_id)

    def _continue(self, client: Any) -> None:
        run = client.get_run(self._version)
        self._experiment_id = run.info.experiment_id
        self._params = dict(run.data.params)
        for key, value in (self.tags or {}).items():
            client.set_tag(self._version, key, value)
        if self._run_name is not None:
            client.update_run(self._version, name=self._run_name)

    def _write(self, **batch: list[Any]) -> None:
        """Hand metrics or parameters to MLflow, as part of a run that is running."""
        client = self.experiment
        if not self._running:
            client.update_run(self._version, status="RUNNING")
            self._running = True
        write = client.log_batch(self._version, **batch, **self._wait)
        if write is not None:
            self._writes.append(write)
            if len(self._writes) >= WRITES_AT_ONCE:
                self.save()

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Record numbers.

        Args:
            metrics: Value by name: a number, a tensor of one element, or a dict of them, recorded as ``name/key``.
            step: Optimizer step the values belong to. Default: one more than the highest so far.

        Raises:
            TypeError: A value is not a number, or the step is not an integer.
            ValueError: A value is more than one number, or the step is negative.
        """
        row = list(flatten(as_metrics(metrics, self._prefix)))
        step = check_step(self._last_step + 1 if step is None else step)
        self._last_step = max(self._last_step, step)
        if process_rank() != 0:
            return
        from mlflow.entities import Metric

        timestamp = int(time.time() * 1000)
        entries = [Metric(_drop_forbidden_characters(name), float(value), timestamp, step) for name, value in row]
        for start in range(0, len(entries), METRICS_AT_ONCE):
            self._write(metrics=entries[start : start + METRICS_AT_ONCE])

    def log_hyperparams(self, params: Params, metrics: dict[str, Any] | None = None) -> None:
        """Record hyperparameters, and metrics, if any, at step 0.

        MLflow never changes a parameter: a new value of one that the run has gives a warning and is left out.

        Args:
            params: Settings by name, nested or not, whose names are joined by ``/``.
            metrics: Starting values of the metrics by which runs are compared. Default: none.

        Raises:
            TypeError: ``params`` has no names, or a metric is not a number.
        """
        flat = {_drop_forbidden_characters(name): str(value) for name, value in flatten(plain(as_mapping(params)))}
        if process_rank() == 0 and flat:
            from mlflow.entities import Param

            _ = self.experiment  # a continued run has parameters already
            for name in flat.keys() & self._params.keys():
                if flat[name] != self._params[name]:
                    warnings.warn(
                        f"MLflow keeps {name}={self._params[name]} of run {self._version}, and not the new value "
                        f"{flat[name]}: its parameters can't change. Begin another run for another setting",
                        stacklevel=2,
                    )
            entries = [Param(name, value) for name, value in flat.items() if name not in self._params]
            for start in range(0, len(entries), PARAMS_AT_ONCE):
                self._write(params=entries[start : start + PARAMS_AT_ONCE])
            self._params = flat | self._params
        if metrics:
            self.log_metrics(metrics, step=0)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Upload what the callback keeps, now or when the fit ends, as ``log_model`` says."""
        self._upload(self._uploads.collect_after_save(checkpoint_callback))

    def _upload(self, checkpoints: Iterable[tuple[str, Any, dict[str, Any]]]) -> None:
        if process_rank() != 0:
            return
        for path, callback, facts in checkpoints:
            import yaml

            folder = Path(path).stem
            best = ["best"] if path == callback.best_model_path else []
            client = self.experiment
            client.log_artifact(self._version, path, folder)
            with tempfile.TemporaryDirectory() as temporary_directory:
                Path(temporary_directory, "metadata.yaml").write_text(
                    yaml.safe_dump(facts, sort_keys=False), encoding="utf-8"
                )
                Path(temporary_directory, "aliases.txt").write_text(str(["latest", *best]), encoding="utf-8")
                client.log_artifacts(self._version, temporary_directory, folder)

    def save(self) -> None:
        """Wait until all is written that is written in the background."""
        writes, self._writes = self._writes, []
        for write in writes:
            write.wait()

    def finalize(self, status: str = "success") -> None:
        """Upload the checkpoints that wait, and note how it ended. What is logged later continues the run.

        Args:
            status: ``"success"``, ``"failed"``, or one of MLflow's own.
        """
        try:
            self.save()
            self._upload(self._uploads.collect_at_end())
        finally:
            if self._client is not None:
                self._running = False
                self._client.set_terminated(self._version, END.get(status, status))


def _check_store(uri: str) -> None:
    """Raise an error if the installed MLflow can't write there, while nothing runs yet; nothing is written."""
    if uri.startswith(FILES) or ("://" not in uri and not uri.startswith(("databricks", "uc"))):
        from mlflow import environment_variables

        switch = getattr(environment_variables, "MLFLOW_ALLOW_FILE_STORE", None)  # older versions always write files
        if switch is not None and not switch.get():
            raise ValueError(
                f"tracking_uri={uri!r}: this version of MLflow writes no files. Pass a server's address or "
                "tracking_uri='sqlite:///mlflow.db' (pip install mlflow), or set MLFLOW_ALLOW_FILE_STORE=true"
            )
    elif uri.startswith(DATABASES) and not is_installed("sqlalchemy"):
        raise ModuleNotFoundError(f"tracking_uri={uri!r} needs more than mlflow-skinny: pip install mlflow")


def _drop_forbidden_characters(name: str) -> str:
    """Return a name without the characters that MLflow refuses, with a warning if there are any."""
    allowed = re.sub(r"[^\w/. -]+", "", name, flags=re.ASCII)
    if allowed != name:
        warnings.warn(f"MLflow names {name!r} {allowed!r}: it takes letters, digits and _ / . - only", stacklevel=4)
    return allowed
