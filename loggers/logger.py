"""What a logger is: the base class for any backend."""

from __future__ import annotations

import argparse
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..common.rank_zero import rank_zero_only

EVALUATED_AT = "evaluation/global_step"
"""In rows of an evaluation's single batches, whose step counts batches: the optimizer steps done."""

Params = Mapping[str, Any] | argparse.Namespace | None


def process_rank() -> int:
    """Return the global rank that ``rank_zero_only.rank`` holds."""
    return rank_zero_only.rank  # type: ignore[attr-defined, no-any-return]


class NullExperiment:
    """Takes any use of an experiment and does nothing, so that user code needs no ``if rank == 0``.

    Every attribute, call and item is the object itself; it is false, empty and a context manager; what is assigned
    to it is forgotten.
    """

    def __getattr__(self, name: str) -> NullExperiment:
        # Python and numpy ask any object for protocols by such names (__array__, __deepcopy__): "no" must stay "no".
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> NullExperiment:
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
    """Make an ``experiment`` getter answer with a `NullExperiment` on every rank but 0, where it is never entered.

    Write it under ``@property``.

    Args:
        method: The getter, which builds the backend's object at its first call.

    Returns:
        The getter for all ranks.
    """

    @functools.wraps(method)
    def experiment(self: Any) -> Any:
        return method(self) if process_rank() == 0 else NullExperiment()

    return experiment


class Logger(ABC):
    """Where the numbers of a run go. Subclass it, write `log_metrics` and `log_hyperparams`, and pass it to a Trainer.

    The Trainer calls a logger's methods on rank 0 only, so they need no guard and must not communicate. ``name``,
    ``version`` and ``log_dir`` are read on every rank: they cost nothing and never communicate, so one rank alone may
    read them. The Trainer hands rank 0's version to the other ranks by assigning ``logger.version``; a subclass that
    replaces the property leaves it settable. ``experiment`` is for user code, which runs on every rank: put
    ``@rank_zero_experiment`` under its ``@property``.

    Example:
        >>> class Print(Logger):
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, metrics)
        ...
        ...     def log_hyperparams(self, params, metrics=None):
        ...         print(params)

    Attributes:
        strict: If a method fails, let its error end the run. Else the Trainer warns once, the logger gets nothing more
            and the run goes on. Default: False.
    """

    strict: bool = False
    _version: int | str | None = None

    @property
    def name(self) -> str | None:
        """Name of the experiment, None if it has none."""
        return None

    @property
    def version(self) -> int | str | None:
        """Which run of the experiment this is. None until it is known on this rank."""
        return self._version

    @version.setter
    def version(self, version: int | str | None) -> None:
        self._version = version

    @property
    def save_dir(self) -> str | None:
        """Directory above all experiments, None if nothing is written to files."""
        return None

    @property
    def root_dir(self) -> str | None:
        """Directory above all versions of this experiment, None if nothing is written to files."""
        return None

    @property
    def log_dir(self) -> str | None:
        """Directory of this version. None if no files are written, or until the version is known on this rank."""
        return None

    @property
    def experiment(self) -> Any:
        """The backend's own object, for what this class does not offer; a `NullExperiment` on ranks other than 0."""
        return None

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Record numbers.

        Args:
            metrics: Value by name.
            step: Optimizer step the values belong to. Default: the logger numbers them itself.
        """

    @abstractmethod
    def log_hyperparams(self, params: Params, metrics: dict[str, float] | None = None) -> None:
        """Record what the run was configured with.

        Args:
            params: Settings by name, nested or not.
            metrics: Starting values of the metrics by which runs are compared. Default: none.
        """

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Record the structure of a model. Does nothing unless a subclass writes it.

        Args:
            model: The module.
            input_array: What its ``forward`` is called with. Default: the module's ``example_input_array``.
        """
        return None

    def go_on(self, step: int) -> None:
        """Drop what was logged for later steps: a run goes on from a checkpoint of this one, and logs them again.

        Called before its first step, also where nothing was logged yet. Does nothing unless a subclass writes it.

        Args:
            step: Optimizer steps that are done.
        """
        return None

    @property
    def saves_each_row(self) -> bool:
        """True for a custom logger with a ``save`` of its own, which is called after each `log_metrics`."""
        return type(self).save is not Logger.save and not type(self).save.__module__.startswith("treadle.")

    def save(self) -> None:
        """Write out what is still in memory; called after each `log_metrics`. Does nothing unless a subclass does."""
        return None

    def finalize(self, status: str) -> None:
        """Finish a fit, validation or test. The logger may be used again afterwards.

        Args:
            status: How it ended: ``"success"`` or ``"failed"``.
        """
        self.save()

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Take note of a checkpoint that is complete on disk. Does nothing unless a subclass writes it.

        Args:
            checkpoint_callback: The callback that saved it.
        """
        return None
