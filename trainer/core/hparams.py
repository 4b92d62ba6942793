"""Hyperparameters of tasks and data modules, the form that checkpoints store and loggers receive, and its way back.

``hparams`` holds the user's objects unchanged. The stored form holds only data: OmegaConf containers, dataclasses and
enum members become a `Record` of their content. Reading this form imports no module that the data names. A dataclass is
built only if an annotation contains that class or a base class of it, or if the default value has one of these
classes. The constructor of such a class is the only code that a checkpoint can choose to run. It may name a class, for
an argument that is one, only among the layers, optimizers and schedules of torch.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import re
import sys
import typing
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, time
from pathlib import Path
from types import FrameType
from typing import Any

from numpy import ndarray
from torch import Tensor, nn, optim

from ...common.messages import add_article, name_type, nearest, warn
from ...common.optional import is_config
from ...common.validation import WrongTypeError
from ...engine.checkpoint import MAX_DEPTH, Record, encode
from ...loggers import plain
from .cli_hparams import CLASS_PATH, given_settings
from .signatures import signature

_DICTS = (dict, OrderedDict, defaultdict)
_PLAIN = (str, int, float, bool, type(None))
_REFERENCE_START = re.compile(r"(\\*)\$\{")  # OmegaConf halves the preceding backslashes
_NOTHING: Any = object()


class AttributeDict(dict[str, Any]):
    """Dict whose keys are also attributes.

    Examples:
        >>> from treadle.utilities import AttributeDict
        >>> hparams = AttributeDict(lr=0.1)
        >>> hparams.width = 8
        >>> hparams["width"], hparams.lr
        (8, 0.1)
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"there is no hyperparameter {name!r}. "
                + (f"Available: {', '.join(self)}." if self else "Call self.save_hyperparameters() in __init__.")
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError:
            raise AttributeError(f"there is no hyperparameter {name!r} to delete.") from None

    def __repr__(self) -> str:
        return "\n".join(f"{name!r}: {value!r}" for name, value in self.items())


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
    if unknown := [name for name in names if name not in arguments]:
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
    arguments: dict[str, Any] = {}
    while frame is not None and _is_init(frame, instance):  # the outermost class last, so that its values override
        names, _, variadic, local = inspect.getargvalues(frame)
        arguments |= {name: local[name] for name in names[1:] if name in local}
        arguments |= local.get(variadic or "", {})
        frame = frame.f_back
    arguments.pop("__class__", None)
    return arguments


def _is_init(frame: FrameType, instance: Any) -> bool:
    code = frame.f_code
    first = code.co_varnames[0] if code.co_argcount else ""
    return code.co_name == "__init__" and frame.f_locals.get(first) is instance


# -- stored form ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stored:
    """Hyperparameters in the form that checkpoints store, and the names of those that cannot be stored.

    Attributes:
        values: Values by name. A mapping that can be stored only in part is reduced to that part.
        left_out: For each hyperparameter with values that cannot be stored, by name: the place of the first of them
            and the reason, as in ``"net.activation (ReLU)"``.
    """

    values: dict[str, Any]
    left_out: dict[str, str]


def stored(hparams: Mapping[str, Any], defaults: Mapping[str, Any]) -> Stored:
    """Return hyperparameters in the form that checkpoints store, without values that cannot be stored.

    ``defaults`` holds the default values of the constructor's arguments. A default value that cannot be stored is not
    reported, because the constructor sets it again.
    """
    flattener = _Flattener()
    values = flattener.mapping(hparams, ())
    left_out: dict[str, str] = {}
    for place, words in flattener.left_out.items():
        name = place[0]
        if len(place) > 1 or hparams.get(name) is not defaults.get(name, _NOTHING):
            left_out.setdefault(name, f"{'.'.join(place)} ({words})")
    return Stored(values, left_out)


