"""Trackers, which receive the numbers that a user-defined loop logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..common.messages import nearest
from ..common.optional import is_installed, require
from ..common.validation import choose
from ..strategies import World
from .configuration import ProjectConfiguration

# By name: the class in `treadle.loggers`, the package it needs, and what it calls the project.
_LOGGERS = {
    "tensorboard": ("TensorBoardLogger", "tensorboard", "name"),
    "csv": ("CSVLogger", "", "name"),
    "wandb": ("WandbLogger", "wandb", "project"),
    "mlflow": ("MLFlowLogger", "mlflow", "experiment_name"),
}
_WITH_FILES = ("tensorboard", "csv")


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
            name = choose("log_with", name.lower(), [*_LOGGERS, "all"])
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
    package = _LOGGERS[name][1]
    return not package or is_installed(package)


def _make_directory_error(name: str) -> str:
    return (
        f"log_with={name!r} writes files: give Accelerator(project_dir=...) or ProjectConfiguration(logging_dir=...)."
    )


def _resolve_source(name: str, project: ProjectConfiguration) -> Source:
    kind, package, project_argument = _LOGGERS[name]
    if package:
        require(f"log_with={name!r}", package, extra=package)
    if name in _WITH_FILES and project.logging_dir is None:
        raise ValueError(_make_directory_error(name))

    def make(project_name: str, options: dict[str, Any]) -> GeneralTracker:
        from .. import loggers

        if name in _WITH_FILES:  # logging_dir/project_name, no numbered directory below
            options = {"save_dir": project.logging_dir, "version": "", **options}
        elif project.logging_dir is not None and not {"save_dir", "dir"} & set(options):
            options = {"save_dir": project.logging_dir, **options}
        logger = getattr(loggers, kind)(**{project_argument: project_name, **options})
        return RunTracker(logger, name) if name == "wandb" else LoggerTracker(logger, name)

    return make


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
            if name not in self.sources:
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
