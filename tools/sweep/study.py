"""Optuna study of a sweep: its storage, the values of a trial, and pruning."""

from __future__ import annotations

import hashlib
import inspect
import logging
import random
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler, PartialFixedSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError

from ...cli.config import ConfigError
from ...common.messages import nearest
from .sweep_file import Choice, Choices, Parameter, Sweep

DATABASE = "study.db"
JOURNAL = "study.log"

_PASSWORD = re.compile(r"(://[^:/@]*:)[^@]*@")
_BUSY = 60.0  # seconds that a process waits for the transactions of others
_TRIES = 5  # attempts if the database refuses an access

_PRUNERS: dict[str, type[BasePruner]] = {
    "hyperband": optuna.pruners.HyperbandPruner,
    "asha": optuna.pruners.SuccessiveHalvingPruner,
    "median": optuna.pruners.MedianPruner,
    "percentile": optuna.pruners.PercentilePruner,
    "threshold": optuna.pruners.ThresholdPruner,
}

_HALVING_OPTIONS = ("min_resource", "reduction_factor", "bootstrap_count")

T = TypeVar("T")


class Study:
    """Optuna study of a sweep. Only one process at a time may start a trial or draw its values."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.pruner = make_pruner(self._complete_pruner())
        make_sampler(sweep, 0)  # checks its options
        self.url = make_url(sweep)
        try:
            self.storage = open_storage(self.url)
            self.study = retry(self._open)
        except (ImportError, ValueError, OSError, SQLAlchemyError, StorageInternalError) as error:
            raise ConfigError(f"{sweep.file}: storage: {self.place} can't be opened: {error}") from error

    def _open(self) -> optuna.Study:
        return optuna.create_study(
            storage=self.storage,
            study_name=self.sweep.name,
            direction=self.sweep.metric.goal,
            pruner=self.pruner,
            load_if_exists=True,
        )

    @property
    def place(self) -> str:
        """URL of the study's storage with the password hidden."""
        return _PASSWORD.sub(r"\1***@", self.url)

    def _complete_pruner(self) -> Choice | None:
        """Return the sweep's pruner, or None. Hyperband's ``max_resource`` defaults to the trials' ``max_epochs``."""
        prune, epochs = self.sweep.prune, _get_max_epochs(self.sweep)
        if prune is None or prune.kind != "hyperband" or epochs is None:
            return prune
        return replace(prune, options={"max_resource": epochs, **prune.options})

    def describe_pruner(self) -> dict[str, Any]:
        """Return the pruner's kind and options for the trials' processes; empty without a pruner."""
        prune = self._complete_pruner()
        return {} if prune is None else prune.describe()

    def list_trials(self) -> list[FrozenTrial]:
        """Return all trials, ordered by number."""
        return retry(lambda: self.study.get_trials(deepcopy=False))

    def ask(self) -> int:
        """Start a new trial in the study and return the trial's number."""
        number = len(self.list_trials())
        self.study.sampler = make_sampler(self.sweep, number)
        # Not repeated after a failure, because the trial may exist; it is then found as one that no process runs.
        return self.study.ask().number

    def draw(self, number: int) -> dict[str, Any]:
        """Draw the values that a trial does not have yet, and return all its values as the study stores them."""
        self.study.sampler = make_sampler(self.sweep, number)
        trial = open_trial(self.study, number)
        return {parameter.key: retry(partial(_suggest, trial, parameter)) for parameter in self.sweep.parameters}

    def record_attributes(self, number: int, **attributes: Any) -> None:
        """Set user attributes of a trial that has not ended."""
        trial_id = _get_id(self.study, number)
        for name, value in attributes.items():
            retry(partial(self.storage.set_trial_user_attr, trial_id, name, value))

    def tell(self, number: int, state: TrialState, value: float | None = None) -> None:
        """Record the end of a trial in the study, unless it has ended already."""
        retry(lambda: self.study.tell(number, value, state, skip_if_finished=True))

    def find_best(self) -> FrozenTrial | None:
        """Return the best complete trial; None if no trial is complete."""
        complete = [trial for trial in self.list_trials() if trial.state is TrialState.COMPLETE]
        choose = min if self.sweep.metric.goal == "minimize" else max
        return choose(complete, key=lambda trial: trial.value or 0.0, default=None)


def make_url(sweep: Sweep) -> str:
    """Return the URL of a sweep's storage; for a journal, ``journal:`` and the path of its file."""
    if sweep.storage is None:
        return URL.create("sqlite", database=str(sweep.folder / DATABASE)).render_as_string(hide_password=False)
    return f"journal:{sweep.folder / JOURNAL}" if sweep.storage == "journal" else sweep.storage


