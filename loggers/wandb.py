"""Metrics, hyperparameters, media and checkpoints for Weights & Biases."""

from __future__ import annotations

import inspect
import os
import secrets
import string
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from ..common.optional import require
from ..common.validation import check_bool
from ._services import Uploads, check_arguments
from .logger import Logger, Params, process_rank, rank_zero_experiment
from .values import as_mapping, as_metrics, check_step, flatten, plain

STEP = "trainer/global_step"  # W&B counts calls of `log`; charts are drawn over this instead


class WandbLogger(Logger):
    """Sends metrics, hyperparameters, media and checkpoints to Weights & Biases (``pip install wandb``).

    One run on rank 0, begun when something is logged or ``experiment`` is read. It stays open after a fit, so several
    fits, and ``wandb.log`` after them, continue it; it ends with the process or with `finish`. A run that is active
    already, such as a sweep's, is used if it is not another than the one asked for.

    Args:
        name: What the run is called. Default: W&B makes up a name.
        save_dir: Local directory above W&B's own. Default: ``WANDB_DIR``, or the working directory.
        version: The run's id; a run that has it is continued. Default: ``WANDB_RUN_ID``, or a new one.
        offline: Only write files; ``wandb sync`` sends them. Default: False.
        dir: The same as ``save_dir``.
        id: The same as ``version``.
        anonymous: Whether W&B may log without an account. Newer versions of wandb say that it has no effect.
        project: Project of the run. Default: ``WANDB_PROJECT``, or ``"treadle_logs"``.
        log_model: Upload checkpoints as artifacts: True those that are kept, when a fit ends well; ``"all"`` each as
            it is saved. Default: False.
        experiment: A run that was begun already. Default: begin one.
        prefix: Put before every metric's name, as ``prefix-name``. Default: nothing.
        checkpoint_name: Name of the artifacts. Default: ``model-`` and the run's id.
        add_file_policy: ``"mutable"`` copies a checkpoint before its upload, ``"immutable"`` trusts that it stays.
        strict: Let a failure end the run. Default: False, which warns once and goes on without this logger.
        **kwargs: For ``wandb.init``, which they override: ``entity``, ``group``, ``tags``, ``config``, ``mode``, ...

    Raises:
        ModuleNotFoundError: Wandb is not installed.
        TypeError: An argument has the wrong type, or ``wandb.init`` does not take it.
        ValueError: Arguments contradict each other.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: bool | str = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: str = "mutable",
        strict: bool = False,
        **kwargs: Any,
    ) -> None:
        require("WandbLogger", "wandb", extra="wandb")
        self.strict = check_bool("strict", strict)
        texts = {"name": name, "version": version, "id": id, "project": project, "checkpoint_name": checkpoint_name}
        check_arguments(log_model, {**texts, "prefix": prefix})
        if add_file_policy not in ("mutable", "immutable"):
            raise ValueError(f"add_file_policy={add_file_policy!r} is not one of 'mutable', 'immutable'")
        directory = _choose_argument("save_dir", save_dir, "dir", dir) or os.environ.get("WANDB_DIR") or "."
        offline = offline or kwargs.get("mode") == "offline"
        if offline and kwargs.setdefault("mode", "offline") != "offline":
            raise ValueError(f"offline=True contradicts mode={kwargs['mode']!r}: pass one of them")
        if offline and log_model:
            raise ValueError(f"log_model={log_model!r} needs uploads, and this run is offline: drop one of them")
        _check_init(kwargs)
        self._save_dir = os.path.expandvars(os.path.expanduser(os.fspath(directory)))
        self._requested = {"name": name, "project": project, "id": _choose_argument("version", version, "id", id)}
        self._requested["entity"] = kwargs.get("entity")
        self._project = project or os.environ.get("WANDB_PROJECT") or "treadle_logs"
        self._version = self._requested["id"] or (None if experiment is None else experiment.id)
        self._options = {"resume": "allow", **({"anonymous": "allow"} if anonymous else {}), **kwargs}
        self._prefix = f"{prefix}-" if prefix else ""
        self._log_model = log_model
        self._checkpoint_name = checkpoint_name
        self._file_policy: Any = add_file_policy
        self._uploads = Uploads(log_model)
        self._experiment = experiment

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which continues the run by its id."""
        requested = {**self._requested, "id": self.version}
        return {**self.__dict__, "_experiment": None, "_uploads": Uploads(self._log_model), "_requested": requested}

    @property
    def name(self) -> str:
        """Name of the project, as in the paths of W&B. The run's own name is ``experiment.name``."""
        return self._project

    @property
    def version(self) -> int | str | None:
        """The run's id. The first read on rank 0 makes it up, without any connection; other ranks are told it."""
        if self._version is None and process_rank() == 0:
            active = self._find_active_run()
            self._version = active.id if active is not None else os.environ.get("WANDB_RUN_ID") or _make_id()
        return self._version

    @version.setter
    def version(self, version: int | str | None) -> None:
        if self._experiment is not None and version != self._experiment.id:
            raise ValueError(
                f"version={version!r} cannot replace {self._experiment.id!r} while the run is open: call finish() first"
            )
        self._version = version

    @property
    def save_dir(self) -> str:
        """Directory above W&B's own."""
        return self._save_dir

    @property
    def root_dir(self) -> str:
        """Directory of the project's other files, such as checkpoints."""
        return os.path.join(self._save_dir, self._project)

    @property
    def log_dir(self) -> str | None:
        """Directory of the run's other files, such as checkpoints. None on other ranks until the id was assigned."""
        version = self.version
        return None if version is None else os.path.join(self.root_dir, str(version))

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The ``wandb.Run``, begun or continued at the first read."""
        if self._experiment is None:
            self._experiment = self._open()
            self._version = self._experiment.id
        return self._experiment

    def _find_active_run(self) -> Any:
        """The run that is active in this process, unless it is another than the one asked for."""
        wandb = sys.modules.get("wandb")
        run = None if wandb is None else wandb.run
        if run is None:
            return None
        requested = {**self._requested, "id": self._version}
        others = [key for key, value in requested.items() if value is not None and value != getattr(run, key)]
        return None if others else run

    def _open(self) -> Any:
        import wandb

        run = self._find_active_run()
        if run is not None:
            if run.id != self._requested["id"]:
                warnings.warn(
                    f"WandbLogger logs into the active W&B run {run.id!r}. Call wandb.finish() before, or pass a name, "
                    "a project or an id, for a run of its own",
                    stacklevel=4,
                )
            return run
        os.makedirs(self._save_dir, exist_ok=True)  # W&B would write to a temporary directory instead
        options = {"project": self._project, "name": self._requested["name"], "id": self.version, "dir": self._save_dir}
        if wandb.run is not None:
            options["reinit"] = "create_new"  # the default would give the active one, which was not asked for
        run = wandb.init(**{**options, **self._options})
        if self._options.get("sync_tensorboard"):
            run.define_metric("*", step_metric="global_step")
        else:
            run.define_metric(STEP)
            run.define_metric("*", step_metric=STEP, step_sync=True)
        return run

    def watch(self, model: Any, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Record gradients, parameters and the graph of a model while it trains.

        Args:
            model: The module.
            log: ``"gradients"``, ``"parameters"``, ``"all"`` or None. Default: ``"gradients"``.
            log_freq: Once in so many backward passes. Default: 100.
            log_graph: Whether the graph is recorded. Default: True.
        """
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Record numbers.

        Args:
            metrics: Value by name: a number, a tensor of one element, or a dict of them, recorded as ``name/key``.
            step: Optimizer step the values belong to, kept as ``trainer/global_step``. Default: the last one's.

        Raises:
            TypeError: A value is not a number, or the step is not an integer.
            ValueError: A value is more than one number, or the step is negative.
        """
        self._log(dict(flatten(as_metrics(metrics, self._prefix))), step)

    def _log(self, row: dict[str, Any], step: int | None) -> None:
        if step is not None:
            step = check_step(step)
            if not self._options.get("sync_tensorboard"):
                row[STEP] = step
        self.experiment.log(row)

    def log_hyperparams(self, params: Params, metrics: dict[str, Any] | None = None) -> None:
        """Add to the run's config, and record metrics, if any, at step 0.

        Args:
            params: Settings by name, nested or not. What JSON has no type for is recorded as its ``str``.
            metrics: Starting values of the metrics by which runs are compared. Default: none.

        Raises:
            TypeError: ``params`` has no names, or a metric is not a number.
        """
        self.experiment.config.update(plain(as_mapping(params)), allow_val_change=True)
        if metrics:
            self.log_metrics(metrics, step=0)

    def log_table(
        self,
        key: str,
        columns: list[Any] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Record a table, given by ``columns`` and ``data`` or by ``dataframe``; a cell may be an image or a sound."""
        if process_rank() == 0:
            import wandb

            self._log({self._prefix + key: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step)

    def log_text(
        self,
        key: str,
        columns: list[Any] | None = None,
        data: list[list[str]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Record texts as a table, given as for `log_table`."""
        self.log_table(key, columns, data, dataframe, step)

    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images: tensors, arrays, PIL images or paths; ``kwargs`` are lists such as ``caption``, one each."""
        self._log_media("Image", key, "images", images, step, kwargs)

    def log_audio(self, key: str, audios: list[Any], step: int | None = None, **kwargs: Any) -> None:
        """Record sounds: arrays or paths; ``kwargs`` are lists such as ``sample_rate``, one value each."""
        self._log_media("Audio", key, "audios", audios, step, kwargs)

    def log_video(self, key: str, videos: list[Any], step: int | None = None, **kwargs: Any) -> None:
        """Record videos: arrays or paths; ``kwargs`` are lists such as ``fps``, one value each."""
        self._log_media("Video", key, "videos", videos, step, kwargs)

    def _log_media(
        self,
        kind: str,
        key: str,
        argument_name: str,
        values: list[Any],
        step: int | None,
        options: dict[str, Sequence[Any]],
    ) -> None:
        if not isinstance(values, list):
            raise TypeError(f"{argument_name}={values!r} must be a list, not {type(values).__name__}: pass [value]")
        for option, option_values in options.items():
            if len(option_values) != len(values):
                raise ValueError(
                    f"{option} has {len(option_values)} items for {len(values)} {argument_name}: pass one for each"
                )
        if process_rank() == 0:
            import wandb

            make = getattr(wandb, kind)
            media = [make(value, **{name: options[name][i] for name in options}) for i, value in enumerate(values)]
            self._log({self._prefix + key: media}, step)

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Note that the run uses an artifact, and return it.

        Args:
            artifact: Its path, ``entity/project/name:alias``.
            artifact_type: Its type. Default: any.
        """
        return self.experiment.use_artifact(artifact, type=artifact_type)

    @staticmethod
    def download_artifact(
        artifact: str,
        save_dir: str | os.PathLike[str] | None = None,
        artifact_type: str | None = None,
        use_artifact: bool | None = True,
    ) -> str | None:
        """Download an artifact on rank 0.

        Args:
            artifact: Its path, ``entity/project/name:alias``.
            save_dir: Directory for its files. Default: W&B chooses one.
            artifact_type: Its type. Default: any.
            use_artifact: Whether the active run, if there is one, notes that it uses the artifact. Default: True.

        Returns:
            The directory; None on other ranks.
        """
        if process_rank() != 0:
            return None
        import wandb

        if use_artifact and wandb.run is not None:
            wandb_artifact = wandb.run.use_artifact(artifact, type=artifact_type)
        else:
            wandb_artifact = wandb.Api().artifact(artifact, type=artifact_type)
        return str(wandb_artifact.download(root=None if save_dir is None else os.fspath(save_dir)))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Upload what the callback keeps, now or when the fit ends, as ``log_model`` says."""
        self._upload(self._uploads.collect_after_save(checkpoint_callback))

    def finalize(self, status: str) -> None:
        """Upload the checkpoints that wait for a good end. The run stays open: see `finish`."""
        if status == "success":
            self._upload(self._uploads.collect_at_end())

    def _upload(self, checkpoints: Any) -> None:
        if process_rank() != 0:
            return
        for path, callback, facts in checkpoints:
            import wandb

            name = self._checkpoint_name or f"model-{self.experiment.id}"
            artifact = wandb.Artifact(name=name, type="model", metadata=facts)
            artifact.add_dir(path, policy=self._file_policy)
            best = ["best"] if path == callback.best_model_path else []
            self.experiment.log_artifact(artifact, aliases=["latest", *best])

    def finish(self) -> None:
        """End the run, once all of it is sent or written. What is logged later continues it by its id."""
        if self._experiment is not None:
            self._experiment.finish()
            self._experiment = None


def _choose_argument(name: str, value: Any, twin: str, other: Any) -> Any:
    """Return the one of two arguments of the same meaning that is given."""
    if value is not None and other is not None and value != other:
        raise ValueError(f"{name}={value!r} and {twin}={other!r} mean the same: pass one of them")
    return other if value is None else value


def _check_init(options: dict[str, Any]) -> None:
    """Raise TypeError for what ``wandb.init`` does not take, while nothing runs yet."""
    if not options:
        return  # wandb is not even imported
    import wandb

    valid = inspect.signature(wandb.init).parameters
    for option, value in options.items():
        if option not in valid:
            raise TypeError(f"{option}={value!r} is no argument: wandb.init takes {', '.join(valid)}")


def _make_id() -> str:
    """Return what W&B would make up: 8 characters, from the system and not from a generator that training uses."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
