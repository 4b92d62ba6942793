"""Trackers that receive the values logged by a user-defined loop."""

from __future__ import annotations

import numbers
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..common.messages import describe_error, nearest, warn
from ..common.optional import is_installed, require
from ..common.validation import choose

if TYPE_CHECKING:
    from ..strategies import World
    from .configuration import ProjectConfiguration


_PLACES = {"save_dir", "dir", "log_dir", "logdir"}  # options that set where files are written
_FROM_ENVIRONMENT = {"project_name": "CLEARML_PROJECT", "task_name": "CLEARML_TASK"}
# Scripts that let the user choose a tracker pass the options of all trackers, so options of unused ones are no mistake.
_PEERS = {"aim": "aim.Run", "dvclive": "dvclive.Live"}


class GeneralTracker:
    """Base class of user-defined trackers for ``Accelerator(log_with=...)``.

    A subclass must define ``name``, ``requires_logging_directory`` and a property ``tracker``. The property returns the
    underlying object, such as a ``SummaryWriter``. The methods of the base class do nothing; override those that the
    tracker needs.

    Attributes:
        main_process_only: Whether the tracker is called on rank zero only. Default: True.

    Raises:
        NotImplementedError: If a subclass lacks ``name``, ``requires_logging_directory`` or ``tracker``.

    Examples:
        >>> import treadle
        >>> from treadle.engine import GeneralTracker
        >>> class ListTracker(GeneralTracker):
        ...     name = "list"
        ...     requires_logging_directory = False
        ...     rows = []
        ...     @property
        ...     def tracker(self):
        ...         return self.rows
        ...     def log(self, values, step=None, **kwargs):
        ...         self.rows.append((step, values))
        >>> accelerator = treadle.Accelerator(cpu=True, log_with=ListTracker())
        >>> accelerator.init_trackers("project")
        >>> accelerator.log({"loss": 0.5}, step=1)
        >>> accelerator.get_tracker("list", unwrap=True)
        [(1, {'loss': 0.5})]
    """

    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        needed = ("name", "requires_logging_directory", "tracker")
        missing = [name for name in needed if name not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(
                f"{type(self).__name__} does not define {', '.join(map(repr, missing))}. A tracker must define "
                f"{', '.join(map(repr, needed[:-1]))} and {needed[-1]!r}. Add the missing attributes to the class."
            )

    def start(self) -> None:
        """Start the tracker. `Accelerator.init_trackers` calls this method."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration of the run.

        Args:
            values: The configuration's values, by name.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store the values of one step.

        Args:
            values: The values, by name.
            step: The step, or None.
            kwargs: Further arguments from `Accelerator.log`.
        """

    def finish(self) -> None:
        """Write all values that are still in memory, and close the tracker."""


@dataclass(frozen=True)
class _Service:
    """Description of a kind of tracker that Treadle makes of a logger.

    Attributes:
        logger: Name of the logger's class in `treadle.loggers`.
        package: The package that it needs, if any.
        project: The logger's arguments that get the project's name.
        directory: The logger's argument that gets ``logging_dir``, if it has one.
        texts: Method of the service's object that stores a text.
        log: Method of the service's object, or of the logger if it begins with ``_``, that stores any object.
        extra: Treadle's extra that installs the package. Default: its name.
    """

    logger: str = ""
    package: str = ""
    project: tuple[str, ...] = ("project",)
    directory: str = ""
    texts: str = ""
    log: str = ""
    extra: str = ""


class LoggerTracker(GeneralTracker):
    """Tracker that writes to a logger of `treadle.loggers`.

    Args:
        logger: The logger to write to.
        name: The name by which `Accelerator.get_tracker` finds the tracker.
    """

    requires_logging_directory = False
    service = _Service()

    def __init__(self, logger: Any, name: str) -> None:
        # The tracker of a logger that the user has made stores what Treadle's own for this kind of logger does.
        kinds = {kind.service.logger: kind.service for kind in _BUILT_IN}
        self.service = kinds.get(type(logger).__name__, self.service)
        self.name = name
        self.logger = logger
        self._warned_of_objects = False
        super().__init__()

    @property
    def tracker(self) -> Any:
        """The logger's ``experiment``, such as a ``SummaryWriter``."""
        return self.logger.experiment

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration as hyperparameters; see `GeneralTracker`.

        Args:
            values: The configuration's values, by name.
        """
        self.logger.log_hyperparams(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics. Texts and other objects go to the service, or are left out with a warning.

        Args:
            values: The values, by name.
            step: The step, or None.
            kwargs: Further arguments of the logger's ``log_metrics``.
        """
        objects = {name: value for name, value in values.items() if not _is_metric(value)}
        if objects:
            self._log_objects(objects, step)
            values = {name: value for name, value in values.items() if name not in objects}
        if values or not objects:
            self.logger.log_metrics(values, step, **kwargs)

    def _log_objects(self, values: dict[str, Any], step: int | None) -> None:
        service = self.service
        if service.log:
            getattr(self.logger if service.log.startswith("_") else self.tracker, service.log)(values, step=step)
            return
        for name, value in values.items():
            if service.texts and isinstance(value, str):
                place = {"global_step": step} if service.texts == "add_text" else {}
                getattr(self.tracker, service.texts)(name, value, **place)
            elif not self._warned_of_objects:
                self._warned_of_objects = True
                warn(
                    f"accelerator.log got {name}={value!r}, but the tracker {self.name!r} stores only "
                    f"{'numbers and texts' if service.texts else 'numbers'}. Other values are left out."
                )

    def finish(self) -> None:
        """Finalize the logger; see `GeneralTracker`."""
        self.logger.finalize("success")


def _is_metric(value: Any) -> bool:
    """Return whether a logger's ``log_metrics`` accepts a value: one real number, or a dict of such numbers."""
    if isinstance(value, Mapping):
        return all(not isinstance(inner, Mapping) and _is_metric(inner) for inner in value.values())
    if callable(getattr(value, "item", None)):  # a tensor, an array or a numpy number
        try:
            value = value.item()
        except (RuntimeError, ValueError, TypeError):
            return False
    return isinstance(value, numbers.Real)


class ServiceTracker(LoggerTracker):
    """Base class of the trackers that Treadle has, each of which writes to a logger of `treadle.loggers`.

    Args:
        run_name: The project's name, passed to `Accelerator.init_trackers`.
        logging_dir: Directory of the tracker's files. Default: that of the logger.
        kwargs: Further arguments of the logger.
    """

    name: str

    def __init__(self, run_name: str | None = None, logging_dir: Any = None, /, **kwargs: Any) -> None:
        from .. import loggers

        if self.name != "mlflow":  # whose logger has a run_name besides the project's
            run_name = kwargs.pop("run_name", run_name)
        logging_dir = kwargs.pop("logging_dir", logging_dir)

        service, options = self.service, {}
        if run_name is not None:
            options = {key: os.environ.get(_FROM_ENVIRONMENT.get(key, "")) or run_name for key in service.project}
        if self.requires_logging_directory:  # files are in logging_dir/run_name, without a numbered directory below
            options["version"] = ""
        is_placed = not self.requires_logging_directory and _PLACES & {*kwargs}
        if logging_dir is not None and service.directory and not is_placed:
            options[service.directory] = logging_dir
        super().__init__(getattr(loggers, service.logger)(**{**options, **kwargs}), self.name)

    @property
    def writer(self) -> Any:
        """The service's object, such as TensorBoard's ``SummaryWriter``; ``run`` and ``task`` are the same."""
        return self.tracker

    run = task = writer

    def finish(self) -> None:
        """Finalize the logger and end its run; see `GeneralTracker`."""
        super().finish()
        if hasattr(self.logger, "finish"):
            self.logger.finish()


class TensorBoardTracker(ServiceTracker):
    """Tracker that writes TensorBoard event files below ``logging_dir/run_name``; see `ServiceTracker`."""

    name = "tensorboard"
    service = _Service("TensorBoardLogger", "tensorboard", ("name",), "save_dir", texts="add_text")
    requires_logging_directory = True

    def __init__(self, run_name: str | None = None, logging_dir: Any = None, /, **kwargs: Any) -> None:
        super().__init__(run_name, logging_dir, **{"default_hp_metric": False, **kwargs})  # nobody logs an hp_metric

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write batches of images.

        Args:
            values: Batches of images by name.
            step: The step.
            kwargs: Further arguments of ``SummaryWriter.add_images``.
        """
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)


class CSVTracker(ServiceTracker):
    """Tracker that writes a CSV file below ``logging_dir/run_name``; see `ServiceTracker`."""

    name = "csv"
    service = _Service("CSVLogger", "", ("name",), "save_dir")
    requires_logging_directory = True


class WandBTracker(ServiceTracker):
    """Tracker for a run of Weights & Biases. ``WANDB_DIR`` replaces ``logging_dir``; see `ServiceTracker`."""

    name = "wandb"
    service = _Service("WandbLogger", "wandb", directory="save_dir", log="_log")

    def __init__(self, run_name: str | None = None, logging_dir: Any = None, /, **kwargs: Any) -> None:
        super().__init__(run_name, os.environ.get("WANDB_DIR") or logging_dir, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Upload lists of images.

        Args:
            values: Lists of images by name.
            step: The step.
            kwargs: Further arguments of ``wandb.Image``.
        """
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
        """Upload a table.

        Args:
            table_name: The name of the table.
            columns: The names of the columns.
            data: The rows.
            dataframe: A pandas data frame, instead of ``columns`` and ``data``.
            step: The step.
            kwargs: Further arguments of ``wandb.log``.

        Raises:
            ValueError: If no table is passed.
        """
        import wandb

        if dataframe is None and (columns is None or data is None):
            raise ValueError(f"log_table({table_name!r}) got no table. Pass columns= and data=, or dataframe=.")
        self.run.log({table_name: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step=step, **kwargs)


class MLflowTracker(ServiceTracker):
    """Tracker for a run of MLflow; see `ServiceTracker`."""

    name = "mlflow"
    service = _Service("MLFlowLogger", "mlflow", ("experiment_name",), "save_dir")


class CometMLTracker(ServiceTracker):
    """Tracker for an experiment of Comet; see `ServiceTracker`."""

    name = "comet_ml"
    service = _Service("CometLogger", "comet_ml", texts="log_other", extra="comet")


class ClearMLTracker(ServiceTracker):
    """Tracker for a task of ClearML. A task that the script has created is used and not closed; see `ServiceTracker`.

    ``CLEARML_PROJECT`` and ``CLEARML_TASK`` replace the name of the project and of the task.
    """

    name = "clearml"
    service = _Service("ClearMLLogger", "clearml", ("project_name", "task_name"))
    _is_own = True

    def start(self) -> None:
        """Record whether the script has already created a task; see `GeneralTracker`."""
        clearml = sys.modules.get("clearml")
        self._is_own = clearml is None or clearml.Task.current_task() is None

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Upload one image per name.

        Args:
            values: Images by name.
            step: The step.
            kwargs: Further arguments of ``Logger.report_image``.
        """
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
        """Upload a table.

        Args:
            table_name: The name of the table.
            columns: The names of the columns. Default: the first row of ``data``.
            data: The rows.
            dataframe: A pandas data frame, instead of ``columns`` and ``data``.
            step: The step.
            kwargs: Further arguments of ``Logger.report_table``.

        Raises:
            ValueError: If no table is passed.
        """
        if dataframe is None and data is None:
            raise ValueError(f"log_table({table_name!r}) got no table. Pass data= or dataframe=.")
        table = dataframe if dataframe is not None else ([columns, *data] if columns else data)  # type: ignore[misc]
        logger = self.task.get_logger()
        logger.report_table(title=table_name, series=table_name, table_plot=table, iteration=step, **kwargs)

    def finish(self) -> None:
        """Close the task, unless the script has created it; see `GeneralTracker`."""
        if self._is_own:
            super().finish()


class SwanLabTracker(ServiceTracker):
    """Tracker for a run of SwanLab; see `ServiceTracker`."""

    name = "swanlab"
    service = _Service("SwanLabLogger", "swanlab", directory="save_dir", log="log")

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Upload lists of images.

        Args:
            values: Lists of images by name.
            step: The step.
            kwargs: Further arguments of ``Run.log``.
        """
        import swanlab

        images = {name: [swanlab.Image(image) for image in batch] for name, batch in values.items()}
        self.run.log(images, step=step, **kwargs)


class TrackioTracker(ServiceTracker):
    """Tracker for a run of Trackio; see `ServiceTracker`."""

    name = "trackio"
    service = _Service("TrackioLogger", "trackio", log="log")


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Register a tracker class, which ``Accelerator(log_with=tracker_class.name)`` then instantiates.

    The class is called with the project's name, the logging directory if ``requires_logging_directory`` is True, and
    its ``init_kwargs``.

    Args:
        tracker_class: A subclass of `GeneralTracker` with the class attributes ``name`` and
            ``requires_logging_directory``.

    Raises:
        ValueError: If ``tracker_class`` is not such a class.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ValueError(
            f"tracker_class={tracker_class!r} must be a subclass of GeneralTracker. Pass the class itself, not its "
            "name or an instance."
        )
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name or not hasattr(tracker_class, "requires_logging_directory"):
        raise ValueError(
            f"{tracker_class.__name__} must have the class attributes 'name' (a non-empty string) and "
            "'requires_logging_directory'. Define both."
        )
    if name in LOGGER_TYPE_TO_CLASS:
        warn(f"a tracker named {name!r} is already registered. {tracker_class.__name__} replaces it.")
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def list_installed_trackers() -> list[str]:
    """Return the names of the built-in trackers whose packages are installed."""
    return [kind.name for kind in _BUILT_IN if not kind.service.package or is_installed(kind.service.package)]


Source = Callable[[str, dict[str, Any]], GeneralTracker]


def tracker_sources(log_with: Any, project: ProjectConfiguration) -> dict[str, Source]:
    """Validate the requested trackers, and return the functions that create them, by name.

    Args:
        log_with: The argument ``log_with`` of the Accelerator.
        project: The directories of the run.

    Raises:
        ValueError: If a name is unknown, or a directory is missing.
        ModuleNotFoundError: If the package of a tracker is not installed.
        TypeError: If an object is not a tracker.
    """
    sources: dict[str, Source] = {}
    for entry in [log_with] if isinstance(log_with, str) or not isinstance(log_with, list | tuple) else log_with:
        if entry is None:
            continue
        value = getattr(entry, "value", entry)
        names = [value] if isinstance(value, str) else []
        if value == "all":
            names = [
                name
                for name in list_installed_trackers()
                if project.logging_dir or not LOGGER_TYPE_TO_CLASS[name].requires_logging_directory
            ]
        for name in names:
            if name in _PEERS.keys() - LOGGER_TYPE_TO_CLASS.keys():
                raise ValueError(
                    f"log_with={name!r}: Treadle has no tracker for this service. Wrap {_PEERS[name]} in a "
                    "GeneralTracker, or use log_with='mlflow'."
                )
            if name not in LOGGER_TYPE_TO_CLASS:
                name = choose("log_with", name.lower(), [*LOGGER_TYPE_TO_CLASS, "all"])
            sources[name] = _resolve_source(name, project)
        if not isinstance(value, str):
            tracker = _to_tracker(value)
            sources[str(tracker.name)] = lambda _, options, tracker=tracker: tracker  # type: ignore[misc, attr-defined]
    return sources


def _to_tracker(value: Any) -> GeneralTracker:
    if isinstance(value, GeneralTracker):
        return value
    if isinstance(value, type):
        raise TypeError(f"log_with={value.__name__} is a class, not a tracker. Pass {value.__name__}(...).")
    if callable(getattr(value, "log_metrics", None)):
        return LoggerTracker(value, type(value).__name__.removesuffix("Logger").lower())
    if all(hasattr(value, name) for name in ("name", "tracker", "log", "finish", "requires_logging_directory")):
        return value  # it already has this form
    raise TypeError(
        f"log_with={value!r} is not a tracker. Pass a name ({', '.join(kind.name for kind in _BUILT_IN)}), a "
        "GeneralTracker, or a logger from treadle.loggers."
    )


def _resolve_source(name: str, project: ProjectConfiguration) -> Source:
    make: Any = LOGGER_TYPE_TO_CLASS[name]
    service = make.service if issubclass(make, ServiceTracker) else None
    if service is not None and service.package:
        require(f"log_with={name!r}", service.package, extra=service.extra or service.package)
    if make.requires_logging_directory and project.logging_dir is None:
        raise ValueError(
            f"log_with={name!r} writes files, but no directory is set. Pass Accelerator(project_dir=...) or "
            "ProjectConfiguration(logging_dir=...)."
        )
    place = [project.logging_dir] if make.requires_logging_directory or service is not None else []
    return lambda project_name, options: make(project_name, *place, **options)


_BUILT_IN = (
    *(TensorBoardTracker, CSVTracker, WandBTracker, MLflowTracker),
    *(ClearMLTracker, CometMLTracker, SwanLabTracker, TrackioTracker),
)
LOGGER_TYPE_TO_CLASS: dict[str, Any] = {tracker.name: tracker for tracker in _BUILT_IN}
"""The tracker classes by name, including registered ones."""


class Trackers:
    """Collection of an Accelerator's trackers. The methods of `Accelerator` document the arguments."""

    def __init__(self, world: World, sources: dict[str, Source]) -> None:
        self.sources = sources
        self.started: list[GeneralTracker] = []
        self._world = world
        self._failed: set[int] = set()

    def start(self, project_name: str, config: Mapping[str, Any] | None, init_kwargs: Mapping[str, Any] | None) -> None:
        """Create the trackers, start them and store the configuration; see `Accelerator.init_trackers`."""
        options = dict(init_kwargs or {})
        for name in options:
            if name not in {*self.sources, *_PEERS, *LOGGER_TYPE_TO_CLASS}:
                requested = ", ".join(self.sources) or "no tracker"
                hint = nearest(name, self.sources) or f" Remove {name!r} from init_kwargs."
                raise ValueError(f"init_kwargs names {name!r}, but log_with names {requested}.{hint}")
        # No collective is used, because scripts also call this in ``if accelerator.is_main_process:``.
        self._failed.clear()
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
        """Send values of this process to the trackers; see `Accelerator.log`."""
        if self.sources and not self.started and self._world.is_main:
            raise RuntimeError(
                "accelerator.log was called before accelerator.init_trackers(...), so the values would be lost. Call "
                "init_trackers first."
            )
        trackers = self._on_this_rank()
        if not trackers:
            return
        plain = {name: _read(value) for name, value in values.items()}
        for tracker in trackers:
            if id(tracker) in self._failed:
                continue
            name = str(tracker.name)  # type: ignore[attr-defined]
            try:
                tracker.log(plain, step=step, **(log_kwargs or {}).get(name, {}))
            except Exception as error:  # a service that is down must not end the training
                if getattr(getattr(tracker, "logger", tracker), "strict", False):
                    raise
                self._failed.add(id(tracker))
                warn(f"the tracker {name!r} failed in accelerator.log, so it is disabled: {describe_error(error)}")

    def get(self, name: str, unwrap: bool) -> Any:
        """Return a started tracker by name; see `Accelerator.get_tracker`."""
        from ..loggers import NullExperiment

        for tracker in self.started:
            if tracker.name == name:  # type: ignore[attr-defined]
                if not unwrap:
                    return tracker
                return tracker.tracker if tracker in self._on_this_rank() else NullExperiment()  # type: ignore[attr-defined]
        # The tracker was started on the main process only.
        if not self.started and not self._world.is_main and name in self.sources:
            return NullExperiment()
        names = [str(tracker.name) for tracker in self.started]  # type: ignore[attr-defined]
        hint = f" Started: {', '.join(names)}.{nearest(name, names)}" if names else " Call init_trackers first."
        raise ValueError(f"{name!r} is not a started tracker.{hint}")

    def finish(self) -> None:
        """Finish all trackers. Must be called on all ranks."""
        with self._world.failing_together():
            for tracker in self._on_this_rank():
                tracker.finish()
        self.started = []


def _read(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
