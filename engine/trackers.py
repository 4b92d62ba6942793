"""Trackers, which receive the numbers that a user-defined loop logs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..common.messages import nearest, warn
from ..common.optional import is_installed, require
from ..common.validation import choose
from ..strategies import World
from .configuration import ProjectConfiguration

# By name: the package that the logger needs.
_LOGGERS = {
    **{"tensorboard": "tensorboard", "csv": "", "wandb": "wandb", "mlflow": "mlflow"},
    **{name: name for name in ("aim", "clearml", "comet_ml", "swanlab", "trackio")},
}
_EXTRAS = {"comet_ml": "comet"}
"""By name: Treadle's extra, where it has another."""
_WITH_FILES = ("tensorboard", "csv", "aim")
_WITH_SAVE_DIR = ("wandb", "mlflow", "swanlab")
_PLACES = {"save_dir", "dir", "log_dir", "logdir"}  # options that say where their files go
# Scripts that let the user choose a tracker give the options of all, so those of others are no mistake.
_PEERS = ("dvclive",)


class GeneralTracker:
    """Base of a tracker of one's own, for ``Accelerator(log_with=...)``.

    A subclass sets ``name`` and ``requires_logging_directory``, has a property ``tracker`` (what it writes with), and
    writes `store_init_configuration` and `log`.

    Attributes:
        main_process_only: whether it is called on the main process only.
    """

    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        needed = ("name", "requires_logging_directory", "tracker")
        missing = [name for name in needed if name not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(f"{type(self).__name__} has no {', '.join(missing)}; define them in the class.")

    def start(self) -> None:
        """Begin, once `Accelerator.init_trackers` is called."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Note what the run was configured with."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Note numbers by name, of one step."""

    def finish(self) -> None:
        """End: write out what is still in memory."""


class LoggerTracker(GeneralTracker):
    """One of `treadle.loggers`, as a tracker.

    Args:
        logger: the logger; or what makes it from the project's name, once that is known.
        name: the tracker's name.
    """

    requires_logging_directory = False

    def __init__(self, logger: Any, name: str) -> None:
        self.name = name
        self.logger = logger
        super().__init__()

    @property
    def tracker(self) -> Any:
        """What the logger writes with, such as a ``SummaryWriter``."""
        return self.logger.experiment

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """See `GeneralTracker`."""
        self.logger.log_hyperparams(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """See `GeneralTracker`."""
        self.logger.log_metrics(values, step, **kwargs)

    def finish(self) -> None:
        """See `GeneralTracker`."""
        self.logger.finalize("success")


class RunTracker(LoggerTracker):
    """A logger whose run stays open after its `finalize`, as a tracker, which ends the run."""

    def finish(self) -> None:
        """See `GeneralTracker`."""
        super().finish()
        self.logger.finish()


class TensorBoardTracker(LoggerTracker):
    """TensorBoard's event files below ``logging_dir/run_name``.

    Args:
        run_name: the project's name.
        logging_dir: the directory of all projects.
        kwargs: for `treadle.loggers.TensorBoardLogger`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: Any, **kwargs: Any) -> None:
        from ..loggers import TensorBoardLogger

        settings = {"save_dir": logging_dir, "name": run_name, "version": "", **kwargs}
        super().__init__(TensorBoardLogger(**settings), self.name)

    @property
    def writer(self) -> Any:
        """The ``SummaryWriter``."""
        return self.tracker

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write batches of images by name; see ``SummaryWriter.add_images``."""
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)


class WandBTracker(RunTracker):
    """A run of Weights & Biases.

    Args:
        run_name: the project's name.
        kwargs: for `treadle.loggers.WandbLogger`.
    """

    name = "wandb"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        from ..loggers import WandbLogger

        super().__init__(WandbLogger(**{"project": run_name, **kwargs}), self.name)

    @property
    def run(self) -> Any:
        """The ``wandb`` run."""
        return self.tracker

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Upload lists of images by name; ``kwargs`` are those of ``wandb.Image``."""
        import wandb

        images = {name: [wandb.Image(image, **kwargs) for image in batch] for name, batch in values.items()}
        self.run.log(images, step=step)

    def log_table(
        self,
        table_name: str,
        columns: list[str | int] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Upload a table of ``columns`` and ``data``, or a pandas ``dataframe``."""
        import wandb

        if dataframe is None and (columns is None or data is None):
            raise ValueError(f"log_table({table_name!r}) takes columns= and data=, or dataframe=.")
        self.run.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step=step, **kwargs)


