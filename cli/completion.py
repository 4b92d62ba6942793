"""`treadle completion bash|zsh|fish`: shell completion."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import shlex
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

SCRIPTS = {
    "bash": """\
# eval "$(treadle completion bash)", in ~/.bashrc
_treadle() {
    local IFS=$'\\n'
    COMPREPLY=($(treadle completion words bash "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    [[ ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
}
complete -o default -F _treadle treadle
""",
    "zsh": """\
# eval "$(treadle completion zsh)", in ~/.zshrc after compinit
_treadle() {
    local -a found
    found=(${(f)"$(treadle completion words zsh "${LBUFFER}" 2>/dev/null)"})
    if (( $#found )); then compadd -Q -S '' -- $found; else _files; fi
}
compdef _treadle treadle
""",
    "fish": """\
# treadle completion fish | source, in ~/.config/fish/config.fish
complete -c treadle -a '(treadle completion words fish (commandline -cp | string collect))'
""",
}
USAGE = """\
usage: treadle completion bash|zsh|fish

Print a script that lets a shell complete treadle's commands and options, the Trainer's flags, and the keys of the
configuration files that a command line names.

    eval "$(treadle completion bash)"           in ~/.bashrc
    eval "$(treadle completion zsh)"            in ~/.zshrc, after compinit
    treadle completion fish | source            in ~/.config/fish/config.fish"""

_OPTIONS = ("--config", "--from-run", "--print-config", "--help")
_STAGES = ("fit", "validate", "test", "predict")
_SWITCH = ("true", "false")


def main(arguments: Sequence[str]) -> int:
    """Run `treadle completion` and return the exit status: 2 if the arguments are invalid, otherwise 0."""
    if len(arguments) == 3 and arguments[0] == "words":
        print("\n".join(list_candidates(arguments[2], in_parts=arguments[1] == "bash")))
        return 0
    if len(arguments) == 1 and arguments[0] in SCRIPTS:
        print(SCRIPTS[arguments[0]], end="")
        return 0
    is_help = not arguments or arguments[0] in ("-h", "--help")
    complaint = ""
    if not is_help and arguments[0] in SCRIPTS:
        complaint = f"treadle completion: unexpected argument {arguments[1]!r}. Pass one shell only.\n\n"
    elif not is_help:
        complaint = f"treadle completion: {arguments[0]!r} is not one of {', '.join(SCRIPTS)}.\n\n"
    print(complaint + USAGE, file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else 2


def list_candidates(line: str, in_parts: bool = False) -> list[str]:
    """Return the completions of the last word of a command line.

    With ``in_parts``, the completions begin after the word's last ``=``, because bash splits words there.
    """
    try:
        words = shlex.split(line)[1:]
    except ValueError:  # the word is inside quotes
        return []
    last = "" if line[-1:].isspace() or not words else words.pop()
    matches = sorted(word for word in _list_words(words, last) if word.startswith(last))
    cut = last.rfind("=") + 1 if in_parts else 0
    return [word[cut:] for word in matches]


def _list_words(before: list[str], last: str) -> Iterable[str]:
    from .entry_point import COMMANDS, find_registered_commands

    registered = find_registered_commands()
    if not before:
        return (*COMMANDS, *registered)
    if before[0] == "completion":
        return SCRIPTS
    if before[0] in registered:
        command = registered[before[0]].load()
        if hasattr(command, "complete"):
            return command.complete(before, last)
        return command.build_parser()._option_string_actions if last.startswith("-") else ()
    if before[0] not in _STAGES or before[-1] in ("-c", "--config", "--from-run"):
        return ()  # the shell completes files itself
    if last.startswith("-"):
        return _OPTIONS
    key, equals, _ = last.partition("=")
    if equals:
        return [f"{key}={value}" for value in list_values(key.rstrip("+"))]
    return list_keys(before, last)


def list_values(key: str) -> Iterable[str]:
    """Return the values that a key of a configuration may have, if they are known."""
    values_by_key = {
        "trainer.accelerator": ("auto", "cpu", "cuda", "gpu", "mps"),
        "trainer.precision": ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"),
        "trainer.strategy": ("auto", *_read_dict_keys("treadle.strategies", "registry.py", "_FACTORIES")),
        "trainer.callbacks": _list_classes("treadle.callbacks"),
        "trainer.logger": (*_SWITCH, *_list_classes("treadle.loggers")),
        "trainer.profiler": ("simple", "advanced", "pytorch"),
    }
    if key in values_by_key:
        return values_by_key[key]
    return _SWITCH if "bool" in _list_flags().get(key.removeprefix("trainer."), "") else ()


def list_keys(before: list[str], last: str) -> Iterable[str]:
    """Return sections, Trainer flags and keys of the configuration files, no deeper than the level of the last word."""
    from .config import SECTIONS, ConfigError, format_path, iterate_values, normalize

    keys = {f"trainer.{name}=" for name in _list_flags()} | {"seed=", "ckpt_path=", "run.name=", "run.dir="}
    keys |= {f"{name}." for name in SECTIONS if name not in ("seed", "ckpt_path")} | {"optimizer=", "lr_scheduler="}
    files = [after for option, after in pairwise(before) if option in ("-c", "--config")]
    files += [word.partition("=")[2] for word in before if word.startswith("--config=")]
    for file in files:
        from .config import read

        try:
            values = normalize(read(file))
        except ConfigError:
            continue  # the command itself reports the error
        for path, value in iterate_values(values):
            if path:
                keys.add(format_path(path) + ("." if isinstance(value.data, dict | list) else "="))
    depth = last.count(".")
    return [key for key in keys if key != last and key.rstrip(".").count(".") <= depth]


def _list_flags() -> dict[str, str]:
    from ..trainer import TrainerSettings

    return {field.name: str(field.type) for field in dataclasses.fields(TrainerSettings)}


def _list_classes(room: str) -> list[str]:
    """Return the names of the classes that a package exports, without importing them."""
    names = importlib.import_module(room).__all__
    return [name for name in names if name[:1].isupper() and not name.isupper()]


def _read_dict_keys(room: str, file: str, name: str) -> list[str]:
    """Return the keys of the dict literal ``name`` in a package's file, which is parsed but not imported."""
    spec = importlib.util.find_spec(room)
    if spec is None or spec.origin is None:
        return []
    for node in ast.parse(Path(spec.origin).with_name(file).read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if (
            isinstance(target, ast.Name)
            and target.id == name
            and isinstance(value := getattr(node, "value", 0), ast.Dict)
        ):
            return [str(key.value) for key in value.keys if isinstance(key, ast.Constant)]
    return []
