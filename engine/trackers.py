"""Trackers that receive the values logged by a user-defined loop."""

from __future__ import annotations

import numbers
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..common.messages import describe_error, nearest, warn
from ..common.optional import is_installed, require
from ..common.validation import choose
from ..strategies import World
from .configuration import ProjectConfiguration

# By the tracker's name: the package that its logger needs.
_LOGGERS = {
    **{"tensorboard": "tensorboard", "csv": "", "wandb": "wandb", "mlflow": "mlflow"},
    **{name: name for name in ("aim", "clearml", "comet_ml", "swanlab", "trackio")},
}
_EXTRAS = {"comet_ml": "comet"}
"""Treadle's extras whose name differs from the tracker's, by the tracker's name."""
_WITH_FILES = ("tensorboard", "csv", "aim")
_WITH_SAVE_DIR = ("wandb", "mlflow", "swanlab")
_PLACES = {"save_dir", "dir", "log_dir", "logdir"}  # options that set where files are written
# Scripts that let the user choose a tracker pass the options of all trackers, so options of unused ones are no mistake.
_PEERS = ("dvclive",)


class GeneralTracker:
    """Base class of user-defined trackers for ``Accelerator(log_with=...)``.

    A subclass must define ``name``, ``requires_logging_directory`` and a property ``tracker``. The property returns the
    underlying object, such as a ``SummaryWriter``. The methods of the base class do nothing; override those that the
    tracker needs.

    Attributes:
        main_process_only: Whether the tracker is called on rank zero only. Default: True.

    Raises:
        NotImplementedError: If a subclass lacks ``name``, ``requires_logging_directory`` or ``tracker``.

    Example:
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


class LoggerTracker(GeneralTracker):
    """Tracker that writes to a logger of `treadle.loggers`.

    Args:
        logger: The logger to write to.
        name: The name by which `Accelerator.get_tracker` finds the tracker.
    """

    requires_logging_directory = False

    def __init__(self, logger: Any, name: str) -> None:
        self.name = name
        self.logger = logger
        self._warned_of_others = False
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
        others = {name: value for name, value in values.items() if not _is_metric(value)}
        if others:
            self._log_others(others, step)
            values = {name: value for name, value in values.items() if name not in others}
        if values or not others:
            self.logger.log_metrics(values, step, **kwargs)

    def _log_others(self, values: dict[str, Any], step: int | None) -> None:
        types, write = _OTHERS.get(self.name, ((), None))
        if write is not None and (kept := {name: value for name, value in values.items() if isinstance(value, types)}):
            write(self, kept, step)
        for name, value in values.items():
            if not isinstance(value, types) and not self._warned_of_others:
                self._warned_of_others = True
                warn(
                    f"accelerator.log got {name}={value!r}, but the tracker {self.name!r} stores only "
                    f"{'numbers and texts' if types else 'numbers'}. Other values are left out."
                )

    def finish(self) -> None:
        """Finalize the logger; see `GeneralTracker`."""
        self.logger.finalize("success")


def _add_texts(tracker: LoggerTracker, texts: dict[str, str], step: int | None) -> None:
    for name, text in texts.items():
        tracker.tracker.add_text(name, text, global_step=step)


def _log_objects(tracker: LoggerTracker, values: dict[str, Any], step: int | None) -> None:
    tracker.tracker.log(values, step=step)


def _log_row(tracker: LoggerTracker, values: dict[str, Any], step: int | None) -> None:
    tracker.logger._log(dict(values), step)


def _log_texts_as_others(tracker: LoggerTracker, texts: dict[str, str], step: int | None) -> None:
    for name, text in texts.items():
        tracker.tracker.log_other(name, text)


def _track_texts(tracker: LoggerTracker, texts: dict[str, str], step: int | None) -> None:
    import aim

    for name, text in texts.items():
        tracker.tracker.track(aim.Text(text), name=name, step=step)


# By the tracker's name: the types other than numbers that its service stores, and the method that Accelerate's trackers
# call for them.
_OTHERS: dict[str, tuple[type | tuple[type, ...], Callable[[Any, dict[str, Any], int | None], None]]] = {
    "tensorboard": (str, _add_texts),
    "comet_ml": (str, _log_texts_as_others),
    "comet": (str, _log_texts_as_others),
    "aim": (str, _track_texts),
    "wandb": (object, _log_row),
    "trackio": (object, _log_objects),
    "swanlab": (object, _log_objects),
}


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


class RunTracker(LoggerTracker):
    """Tracker for a logger whose ``finalize`` leaves its run open. The tracker ends the run."""

    def finish(self) -> None:
        """Finalize the logger and end its run; see `GeneralTracker`."""
        super().finish()
        self.logger.finish()


class TensorBoardTracker(LoggerTracker):
    """Tracker that writes TensorBoard event files below ``logging_dir/run_name``.

    Args:
        run_name: The project's name, passed to `Accelerator.init_trackers`.
        logging_dir: The parent directory.
        kwargs: Further arguments of `treadle.loggers.TensorBoardLogger`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: Any, **kwargs: Any) -> None:
        from ..loggers import TensorBoardLogger

        settings = {"save_dir": logging_dir, "name": run_name, "version": "", **kwargs}
        super().__init__(TensorBoardLogger(**settings), self.name)

    @property
    def writer(self) -> Any:
        """TensorBoard's ``SummaryWriter``."""
        return self.tracker

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write batches of images; see ``SummaryWriter.add_images``.

        Args:
            values: Batches of images by name.
            step: The step.
            kwargs: Further arguments of ``add_images``.
        """
        for name, images in values.items():
            self.writer.add_images(name, images, global_step=step, **kwargs)


class WandBTracker(RunTracker):
    """Tracker for a run of Weights & Biases.

    Args:
        run_name: The project's name, passed to `Accelerator.init_trackers`.
        kwargs: Further arguments of `treadle.loggers.WandbLogger`.
    """

    name = "wandb"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        from ..loggers import WandbLogger

        super().__init__(WandbLogger(**{"project": run_name, **kwargs}), self.name)

    @property
    def run(self) -> Any:
        """The run object of ``wandb``."""
        return self.tracker

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


class MLflowTracker(LoggerTracker):
    """Tracker for a run of MLflow.

    Args:
        experiment_name: The project's name, passed to `Accelerator.init_trackers`.
        logging_dir: A local directory for the runs.
        kwargs: Further arguments of `treadle.loggers.MLFlowLogger`.
    """

    name = "mlflow"

    def __init__(self, experiment_name: str | None = None, logging_dir: Any = None, **kwargs: Any) -> None:
        from ..loggers import MLFlowLogger

        settings = {} if experiment_name is None else {"experiment_name": experiment_name}
        if logging_dir is not None:
            settings["save_dir"] = logging_dir
        super().__init__(MLFlowLogger(**{**settings, **kwargs}), self.name)


class AimTracker(RunTracker):
    """Tracker for a run of Aim, stored in the Aim repository at ``logging_dir``.

    Args:
        run_name: The project's name, passed to `Accelerator.init_trackers`.
        logging_dir: The directory of the repository. Default: the working directory.
        kwargs: Further arguments of `treadle.loggers.AimLogger`.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: Any = ".", **kwargs: Any) -> None:
        from ..loggers import AimLogger

        settings = {"repo": logging_dir, "experiment": run_name, "run_name": run_name, "context_prefixes": {}}
        super().__init__(AimLogger(**{**settings, **kwargs}), self.name)

    @property
    def writer(self) -> Any:
        """The run object, an ``aim.Run``."""
        return self.tracker

    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Write images, optionally with captions.

        Args:
            values: Images by name, each an image or a tuple of an image and a caption.
            step: The step.
            kwargs: ``{"aim_image": {...}, "track": {...}}`` with further arguments of ``aim.Image`` and ``Run.track``.
        """
        import aim

        options = kwargs or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            logged_image = aim.Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(logged_image, name=name, step=step, **options.get("track", {}))


class CometMLTracker(RunTracker):
    """Tracker for an experiment of Comet.

    Args:
        run_name: The project's name, passed to `Accelerator.init_trackers`.
        kwargs: Further arguments of `treadle.loggers.CometLogger`.
    """

    name = "comet_ml"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        from ..loggers import CometLogger

        super().__init__(CometLogger(**{"project": run_name, **kwargs}), self.name)

    @property
    def writer(self) -> Any:
        """The experiment object of ``comet_ml``."""
        return self.tracker


class ClearMLTracker(RunTracker):
    """Tracker for a task of ClearML. A task that the script has created is used and not closed.

    Args:
        run_name: The name of the project and of the task, unless ``CLEARML_PROJECT`` and ``CLEARML_TASK`` are set.
        kwargs: Further arguments of `treadle.loggers.ClearMLLogger`.
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
        """The task object, a ``clearml.Task``."""
        return self.tracker

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


