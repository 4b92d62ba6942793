"""Parser of settings from the command line, files and environment variables, in LightningCLI's syntax."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...callbacks import Callback
from ...common.messages import nearest
from ...trainer import Trainer
from ...trainer.core import REQUIRED, Argument, DataModule, TaskModule, described, signature
from ..commands import report_error
from ..config import ConfigError, Value, resolve_references
from ..config.instantiate import ObjectRecipe, Recipe
from .checker import SettingsChecker, look_up, make_arguments, make_config, supply
from .command_line import check_option_names, choose_subcommand, read_command_line
from .declarations import (
    ClassGroup,
    Declared,
    Link,
    Option,
    find_owner,
    order_by_links,
    read_return_annotation,
    resolve_skipped,
)
from .help import format_help
from .linking import apply_link, remove_target
from .namespace import Namespace
from .optimizers import ReduceLROnPlateau
from .settings import (
    VARIABLE,
    Path,
    find_shape,
    find_value,
    make_default,
    make_settings,
    merge,
    parse_value,
    place,
    read_named_file,
    read_settings,
    read_text,
)
from .subcommands import Subcommands
from .writing import drop_equal, drop_none, dump_config, save_text, to_plain

_FLAG_ACTIONS = {"store_true": (True, False), "store_false": (False, True)}
_PARSER_MODES = ("yaml", "json", "omegaconf")
# Arguments of Lightning's Trainer that Treadle's does not have, but that its configurations contain, always as null.
_PEER_FLAGS = frozenset({"model_registry"})


class ActionConfigFile(argparse.Action):
    """Action of options that read configuration files, as in ``add_argument("--config", action=ActionConfigFile)``."""


class LightningArgumentParser:
    """Command-line parser whose options are declared one by one or derived from the arguments of classes and functions.

    Args:
        description: Text below the usage line of the help. Default: a sentence about the Trainer. None omits it.
        env_prefix: Prefix of the names of environment variables, as in ``PL_TRAINER__MAX_EPOCHS``. Default: ``"PL"``.
        default_env: Whether environment variables are read. Default: False.
        prog: The program's name in the help. Default: None, the script's name.
        default_config_files: Files with defaults, read if they exist. Their names may contain ``*``. Default: None.
        parser_mode: ``"omegaconf"`` resolves ``${...}``; ``"yaml"`` and ``"json"`` do not. Default: ``"yaml"``.
        exit_on_error: Whether the program exits with status 2 if parsing finds invalid settings. If False, a
            ConfigError is raised. Default: True.
        dump_header: Comment lines at the top of YAML output. Default: None, one line with Treadle's version.
        epilog: Last lines of the help. Default: None.
        usage: The usage line of the help. Default: None, a generated line.

    Raises:
        ValueError: If ``parser_mode`` is unknown.

    Example:
        >>> parser = LightningArgumentParser()
        >>> parser.add_argument("--batch_size", type=int, default=32)
        >>> parser.parse_args(["--batch_size=64"]).batch_size
        64
    """

    def __init__(
        self,
        *,
        description: str | None = "Train, validate, test and predict with a Trainer.",
        env_prefix: str = "PL",
        default_env: bool = False,
        prog: str | None = None,
        default_config_files: Sequence[str | FilePath] | None = None,
        parser_mode: str = "yaml",
        exit_on_error: bool = True,
        dump_header: Sequence[str] | None = None,
        epilog: str | None = None,
        usage: str | None = None,
    ) -> None:
        if parser_mode not in _PARSER_MODES:
            raise ValueError(f"parser_mode={parser_mode!r} is not one of {', '.join(_PARSER_MODES)}.")
        self.description, self.epilog, self.usage = description, epilog, usage
        self.prog = prog or sys.argv[0].rpartition("/")[2]
        self.env_prefix, self.default_env = env_prefix, default_env
        self.default_config_files = list(default_config_files or ())
        self.parser_mode, self.exit_on_error = parser_mode, exit_on_error
        self.dump_header = dump_header
        self.callback_keys: list[str] = []
        self.declared: dict[str, Declared] = {}
        self.links: list[Link] = []
        self.aliases: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.config_keys: list[str] = []
        self.several: set[str] = set()
        self.subcommands: dict[str, LightningArgumentParser] = {}
        self.defaults = Value({}, "default")
        self._optimizers: dict[str, tuple[Any, str]] = {}
        self._lr_schedulers: dict[str, tuple[Any, str]] = {}

    # -- arguments ---------------------------------------------------------------------------------------------------

    def add_argument(
        self,
        *names: str,
        type: Any = None,
        default: Any = None,
        required: bool = False,
        help: str | None = None,
        choices: Iterable[Any] | None = None,
        nargs: int | str | None = None,
        action: Any = None,
        dest: str | None = None,
        const: Any = None,
        metavar: str | None = None,
    ) -> None:
        """Add a single option. The arguments have the same names as in argparse's ``add_argument``.

        Args:
            *names: Names of the option: ``"--key"`` or ``"--group.key"``, and short forms such as ``"-k"``.
            type: An annotation such as ``int`` or ``list[int] | None``, a class, or a function that converts text.
                Default: None, any value. A number or boolean then remains text, unless ``choices`` is set.
            default: The default value; ignored by ``"store_true"`` and ``"store_false"``. Default: None.
            required: Whether the option must be set. Default: False.
            help: The option's description in the help. Default: None.
            choices: The allowed values. Default: None, any value.
            nargs: None or ``"?"`` for one value; ``"+"``, ``"*"`` or a number for a list of any length. Default: None.
            action: None or ``"store"``, ``"store_true"``, ``"store_false"``, or `ActionConfigFile`. Default: None.
            dest: The option's key. Default: the longest name without leading dashes, with ``-`` replaced by ``_``.
            const: Accepted and ignored.
            metavar: Accepted and ignored.

        Raises:
            ValueError: If a name is invalid or the action is not supported.
        """
        check_option_names(names)
        key = dest or max(names, key=len).lstrip("-").replace("-", "_")
        self.aliases |= dict.fromkeys(names, key)
        if action is ActionConfigFile:
            self.config_keys.append(key)
            return
        if action in _FLAG_ACTIONS:
            self.constants[key], default = _FLAG_ACTIONS[action]
            type = bool
        elif action not in (None, "store"):
            raise ValueError(f"add_argument({names[0]!r}): action={action!r} is not supported. Pass type=... instead.")
        annotation: Any = Any if type is None else type
        convert = annotation if inspect.isroutine(annotation) else None
        if nargs not in (None, "?"):
            annotation = list[Any if convert is not None else annotation]  # type: ignore[misc]
            self.several.add(key)
        words = (help or "").replace("%(default)s", str(default))
        self.declared[key] = Option(
            key,
            Argument(key, Any if convert is not None else annotation, default),
            required,
            words,
            convert,
            None if choices is None else tuple(choices),
            of_items=key in self.several,
            untyped=type is None and choices is None,
        )

    def add_class_arguments(
        self,
        theclass: Any,
        nested_key: str | None = None,
        as_group: bool = True,
        as_positional: bool = False,
        skip: Iterable[str | int] | None = None,
        instantiate: bool = True,
        fail_untyped: bool = True,
        sub_configs: bool = False,
        help: str | None = None,
        **unused: Any,
    ) -> list[str]:
        """Add the arguments of a class or function under ``nested_key``, or at the top level if it is None.

        Args:
            theclass: Class or function whose arguments are added.
            nested_key: Dotted key under which the arguments are added. Default: None, the top level.
            as_group: Accepted and ignored.
            as_positional: Accepted and ignored.
            skip: Names of arguments to skip. A number skips that many leading arguments. Default: None.
            instantiate: Whether `instantiate_classes` builds the object. Ignored at the top level. Default: True.
            fail_untyped: Accepted and ignored.
            sub_configs: Accepted and ignored.
            help: Accepted and ignored.
            **unused: Accepted and ignored.

        Returns:
            The dotted keys of the arguments.
        """
        takes = signature(theclass)
        left_out = resolve_skipped(skip, takes.arguments)
        if nested_key is None:
            words = described(theclass)
            for name, argument in takes.arguments.items():
                if name not in left_out:
                    required = argument.default is REQUIRED
                    self.declared[name] = Option(name, argument, required, words.get(name, ""))
            return [name for name in takes.arguments if name not in left_out]
        is_trainer = isinstance(theclass, type) and issubclass(theclass, Trainer)
        group = ClassGroup(
            nested_key,
            (theclass,),
            skip=left_out,
            instantiate=instantiate,
            open=not is_trainer,
            help=help or "",
            ignored_nulls=_PEER_FLAGS if is_trainer else frozenset(),
        )
        self.declared[nested_key] = group
        return [f"{nested_key}.{name}" for name in group.get_signature().arguments]

    add_dataclass_arguments = add_class_arguments
    add_function_arguments = add_class_arguments

    def add_subclass_arguments(
        self,
        baseclass: Any,
        nested_key: str,
        as_group: bool = True,
        skip: Iterable[str] | None = None,
        instantiate: bool = True,
        required: bool = False,
        help: str | None = None,
        default: Any = None,
        fail_untyped: bool = True,
        **unused: Any,
    ) -> list[str]:
        """Add an object whose class is named in the settings, as in ``--key=Class --key.argument=value``.

        Args:
            baseclass: The object's class, or one of its base classes. A tuple lists alternatives.
            nested_key: Dotted key of the object.
            as_group: Accepted and ignored.
            skip: Names of arguments that the settings must not set, such as an optimizer's ``params``. Default: None.
            instantiate: Whether `instantiate_classes` builds the object. Default: True.
            required: Whether the settings must contain the object. Default: False.
            help: The object's description in the help. Default: None, a note on the syntax.
            default: Default settings, as ``{"class_path": ..., "init_args": {...}}``. Default: None, no object.
            fail_untyped: Accepted and ignored.
            **unused: Accepted and ignored.

        Returns:
            A list with ``nested_key``.
        """
        bases = baseclass if isinstance(baseclass, tuple) else (baseclass,)
        self.declared[nested_key] = ClassGroup(
            nested_key, bases, True, required, frozenset(skip or ()), instantiate, help=help or ""
        )
        if default is not None:
            self.set_defaults({nested_key: default})
        return [nested_key]

    def add_method_arguments(
        self,
        theclass: type,
        themethod: str,
        nested_key: str | None = None,
        skip: Iterable[str | int] | None = None,
        **unused: Any,
    ) -> list[str]:
        """Add the arguments of a method, each as a single option.

        Args:
            theclass: The class that has the method.
            themethod: Name of the method.
            nested_key: Prefix of the dotted keys. Default: None, the top level.
            skip: Names of arguments to skip. A number skips that many leading arguments after ``self``. Default: None.
            **unused: Accepted and ignored.

        Returns:
            The names of the arguments that were added, without ``nested_key``.
        """
        takes, words = signature(getattr(theclass, themethod)), described(getattr(theclass, themethod))
        left_out = {"self"} | resolve_skipped(skip, (name for name in takes.arguments if name != "self"))
        added = [name for name in takes.arguments if name not in left_out]
        for name in added:
            key = f"{nested_key}.{name}" if nested_key else name
            argument = takes.arguments[name]
            self.declared[key] = Option(key, argument, argument.default is REQUIRED, words.get(name, ""))
        return added

    def add_lightning_class_args(
        self, lightning_class: Any, nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> list[str]:
        """Add the arguments of a Trainer, task, data module or callback.

        Args:
            lightning_class: A class that extends Trainer, TaskModule, DataModule or Callback, or a function that
                returns such an object.
            nested_key: Dotted key under which the arguments are added.
            subclass_mode: Whether the settings may name a subclass of ``lightning_class``. Default: False.
            required: In subclass mode, whether the settings must contain the object. Default: True.

        Returns:
            The dotted keys of the arguments; in subclass mode, a list with ``nested_key``.

        Raises:
            ValueError: If ``lightning_class`` is neither such a class nor a function.
        """
        kinds = (Trainer, TaskModule, DataModule, Callback)
        is_class = isinstance(lightning_class, type)
        if not callable(lightning_class) or (is_class and not issubclass(lightning_class, kinds)):
            raise ValueError(
                f"add_lightning_class_args({lightning_class!r}): pass a class that extends Trainer, TaskModule, "
                "DataModule or Callback, or a function that returns an instance of such a class."
            )
        if is_class and issubclass(lightning_class, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            return self.add_subclass_arguments(lightning_class, nested_key, required=required)
        returned = lightning_class if is_class else read_return_annotation(lightning_class)
        builds_trainer = nested_key == "trainer" or (isinstance(returned, type) and issubclass(returned, Trainer))
        return self.add_class_arguments(lightning_class, nested_key, instantiate=not builds_trainer)

    def add_optimizer_args(
        self, optimizer_class: Any = (Optimizer,), nested_key: str = "optimizer", link_to: str = "AUTOMATIC"
    ) -> None:
        """Add the arguments of an optimizer.

        Args:
            optimizer_class: The optimizer's class, or a tuple of base classes. With a tuple, the settings name the
                class. Default: a tuple with ``torch.optim.Optimizer``.
            nested_key: Dotted key under which the arguments are added. Default: ``"optimizer"``.
            link_to: Dotted key of the argument that receives ``{"class_path": ..., "init_args": ...}``.
                ``"AUTOMATIC"`` makes the task of a `LightningCLI` use the optimizer. Default: ``"AUTOMATIC"``.

        Raises:
            TypeError: If a class does not extend ``torch.optim.Optimizer``.
        """
        self._add_optimizer(self._optimizers, (Optimizer,), optimizer_class, nested_key, link_to, "params")

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: Any = (LRScheduler, ReduceLROnPlateau),
        nested_key: str = "lr_scheduler",
        link_to: str = "AUTOMATIC",
    ) -> None:
        """Add the arguments of a learning rate scheduler.

        Args:
            lr_scheduler_class: The scheduler's class, or a tuple of base classes. With a tuple, the settings name the
                class. Default: a tuple of ``LRScheduler`` and `ReduceLROnPlateau`.
            nested_key: Dotted key under which the arguments are added. Default: ``"lr_scheduler"``.
            link_to: Dotted key of the argument that receives ``{"class_path": ..., "init_args": ...}``.
                ``"AUTOMATIC"`` makes the task of a `LightningCLI` use the scheduler. Default: ``"AUTOMATIC"``.

        Raises:
            TypeError: If a class does not extend ``LRScheduler`` or `ReduceLROnPlateau`.
        """
        kinds = (LRScheduler, ReduceLROnPlateau)
        self._add_optimizer(self._lr_schedulers, kinds, lr_scheduler_class, nested_key, link_to, "optimizer")

    def _add_optimizer(
        self, register: dict[str, Any], kinds: tuple[type, ...], classes: Any, key: str, link_to: str, supplied: str
    ) -> None:
        several = isinstance(classes, tuple)
        for cls in classes if several else (classes,):
            if not (isinstance(cls, type) and issubclass(cls, kinds)):
                raise TypeError(f"{key}: {cls!r} must be a class that extends {kinds[0].__name__}.")
        if several:
            # The bare name denotes the class defined here.
            bases = sorted(classes, key=lambda cls: cls is not ReduceLROnPlateau)
            self.add_subclass_arguments(tuple(bases), key, skip={supplied}, instantiate=False)
        else:
            self.add_class_arguments(classes, key, skip={supplied}, instantiate=False)
        register[key] = (classes, link_to)

    def link_arguments(
        self,
        source: str | tuple[str, ...],
        target: str,
        compute_fn: Callable[..., Any] | None = None,
        apply_on: str = "parse",
    ) -> None:
        """Derive the value of an argument from other arguments.

        If the target is a single option or a whole object, the link's value replaces any other setting of the target.

        Args:
            source: A dotted key, or a tuple of dotted keys.
            target: The dotted key of the argument.
            compute_fn: Function that computes the target's value from the sources' values. Required for several
                sources. Default: None, which copies the value of the single source.
            apply_on: ``"parse"`` reads the sources from the settings, ``"instantiate"`` from the built objects.
                Default: ``"parse"``.

        Raises:
            ValueError: If an argument is invalid, ``target`` already has a link, or the links form a cycle.
        """
        sources = (source,) if isinstance(source, str) else tuple(source)
        if apply_on not in ("parse", "instantiate"):
            raise ValueError(f"link_arguments: apply_on={apply_on!r} must be 'parse' or 'instantiate'.")
        if len(sources) > 1 and compute_fn is None:
            raise ValueError(f"link_arguments({sources}, {target!r}) needs compute_fn to combine several values.")
        for key in (*sources, target):
            find_owner(self.declared, key)
        if any(link.target == target for link in self.links):
            raise ValueError(f"link_arguments: {target!r} is already the target of a link. Remove one of the links.")
        self.links.append(Link(sources, target, compute_fn, apply_on == "instantiate"))
        order_by_links(
            self.declared, [link for link in self.links if link.at_instantiation == (apply_on == "instantiate")]
        )

    def set_defaults(self, *mappings: Mapping[str, Any], **named: Any) -> None:
        """Set defaults by dotted key. Files, environment variables and the command line override them.

        Args:
            *mappings: Defaults by dotted key.
            **named: Defaults by key.

        Raises:
            ValueError: If a key is unknown or invalid.
        """
        for mapping in (*mappings, named):
            for key, value in mapping.items():
                find_owner(self.declared, key)
                self.defaults = self.place(self.defaults, key, make_settings(value, "set_defaults"))

    def get_defaults(self, skip_validation: bool = False) -> Namespace:
        """Return the configuration for an empty command line. Required values may be missing.

        Args:
            skip_validation: Accepted and ignored.

        Raises:
            ConfigError: If the configuration is invalid.
        """
        return self.finish(self.start(), partial=True)

    def get_default(self, key: str) -> Any:
        """Return an argument's default after default configuration files and environment variables are applied.

        Args:
            key: The argument's dotted key.

        Returns:
            The argument's value in the result of `get_defaults`; None if there is no such key.

        Raises:
            ConfigError: If the configuration is invalid.
        """
        return self.get_defaults().get(key)

    def add_subcommands(self, required: bool = True, dest: str = "subcommand", **unused: Any) -> Subcommands:
        """Return an object to which subcommands with their own parsers can be added. The arguments are ignored."""
        return Subcommands(self)

    def add_argument_group(self, *unused: Any, **also_unused: Any) -> LightningArgumentParser:
        """Return this parser. The arguments are ignored."""
        return self

    # -- reading -----------------------------------------------------------------------------------------------------

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Namespace:
        """Return the configuration that a command line specifies.

        Args:
            args: The command line. Default: ``sys.argv`` without the program's name.
            namespace: A configuration to merge the command line into. Default: the result of `get_defaults`.

        Raises:
            SystemExit: After the help or the configuration is printed, or if the settings are invalid. With
                ``exit_on_error=False``, invalid settings raise a ConfigError instead.
        """
        words = list(sys.argv[1:] if args is None else args)
        return self._guard(lambda: read_command_line(self, [str(word) for word in words], namespace))

    def parse_object(self, cfg_obj: Mapping[str, Any] | argparse.Namespace, cfg_base: Any = None) -> Namespace:
        """Return the configuration that nested settings specify.

        Args:
            cfg_obj: The settings. Keys may be dotted.
            cfg_base: A configuration to merge the settings into. Default: the result of `get_defaults`.

        Raises:
            SystemExit: If the settings are invalid. With ``exit_on_error=False``, a ConfigError is raised instead.
        """
        return self._guard(lambda: self._parse_object(cfg_obj, cfg_base))

    def parse_path(self, cfg_path: str | FilePath) -> Namespace:
        """Return the configuration that a file specifies.

        Args:
            cfg_path: Path of a YAML or JSON file.

        Raises:
            SystemExit: If the settings are invalid. With ``exit_on_error=False``, a ConfigError is raised instead.
        """
        return self._guard(lambda: self._finish_any(merge(self.start(), read_settings(cfg_path))))

    def parse_string(self, cfg_str: str) -> Namespace:
        """Return the configuration that a YAML string specifies.

        Args:
            cfg_str: The configuration, in YAML.

        Raises:
            SystemExit: If the settings are invalid. With ``exit_on_error=False``, a ConfigError is raised instead.
        """
        return self._guard(lambda: self._finish_any(merge(self.start(), read_text(cfg_str))))

    def _parse_object(self, settings: Any, base: Any) -> Namespace:
        given = vars(settings) if isinstance(settings, argparse.Namespace) else settings
        root = self.start() if base is None else make_settings(base, "configuration")
        for key, value in given.items():
            new = make_settings(value, "args")
            if key in self.subcommands and isinstance(new.data, dict):
                inner = self.subcommands[key]
                section = root.data.get(key) or inner.start()
                for name, item in new.data.items():
                    section = inner.place(section, str(name), item, merging=True)
                root = self.place(root, key, section)
            else:
                root = self.place(root, key, new, merging=True)
        return self._finish_any(root)

    def _finish_any(self, root: Value) -> Namespace:
        """Return the checked configuration, including that of the chosen subcommand, if any."""
        if not self.subcommands:
            return self.finish(root)
        name = choose_subcommand(self, root)
        section = root.data.get(name, Value({}, "default"))
        outer = {key: value for key, value in root.data.items() if key not in self.subcommands and key != "subcommand"}
        config = self.finish(Value(outer, root.source))
        inner = self.subcommands[name]
        config["subcommand"] = name
        config[name] = inner.finish(merge(inner.start(), section))
        return config

    def _guard(self, parse: Callable[[], Namespace]) -> Namespace:
        try:
            return parse()
        except ConfigError as error:
            if not self.exit_on_error:
                raise
            self.error(error)

    def error(self, message: str | ConfigError) -> NoReturn:
        """Print an error to standard error and exit with status 2.

        Args:
            message: The text of the error, or the error itself.
        """
        error = message if isinstance(message, ConfigError) else ConfigError(message)
        *others, last = error.problems
        sys.exit(report_error(self.prog, ConfigError(*others, f"{last}\n`{self.prog} --help` lists the options.")))

    def start(self) -> Value:
        """Return the settings from `set_defaults`, default configuration files and environment variables."""
        root = self.defaults
        for pattern in self.default_config_files:
            folder = FilePath(pattern).expanduser()
            for file in sorted(folder.parent.glob(folder.name)):
                root = self.merge_file(root, file)
        for key, name in self._iterate_variables() if self.default_env else ():
            if name in os.environ:
                if key in self.config_keys:
                    root = self.merge_file(root, os.environ[name])
                else:
                    root = self.place(root, key, parse_value(os.environ[name], f"{VARIABLE} {name}"))
        return root

    def _iterate_variables(self) -> Iterator[tuple[str, str]]:
        """Yield each key with the name of its environment variable. Options for configuration files come first."""
        keys = [*self.config_keys, *self.declared]
        for key, declared in self.declared.items():
            if isinstance(declared, ClassGroup) and not declared.subclass_mode:
                keys += [f"{key}.{name}" for name in declared.get_signature().arguments]
        for key in keys:
            yield key, f"{self.env_prefix}_{key}".upper().replace(".", "__")

    def merge_file(self, root: Value, file: str | FilePath) -> Value:
        """Return the settings ``root`` with the settings in a YAML or JSON file merged into them."""
        for key, value in read_settings(file).data.items():
            root = self.place(root, str(key), value, merging=True)
        return root

    def place(self, root: Value, key: str, value: Value, add: bool = False, merging: bool = False) -> Value:
        """Return the settings ``root`` with ``value`` at a dotted ``key``, such as ``"model.lr"``.

        ``add`` appends the value to a list at the key. ``merging`` merges a mapping into the mapping at the key.
        """
        path: Path = tuple("class" if part == "class_path" else part for part in key.split(".") if part != "init_args")
        if key in self.declared and isinstance(self.declared[key], ClassGroup):
            value = read_named_file(value)
            merging = merging or isinstance(value.data, dict)
        if merging and (before := find_value(root, path)) is not None:
            value = merge(before, value, lambda inner: self._is_plain(root, inner), path)
        return place(root, path, value, lambda place: self._find_default(root, place), add)

    def _is_plain(self, root: Value, path: Path) -> bool:
        """Return whether a mapping replaces the value at a path: its argument's type is not a dataclass."""
        argument = self._find_argument(root, path)
        return argument is not None and find_shape(argument.type) is None

    def _find_default(self, root: Value, path: Path) -> Value | None:
        argument = self._find_argument(root, path)
        return None if argument is None else make_default(argument)

    def _find_argument(self, root: Value, path: Path) -> Argument | None:
        try:
            owner = find_owner(self.declared, ".".join(map(str, path)))
        except ValueError:
            return None
        length = len(owner.split("."))
        return self.declared[owner].find_argument(path[length:], find_value(root, path[:length]))

    # -- checking ----------------------------------------------------------------------------------------------------

    def finish(self, root: Value, partial: bool = False) -> Namespace:
        """Check the settings ``root`` and return the configuration. ``partial`` allows missing required values."""
        recipes = self._check(root, partial=partial)
        config = Namespace(dict.fromkeys(self.config_keys))
        for key in self.declared:
            config[key] = None if recipes.get(key) is None else make_config(recipes[key])
        for link in self.links:
            if link.at_instantiation:
                remove_target(self.declared, link, config)
        return config

    def _check(self, root: Value, partial: bool = False, linking: bool = True) -> dict[str, Recipe]:
        if self.parser_mode == "omegaconf":
            root = resolve_references(root)
        checker = SettingsChecker()
        checker.partial = partial
        links = [link for link in self.links if not link.at_instantiation]
        checker.awaited = frozenset(link.path for link in self.links if link.at_instantiation)
        self._report_unknown(checker, root)
        sections = {key: find_value(root, tuple(key.split("."))) for key in self.declared}
        recipes: dict[str, Recipe] = {}
        configs = Namespace()
        for key in order_by_links(self.declared, links):
            declared, section = self.declared[key], sections[key]
            for link in self.links if linking else ():
                if find_owner(self.declared, link.target) == key:
                    section = apply_link(self.declared, checker, link, key, section, configs)
            recipe = declared.check(checker, self._drop_nested(key, section))
            if recipe is not None:
                recipes[key] = recipe
                configs[key] = make_config(recipe)
        if checker.problems:
            raise ConfigError(*dict.fromkeys(checker.problems))
        return recipes

    def _drop_nested(self, key: str, section: Value | None) -> Value | None:
        """Return the settings of the group ``key`` without those of other options below it, such as ``model.name``."""
        inner = {name[len(key) + 1 :] for name in self.declared if name.startswith(f"{key}.")}
        if section is None or not isinstance(section.data, dict) or not inner:
            return section
        return Value({name: item for name, item in section.data.items() if name not in inner}, section.source)

    def _report_unknown(self, checker: SettingsChecker, root: Value) -> None:
        tops = {key.split(".")[0] for key in self.declared} | {*self.config_keys}
        for key, value in root.data.items():
            if key not in tops and key not in self.subcommands and key != "subcommand":
                checker.report(value, (key,), f": unknown argument --{key}.{nearest(str(key), tops)}")

    # -- building ----------------------------------------------------------------------------------------------------

    def instantiate_classes(self, cfg: Namespace, instantiate_groups: bool = True) -> Namespace:
        """Return the configuration with its objects built.

        Groups of arguments added with ``instantiate=False`` do not become objects. Only their nested objects are built.

        Args:
            cfg: A parsed configuration, whose values may have been modified.
            instantiate_groups: Whether groups become objects. If False, only nested objects are built. Default: True.

        Raises:
            ConfigError: If the settings are invalid.
        """
        built = cfg.clone()
        for name, parser in self.subcommands.items():
            if cfg.get("subcommand") == name:
                built[name] = parser.instantiate_classes(cfg[name], instantiate_groups)
        settings = Namespace({key: cfg[key] for key in self.declared if key in cfg})
        recipes = self._check(make_settings(settings, "configuration"), linking=False)
        links = [link for link in self.links if link.at_instantiation]
        for key in order_by_links(self.declared, links):
            if key not in recipes:
                continue
            recipe, declared = recipes[key], self.declared[key]
            for link in links:
                if find_owner(self.declared, link.target) == key:
                    value = link.apply(lambda source: look_up(built, source))
                    recipe = supply(recipe, link.path[len(key.split(".")) :], value)
            if isinstance(recipe, ObjectRecipe) and not (declared.instantiate and instantiate_groups):
                built[key] = make_arguments(recipe)
            else:
                built[key] = recipe.make()
        return built

    instantiate = instantiate_classes

    # -- writing -----------------------------------------------------------------------------------------------------

    def dump(
        self,
        cfg: Namespace | Mapping[str, Any],
        format: str | None = None,
        skip_none: bool = True,
        skip_default: bool = False,
        skip_link_targets: bool = True,
        **unused: Any,
    ) -> str:
        """Return a configuration as YAML or JSON, without values that cannot be represented as text.

        Args:
            cfg: The configuration to serialize.
            format: ``"yaml"``, ``"json"`` or ``"json_indented"``. Default: None, which selects YAML.
            skip_none: Whether to omit keys whose value is null. Default: True.
            skip_default: Whether to omit values that equal their default. Default: False.
            skip_link_targets: Whether to omit the values that links set. Default: True.
            **unused: Accepted and ignored.
        """
        data = to_plain(self._select_for_writing(Namespace(cfg).clone(), skip_link_targets))
        data = drop_equal(data, to_plain(self.get_defaults())) if skip_default else data
        data = drop_none(data) if skip_none else data
        return dump_config(data, format, self.dump_header, interpolates=self.parser_mode == "omegaconf")

    def _select_for_writing(self, config: Namespace, skip_link_targets: bool) -> Namespace:
        for name, parser in self.subcommands.items():
            if name in config:
                parser._select_for_writing(config[name], skip_link_targets)
        for key in self.config_keys:
            config.pop(key, None)
        for link in self.links if skip_link_targets else ():
            remove_target(self.declared, link, config)
        return config

    def save(
        self,
        cfg: Namespace,
        path: str | FilePath,
        format: str | None = None,
        skip_none: bool = True,
        overwrite: bool = False,
        **options: Any,
    ) -> None:
        """Write a configuration to a file.

        Args:
            cfg: The configuration to write.
            path: Path or URL of the file.
            format: See `dump`. Default: None, which selects JSON if the file's suffix is ``.json`` and YAML otherwise.
            skip_none: Whether to omit keys whose value is null. Default: True.
            overwrite: Whether to replace an existing file. Default: False.
            **options: Further arguments of `dump`.

        Raises:
            FileExistsError: If the file exists and ``overwrite`` is False.
            OSError: If the file cannot be written.
        """
        format = format or ("json" if str(path).endswith(".json") else None)
        save_text(self.dump(cfg, format, skip_none, **options), path, overwrite)

    def format_help(self) -> str:
        """Return the help text."""
        return format_help(self)

    def print_help(self, file: Any = None) -> None:
        """Print the help text.

        Args:
            file: The stream to print to. Default: standard output.
        """
        print(self.format_help(), file=file)