class MLflowTracker(LoggerTracker):
    """A run of MLflow.

    Args:
        experiment_name: the project's name.
        logging_dir: a local directory for the runs; by default the tracking server's.
        kwargs: for `treadle.loggers.MLFlowLogger`, such as ``run_name``, ``run_id``, ``tags``.
    """

    name = "mlflow"

    def __init__(self, experiment_name: str | None = None, logging_dir: Any = None, **kwargs: Any) -> None:
        from ..loggers import MLFlowLogger

        settings = {} if experiment_name is None else {"experiment_name": experiment_name}
        if logging_dir is not None:
            settings["save_dir"] = logging_dir
        super().__init__(MLFlowLogger(**{**settings, **kwargs}), self.name)


class AimTracker(RunTracker):
    """A run of Aim, in the repository ``logging_dir``.

    Args:
        run_name: the project's name, which the run is called, and its experiment.
        logging_dir: the directory of the repository.
        kwargs: for `treadle.loggers.AimLogger`.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: Any = ".", **kwargs: Any) -> None:
        from ..loggers import AimLogger

        settings = {"repo": logging_dir, "experiment": run_name, "run_name": run_name, "context_prefixes": {}}
        super().__init__(AimLogger(**{**settings, **kwargs}), self.name)

    @property
    def writer(self) -> Any:
        """The ``aim.Run``."""
        return self.tracker

    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Write images by name, each an array, a PIL image, or one of them with a caption.

        Args:
            values: the images.
            step: optimizer step they belong to.
            kwargs: ``{"aim_image": {...}, "track": {...}}`` for ``aim.Image`` and ``Run.track``.
        """
        import aim

        options = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            made = aim.Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(made, name=name, step=step, **options.get("track", {}))


class CometMLTracker(RunTracker):
    """An experiment of Comet.

    Args:
        run_name: the project's name.
        kwargs: for `treadle.loggers.CometLogger`, which takes those of ``comet_ml.start``.
    """

    name = "comet_ml"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        from ..loggers import CometLogger

        super().__init__(CometLogger(**{"project": run_name, **kwargs}), self.name)

    @property
    def writer(self) -> Any:
        """The experiment of ``comet_ml``."""
        return self.tracker


class ClearMLTracker(RunTracker):
    """A task of ClearML. One that the script began itself is used, and stays open at the end.

    Args:
        run_name: the project's and the task's name, unless ``CLEARML_PROJECT`` and ``CLEARML_TASK`` are set.
        kwargs: for `treadle.loggers.ClearMLLogger`, which takes those of ``Task.init``.
    """

    name = "clearml"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        from ..loggers import ClearMLLogger

        settings = {
            "project_name": os.environ.get("CLEARML_PROJECT") or run_name,
            "task_name": os.environ.get("CLEARML_TASK") or run_name,
        }
        super().__init__(ClearMLLogger(**{**settings, **kwargs}), self.name)
        self._is_own = True

    @property
    def task(self) -> Any:
        """The ``clearml.Task``."""
        return self.tracker

    def start(self) -> None:
        """See `GeneralTracker`."""
        clearml = sys.modules.get("clearml")
        self._is_own = clearml is None or clearml.Task.current_task() is None

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Upload images by name, each an array or a PIL image; ``kwargs`` are those of ``Logger.report_image``."""
        for name, image in values.items():
            self.task.get_logger().report_image(title=name, series=name, iteration=step, image=image, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Upload a table of ``data``, with ``columns`` or the names in its first row, or a pandas ``dataframe``."""
        if dataframe is None and data is None:
            raise ValueError(f"log_table({table_name!r}) takes data=, or dataframe=.")
        table = dataframe if dataframe is not None else ([columns, *data] if columns else data)  # type: ignore[misc]
        logger = self.task.get_logger()
        logger.report_table(title=table_name, series=table_name, table_plot=table, iteration=step, **kwargs)

    def finish(self) -> None:
        """See `GeneralTracker`."""
        if self._is_own:
            super().finish()


