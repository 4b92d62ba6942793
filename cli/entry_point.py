"""Entry point of `treadle COMMAND ...` and `python -m treadle COMMAND ...`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
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
_GROUP = "treadle.commands"
_OTHER_NAMES = {"train": "fit", "evaluate": "validate", "eval": "validate"}
"""Names of other programs' commands, with Treadle's counterparts."""


def format_usage() -> str:
    """Return the text of `treadle --help`."""
    descriptions = {name: words for name, (_, words) in COMMANDS.items()}
    descriptions |= {name: command.SUMMARY for name, command in load_registered_commands().items()}
    width = max(map(len, descriptions))
    lines = [f"  {name:<{width}}  {descriptions[name]}" for name in sorted(descriptions)]
    return "\n".join(["usage: treadle COMMAND ...", "", *lines, "", "`treadle COMMAND --help` describes each."])


def load_registered_commands() -> dict[str, Any]:
    """Return the commands that packages register in the entry-point group ``treadle.commands``: modules by name.

    A module has a function ``main(arguments)``, which returns the exit status, and a string ``SUMMARY``, which
    `treadle --help` prints. Further functions are optional: ``build_parser()`` and ``list_settings()``, the completions
    of its argument with metavar ``KEY=VALUE``, are for `treadle completion`. ``run_for_script`` is for `run`: its
    arguments are those of the command, the program's name, the words of a command line before ``fit``, and ``Model``,
    ``Data`` and ``defaults`` of `run`.
    """
    entries = (entry for entry in entry_points(group=_GROUP) if entry.name not in COMMANDS)
    return {entry.name: _load(entry) for entry in entries}


def _load(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # of any module; the other commands must not depend on it
        return _BrokenCommand(entry, error)


class _BrokenCommand:
    """Stand-in for a command whose module cannot be imported. It prints the error."""

    def __init__(self, entry: EntryPoint, error: Exception) -> None:
        package = f"the package {entry.dist.name} " if entry.dist is not None else ""
        raised = f"{type(error).__name__}: {error}"
        self.SUMMARY = f"can't be loaded: {package}registers {entry.value}, which raises {raised}"
        self._name = entry.name

    def main(self, arguments: Sequence[str]) -> int:
        print(f"treadle: the command {self._name!r} {self.SUMMARY}", file=sys.stderr)
        return 1

    def run_for_script(self, *arguments: Any) -> int:
        return self.main(())


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
        from ..common import __version__

        print(__version__)
        return 0
    if name in COMMANDS:
        module, _, function = COMMANDS[name][0].partition(":")
        with _choose_output(name, remaining_arguments):
            return int(getattr(importlib.import_module(module), function or "main")(remaining_arguments))
    for entry in entry_points(group=_GROUP, name=name):
        # What the commands of other packages print is theirs.
        is_own = entry.value.startswith(f"{__name__.partition('.')[0]}.")
        with _choose_output(name, remaining_arguments if is_own else ()):
            return int(_load(entry).main(remaining_arguments))
    with _choose_output(name, remaining_arguments):
        return _refuse(name)


def _choose_output(name: str, arguments: Sequence[str]) -> AbstractContextManager[None]:
    """Return the context of a command: with ``--json``, one that prints its result as JSON."""
    # The words after the script of `treadle launch` are the script's.
    if "--json" not in (arguments[:1] if name == "launch" else arguments):
        return nullcontext()
    from ..common.command_results import as_json

    return as_json(f"treadle {name}")


def _refuse(name: str) -> int:
    from ..common.command_results import fail
    from ..common.messages import nearest

    names = {*COMMANDS, *entry_points(group=_GROUP).names}
    hint = f" Did you mean {_OTHER_NAMES[name]!r}?" if name in _OTHER_NAMES else nearest(name, names)
    error = ValueError(f"unknown command {name!r}.{hint}")
    print(f"treadle: {error}\n\n{format_usage()}", file=sys.stderr)
    return fail("treadle", error, code="unknown_command", is_printed=True)
