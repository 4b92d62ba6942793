"""Base class of loggers, and helpers for loggers."""

from __future__ import annotations

import argparse
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .values import check_step

EVALUATED_AT = "evaluation/global_step"
"""Metric with the optimizer step, in rows whose ``step`` is that of a batch in an evaluation, or the task's own."""

Params = Mapping[str, Any] | argparse.Namespace | None


def process_rank() -> int:
    """Return the global rank, from ``rank_zero_only.rank``."""
    from ..common.rank_zero import rank_zero_only  # here, as its package takes time to import

    return rank_zero_only.rank  # type: ignore[attr-defined, no-any-return]


class NullExperiment:
    """Experiment object that ignores calls and assignments, so that user code does not need ``if rank == 0``.

    Accessing an ordinary attribute, calling the object and indexing it all return the object itself. The object is
    falsy and empty, and it can be used as a context manager.

    Examples:
        >>> from treadle.loggers import NullExperiment
        >>> experiment = NullExperiment()
        >>> experiment.add_image("samples", None).anything is experiment
        True
        >>> bool(experiment)
        False
    """

    def __getattr__(self, name: str) -> NullExperiment:
        # Python and numpy look up protocols by such names (__array__, __deepcopy__), which must be absent.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> NullExperiment:
        """Return the object itself."""
        return self

    def __getitem__(self, key: Any) -> NullExperiment:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __enter__(self) -> NullExperiment:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


def rank_zero_experiment(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap an ``experiment`` getter so that it returns a `NullExperiment` on ranks other than zero.

    Put the decorator below ``@property``.

    Args:
        method: The getter to decorate, which creates the backend's object on first access.
    """

    @functools.wraps(method)
    def experiment(self: Any) -> Any:
        return method(self) if process_rank() == 0 else NullExperiment()

    return experiment


class Logger(ABC):
    """Base class of loggers.

    Implement `log_metrics` and `log_hyperparams` in a subclass, and pass an instance to a Trainer.

    The Trainer calls a logger's methods on rank zero only. The logger's properties may be read on any rank. Methods and
    properties must not use collectives. A subclass that overrides ``version`` must also define a setter. Put
    ``@rank_zero_experiment`` below the ``@property`` of ``experiment``, because user code reads ``experiment`` on every
    rank.

    Attributes:
        strict: Raise errors from the logger instead of disabling it with a warning. Default: False.

    Examples:
        >>> from treadle.loggers import Logger
        >>> class PrintLogger(Logger):
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, metrics)
        ...     def log_hyperparams(self, params, metrics=None):
        ...         print(params)
        >>> PrintLogger().log_metrics({"loss": 0.5}, step=1)
        1 {'loss': 0.5}
    """

    strict: bool = False
    _version: int | str | None = None
    _last_step = -1

    @property
    def name(self) -> str | None:
        """Name of the experiment, or None."""
        return None

    @property
    def version(self) -> int | str | None:
        """Version of the experiment; None until it is known on this rank."""
        return self._version

    @version.setter
    def version(self, version: int | str | None) -> None:
        self._version = version

    @property
    def save_dir(self) -> str | None:
        """Parent directory of all experiments; None if no files are written."""
        return None

    @property
    def root_dir(self) -> str | None:
        """Parent directory of all versions of this experiment; None if no files are written."""
        return None

    @property
    def log_dir(self) -> str | None:
        """Directory of this version; None if no files are written or the version is not known on this rank."""
        return None

    @property
    def location(self) -> str:
        """Place of the logged values, printed at the end of ``fit``: by default `log_dir`, or the run of a service."""
        run = "/".join(str(part) for part in (self.name, self.version) if part not in (None, ""))
        return self.log_dir or ", ".join(filter(None, (type(self).__name__, run)))

    @property
    def experiment(self) -> Any:
        """Backend object, such as a ``SummaryWriter``; None unless overridden.

        On nonzero ranks, Treadle's own loggers return a `NullExperiment`.
        """
        return None

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Record metrics.

        Args:
            metrics: Values by name.
            step: Optimizer step of the values. If ``metrics`` contains `EVALUATED_AT`, ``step`` counts evaluation
                batches instead, or is what the task logged as ``"step"``. If None, the logger chooses the step.
                Default: None.
        """

    @abstractmethod
    def log_hyperparams(self, params: Params, metrics: dict[str, float] | None = None) -> None:
        """Record the settings of the run.

        Args:
            params: Settings by name, nested or not.
            metrics: Initial values of metrics. Default: none.
        """

    def next_step(self, step: int | None) -> int:
        """Return the step to log, and remember the highest step.

        Args:
            step: Step that was passed to `log_metrics`. If None, the highest previous step plus one is used.

        Raises:
            TypeError, ValueError: If ``step`` is invalid.
        """
        step = check_step(self._last_step + 1 if step is None else step)
        self._last_step = max(self._last_step, step)
        return step

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the structure of a model. Does nothing unless overridden.

        Args:
            model: The module, not wrapped for distributed training.
            input_array: Input of ``forward``. Default: the module's ``example_input_array``.
        """
        return None

    def on_resume(self, step: int) -> None:
        """Remove the logs of all steps after ``step``, because the resumed run logs these steps again.

        Called before the first step of the resumed run. Does nothing unless overridden.

        Args:
            step: Number of optimizer steps completed when the checkpoint was saved.
        """
        return None

    @property
    def saves_each_row(self) -> bool:
        """True if a custom logger overrides ``save``. The Trainer then calls ``save`` after each `log_metrics`."""
        return type(self).save is not Logger.save and not type(self).save.__module__.startswith("treadle.")

    def save(self) -> None:
        """Write buffered values. Does nothing unless overridden."""
        return None

    def finalize(self, status: str) -> None:
        """Finish logging at the end of a stage, such as ``fit``. Calls `save` unless overridden.

        The logger may be used again afterwards.

        Args:
            status: ``"success"`` or ``"failed"``.
        """
        self.save()

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Handle a saved checkpoint, for example by uploading it. Does nothing unless overridden.

        Args:
            checkpoint_callback: The callback that saved the checkpoint.
        """
        return None