class SwanLabTracker(RunTracker):
    """A run of SwanLab.

    Args:
        run_name: the project's name.
        kwargs: for `treadle.loggers.SwanLabLogger`, which takes those of ``swanlab.init``.
    """

    name = "swanlab"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        from ..loggers import SwanLabLogger

        super().__init__(SwanLabLogger(**{"project": run_name, **kwargs}), self.name)

    @property
    def run(self) -> Any:
        """The ``swanlab`` run."""
        return self.tracker

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Upload lists of images by name; ``kwargs`` are those of ``Run.log``."""
        import swanlab

        images = {name: [swanlab.Image(image) for image in batch] for name, batch in values.items()}
        self.run.log(images, step=step, **kwargs)


class TrackioTracker(RunTracker):
    """A run of Trackio.

    Args:
        run_name: the project's name.
        kwargs: for `treadle.loggers.TrackioLogger`, which takes those of ``trackio.init``.
    """

    name = "trackio"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        from ..loggers import TrackioLogger

        super().__init__(TrackioLogger(**{"project": run_name, **kwargs}), self.name)

    @property
    def run(self) -> Any:
        """The ``trackio`` run."""
        return self.tracker


_registered: dict[str, type[GeneralTracker]] = {}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let ``Accelerator(log_with=tracker_class.name)`` make trackers of a class.

    It is called with the project's name, then with the logging directory if ``requires_logging_directory``, and with
    its ``init_kwargs``.

    Args:
        tracker_class: a subclass of `GeneralTracker` with ``name`` and ``requires_logging_directory``.

    Raises:
        ValueError: for any other class.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ValueError(f"register_tracker_class takes a subclass of GeneralTracker, not {tracker_class!r}.")
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name or not hasattr(tracker_class, "requires_logging_directory"):
        raise ValueError(f"{tracker_class.__name__} needs the class attributes name and requires_logging_directory.")
    if name in _registered or name in _LOGGERS:
        warn(f"the tracker {name!r} was there already; {tracker_class.__name__} replaces it.")
    _registered[name] = tracker_class


def list_installed_trackers() -> list[str]:
    """Return the names of the trackers whose packages are installed."""
    return [name for name in _LOGGERS if _is_installed(name)]


Source = Callable[[str, dict[str, Any]], GeneralTracker]


def tracker_sources(log_with: Any, project: ProjectConfiguration) -> dict[str, Source]:
    """Return what makes each requested tracker, by its name; all of it is checked now, before any work is done.

    Raises:
        ValueError: for an unknown name, a package that is not installed, or no directory to write into.
        TypeError: for something that is no tracker.
    """
    sources: dict[str, Source] = {}
    for entry in [log_with] if isinstance(log_with, str) or not isinstance(log_with, list | tuple) else log_with:
        if entry is None:
            continue
        value = getattr(entry, "value", entry)
        names = [value] if isinstance(value, str) else []
        if value == "all":
            names = [
                name for name in _LOGGERS if _is_installed(name) and (project.logging_dir or name not in _WITH_FILES)
            ]
        for name in names:
            name = name if name in _registered else choose("log_with", name.lower(), [*_LOGGERS, *_registered, "all"])
            sources[name] = _resolve_source(name, project)
        if not isinstance(value, str):
            tracker = _to_tracker(value)
            if tracker.requires_logging_directory and project.logging_dir is None:  # type: ignore[attr-defined]
                raise ValueError(_make_directory_error(str(tracker.name)))  # type: ignore[attr-defined]
            sources[str(tracker.name)] = lambda _, options, tracker=tracker: tracker  # type: ignore[misc, attr-defined]
    return sources


def _to_tracker(value: Any) -> GeneralTracker:
    if isinstance(value, GeneralTracker):
        return value
    if isinstance(value, type):
        raise TypeError(f"log_with takes a tracker, not the class {value.__name__}; make one: {value.__name__}(...).")
    if callable(getattr(value, "log_metrics", None)):
        return LoggerTracker(value, type(value).__name__.removesuffix("Logger").lower())
    if all(hasattr(value, name) for name in ("name", "tracker", "log", "finish", "requires_logging_directory")):
        return value  # of the same form
    raise TypeError(
        f"log_with={value!r} is no tracker: give one of {', '.join(_LOGGERS)}, a GeneralTracker or one of "
        "treadle.loggers."
    )


def _is_installed(name: str) -> bool:
    package = _LOGGERS[name]
    return not package or is_installed(package)


def _make_directory_error(name: str) -> str:
    return (
        f"log_with={name!r} writes files: give Accelerator(project_dir=...) or ProjectConfiguration(logging_dir=...)."
    )


def _resolve_source(name: str, project: ProjectConfiguration) -> Source:
    if name in _registered:
        return _resolve_registered(_registered[name], project)
    package = _LOGGERS[name]
    if package:
        require(f"log_with={name!r}", package, extra=_EXTRAS.get(name, name))
    if name in _WITH_FILES and project.logging_dir is None:
        raise ValueError(_make_directory_error(name))

    def make(project_name: str, options: dict[str, Any]) -> GeneralTracker:
        if name == "csv":
            from ..loggers import CSVLogger

            settings = {"save_dir": project.logging_dir, "name": project_name, "version": "", **options}
            return LoggerTracker(CSVLogger(**settings), name)
        if name in _WITH_FILES:  # logging_dir/project_name, no numbered directory below
            options = {"logging_dir": project.logging_dir, **options}
        elif name in _WITH_SAVE_DIR and project.logging_dir is not None and not _PLACES & set(options):
            options = {"save_dir": project.logging_dir, **options}
        first = "experiment_name" if name == "mlflow" else "run_name"
        return _CLASSES[name](**{first: project_name, **options})

    return make


_CLASSES: dict[str, Callable[..., GeneralTracker]] = {
    tracker.name: tracker
    for tracker in (
        *(TensorBoardTracker, WandBTracker, MLflowTracker),
        *(AimTracker, ClearMLTracker, CometMLTracker, SwanLabTracker, TrackioTracker),
    )
}


def _resolve_registered(tracker_class: type[GeneralTracker], project: ProjectConfiguration) -> Source:
    make: Callable[..., GeneralTracker] = tracker_class
    if not tracker_class.requires_logging_directory:  # type: ignore[attr-defined]
        return lambda project_name, options: make(project_name, **options)
    if project.logging_dir is None:
        raise ValueError(_make_directory_error(tracker_class.name))  # type: ignore[attr-defined]
    return lambda project_name, options: make(project_name, project.logging_dir, **options)


class Trackers:
    """The trackers of an `Accelerator`. Each public method is documented at the `Accelerator`.

    Args:
        world: all processes.
        sources: what makes each tracker, by its name; see `tracker_sources`.

    Attributes:
        started: the trackers that `start` made.
    """

    def __init__(self, world: World, sources: dict[str, Source]) -> None:
        self.sources = sources
        self.started: list[GeneralTracker] = []
        self._world = world

    def start(self, project_name: str, config: Mapping[str, Any] | None, init_kwargs: Mapping[str, Any] | None) -> None:
        """Make and start the trackers."""
        options = dict(init_kwargs or {})
        for name in options:
            if name not in {*self.sources, *_LOGGERS, *_PEERS, *_registered}:
                requested = ", ".join(self.sources) or "none"
                raise ValueError(f"init_kwargs names {name!r}, log_with {requested}.{nearest(name, self.sources)}")
        # Without a collective: scripts also call this in ``if accelerator.is_main_process:``.
        self.started = [make(project_name, dict(options.get(name, {}))) for name, make in self.sources.items()]
        for tracker in self._on_this_rank():
            tracker.start()
            if config is not None:
                tracker.store_init_configuration(dict(config))

    def _on_this_rank(self) -> list[GeneralTracker]:
        if self._world.is_main:
            return self.started
        return [tracker for tracker in self.started if not getattr(tracker, "main_process_only", True)]

    def log(
        self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, Mapping[str, Any]] | None
    ) -> None:
        """Hand numbers of this process to the trackers."""
        if self.sources and not self.started and self._world.is_main:
            raise RuntimeError("accelerator.log before accelerator.init_trackers(...): the numbers would be lost.")
        trackers = self._on_this_rank()
        if not trackers:
            return
        plain = {name: _read(value) for name, value in values.items()}
        for tracker in trackers:
            tracker.log(plain, step=step, **(log_kwargs or {}).get(str(tracker.name), {}))  # type: ignore[attr-defined]

    def get(self, name: str, unwrap: bool) -> Any:
        """Return the tracker of a name, or with ``unwrap`` what it writes with."""
        for tracker in self.started:
            if tracker.name == name:  # type: ignore[attr-defined]
                if not unwrap:
                    return tracker
                return tracker.tracker if tracker in self._on_this_rank() else _Silent()  # type: ignore[attr-defined]
        if not self.started and not self._world.is_main and name in self.sources:  # started on the main process only
            return _Silent()
        names = [str(tracker.name) for tracker in self.started]  # type: ignore[attr-defined]
        raise ValueError(f"there is no tracker {name!r} among {names}.{nearest(name, names)}")

    def finish(self) -> None:
        """Finish all trackers."""
        with self._world.together():
            for tracker in self._on_this_rank():
                tracker.finish()
        self.started = []


class _Silent:
    """Takes any use and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


def _read(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
