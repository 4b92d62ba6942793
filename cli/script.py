"""`run`, which gives a script a command line: ``python train.py fit --config run.yaml model.lr=3e-4``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .entry_point import load_registered_commands

if TYPE_CHECKING:
    from ..trainer import DataModule, TaskModule
    from .commands import Session

__all__ = ["run"]

_STAGES = ("fit", "validate", "test", "predict")


def run(
    Model: type[TaskModule] | None = None,
    Data: type[DataModule] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    arguments: Sequence[str] | None = None,
) -> Session:
    """Run the stage that the command line names: ``STAGE [--config FILE ...] [KEY=VALUE ...]``.

    ``STAGE`` is ``fit``, ``validate``, ``test`` or ``predict``. The arguments after it are those of `treadle STAGE`;
    see, for example, `treadle fit --help`. ``STAGE`` may also be a command that a package registers for scripts:
    ``sweep --config FILE`` runs a sweep; see `treadle sweep --help`.

    Args:
        Model: The class of the task. Default: None, in which case the configuration must name the class.
        Data: The class of the data module. Default: None, in which case the configuration may name a class.
        defaults: Default configuration, such as ``{"trainer": {"max_epochs": 3}}``. Files and the command line
            override it. Default: None.
        arguments: The command-line arguments. Default: ``sys.argv[1:]``.

    Returns:
        The session, with the attributes ``trainer``, ``model``, ``data`` (None without a data module) and ``result``.
        ``result`` is the return value of the Trainer method that ran the stage.

    Raises:
        SystemExit: With status 2 after an error in the command line or the configuration. With status 0 after
            ``--help`` or ``--print-config``. With the command's exit status after a registered command.
    """
    remaining_arguments = list(sys.argv[1:] if arguments is None else arguments)
    program = _find_program(remaining_arguments)
    if not remaining_arguments or remaining_arguments[0] not in _STAGES:
        registered = load_registered_commands()
        commands = {name: command for name, command in registered.items() if hasattr(command, "run_for_script")}
        if remaining_arguments and remaining_arguments[0] in commands:
            name, command = remaining_arguments.pop(0), [sys.executable, os.path.abspath(sys.argv[0])]
            place = (f"python {program} {name}", command)
            sys.exit(commands[name].run_for_script(remaining_arguments, *place, Model, Data, defaults))
        names = (*_STAGES, *commands)
        usage = f"usage: python {program} {'|'.join(names)} [--config FILE ...] [KEY=VALUE ...]"
        if remaining_arguments and remaining_arguments[0] in ("-h", "--help"):
            print(f"{usage}\n\n`python {program} fit --help` lists the options.")
            sys.exit(0)
        complaint = (
            f"{remaining_arguments[0]!r} is not one of {', '.join(names)}."
            if remaining_arguments
            else "a command is missing."
        )
        print(f"{program}: {complaint}\n{usage}", file=sys.stderr)
        sys.exit(2)
    from .commands import report_error, stages
    from .config import ConfigError

    stage = remaining_arguments.pop(0)
    try:
        done = stages.run(stage, remaining_arguments, f"python {program} {stage}", Model, Data, defaults)
    except ConfigError as error:
        sys.exit(report_error(f"{program} {stage}", error))
    if done is None:
        sys.exit(0)
    return done


def _find_program(arguments: Sequence[str]) -> str:
    program = sys.argv[0].rpartition("/")[2]
    if "--json" in arguments:
        sys.exit(f"{program}: --json is an option of `treadle`, because a script prints text of its own. Remove it.")
    return program