class SwanLabTracker(RunTracker):
    """Tracker for a run of SwanLab.

    Args:
        run_name: The project's name, passed to `Accelerator.init_trackers`.
        kwargs: Further arguments of `treadle.loggers.SwanLabLogger`.
    """

    name = "swanlab"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        from ..loggers import SwanLabLogger

        super().__init__(SwanLabLogger(**{"project": run_name, **kwargs}), self.name)

    @property
    def run(self) -> Any:
        """The run object of ``swanlab``."""
        return self.tracker

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


class TrackioTracker(RunTracker):
    """Tracker for a run of Trackio.

    Args:
        run_name: The project's name, passed to `Accelerator.init_trackers`.
        kwargs: Further arguments of `treadle.loggers.TrackioLogger`.
    """

    name = "trackio"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        from ..loggers import TrackioLogger

        super().__init__(TrackioLogger(**{"project": run_name, **kwargs}), self.name)

    @property
    def run(self) -> Any:
        """The run object of ``trackio``."""
        return self.tracker


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
    if name in LOGGER_TYPE_TO_CLASS or name in _LOGGERS:
        warn(f"a tracker named {name!r} is already registered. {tracker_class.__name__} replaces it.")
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def list_installed_trackers() -> list[str]:
    """Return the names of the built-in trackers whose packages are installed."""
    return [name for name in _LOGGERS if _is_installed(name)]


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
                name for name in _LOGGERS if _is_installed(name) and (project.logging_dir or name not in _WITH_FILES)
            ]
        for name in names:
            if name not in LOGGER_TYPE_TO_CLASS:
                name = choose("log_with", name.lower(), [*dict.fromkeys((*_LOGGERS, *LOGGER_TYPE_TO_CLASS)), "all"])
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
        raise TypeError(f"log_with={value.__name__} is a class, not a tracker. Pass {value.__name__}(...).")
    if callable(getattr(value, "log_metrics", None)):
        return LoggerTracker(value, type(value).__name__.removesuffix("Logger").lower())
    if all(hasattr(value, name) for name in ("name", "tracker", "log", "finish", "requires_logging_directory")):
        return value  # it already has this form
    raise TypeError(
        f"log_with={value!r} is not a tracker. Pass a name ({', '.join(_LOGGERS)}), a GeneralTracker, or a logger from "
        "treadle.loggers."
    )


