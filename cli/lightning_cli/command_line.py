"""Parsing of command lines in LightningCLI's form."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, NoReturn, Protocol

from ...common.messages import nearest
from ..commands import describe_target, print_on_rank_zero
from ..config import COMMAND_LINE, ConfigError, Value
from ..config.instantiate import catalog
from .declarations import ClassGroup, Declared, find_owner
from .namespace import Namespace
from .settings import VARIABLE, make_settings, merge, parse_value, translate_class_path


class Parser(Protocol):
    """Part of `LightningArgumentParser` that is needed to parse a command line and to format the help."""

    prog: str
    usage: str | None
    description: str | None
    epilog: str | None
    env_prefix: str
    default_env: bool
    declared: dict[str, Declared]
    aliases: dict[str, str]
    constants: dict[str, Any]
    config_keys: list[str]
    several: set[str]

    @property
    def subcommands(self) -> Mapping[str, Any]:
        """See `LightningArgumentParser.subcommands`."""
        ...

    def start(self) -> Value:
        """See `LightningArgumentParser.start`."""
        ...

    def merge_file(self, root: Value, file: str | FilePath) -> Value:
        """See `LightningArgumentParser.merge_file`."""
        ...

    def place(self, root: Value, key: str, value: Value, add: bool = False, merging: bool = False) -> Value:
        """See `LightningArgumentParser.place`."""
        ...

    def finish(self, root: Value, partial: bool = False) -> Namespace:
        """See `LightningArgumentParser.finish`."""
        ...

    def dump(self, cfg: Namespace, *, skip_none: bool, skip_default: bool) -> str:
        """See `LightningArgumentParser.dump`."""
        ...

    def format_help(self) -> str:
        """See `LightningArgumentParser.format_help`."""
        ...


_PRINT_OPTIONS = ("comments", "skip_null", "skip_none", "skip_default")


def read_command_line(parser: Parser, words: list[str], base: Namespace | None = None) -> Namespace:
    """Return the configuration that a command line specifies.

    The options are merged into ``base``, or into the parser's own settings if it is None.
    """
    reader = _Reader(parser, words)
    root = parser.start() if base is None else make_settings(base, "configuration")
    root = reader.read_options(root)
    if not parser.subcommands:
        if reader.shown is not None:
            _print_config(parser, root, reader.shown)
        return parser.finish(root)
    name = reader.subcommand or choose_subcommand(parser, root)
    inner = parser.subcommands[name]
    section = root.data.get(name)
    inner_reader = _Reader(inner, reader.words)
    started = inner.start()
    inner_root = inner_reader.read_options(started if section is None else merge(started, section))
    shown = inner_reader.shown if inner_reader.shown is not None else reader.shown
    if shown is not None:
        _print_config(inner, inner_root, shown)
    outer = {key: value for key, value in root.data.items() if key not in parser.subcommands and key != "subcommand"}
    config = parser.finish(Value(outer, root.source))
    config["subcommand"] = name
    config[name] = inner.finish(inner_root)
    return config


def check_option_names(names: Sequence[str]) -> None:
    """Raise ValueError if an option has no name, or a name that does not begin with a dash."""
    if not names:
        raise ValueError("add_argument() needs the name of an option, such as '--batch_size'.")
    for name in names:
        if not name.startswith("-"):
            raise ValueError(f"add_argument({name!r}): positional arguments are not supported. Name it --{name}.")


def choose_subcommand(parser: Parser, root: Value) -> str:
    """Return the subcommand that the settings or the environment variable name, or whose section is the only one."""
    named = root.data.get("subcommand")
    if named is None and parser.default_env:
        variable = f"{parser.env_prefix}_SUBCOMMAND"
        named = Value(os.environ[variable], f"{VARIABLE} {variable}") if variable in os.environ else None
    sections = [name for name in parser.subcommands if name in root.data]
    chosen = named.data if named is not None else sections[0] if len(sections) == 1 else None
    if chosen in parser.subcommands:
        return str(chosen)
    commands = ", ".join(parser.subcommands)
    if chosen is None:
        raise ConfigError(
            f"the subcommand is missing. Write {parser.prog} SUBCOMMAND ..., where SUBCOMMAND is one of {commands}."
        )
    raise ConfigError(
        f"unknown subcommand {chosen!r}.{nearest(chosen, parser.subcommands)} The subcommands are {commands}."
    )


class _Reader:
    """Reader that applies the options of a command line to the settings of one parser."""

    def __init__(self, parser: Parser, words: list[str]) -> None:
        self.parser, self.words = parser, list(words)
        self.subcommand: str | None = None
        self.shown: set[str] | None = None

    def read_options(self, root: Value) -> Value:
        while self.words:
            word = self.words.pop(0)
            if word in self.parser.subcommands:
                self.subcommand = word
                return root
            if not word.startswith("-"):
                self._refuse_word(word)
            name, equals, text = word.partition("=")
            if name in ("-h", "--help"):
                _leave(self.parser.format_help())
            elif name == "--print_config":
                self.shown = self._read_print_options(text)
            elif name.endswith(".help") and self.parser.aliases.get(name) is None:
                self._print_class_help(root, name.lstrip("-").removesuffix(".help"), text if equals else None)
            else:
                root = self._read_option(root, name, text if equals else None)
        return root

    def _refuse_word(self, word: str) -> NoReturn:
        valid = self.parser.subcommands
        hint = nearest(word, valid)
        rule = (
            f"expected a subcommand, one of {', '.join(valid)}"
            if valid
            else "options begin with --, such as --key=value"
        )
        raise ConfigError(f"{COMMAND_LINE}: unexpected {word!r}: {rule}.{hint}")

    def _read_print_options(self, text: str) -> set[str]:
        options = set(text.split(",")) if text else set()
        for option in options:
            if option not in _PRINT_OPTIONS:
                raise ConfigError(f"--print_config={text}: {option!r} is not one of {', '.join(_PRINT_OPTIONS)}.")
        return options

    def _read_option(self, root: Value, name: str, text: str | None) -> Value:
        parser, add = self.parser, name.endswith("+")
        written = name.removesuffix("+")
        key = parser.aliases.get(written) or written.lstrip("-")
        if key in parser.constants and text is None:
            return parser.place(root, key, Value(parser.constants[key], COMMAND_LINE))
        known = written in parser.aliases or (written.startswith("--") and self._is_known(key))
        if not known:
            raise ConfigError(f"{COMMAND_LINE}: unknown option {written}.{self._suggest(key)}")
        if text is None and key in parser.several:
            return parser.place(root, key, self._read_several())
        if text is None:
            if not self.words or self.words[0].startswith("--"):
                raise ConfigError(f"{COMMAND_LINE}: {written} needs a value. Write {written}=VALUE or {written} VALUE.")
            text = self.words.pop(0)
        if key in parser.config_keys:
            return self._merge_text(root, text) if "{" in text else parser.merge_file(root, text)
        try:
            return parser.place(root, key, parse_value(text, COMMAND_LINE), add)
        except ConfigError as error:
            raise ConfigError(f"{COMMAND_LINE}: {written}={text}: {error}") from None

    def _merge_text(self, root: Value, text: str) -> Value:
        value = parse_value(text, COMMAND_LINE)
        for key, item in value.data.items() if isinstance(value.data, dict) else ():
            root = self.parser.place(root, str(key), item, merging=True)
        return root

    def _read_several(self) -> Value:
        """Return the words up to the next option as a list. A single word may be a list in YAML."""
        values = []
        while self.words and not self.words[0].startswith("--"):
            values.append(parse_value(self.words.pop(0), COMMAND_LINE))
        if len(values) == 1 and isinstance(values[0].data, list):
            return values[0]
        return Value(values, COMMAND_LINE)

    def _is_known(self, key: str) -> bool:
        """Return whether a key is declared or below a declared option or group, whose settings are checked later."""
        try:
            find_owner(self.parser.declared, key)
        except ValueError:
            return False
        return True

    def _suggest(self, key: str) -> str:
        valid = list(self.parser.declared) + self.parser.config_keys
        for name, declared in self.parser.declared.items():
            if isinstance(declared, ClassGroup) and not declared.subclass_mode:
                valid += [f"{name}.{argument}" for argument in declared.get_signature().arguments]
        return nearest(f"--{key}", [f"--{name}" for name in valid])

    def _print_class_help(self, root: Value, key: str, name: str | None) -> NoReturn:
        owner = find_owner(self.parser.declared, key)
        declared = self.parser.declared[owner]
        if name is None and self.words and not self.words[0].startswith("-"):
            name = self.words.pop(0)
        if name is None:
            target = declared.bases[0] if isinstance(declared, ClassGroup) else declared.argument.type
        else:
            target = catalog.find(translate_class_path(name), object)
        _leave(describe_target(target, key))


def _print_config(parser: Parser, root: Value, options: set[str]) -> NoReturn:
    config = parser.finish(root, partial=True)
    skip_none = bool(options & {"skip_null", "skip_none"})
    _leave(parser.dump(config, skip_none=skip_none, skip_default="skip_default" in options).rstrip("\n"))


def _leave(text: str) -> NoReturn:
    print_on_rank_zero(text)
    sys.exit(0)
