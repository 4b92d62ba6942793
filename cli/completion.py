"""`treadle completion SHELL`: shell completion, in a script that shtab writes."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence

from ..common.command_results import fail, report
from ..common.optional import require
from .commands import CommandParser

SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")
DESCRIPTION = """\
Print a script that lets a shell complete treadle's commands and options, and the Trainer's flags.

    eval "$(treadle completion bash)"           in ~/.bashrc
    eval "$(treadle completion zsh)"            in ~/.zshrc, after compinit
    treadle completion fish | source            in ~/.config/fish/config.fish"""

# bash adds a space to a completed word, also after `trainer.max_epochs=`.
_NO_SPACE_IN_BASH = """
_treadle() {
    _shtab_treadle "$@"
    [[ ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
}
complete -o filenames -F _treadle treadle"""
_VALUES = {
    "trainer.accelerator": ("auto", "cpu", "cuda", "gpu", "mps"),
    "trainer.precision": ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"),
    "trainer.strategy": ("auto", "single", "ddp", "fsdp"),
    "trainer.profiler": ("simple", "advanced", "pytorch", "events"),
}


def main(arguments: Sequence[str]) -> int:
    """Run `treadle completion` and return the exit status: 2 if the arguments are invalid, otherwise 0."""
    parser = CommandParser("treadle completion", DESCRIPTION)
    parser.add_argument("shell", choices=SHELLS, metavar="|".join(SHELLS))
    try:
        shell = parser.parse_args(arguments).shell
        require("treadle completion", "shtab", extra="completion")
    except (ValueError, ModuleNotFoundError) as error:
        return fail("treadle completion", error)
    import shtab

    script = shtab.complete(make_parser(), shell) + _NO_SPACE_IN_BASH * (shell == "bash")
    report(script, {"shell": shell, "script": script})
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return a parser with the words of `treadle`'s command lines. It only describes them to shtab."""
    import shtab

    from .entry_point import COMMANDS, load_registered_commands

    parser = argparse.ArgumentParser("treadle")
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for name, (_, words) in COMMANDS.items():
        command = commands.add_parser(name, help=words)
        if name == "completion":
            command.add_argument("shell", choices=SHELLS)
        elif name in ("fit", "validate", "test", "predict"):
            config = command.add_argument("-c", "--config", help="a YAML file")
            config.complete = shtab.FILE  # type: ignore[attr-defined]
            command.add_argument("--from-run", help="an earlier run's configuration")
            command.add_argument("--print-config", action="store_true", help="print the configuration")
            command.add_argument("settings", nargs="*", choices=sorted(list_settings()))
        else:
            command.add_argument("files", nargs="*").complete = shtab.FILE  # type: ignore[attr-defined]
    for name, registered in load_registered_commands().items():
        parents = [registered.build_parser()] if hasattr(registered, "build_parser") else []
        command = commands.add_parser(name, help=registered.SUMMARY, parents=parents, add_help=not parents)
        for action in command._actions:
            if action.metavar == "FILE":
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar == "KEY=VALUE":
                own_settings = registered.list_settings() if hasattr(registered, "list_settings") else []
                action.choices = sorted({*list_settings(), *own_settings})
    return parser


def list_settings() -> Iterator[str]:
    """Iterate over the beginnings of KEY=VALUE: sections, the Trainer's flags, and values of some of them."""
    from ..trainer.core import read_flags
    from .config import SECTIONS

    yield from ("seed=", "ckpt_path=", "run.name=", "run.dir=", "optimizer=", "lr_scheduler=")
    yield from (f"{name}." for name in SECTIONS if name not in ("seed", "ckpt_path"))
    for name, annotation in read_flags().items():
        key = f"trainer.{name}"
        yield f"{key}="
        values = ("true", "false") if "bool" in annotation else ()
        yield from (f"{key}={value}" for value in _VALUES.get(key, values))
    for kind in ("callbacks+", "logger"):
        names = importlib.import_module(f"treadle.{'callbacks' if kind == 'callbacks+' else 'loggers'}").__all__
        yield from (f"trainer.{kind}={name}" for name in names if name[:1].isupper() and not name.isupper())