def _is_installed(name: str) -> bool:
    package = _LOGGERS[name]
    return not package or is_installed(package)


def _make_directory_error(name: str) -> str:
    return (
        f"log_with={name!r} writes files, but no directory is set. Pass Accelerator(project_dir=...) or "
        "ProjectConfiguration(logging_dir=...)."
    )


def _resolve_source(name: str, project: ProjectConfiguration) -> Source:
    tracker_class = LOGGER_TYPE_TO_CLASS.get(name)
    if tracker_class is not None and tracker_class not in _BUILT_IN:
        return _resolve_registered(tracker_class, project)  # type: ignore[arg-type]  # a class of the user
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
        if name in _WITH_FILES:  # they are in logging_dir/project_name, without a numbered directory below
            options = {"logging_dir": project.logging_dir, **options}
        elif name in _WITH_SAVE_DIR and project.logging_dir is not None and not _PLACES & set(options):
            options = {"save_dir": project.logging_dir, **options}
        first = "experiment_name" if name == "mlflow" else "run_name"
        return tracker_class(**{first: project_name, **options})  # type: ignore[misc]

    return make


_BUILT_IN = (
    *(TensorBoardTracker, WandBTracker, MLflowTracker),
    *(AimTracker, ClearMLTracker, CometMLTracker, SwanLabTracker, TrackioTracker),
)
LOGGER_TYPE_TO_CLASS: dict[str, Callable[..., GeneralTracker]] = {tracker.name: tracker for tracker in _BUILT_IN}
"""The tracker classes by name, including registered ones."""


def _resolve_registered(tracker_class: type[GeneralTracker], project: ProjectConfiguration) -> Source:
    make: Callable[..., GeneralTracker] = tracker_class
    if not tracker_class.requires_logging_directory:  # type: ignore[attr-defined]
        return lambda project_name, options: make(project_name, **options)
    if project.logging_dir is None:
        raise ValueError(_make_directory_error(tracker_class.name))  # type: ignore[attr-defined]
    return lambda project_name, options: make(project_name, project.logging_dir, **options)


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
            if name not in {*self.sources, *_LOGGERS, *_PEERS, *LOGGER_TYPE_TO_CLASS}:
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
        for tracker in self.started:
            if tracker.name == name:  # type: ignore[attr-defined]
                if not unwrap:
                    return tracker
                return tracker.tracker if tracker in self._on_this_rank() else _Silent()  # type: ignore[attr-defined]
        # The tracker was started on the main process only.
        if not self.started and not self._world.is_main and name in self.sources:
            return _Silent()
        names = [str(tracker.name) for tracker in self.started]  # type: ignore[attr-defined]
        hint = f" Started: {', '.join(names)}.{nearest(name, names)}" if names else " Call init_trackers first."
        raise ValueError(f"{name!r} is not a started tracker.{hint}")

    def finish(self) -> None:
        """Finish all trackers. Must be called on all ranks."""
        with self._world.together():
            for tracker in self._on_this_rank():
                tracker.finish()
        self.started = []


class _Silent:
    """Placeholder for a tracker on a rank that did not start it. Its attributes and calls return the placeholder."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


def _read(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