def make_config(values: Any) -> Any:
    """Return values as an OmegaConf container, or unchanged if OmegaConf does not support them."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.create(values)
    except OmegaConfBaseException:
        return values


def copied_config(config: Any, ignored: set[str]) -> Any:
    """Return a copy of a ``DictConfig`` without the keys in ``ignored``."""
    from omegaconf import flag_override

    copied = copy.deepcopy(config)
    with flag_override(copied, ["struct", "readonly"], False):
        for name in ignored.intersection(copied):
            del copied[name]
    return copied


def entries(config: Any) -> dict[Any, Any]:
    """Return the values of a ``DictConfig`` by name. Missing values and failing interpolations stay as written."""
    from omegaconf import OmegaConf

    written = OmegaConf.to_container(config)
    assert isinstance(written, dict)
    values = {}
    for name in written:
        try:
            values[name] = _get_item(config, name)
        except _NoData:
            values[name] = written[name]
    return values


def class_name(kind: type) -> str:
    """Return the name by which a record refers to a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def readable(value: Any) -> Any:
    """Return a stored value in readable form: records become their content; enum members and classes become text."""
    if isinstance(value, Record):
        name = value.name.partition(":")[2]
        return {"enum": f"{name}.{value.content}", "class": name}.get(value.kind) or readable(value.content)
    if type(value) is dict:
        return {_make_readable_key(key): readable(item) for key, item in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return [readable(item) for item in value]
    if type(value) is Namespace:
        return {name: readable(item) for name, item in vars(value).items()}
    return value


def _make_readable_key(key: Any) -> Any:
    name = readable(key)
    return name if isinstance(name, Hashable) else str(key)


# -- conversion to data --------------------------------------------------------------------------------------------


class _NoData(Exception):
    """Error for a value that cannot be stored; its text gives the reason."""


class _Flattener:
    """Converter of values to data.

    Entries of a mapping that cannot be converted are left out. A list with an item that cannot be converted cannot be
    converted either.
    """

    def __init__(self) -> None:
        self.left_out: dict[tuple[str, ...], str] = {}
        self._open: set[int] = set()  # the containers that are being flattened

    def mapping(self, value: Any, place: tuple[str, ...]) -> dict[Any, Any]:
        """Return the entries of a mapping as data, and record in ``left_out`` those that cannot be stored."""
        flattened = {}
        for key in value:
            inside = (*place, str(key))
            try:
                name = self.data(key, place)
                if type(name) is not str:
                    _check({name: None})
                flattened[name] = self.data(_get_item(value, key), inside)
            except _NoData as error:
                self.left_out[inside] = str(error)
        return flattened

    def data(self, value: Any, place: tuple[str, ...]) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, enum.Enum):
            if value.name not in type(value).__members__:
                raise _NoData(f"{value}, which is not a single member of {type(value).__name__}")
            return Record("enum", class_name(type(value)), value.name)
        with self._inside(value, place):
            return self._flatten_container(value, place)

    def _flatten_container(self, value: Any, place: tuple[str, ...]) -> Any:
        kind = type(value)
        if is_config(value):
            return Record(kind.__name__, "", self._flatten_config(value, place))
        if _is_dataclass(value):
            names = _list_fields(kind)
            return Record("dataclass", class_name(kind), self.mapping({n: getattr(value, n) for n in names}, place))
        if kind in _DICTS:
            return self.mapping(value, place)
        if isinstance(value, dict) and kind is not Counter:
            return Record("mapping", class_name(kind), self.mapping(value, place))
        if isinstance(value, Namespace):
            return Namespace(**self.mapping(vars(value), place))
        if kind in (list, tuple):
            return kind([self.data(item, (*place, str(number))) for number, item in enumerate(value)])
        if kind in (set, frozenset):
            return _check(kind(self.data(item, place) for item in value))
        if _is_torch_class(value):
            return Record("class", class_name(value), None)
        return _check(value, f"class {value.__qualname__}" if isinstance(value, type) else kind.__qualname__)

    def _flatten_config(self, value: Any, place: tuple[str, ...]) -> Any:
        """Return the content of a configuration with resolved interpolations. Missing values stay ``"???"``."""
        from omegaconf import OmegaConf

        whole = OmegaConf.to_container(value)
        if whole is None:
            return None
        if isinstance(whole, str):
            raise _NoData(f"{type(value).__name__} {whole}")
        if isinstance(whole, dict):
            return self._unwrap_records(self.mapping(value, place))
        items = [self.data(_get_item(value, number), (*place, str(number))) for number in range(len(whole))]
        return self._unwrap_records(items)

    def _unwrap_records(self, content: Any) -> Any:
        """Replace records of nested configurations with dicts and lists, from which the outer one is rebuilt."""
        if isinstance(content, Record) and content.kind in ("DictConfig", "ListConfig"):
            return content.content
        if type(content) is dict:
            return {key: self._unwrap_records(item) for key, item in content.items()}
        return [self._unwrap_records(item) for item in content] if type(content) is list else content

    @contextmanager
    def _inside(self, value: Any, place: tuple[str, ...]) -> Iterator[None]:
        """Mark a container as open within a context. Raise `_NoData` if it contains itself or is nested too deep."""
        if id(value) in self._open:
            raise _NoData("it contains itself")
        if len(place) >= MAX_DEPTH // 2:  # a record adds a level
            raise _NoData(f"it is nested more than {MAX_DEPTH // 2} levels deep")
        self._open.add(id(value))
        try:
            yield
        finally:
            self._open.discard(id(value))


