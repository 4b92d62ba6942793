"""Trackers, which receive the numbers that a user-defined loop logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..common.messages import nearest, warn
from ..common.optional import is_installed, require
from ..common.validation import choose
from ..strategies import World
from .configuration import ProjectConfiguration

# By name: the package that the logger needs.
_LOGGERS = {"tensorboard": "tensorboard", "csv": "", "wandb": "wandb", "mlflow": "mlflow"}
_WITH_FILES = ("tensorboard", "csv")
# Scripts that let the user choose a tracker give the options of all, so those of others are no mistake.
_PEERS = ("aim", "clearml", "comet_ml", "dvclive", "swanlab", "trackio")


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
        require(f"log_with={name!r}", package, extra=package)
    if name in _WITH_FILES and project.logging_dir is None:
        raise ValueError(_make_directory_error(name))

    def make(project_name: str, options: dict[str, Any]) -> GeneralTracker:
        if name == "tensorboard":  # logging_dir/project_name, no numbered directory below
            return TensorBoardTracker(project_name, project.logging_dir, **options)
        if name == "csv":
            from ..loggers import CSVLogger

            settings = {"save_dir": project.logging_dir, "name": project_name, "version": "", **options}
            return LoggerTracker(CSVLogger(**settings), name)
        if project.logging_dir is not None and not {"save_dir", "dir"} & set(options):
            options = {"save_dir": project.logging_dir, **options}
        if name == "wandb":
            return WandBTracker(**{"run_name": project_name, **options})
        return MLflowTracker(**{"experiment_name": project_name, **options})

    return make


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
