"""Help text of a parser."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from ...trainer.core import REQUIRED, Argument, described
from ..config.instantiate import Opaque, describe_annotation, make_default_value
from .declarations import ClassGroup, Declared
from .settings import describe_import_path

_GENERAL = {
    "-h, --help": "print this help",
    "--config FILE": "read settings from a YAML or JSON file; may be repeated, later files take precedence",
    "--print_config[=skip_null,skip_default]": "print the settings as YAML and exit",
}


def format_help(
    usage: str | None,
    prog: str,
    description: str | None,
    declared: Mapping[str, Declared],
    subcommands: Mapping[str, Any],
) -> str:
    """Return the help text of a parser."""
    words = "SUBCOMMAND [options]" if subcommands else "[options]"
    lines = [usage or f"usage: {prog} {words}", "", *textwrap.wrap(description or "", 100), "", "options:"]
    for name, meaning in _GENERAL.items():
        lines += _format_entry(name, meaning)
    for key, option in declared.items():
        if not isinstance(option, ClassGroup):
            lines += _format_argument(key, option.argument, option.help, option.required)
    for key, option in declared.items():
        if isinstance(option, ClassGroup):
            lines += ["", *_format_group(key, option)]
    if subcommands:
        lines += ["", "subcommands:"]
        for name, parser in subcommands.items():
            lines += _format_entry(name, (parser.description or "").partition("\n")[0])
        lines.append(f"\n`{prog} SUBCOMMAND --help` lists the options of a subcommand.")
    return "\n".join(lines) + "\n"


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
        yield from _format_argument(f"{key}.{name}", argument, words.get(name, ""), argument.default is REQUIRED)


def _format_argument(key: str, argument: Argument, words: str, required: bool) -> Iterator[str]:
    facts = [f"type: {describe_annotation(argument.type)}"]
    if required:
        facts.append("required")
    elif argument.default is not REQUIRED:
        default = make_default_value(argument.default).data
        facts.append(f"default: {default.words if isinstance(default, Opaque) else argument.default}")
    text = " ".join(words.replace("``", "").split())
    yield from _format_entry(f"--{key} {key.rpartition('.')[2].upper()}", f"{text} ({', '.join(facts)})".strip())


def _format_entry(name: str, words: str) -> Iterator[str]:
    yield f"  {name}"
    yield from textwrap.wrap(words, 110, initial_indent="      ", subsequent_indent="      ")
