"""What a logger is: a base class for any backend, and one for backends that write files into a numbered directory."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import numbers
import operator
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Set
from enum import Enum
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

Params = Mapping[str, Any] | argparse.Namespace | None


def process_rank() -> int:
    """Return the global rank that ``rank_zero_only.rank`` holds, 0 before anyone set it."""
    return getattr(rank_zero_only, "rank", None) or 0


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
    """

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

    def log_graph(self, model: Any, input: Any = None) -> None:
        """Record the structure of a model. Does nothing unless a subclass writes it.

        Args:
            model: The module.
            input: What its ``forward`` is called with. Default: the module's ``example_input_array``.
        """
        return None

    def save(self) -> None:
        """Write out what is still in memory. Does nothing unless a subclass writes it."""
        return None

    def finalize(self, status: str) -> None:
        """Finish a fit, validation or test. The logger may be used again afterwards.

        Args:
            status: How it ended: ``"success"`` or ``"failed"``.
        """
        self.save()

    def after_save_checkpoint(self, callback: Any) -> None:
        """Take note of a checkpoint that is complete on disk. Does nothing unless a subclass writes it.

        Args:
            callback: The callback that saved it.
        """
        return None


class DirectoryLogger(Logger):
    """A logger that writes files into ``save_dir/name/version_N``.

    Without a version, rank 0 takes the next free number when the version is first needed. It claims the number by
    creating its directory, so two jobs started at once never share one.

    Args:
        save_dir: Local directory above all experiments. ``~`` and ``$VARIABLES`` are expanded.
        name: Directory of the experiment below it. None or ``""``: none.
        version: A number N for ``version_N``, or a directory name used as it is. An existing one is continued.
            Default: the next free number.
        prefix: Put before every metric's name, as ``prefix-name``. Default: nothing.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``save_dir`` is a URL, or ``version`` is negative.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "treadle_logs",
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        path = os.fspath(save_dir)
        if "://" in path:
            raise ValueError(f"save_dir={path!r} is a URL, and this logger writes local files: pass a local directory")
        for argument, value in (("name", name), ("prefix", prefix)):
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{argument}={value!r} must be a string, not {type(value).__name__}")
        self._save_dir = os.path.expandvars(os.path.expanduser(path))
        self._name = name or ""
        self._version = check_version(version)
        self._prefix = f"{prefix}-" if prefix else ""
        self._experiment: Any = None
        self._last_step = -1
        self._hparams: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which opens its own files."""
        return {**self.__dict__, "_experiment": None}

    @property
    def name(self) -> str:
        """Name of the experiment, ``""`` if it has no directory of its own."""
        return self._name

    @property
    def save_dir(self) -> str:
        """Directory above all experiments."""
        return self._save_dir

    @property
    def root_dir(self) -> str:
        """Directory above all versions of this experiment."""
        return os.path.join(self._save_dir, self._name) if self._name else self._save_dir

    @property
    def version(self) -> int | str | None:
        """Which run of the experiment this is. The first read on rank 0 takes a number; other ranks are told it."""
        if self._version is None and process_rank() == 0:
            self._version = claim_version(self.root_dir)
        return self._version

    @version.setter
    def version(self, version: int | str | None) -> None:
        check_version(version)
        if self._experiment is not None and version != self._version:
            raise ValueError(
                f"version={version!r} cannot replace {self._version!r} while files are open: call finalize() first"
            )
        self._version = version

    @property
    def log_dir(self) -> str | None:
        """Directory of this version. None on ranks other than 0 until the version was assigned."""
        version = self.version
        if version is None:
            return None
        folder = version if isinstance(version, str) else f"version_{version}"
        return os.path.join(self.root_dir, folder) if folder else self.root_dir

    def save_hyperparams(self, params: Params) -> None:
        """Add to ``hparams.yaml`` in `log_dir`, which is written at once so that a crash does not lose it.

        Args:
            params: Settings by name, nested or not. What YAML has no type for is written as its ``str``.

        Raises:
            TypeError: ``params`` is not a mapping, a namespace or a dataclass.
        """
        self._hparams.update(plain(as_mapping(params)))
        directory = self.log_dir
        if process_rank() != 0 or directory is None:
            return
        import yaml

        os.makedirs(directory, exist_ok=True)
        target = os.path.join(directory, "hparams.yaml")
        with open(target + ".tmp", "w", encoding="utf-8") as file:
            yaml.safe_dump(self._hparams, file, sort_keys=False, allow_unicode=True)
        os.replace(target + ".tmp", target)

    def next_step(self, step: int | None) -> int:
        """Return the step to write, one more than the highest so far where the caller names none.

        Raises:
            TypeError: ``step`` is not an integer.
            ValueError: ``step`` is negative.
        """
        if step is None:
            step = self._last_step + 1
        try:
            step = operator.index(step)
        except TypeError:
            raise TypeError(f"step={step!r} must be an integer: pass int(step)") from None
        if step < 0:
            raise ValueError(f"step={step} is negative: steps count from 0")
        self._last_step = max(self._last_step, step)
        return step


