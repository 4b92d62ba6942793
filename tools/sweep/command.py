"""`treadle sweep`: many runs of one configuration, each with different values."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...cli.commands import CommandParser, print_on_rank_zero, report_error
from ...cli.config import ConfigError
from ...common.messages import format_count
from ...common.optional import require

if TYPE_CHECKING:
    from ...trainer import DataModule, TaskModule
    from . import Sweep

SUMMARY = "run many trials of one configuration, each with different values"
DESCRIPTION = """\
Run many trials of one configuration, each with different values for some of its keys. Each trial is a run,
NAME/1, NAME/2, ... The same command continues an interrupted sweep. To distribute the trials over several
machines with a shared file system, run the command on each of them."""


def build_parser(program: str = "treadle sweep") -> CommandParser:
    """Return the argument parser of `treadle sweep`. It raises a ValueError for an invalid command line."""
    from . import KEYS

    keys = "\n".join(f"  {key:<13} {words}" for key, words in KEYS.items())
    parser = CommandParser(program, f"{DESCRIPTION}\n\nkeys of a sweep file:\n{keys}")
    parser.add_argument("-c", "--config", action="append", default=[], metavar="FILE", help="the sweep file, YAML")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, and exit")
    words = "set one value: trials=40, processes=4; or a value of the configuration: trainer.max_epochs=3"
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help=words)
    return parser


def list_settings() -> list[str]:
    """Return the keys of a sweep file that `treadle completion` completes."""
    from . import KEYS

    return [f"{name}=" for name in KEYS if name not in ("config", "parameters")]


def main(arguments: Sequence[str]) -> int:
    """Run `treadle sweep` and return the exit status."""
    return run_for_script(arguments, "treadle sweep", [sys.executable, "-m", "treadle"])


def run_for_script(
    arguments: Sequence[str],
    program: str,
    command: Sequence[str],
    model: type[TaskModule] | None = None,
    data: type[DataModule] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> int:
    """Run the sweep that a command line describes and return the exit status; see `treadle.cli.run`.

    ``command`` contains the words of a trial's command line before ``fit``. ``model`` and ``data`` are used unless the
    configuration names subclasses of them.
    """
    try:
        file, overrides, dry = _parse(arguments, program)
        if (current_directory := os.getcwd()) not in sys.path:
            sys.path.insert(0, current_directory)  # so that it can name modules next to the configuration
        from . import read_sweep

        sweep = read_sweep(file, overrides, defaults)
        require(program, "optuna", "plotly", extra="sweep")
        return _run(sweep, program, command, (model, data), dry)
    except ConfigError as error:
        return report_error(program, error)
    except ModuleNotFoundError as error:
        return report_error(program, ConfigError(str(error)))
    except KeyboardInterrupt:  # interrupted before the first trial
        return 128 + signal.SIGINT


def _parse(arguments: Sequence[str], program: str) -> tuple[str, list[str], bool]:
    """Return the sweep file, the overrides, and whether it is a dry run."""
    try:
        options = build_parser(program).parse_intermixed_args(arguments)
    except ValueError as error:
        raise ConfigError(f"command line: {error}") from error
    files, overrides = options.config, []
    for word in options.settings:
        if "=" in word or word.startswith("~"):
            overrides.append(word)
        elif word.endswith((".yaml", ".yml")):
            files.append(word)
        else:
            raise ConfigError(f"command line: {word}: expected key.path=value, or a file after --config.")
    if len(files) != 1:
        raise ConfigError(f"command line: expected one sweep file, but got {len(files)}. Pass --config sweep.yaml.")
    return files[0], overrides, options.dry_run


def _run(
    sweep: Sweep,
    program: str,
    command: Sequence[str],
    classes: tuple[type[TaskModule] | None, type[DataModule] | None],
    dry: bool,
) -> int:
    from . import Scheduler, TrialConfigs, Workers

    fit = [*command, "fit"]
    configs = TrialConfigs(sweep, f"{program.rpartition(' ')[0]} fit", *classes)
    configs.check_all()
    if dry:
        keys = ", ".join(parameter.key for parameter in sweep.parameters)
        many = f"{format_count(sweep.trials, 'trial')} by {sweep.method.kind}, {sweep.processes} at a time"
        planned = {"sweep": sweep.name, "trials": {"left": sweep.trials}, "metric": sweep.metric.name, "best": None}
        print_on_rank_zero(f"sweep {sweep.name}: {many}, over {keys}", planned)
        return 0
    devices, gpus = configs.find_devices()
    return Scheduler(sweep, configs, fit, Workers(sweep.processes, devices, gpus)).run()
