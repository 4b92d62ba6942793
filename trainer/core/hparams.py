"""Hyperparameters of tasks and data modules."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from argparse import Namespace
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from numpy import ndarray
from torch import Tensor

from ...common.messages import nearest, warn
from ...common.optional import is_config
from ...common.validation import WrongTypeError
from ...loggers import plain
from .cli_hparams import CLASS_PATH, given_settings
from .signatures import signature
from .stored_hparams import (
    AttributeDict,
    CannotRebuild,
    Stored,
    class_name,
    copied_config,
    entries,
    readable,
    rebuild,
    stored,
)


class HyperparametersMixin:
    """Mixin that adds ``save_hyperparameters`` and ``hparams``."""

    # Keys of `load_checkpoint`, under Lightning's names; `DataModule` has its own.
    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"

    log_hyperparameters = True
    hparams_name: str | None = None  # name of the one argument that holds all of them, if any
    hparams_kind: tuple[str, str] | None = None  # kind of that argument, and the name of its class

    def save_hyperparameters(
        self, *args: Any, ignore: str | Iterable[str] | None = None, frame: FrameType | None = None, logger: bool = True
    ) -> None:
        """Keep the arguments of ``__init__`` in ``self.hparams``, with their original types.

        Checkpoints and loggers get the arguments that are data, such as numbers, text, lists, dicts, paths, tensors,
        dataclasses and OmegaConf containers. They do not get other arguments, such as a module or a function.

        Args:
            args: Names of the arguments to keep, or one object to keep instead: a dict, namespace, dataclass or
                ``DictConfig``. Default: all arguments except ``*args``.
            ignore: Name of an argument to omit, or several names. Default: none.
            frame: Stack frame of ``__init__``. Default: the caller's frame.
            logger: Whether loggers get the hyperparameters. Default: True.

        Raises:
            TypeError, ValueError: If an argument is invalid, or the method is called outside of ``__init__`` without an
                object.
        """
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        caller = frame or inspect.currentframe().f_back  # type: ignore[union-attr]
        if all(isinstance(name, str) for name in args):
            given = given_settings.get()
            if given is not None and given[0] is type(self):
                values = _select_arguments(self, given[1], args)
            else:
                values = _select_arguments(self, _collect_init_arguments(self, caller), args)
            self._keep({name: value for name, value in values.items() if name not in ignored})
        else:
            if len(args) != 1:
                raise WrongTypeError(
                    f"save_hyperparameters got {args!r:.200}. Pass names of arguments, or one object with all "
                    "hyperparameters."
                )
            self.hparams_kind = _classify(args[0])
            arguments = _collect_init_arguments(self, caller) or {}
            self.hparams_name = next((name for name, value in arguments.items() if value is args[0]), None)
            self._keep_whole(args[0], ignored)
        for name in ignored.intersection(self.hparams):  # kept by a base class
            del self.hparams[name]
        self.__dict__["_hparams_initial"] = _take_snapshot(self.hparams, (Tensor, ndarray))  # large, and already copied
        self.log_hyperparameters = logger

    def _keep(self, values: Mapping[str, Any]) -> None:
        if is_config(self.hparams):  # a DictConfig accepts values of a few types only
            self.__dict__["_hparams"] = AttributeDict(entries(self.hparams))
        self.hparams.update(_take_snapshot(values))

    def _keep_whole(self, whole: Any, ignored: set[str]) -> None:
        if is_config(whole) and not self.hparams:
            self.__dict__["_hparams"] = copied_config(whole, ignored)
            return
        if dataclasses.is_dataclass(whole):
            values = {field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)}
        else:
            values = vars(whole) if isinstance(whole, Namespace) else whole
        self._keep({name: value for name, value in values.items() if name not in ignored})

    @property
    def hparams(self) -> AttributeDict:
        """Hyperparameters: a dict whose keys are also attributes, or a ``DictConfig``."""
        if "_hparams" not in self.__dict__:
            self.__dict__["_hparams"] = AttributeDict()
        return self.__dict__["_hparams"]

    @property
    def hparams_initial(self) -> AttributeDict:
        """Hyperparameters as of the last call of `save_hyperparameters`; empty before the first call.

        In-place changes of tensors and arrays are included.
        """
        return _take_snapshot(self.__dict__.get("_hparams_initial", AttributeDict()))

    def stored_hparams(self) -> Stored:
        """Return the form of `hparams` that checkpoints store."""
        return stored(
            self.hparams, {name: argument.default for name, argument in signature(type(self)).arguments.items()}
        )

    def plain_hparams(self) -> dict[str, Any]:
        """Return `hparams` in the form that loggers receive."""
        values = self.stored_hparams().values.items()
        return plain({name: readable(value) for name, value in values if name != CLASS_PATH})

    def check_hparams(self, stored_form: Stored) -> dict[str, str]:
        """Warn once about each hyperparameter that cannot be passed to the constructor from a checkpoint.

        Args:
            stored_form: Result of `stored_hparams`.

        Returns:
            The reason for each such hyperparameter, by name.
        """
        checked: set[str] = self.__dict__.setdefault("_hparams_checked", set())
        lost: dict[str, str] = {}
        for name in self.hparams.keys() - checked:
            if name in stored_form.left_out:
                lost[name] = stored_form.left_out[name]
            elif (
                argument := signature(type(self)).arguments.get(self.hparams_name or name)
            ) and name in stored_form.values:
                try:
                    rebuild(stored_form.values[name], argument.type, argument.default, type(self).__module__)
                except CannotRebuild as error:
                    lost[name] = f"{name} ({error})"
        checked.update(self.hparams)
        known: dict[str, str] = self.__dict__.setdefault("_hparams_lost", {})
        known |= lost
        if lost:
            names = [name for name in self.hparams if name in lost]
            words, passed = (", ".join(lost[name] for name in names), ", ".join(f"{name}=..." for name in names))
            warn(
                f"{type(self).__name__}.hparams: checkpoints cannot store {words}. Pass {passed} to "
                f"load_from_checkpoint in another process. save_hyperparameters(ignore={names}) silences this warning."
            )
        return known


def _classify(whole: Any) -> tuple[str, str]:
    kind = type(whole)
    if dataclasses.is_dataclass(whole) and not isinstance(whole, type):
        return "dataclass", class_name(kind)
    if isinstance(whole, Namespace):
        return "Namespace", ""
    if isinstance(whole, Mapping):
        return ("DictConfig", "") if is_config(whole) else ("mapping", class_name(kind))
    raise WrongTypeError(
        f"save_hyperparameters got {whole!r:.200}. Pass names of arguments, or a dict, Namespace, dataclass or "
        "DictConfig."
    )


def _take_snapshot(values: Any, shared: tuple[type, ...] = ()) -> Any:
    """Copy hyperparameters, but keep references to values of ``shared`` types and those that cannot be stored."""
    if is_config(values):
        return copy.deepcopy(values)
    snapshot = AttributeDict()
    for name, value in values.items():
        keeps_reference = isinstance(value, shared) or stored({name: value}, {}).left_out
        snapshot[name] = value if keeps_reference else copy.deepcopy(value)
    return snapshot


def _select_arguments(instance: Any, arguments: dict[str, Any] | None, names: tuple[str, ...]) -> dict[str, Any]:
    if arguments is None:
        raise ValueError(
            f"save_hyperparameters was called outside of {type(instance).__name__}.__init__. Call it in __init__, or "
            "pass a dict of the hyperparameters."
        )
    unknown = [name for name in names if name not in arguments]
    if unknown:
        raise ValueError(
            f"save_hyperparameters got {unknown[0]!r}, which is not an argument of {type(instance).__name__}.__init__. "
            f"The arguments are {', '.join(arguments) or 'none'}.{nearest(unknown[0], arguments)}"
        )
    return {name: arguments[name] for name in names or arguments}


def _collect_init_arguments(instance: Any, frame: FrameType | None) -> dict[str, Any] | None:
    """Return the arguments of ``instance``'s ``__init__`` calls on the stack; None if there is no such call."""
    while frame is not None and not _is_init(frame, instance):  # the method may be called in a helper of __init__
        frame = frame.f_back
    if frame is None:
        return None
    frame_arguments: list[dict[str, Any]] = []
    while frame is not None and _is_init(frame, instance):
        names, _, variadic, local = inspect.getargvalues(frame)
        values = {name: local[name] for name in [*names, *_list_keyword_only(frame)][1:] if name in local}
        if variadic is not None:
            values.update(local.get(variadic, {}))
        frame_arguments.append(values)
        frame = frame.f_back
    merged: dict[str, Any] = {}
    for values in frame_arguments:  # the outermost class last, so that its values override
        merged.update(values)
    return {name: value for name, value in merged.items() if name != "__class__"}


def _is_init(frame: FrameType, instance: Any) -> bool:
    code = frame.f_code
    first = code.co_varnames[0] if code.co_argcount else ""
    return code.co_name == "__init__" and frame.f_locals.get(first) is instance


def _list_keyword_only(frame: FrameType) -> tuple[str, ...]:
    code = frame.f_code
    return code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
