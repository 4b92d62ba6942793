"""Entry point of `treadle COMMAND ...` and `python -m treadle COMMAND ...`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# By name: module with main(arguments) -> exit status, or module:function, imported when it is used; and a description.
COMMANDS = {
    "completion": (
        "treadle.cli.completion",
        "print a script that completes commands and configuration keys in a shell",
    ),
    "doctor": (
        "treadle.cli.commands.doctor",
        "check the machines, libraries and connections of a run, on every rank",
    ),
    "export": ("treadle.cli.commands.export", "convert a checkpoint's model to files that other programs load"),
    "fit": ("treadle.cli.commands.stages:fit", "train a task, configured by a file and the command line"),
    "launch": ("treadle.strategies.launch.command", "start a script in several processes, on one machine or many"),
    "migrate": (
        "treadle.cli.commands.migrate",
        "rewrite the imports of a project that uses Lightning, Fabric or Accelerate",
    ),
    "plan": ("treadle.cli.commands.plan", "show what a run would do and need, without its machines"),
    "predict": ("treadle.cli.commands.stages:predict", "run the predict steps, configured like fit"),
    "runs": ("treadle.cli.commands.runs", "list runs and their states, or show one with its curves"),
    "sweep": ("treadle.cli.commands.sweep", "run many trials of one configuration, each with different values"),
    "test": ("treadle.cli.commands.stages:test", "evaluate with the test steps, configured like fit"),
    "validate": ("treadle.cli.commands.stages:validate", "evaluate with the validation steps, configured like fit"),
}
_OTHER_NAMES = {"train": "fit", "evaluate": "validate", "eval": "validate"}
"""Names of other programs' commands, with Treadle's counterparts."""


def format_usage() -> str:
    """Return the text of `treadle --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {words}" for name, (_, words) in COMMANDS.items()]
    return "\n".join(["usage: treadle COMMAND ...", "", *lines, "", "`treadle COMMAND --help` describes each."])


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
    if name not in COMMANDS:
        from ..common.messages import nearest

        hint = f" Did you mean {_OTHER_NAMES[name]!r}?" if name in _OTHER_NAMES else nearest(name, COMMANDS)
        print(f"treadle: unknown command {name!r}.{hint}\n\n{format_usage()}", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[name][0].partition(":")
    return int(getattr(importlib.import_module(module), function or "main")(remaining_arguments))
