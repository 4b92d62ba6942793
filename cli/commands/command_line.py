"""Command lines of `treadle fit`, `validate`, `test` and `predict`, and output of commands."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...common.command_results import fail, report
from ...common.messages import nearest
from ...common.mirror import local_folder
from ...common.remote_path import AnyPath, RemotePath, as_path
from ...trainer.core import read_flags
from ...trainer.runs import CONFIG
from ..config import COMMAND_LINE, SECTIONS, Config, ConfigError, load, make_printable, read_text

GRACE = 3.0  # seconds; launchers check their processes several times per second

WORDS = {
    "fit": "train a task",
    "validate": "evaluate a task with its validation steps",
    "test": "evaluate a task with its test steps",
    "predict": "run a task's predict steps",
}
OPTIONS = {
    "-c, --config FILE": "a YAML file; may be repeated, later files take precedence",
    "KEY=VALUE": "set one value: trainer.max_epochs=3, model.lr=3e-4, trainer.callbacks.0.monitor=val_loss",
    "KEY+=VALUE": "add to a list: trainer.callbacks+=LearningRateMonitor",
    "~KEY": "remove a key",
    "--from-run RUN": "start from an earlier run's configuration: its number, NAME/NUMBER, folder, or a checkpoint",
    "--print-config": "print the full configuration, with defaults and the source of each value, and exit",
    "--json": "print the metrics and paths of the finished run as a JSON object, and all else to standard error",
    "-h, --help [NAME]": "print help, also for a section or class: --help model, --help EarlyStopping, --help my.Task",
}


def format_usage(stage: str, program: str) -> str:
    """Return the help text of a command that runs a stage."""
    lines = [
        f"usage: {program} [--config FILE ...] [KEY=VALUE ...]",
        "",
        f"{WORDS[stage].capitalize()}.",
        "",
        "options:",
    ]
    options = {name: words for name, words in OPTIONS.items() if name != "--json" or program.startswith("treadle ")}
    lines += [_format_row(option, words) for option, words in options.items()]
    lines += ["", "sections of the configuration:"]
    lines += [_format_row(name, words) for name, words in SECTIONS.items()]
    lines += [
        "",
        f"`{program} --help trainer` lists the Trainer's flags.",
        f"`{program} --help EarlyStopping` lists that callback's arguments.",
    ]
    return "\n".join(lines)


def _format_row(name: str, words: str) -> str:
    width = max(60, shutil.get_terminal_size().columns)
    return textwrap.fill(words, width, initial_indent=f"  {name:<20}  ", subsequent_indent=" " * 24)


@dataclass
class Options:
    """Parsed command line.

    Attributes:
        from_run: Path of a run or checkpoint whose configuration is loaded before ``files``, or None.
        show: Whether to print the configuration instead of running it.
        json: Whether to print the result as JSON.
        help: Topic of the requested help; empty for the command itself, None if help is not requested.
    """

    files: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    from_run: str | None = None
    show: bool = False
    json: bool = False
    help: str | None = None


def parse_options(arguments: Sequence[str]) -> Options:
    """Parse a command line.

    LightningCLI's ``--section.key=value`` and ``--section.key value`` are accepted as overrides. The argument of
    ``--from-run``, such as a run's number, is converted to a path.
    """
    options, pending = Options(), list(arguments)
    while pending:
        word = pending.pop(0)
        name, equals, value = word.partition("=")
        if word in ("-h", "--help"):
            options.help = pending.pop(0) if pending and pending[0][0:1].isalpha() and "=" not in pending[0] else ""
        elif name in ("--print-config", "--print_config") and not equals:
            options.show = True
        elif word == "--json":
            options.json = True
        elif name in ("-c", "--config"):
            options.files.append(_take_value(name, equals, value, pending, "a file"))
        elif name in ("--from-run", "--from_run"):
            options.from_run = _take_value(name, equals, value, pending, "a run")
        elif word.startswith("--") and name[2:].rstrip("+").partition(".")[0] in SECTIONS:
            options.overrides.append(f"{name[2:]}={_take_value(name, equals, value, pending, 'a value')}")
        elif word.startswith("-"):
            valid_options = [
                "--config",
                "--print-config",
                "--json",
                "--from-run",
                "--help",
                *(f"--{section}" for section in SECTIONS),
            ]
            flag = name.lstrip("-").replace("-", "_")
            is_flag = flag in read_flags()
            advice = f" Did you mean trainer.{flag}=...?" if is_flag else nearest(name, valid_options)
            raise ConfigError(f"{COMMAND_LINE}: unknown option {name}.{advice}")
        elif equals or word.startswith("~"):
            options.overrides.append(word)
        elif word.endswith((".yaml", ".yml")):
            raise ConfigError(f"{COMMAND_LINE}: {word}: a configuration file needs --config. Write --config {word}.")
        else:
            raise ConfigError(f"{COMMAND_LINE}: {word}: expected key.path=value, or a file after --config.")
    if options.from_run is not None:
        options.from_run = _locate_run(options.from_run, options.overrides)
    return options


def _locate_run(run: str, overrides: Sequence[str]) -> str:
    from ...trainer.runs import locate

    directory = next(
        (override.partition("=")[2] for override in reversed(overrides) if override.startswith("run.dir=")), "runs"
    )
    try:
        return str(locate(run, as_path(directory)))
    except ValueError as error:
        raise ConfigError(f"--from-run {run}: {error}") from error


def _take_value(name: str, equals: str, value: str, pending: list[str], value_kind: str) -> str:
    if equals:
        return value
    if not pending:
        raise ConfigError(f"{COMMAND_LINE}: {name} needs {value_kind} after it.")
    return pending.pop(0)


def load_config(options: Options, defaults: Mapping[str, Any] | None = None) -> Config:
    """Load the configuration that a command line specifies."""
    earlier_config = None if options.from_run is None else read_earlier_config(options.from_run)
    return load(options.files, options.overrides, defaults=defaults, earlier=earlier_config)


def read_earlier_config(place: str | Path) -> tuple[str, str]:
    """Return the name and text of the configuration that a run saved in its folder or in one of its checkpoints."""
    from ...engine.checkpoint import is_checkpoint, recover_interrupted

    folder = as_path(place)
    recover_interrupted(folder)
    if is_checkpoint(folder):
        return str(folder), _read_checkpoint_config(folder)
    file = folder / CONFIG if folder.is_dir() else folder
    if not file.is_file():
        problem = f"has no {CONFIG} and is not a checkpoint" if folder.is_dir() else "does not exist"
        raise ConfigError(f"--from-run {place} {problem}. Pass a run's number, NAME/NUMBER or folder, or a checkpoint.")
    return str(file), read_text(local_folder(folder) / CONFIG if isinstance(file, RemotePath) else file)


def _read_checkpoint_config(folder: AnyPath) -> str:
    from ...engine.checkpoint import CONFIG, OpenCheckpoint

    try:
        opened = OpenCheckpoint(folder)
        if opened.has(CONFIG):
            text = opened.read_part(CONFIG).get("yaml")
            if isinstance(text, str):
                return text
    except (ValueError, OSError) as error:
        raise ConfigError(f"--from-run {error}") from error
    raise ConfigError(
        f"--from-run {folder}: this checkpoint contains no configuration, because its run was started without one. "
        "Use --config FILE."
    )


def print_on_rank_zero(text: str, result: Any = None) -> None:
    """Print text on rank zero only, or the result that stands for it in JSON; see `report`."""
    if not any(_read_nonzero_ranks()):
        report(text, result)


def report_error(program: str, error: ConfigError) -> int:
    """Print an error, if possible once per job, and return the exit status, 2.

    Other ranks first wait a few seconds, which allows rank zero to print the error and the launcher to terminate them.
    """
    time.sleep(GRACE * sum(_read_nonzero_ranks()))
    problems = ["\n".join(map(make_printable, problem.splitlines())) for problem in error.problems]
    if len(problems) > 1:
        print("\n  ".join([f"{program}: {len(problems)} problems:", *problems]), file=sys.stderr)
    else:
        print(f"{program}: {problems[0]}", file=sys.stderr)
    return fail(program, error, code="invalid_configuration", is_printed=True)


def _read_nonzero_ranks() -> list[bool]:
    """Return whether the environment variables ``RANK`` and ``LOCAL_RANK`` are set and nonzero, in this order."""
    return [os.environ.get(name, "0") != "0" for name in ("RANK", "LOCAL_RANK")]