def open_storage(url: str) -> BaseStorage:
    """Open the storage at a URL in the form that `make_url` returns."""
    optuna.logging.set_verbosity(logging.WARNING)
    if url.startswith("journal:"):
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        path = url.removeprefix("journal:")
        return optuna.storages.JournalStorage(JournalFileBackend(path, JournalFileOpenLock(path)))
    options = {"connect_args": {"timeout": _BUSY}} if url.startswith("sqlite") else {}
    return optuna.storages.get_storage(optuna.storages.RDBStorage(url, options))


def open_trial(study: optuna.Study, number: int) -> Trial:
    """Return an existing trial, which another process or an earlier session may have started."""
    return Trial(study, _get_id(study, number))


def retry(access: Callable[[], T]) -> T:
    """Return the result of ``access``, which is called up to ``_TRIES`` times if it raises a StorageInternalError."""
    for left in range(_TRIES - 1, -1, -1):
        try:
            return access()
        except StorageInternalError:
            if not left:
                raise
            time.sleep(random.random())
    raise AssertionError


def make_pruner(prune: Choice | None) -> BasePruner:
    """Return the Optuna pruner that a sweep file names, or one that never prunes."""
    if prune is None:
        return optuna.pruners.NopPruner()
    pruner = _build(_PRUNERS[prune.kind], prune.options, prune, "prune")
    if prune.kind == "hyperband":  # it uses these in the middle of the first trial
        options = {name: prune.options[name] for name in _HALVING_OPTIONS if name in prune.options}
        _build(_PRUNERS["asha"], options, prune, "prune")
    return pruner


def make_sampler(sweep: Sweep, number: int) -> BaseSampler:
    """Return the Optuna sampler that draws the values of one trial."""
    method = sweep.method
    if method.kind == "grid":
        return _build(_make_grid_sampler, {"sweep": sweep, "number": number, **method.options}, method, "method")
    digest = hashlib.sha256(f"{sweep.seed} {number}".encode()).digest()
    options = {**method.options, "seed": int.from_bytes(digest[:4], "little")}
    if method.kind == "random":
        return _build(optuna.samplers.RandomSampler, options, method, "method")
    return _build(optuna.samplers.TPESampler, {"constant_liar": True, **options}, method, "method")


def _build(kind: Callable[..., T], options: Mapping[str, Any], choice: Choice, key: str) -> T:
    ours = ("sweep", "number", "seed")
    valid = [name for name in inspect.signature(kind).parameters if name not in ours]
    for name in options:
        if name not in (*valid, *ours):
            names = f"{'options are' if len(valid) > 1 else 'option is'} {', '.join(valid)}"
            has = f"{nearest(name, valid)} Its {names}." if valid else f" It takes no options. Remove {name!r}."
            raise ConfigError(f"{choice.source}: {key}: {choice.kind} has no option {name!r}.{has}")
    try:
        return kind(**options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{choice.source}: {key}: {choice.kind}: {error}") from error


def _make_grid_sampler(sweep: Sweep, number: int) -> BaseSampler:
    """Return a sampler that gives trial n the n-th combination of a grid.

    Optuna's ``GridSampler`` picks one of the combinations that have not been started, so two processes may pick the
    same combination.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return PartialFixedSampler(sweep.get_combination(number), optuna.samplers.RandomSampler())


def _suggest(trial: Trial, parameter: Parameter) -> Any:
    space = parameter.space
    if isinstance(space, Choices):
        return trial.suggest_categorical(parameter.key, space.labels)
    if space.integer:
        low, high, step = int(space.low), int(space.high), int(space.step or 1)
        return trial.suggest_int(parameter.key, low, high, log=space.log, step=step)
    return trial.suggest_float(parameter.key, space.low, space.high, log=space.log, step=space.step)


def _get_id(study: optuna.Study, number: int) -> int:
    # Optuna has no public function that returns a trial's ID for its number. The list also fills the storage's cache,
    # which otherwise lacks trials that another process has started.
    return retry(lambda: study.get_trials(deepcopy=False))[number]._trial_id


def _get_max_epochs(sweep: Sweep) -> int | None:
    """Return the trials' ``max_epochs``; None if it varies, or if ``val_check_interval`` or ``max_steps`` is set."""
    trainer = sweep.base.data.get("trainer")
    flags = trainer.data if trainer is not None and isinstance(trainer.data, dict) else {}
    varied: Sequence[str] = [parameter.key for parameter in sweep.parameters]
    epochs = flags["max_epochs"].data if "max_epochs" in flags else None
    once = "val_check_interval" not in flags and "max_steps" not in flags
    alike = not {"trainer.max_epochs", "trainer.val_check_interval", "trainer.max_steps"} & set(varied)
    return epochs if once and alike and isinstance(epochs, int) and epochs >= 1 else None
