"""Help text of a parser."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from ...trainer.core import REQUIRED, Argument, described
from ..config.instantiate import Opaque, describe_annotation, make_default_value
from .command_line import Parser
from .declarations import ClassGroup, Option
from .settings import describe_import_path


def format_help(parser: Parser) -> str:
    """Return the help text of a parser."""
    usage = "SUBCOMMAND [options]" if parser.subcommands else "[options]"
    lines = [parser.usage or f"usage: {parser.prog} {usage}", "", *textwrap.wrap(parser.description or "", 100), ""]
    lines += ["options:", *_format_entry("-h, --help", "print this help")]
    for key in parser.config_keys:
        words = "read settings from a YAML or JSON file; may be repeated, later files take precedence"
        lines += _format_entry(f"{_join_names(parser, key)} FILE", words)
    lines += _format_entry("--print_config[=skip_null,skip_default]", "print the settings as YAML and exit")
    for key, option in parser.declared.items():
        if not isinstance(option, ClassGroup):
            lines += _format_option(parser, key, option)
    for key, option in parser.declared.items():
        if isinstance(option, ClassGroup):
            lines += ["", *_format_group(key, option)]
    if parser.subcommands:
        lines += ["", "subcommands:"]
        for name, inner in parser.subcommands.items():
            lines += _format_entry(name, (inner.description or "").partition("\n")[0])
        lines.append(f"\n`{parser.prog} SUBCOMMAND --help` lists the options of a subcommand.")
    return "\n".join(lines) + "\n" + (parser.epilog or "")


def _join_names(parser: Parser, key: str) -> str:
    """Return the names of an option as text, the short ones first."""
    return ", ".join(sorted((name for name, owner in parser.aliases.items() if owner == key), key=len)) or f"--{key}"


def _format_option(parser: Parser, key: str, option: Option) -> Iterator[str]:
    names = _join_names(parser, key)
    name = names if key in parser.constants else f"{names} {key.rpartition('.')[2].upper()}"
    choices = None if option.choices is None else f"one of {', '.join(map(str, option.choices))}"
    yield from _format_argument(name, option.argument, option.help, option.required, choices)


def _format_group(key: str, group: ClassGroup) -> Iterator[str]:
    names = " or ".join(describe_import_path(base) for base in group.bases)
    if group.subclass_mode:
        yield f"{key}: an object of a class that extends {names}"
        yield from _format_entry(f"--{key} CLASS", group.help or f"its class; then --{key}.ARGUMENT VALUE")
        yield from _format_entry(f"--{key}.help CLASS", "print the arguments of that class")
        return
    yield f"{key}: arguments of {names}"
    yield from _format_entry(f"--{key} FILE", "read all of them from a file")
    words = described(group.bases[0])
    for name, argument in group.get_signature().arguments.items():
        is_required = argument.default is REQUIRED
        yield from _format_argument(f"--{key}.{name} {name.upper()}", argument, words.get(name, ""), is_required)


def _format_argument(
    name: str, argument: Argument, words: str, required: bool, choices: str | None = None
) -> Iterator[str]:
    facts = [choices or f"type: {describe_annotation(argument.type)}"]
    if required:
        facts.append("required")
    elif argument.default is not REQUIRED:
        default = make_default_value(argument.default).data
        facts.append(f"default: {default.words if isinstance(default, Opaque) else argument.default}")
    text = " ".join(words.replace("``", "").split())
    yield from _format_entry(name, f"{text} ({', '.join(facts)})".strip())


def _format_entry(name: str, words: str) -> Iterator[str]:
    yield f"  {name}"
    yield from textwrap.wrap(words, 110, initial_indent="      ", subsequent_indent="      ")