def _check(value: Any, words: str = "") -> Any:
    """Return a value unchanged, or raise `_NoData` if checkpoints cannot store it."""
    try:
        encode(value)
    except (TypeError, ValueError) as error:
        raise _NoData(words or str(error)) from None
    return value


def _get_item(container: Any, key: Any) -> Any:
    """Return an item of a dict or of a configuration, or raise `_NoData` if its interpolation fails."""
    if not is_config(container):
        return container[key]
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return "???" if OmegaConf.is_missing(container, key) else container[key]
    except OmegaConfBaseException as error:
        raise _NoData(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from None


def _is_dataclass(value: Any) -> bool:
    """Return whether a value is an instance of a dataclass that is stored by its fields."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type | Record | nn.Module)


def _list_fields(kind: type) -> list[str]:
    """Return a dataclass's constructor arguments by name. Raise `_NoData` if a required one is not a field."""
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    needed = [
        parameter.name
        for parameter in inspect.signature(kind).parameters.values()
        if parameter.default is parameter.empty
    ]
    if dropped := [name for name in needed if name not in names]:
        raise _NoData(f"{kind.__qualname__}, whose argument {dropped[0]!r} is not one of its fields")
    return names


# -- conversion from data ------------------------------------------------------------------------------------------


class CannotRebuild(ValueError):
    """Error for an argument that cannot be rebuilt, so the caller must pass it; the text gives the reason."""


def rebuild(value: Any, annotation: Any, default: Any, home: str, from_text: bool = False) -> Any:
    """Rebuild an argument from its stored form. No module that the stored form names is imported.

    A dataclass is built only if ``annotation`` or ``default`` allows its class. ``home`` is the name of a module in
    which enum classes are looked up. ``from_text`` means that the value was read from a text file, so it is converted
    to the annotated type.

    Raises:
        CannotRebuild: If the argument contains an object that cannot be built.
    """
    allowed = [*_iterate_classes(annotation)]
    if isinstance(default, enum.Enum) or _is_dataclass(default):
        allowed.append(type(default))
    return _Rebuilder(home, from_text).value(value, tuple(allowed))


class _Rebuilder:
    def __init__(self, home: str, from_text: bool) -> None:
        self.home = home
        self.from_text = from_text

    def value(self, value: Any, allowed: tuple[type, ...]) -> Any:
        kind = type(value)
        if kind is Record:
            return self._build_object(value, allowed)
        if kind in (list, tuple, set, frozenset):
            return kind([self.value(item, allowed) for item in value])
        if kind is dict:
            rebuilt = {self.value(key, allowed): self.value(item, allowed) for key, item in value.items()}
            return self._interpret(rebuilt, allowed) if self.from_text else rebuilt
        if kind is Namespace:
            return Namespace(**{name: self.value(item, allowed) for name, item in vars(value).items()})
        return self._interpret(value, allowed) if self.from_text else value

    def _build_object(self, record: Record, allowed: tuple[type, ...]) -> Any:
        if record.kind == "enum":
            return self._find_member(record, allowed)
        if record.kind == "dataclass":
            return self._build_dataclass(record, allowed)
        if record.kind == "class" and _is_torch_class(found := _look_up(*record.name.partition(":")[::2])):
            return found
        content = self.value(record.content, allowed)
        if record.kind == "mapping" and type(content) is dict:
            return AttributeDict(content)
        if record.kind == "Namespace" and type(content) is dict:
            return Namespace(**content)
        if record.kind in ("DictConfig", "ListConfig"):
            return build_config(content)
        stored_as = f"{record.kind} {record.name}"
        raise CannotRebuild(f"it is stored as {stored_as!r:.80}, which this version of Treadle or torch does not have")

    def _find_member(self, record: Record, allowed: tuple[type, ...]) -> Any:
        module, _, name = record.name.partition(":")
        classes = [cls for cls in allowed if cls.__qualname__ == name]
        classes += [_look_up(module_name, name) for module_name in (module, self.home)]
        for cls in classes:
            if isinstance(cls, type) and issubclass(cls, enum.Enum) and record.content in cls.__members__:
                return cls.__members__[record.content]
        raise CannotRebuild(f"{name}.{record.content}, an enum member that cannot be found")

    def _build_dataclass(self, record: Record, allowed: tuple[type, ...]) -> Any:
        name = record.name.partition(":")[2]
        bases = [cls for cls in allowed if dataclasses.is_dataclass(cls)]
        matching_class = next(
            (cls for base in bases for cls in _iterate_subclasses(base) if cls.__qualname__ == name), None
        )
        if matching_class is None or not isinstance(record.content, dict):
            raise CannotRebuild(
                f"{add_article(name)}, but the argument is not annotated with this class or a base class"
            )
        return self._instantiate(matching_class, record.content)

    def _instantiate(self, kind: type, content: Mapping[str, Any]) -> Any:
        try:
            hints = typing.get_type_hints(kind)
        except Exception:  # for example a name imported for type checkers only
            hints = {}
        values = {name: self.value(item, tuple(_iterate_classes(hints.get(name)))) for name, item in content.items()}
        try:
            return kind(**values)
        except TypeError as error:
            raise CannotRebuild(f"{add_article(kind.__qualname__)}, which cannot be rebuilt: {error}") from error

    def _interpret(self, value: Any, allowed: tuple[type, ...]) -> Any:
        """Convert a value to an allowed type; return it unchanged if it already has one or none fits."""
        if type(value) in allowed or not allowed:
            return value
        for kind in allowed:
            if isinstance(value, dict) and dataclasses.is_dataclass(kind):
                return self._instantiate(kind, value)
            if isinstance(value, dict) and kind.__module__.startswith("omegaconf"):
                return build_config(value)
            if not isinstance(value, dict) and issubclass(kind, enum.Enum):
                names = [str(value), str(value).removeprefix(f"{kind.__name__}.")]
                if members := [member for member in kind if member.name in names or member.value == value]:
                    return members[0]
            if isinstance(value, str) and issubclass(kind, Path):
                return Path(value)
            if isinstance(value, str) and kind in (date, datetime, time):
                try:
                    return kind.fromisoformat(value)  # type: ignore[attr-defined]
                except ValueError as error:
                    raise CannotRebuild(f"{value!r:.40}, which is not a {kind.__name__}") from error
        return value


def build_config(content: Any) -> Any:
    """Build an OmegaConf configuration from its content, in which ``${`` is plain text and not an interpolation."""
    from omegaconf import DictConfig, ListConfig, OmegaConf

    if content is None:
        return DictConfig(None)
    if not isinstance(content, dict | list):
        raise CannotRebuild(f"{name_type(content)}, but a configuration must be a dict or a list")
    config = OmegaConf.create(_escape_references(content), flags={"allow_objects": True})
    assert isinstance(config, DictConfig | ListConfig)
    return config


def _escape_references(content: Any) -> Any:
    if isinstance(content, str):
        return _REFERENCE_START.sub(lambda match: match[1] * 2 + "\\${", content)
    if type(content) is dict:
        return {key: _escape_references(item) for key, item in content.items()}
    return [_escape_references(item) for item in content] if type(content) in (list, tuple) else content


def _iterate_classes(annotation: Any) -> Iterator[type]:
    """Yield the classes in an annotation at any depth, except ``object``. ``list[int]`` yields only ``int``."""
    inner = typing.get_args(annotation)
    if isinstance(annotation, type) and not inner and annotation not in (Any, object):
        yield annotation
    for argument in inner:
        yield from _iterate_classes(argument)


def _iterate_subclasses(kind: type) -> Iterator[type]:
    yield kind
    subclasses: list[type] = type.__subclasses__(kind)
    for subclass in subclasses:
        yield from _iterate_subclasses(subclass)


def _is_torch_class(value: Any) -> bool:
    """Return whether a value is a layer, an optimizer or a schedule of torch, which a checkpoint may name."""
    named = isinstance(value, type) and value.__module__.startswith(("torch.nn.", "torch.optim."))
    return named and issubclass(value, nn.Module | optim.Optimizer | optim.lr_scheduler.LRScheduler)


def _look_up(module: str, name: str) -> Any:
    """Return the object with this name in a loaded module, or None. No code is imported or run."""
    target: Any = sys.modules.get(module)
    for part in name.split("."):
        target = vars(target).get(part) if hasattr(target, "__dict__") else None
    return target
