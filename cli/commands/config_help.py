"""Text of `--help NAME`: the arguments of a section or a class."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...common.messages import nearest
from ...trainer import Trainer
from ...trainer.core import REQUIRED, described, signature
from ..config import SECTIONS, ConfigError, to_plain
from ..config.instantiate import Opaque, catalog, describe_annotation, make_default_value
from .yaml_dump import format_word


def describe_target(target: Any, title: str = "") -> str:
    """Return the arguments of a class or function as text, each with its type, default and description.

    The text omits the arguments that a run supplies: an optimizer's ``params`` and a scheduler's ``optimizer``.
    """
    takes, words = signature(target), described(target)
    summary = (inspect.getdoc(target) or "").split("\n\n")[0].replace("\n", " ").replace("``", "")
    home = getattr(target, "__module__", "")
    lines = [f"{title or target.__name__}  ({home}.{getattr(target, '__qualname__', '')})", *_wrap_text(summary, "  ")]
    # The arguments that an optimizer and a scheduler receive from the run.
    run_arguments = {Optimizer: "params", LRScheduler: "optimizer"}
    supplied = [name for kind, name in run_arguments.items() if isinstance(target, type) and issubclass(target, kind)]
    arguments = {name: argument for name, argument in takes.arguments.items() if name not in supplied}
    if arguments:
        lines.append("")
    for name, argument in arguments.items():
        default = "required" if argument.default is REQUIRED else f"default {_format_default(argument.default)}"
        kind = "a list" if argument.several else describe_annotation(argument.type)
        lines.append(f"  {name}: {kind}; {default}")
        description = words.get(name, "").replace("``", "")
        if argument.default is not REQUIRED:  # the line above states the default
            description = description.removesuffix(f" Default: {argument.default}.")
            description = description.removesuffix(f' Default: "{argument.default}".')
        lines += _wrap_text(description, "      ")
    if takes.open and target is not Trainer:
        lines += ["", "  and other arguments that its signature does not list."]
    return "\n".join(lines)


def find_target(name: str, config: dict[str, Any], default_classes: dict[str, type | None]) -> Any:
    """Return the class or function that `--help NAME` describes.

    A name is a section, such as ``"model"``, a class's short name, or an import path.
    """
    if name == "trainer":
        return Trainer
    if name in SECTIONS:
        section = config.get(name)
        named = section.get("class") if isinstance(section, dict) else section
        if default_classes.get(name) is not None and named is None:
            return default_classes[name]
        if name not in ("model", "data", "optimizer", "lr_scheduler"):
            raise ConfigError(f"{name}: {SECTIONS[name]}.")
        if not isinstance(named, str):
            raise ConfigError(
                f"the configuration names no class for {name!r}. Pass --config FILE, or use --help my_module.MyClass."
            )
        name = named
    if "." in name:
        return catalog.import_target(name)
    for base in catalog.list_shelved():
        if name in catalog.list_short_names(base):
            return catalog.find(name, base)
    all_names = [short_name for base in catalog.list_shelved() for short_name in catalog.list_short_names(base)]
    hint = nearest(name, [*SECTIONS, *all_names])
    raise ConfigError(
        f"{name!r} is neither a section nor a class.{hint} For a user-defined class, pass its import path."
    )


def _format_default(default: Any) -> str:
    value = make_default_value(default)
    if isinstance(value.data, Opaque):
        return value.data.words
    return repr(to_plain(value)) if isinstance(value.data, dict | list) else format_word(value.data)


def _wrap_text(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=indent, subsequent_indent=indent)
