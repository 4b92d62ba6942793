"""Entry point of `treadle COMMAND ...` and `python -m treadle COMMAND ...`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

# By name: module with main(arguments) -> exit status, or module:function, imported when it is used; and a description.
COMMANDS = {
    "completion": (
        "treadle.cli.completion",
        "print a script that completes commands and configuration keys in a shell",
    ),
    "export": ("treadle.cli.commands.export", "convert a checkpoint's model to files that other programs load"),
    "fit": ("treadle.cli.commands.stages:fit", "train a task, configured by a file and the command line"),
    "launch": ("treadle.strategies.launch.command", "start a script in several processes, on one machine or many"),
    "predict": ("treadle.cli.commands.stages:predict", "run the predict steps, configured like fit"),
    "runs": ("treadle.cli.commands.runs", "list runs and their states, or show one with its curves"),
    "test": ("treadle.cli.commands.stages:test", "evaluate with the test steps, configured like fit"),
    "validate": ("treadle.cli.commands.stages:validate", "evaluate with the validation steps, configured like fit"),
}
_OTHER_NAMES = {"train": "fit", "evaluate": "validate", "eval": "validate"}
"""Names of other programs' commands, with Treadle's counterparts."""


def format_usage() -> str:
    """Return the text of `treadle --help`."""
    descriptions = {name: words for name, (_, words) in COMMANDS.items()}
    descriptions |= {name: _describe(entry) for name, entry in find_registered_commands().items()}
    width = max(map(len, descriptions))
    lines = [f"  {name:<{width}}  {descriptions[name]}" for name in sorted(descriptions)]
    return "\n".join(["usage: treadle COMMAND ...", "", *lines, "", "`treadle COMMAND --help` describes each."])


def find_registered_commands() -> dict[str, EntryPoint]:
    """Return the commands that packages register in the entry-point group ``treadle.commands``, by name.

    An entry point refers to a module with a function ``main(arguments)``, which returns the exit status, and a string
    ``SUMMARY``, which `treadle --help` prints.
    """
    return {entry.name: entry for entry in entry_points(group="treadle.commands") if entry.name not in COMMANDS}


def _describe(entry: EntryPoint) -> str:
    try:
        return str(entry.load().SUMMARY)
    except Exception as error:  # the help of the other commands must not depend on it
        return _format_failure(entry, error)


def _format_failure(entry: EntryPoint, error: Exception) -> str:
    package = f"the package {entry.dist.name} " if entry.dist is not None else ""
    return f"can't be loaded: {package}registers {entry.value}, which raises {type(error).__name__}: {error}"


def _report_failure(entry: EntryPoint, error: Exception, *arguments: Any) -> int:
    print(f"treadle: the command {entry.name!r} {_format_failure(entry, error)}", file=sys.stderr)
    return 1


def load_script_commands() -> dict[str, Callable[..., int]]:
    """Return the registered commands that a script with `run` offers, too: functions ``run_for_script``, by name.

    They are called with the arguments, the program's name, the words of a command line before ``fit``, and `run`'s
    ``Model``, ``Data`` and ``defaults``, and return the exit status.
    """
    functions: dict[str, Callable[..., int]] = {}
    for name, entry in find_registered_commands().items():
        try:
            command = entry.load()
        except Exception as error:
            functions[name] = partial(_report_failure, entry, error)
            continue
        if hasattr(command, "run_for_script"):
            functions[name] = command.run_for_script
    return functions


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a `treadle` command and return its exit status.

    Args:
        arguments: The command-line arguments after `treadle`. Default: ``sys.argv[1:]``.
    """
    remaining_arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not remaining_arguments or remaining_arguments[0] in ("-h", "--help"):
        print(format_usage())
        return 0
    name = remaining_arguments.pop(0)
    if name in ("-V", "--version"):
        from ..common.version import __version__

        print(__version__)
        return 0
    if name in COMMANDS:
        module, _, function = COMMANDS[name][0].partition(":")
        return int(getattr(importlib.import_module(module), function or "main")(remaining_arguments))
    registered = find_registered_commands()
    if name not in registered:
        from ..common.messages import nearest

        hint = (
            f" Did you mean {_OTHER_NAMES[name]!r}?"
            if name in _OTHER_NAMES
            else nearest(name, {*COMMANDS, *registered})
        )
        print(f"treadle: unknown command {name!r}.{hint}\n\n{format_usage()}", file=sys.stderr)
        return 2
    try:
        command = registered[name].load()
    except Exception as error:
        return _report_failure(registered[name], error)
    return int(command.main(remaining_arguments))