def check_version(version: int | str | None) -> int | str | None:
    """Return a version unchanged if it can be one; raise TypeError or ValueError otherwise."""
    if version is not None and (isinstance(version, bool) or not isinstance(version, int | str)):
        raise TypeError(f"version={version!r} must be a number, a directory name or None, not {type(version).__name__}")
    if isinstance(version, int) and version < 0:
        raise ValueError(f"version={version} is negative: versions count from 0, and None takes the next free one")
    return version


def claim_version(root_dir: str) -> int:
    """Create ``version_N`` in ``root_dir`` for the first N above all that exist, and return N."""
    os.makedirs(root_dir, exist_ok=True)
    taken = [int(found[1]) for entry in os.listdir(root_dir) if (found := re.fullmatch(r"version_(\d+)", entry))]
    version = max(taken, default=-1) + 1
    while True:
        # Exclusive creation is the claim: a look first and a creation after it would let two jobs take the same one.
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.join(root_dir, f"version_{version}"))
            return version
        version += 1


def as_number(name: str, value: Any) -> float:
    """Return a metric's value as a plain number; raise TypeError or ValueError naming the metric otherwise."""
    number = value
    if callable(getattr(value, "item", None)):  # a tensor, an array or a numpy number
        try:
            number = value.item()
        except (RuntimeError, ValueError):
            raise ValueError(
                f"metric {name!r} holds {tuple(value.shape)} values and must be one number: "
                "reduce it first, for example with .mean()"
            ) from None
    if isinstance(number, numbers.Real):
        return int(number) if isinstance(number, numbers.Integral) else float(number)
    raise TypeError(f"metric {name!r} is {value!r} ({type(value).__name__}) and must be one number: pass float(value)")


def as_metrics(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float | dict[str, float]]:
    """Return metrics with plain numbers and full names, a mapping of numbers as a dict; raise on anything else."""
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics={metrics!r} must be a dict of numbers by name, not {type(metrics).__name__}")
    result: dict[str, float | dict[str, float]] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"metric name {name!r} must be a string that is not empty: pass str(name)")
        if isinstance(value, Mapping):
            result[prefix + name] = {str(key): as_number(f"{name}/{key}", inner) for key, inner in value.items()}
        else:
            result[prefix + name] = as_number(name, value)
    return result


def as_mapping(params: Any) -> Mapping[str, Any]:
    """Return hyperparameters as a mapping, empty for None; raise TypeError on what has no names."""
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return params
    if isinstance(params, argparse.Namespace):
        return vars(params)
    if dataclasses.is_dataclass(params) and not isinstance(params, type):
        return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    raise TypeError(
        f"params={params!r} must be a dict, a namespace or a dataclass, not {type(params).__name__}: "
        "pass {'name': value}"
    )


def plain(value: Any) -> Any:
    """Return a value made only of dict, list, str, int, float, bool and None; what is none of them becomes its str."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping | argparse.Namespace) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        return {str(key): plain(inner) for key, inner in as_mapping(value).items()}
    if isinstance(value, MutableSequence | tuple | Set):  # a list of OmegaConf is no list, but this
        return [plain(inner) for inner in value]
    if not isinstance(value, Enum):
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):
            number = value.item()  # one tensor element or a numpy number, whose own type YAML does not know
            if type(number) in (int, float, bool):
                return number
    return str(value)
