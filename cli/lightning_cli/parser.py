"""Parser of LightningCLI's settings: jsonargparse's, with methods for Trainers, tasks, optimizers and schedulers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from ... import callbacks, loggers, strategies
from ...callbacks import Callback
from ...common.messages import announce, nearest
from ...common.optional import require
from ...engine import profilers
from ...trainer import Trainer
from ...trainer.core import DataModule, TaskModule
from .optimizers import LRSchedulerTypeTuple

require("LightningCLI", "jsonargparse", "docstring_parser", "typeshed_client", extra="cli")

from jsonargparse import (  # noqa: E402
    ArgumentParser,
    class_from_function,
    register_unresolvable_import_paths,
    set_parsing_settings,
)

register_unresolvable_import_paths(torch)  # `torch.nn.functional.relu` and others do not name their module
set_parsing_settings(config_read_mode_fsspec_enabled=True)

_KINDS = (Trainer, TaskModule, DataModule, Callback)
_ROOMS = (callbacks, loggers, strategies, profilers)
# A class of Lightning as the value of `class_path` or of an option.
_PEER_CLASS = re.compile(
    r"(class_path['\"]?\s*[:=]\s*['\"]?|^(?:--[\w.]+\+?=)?)"
    r"(?:lightning\.pytorch|pytorch_lightning|lightning(?=\.fabric))\.(?=[\w.]*[A-Z])"
)
# Lightning writes this flag of its Trainer to each configuration file.
_PEER_FLAG = re.compile(r"^ *model_registry: null$", re.MULTILINE)
_UNKNOWN_OPTION = re.compile(r"--([\w.]+)")
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (\w+)")


class LightningArgumentParser(ArgumentParser):
    """Parser of the command line, of files and of environment variables: jsonargparse's, with Lightning's methods.

    Args:
        *args: Arguments of ``jsonargparse.ArgumentParser``.
        description: Text below the usage line of the help. Default: a sentence about the Trainer.
        env_prefix: Prefix of the names of environment variables, as in ``PL_TRAINER__MAX_EPOCHS``. Default: ``"PL"``.
        default_env: Whether environment variables are read. Default: False.
        **kwargs: Arguments of ``jsonargparse.ArgumentParser``, such as ``default_config_files`` or ``parser_mode``.

    Raises:
        ModuleNotFoundError: If jsonargparse is not installed.

    Examples:
        >>> parser = LightningArgumentParser()
        >>> _ = parser.add_argument("--batch_size", type=int, default=32)
        >>> parser.parse_args(["--batch_size=64"]).batch_size
        64
    """

    def __init__(
        self,
        *args: Any,
        description: str = "Train, validate, test and predict with a Trainer.",
        env_prefix: str = "PL",
        default_env: bool = False,
        **kwargs: Any,
    ) -> None:
        for room in _ROOMS:  # a class is found by its short name once it is imported
            for name in room.__all__:
                getattr(room, name)
        super().__init__(*args, description=description, env_prefix=env_prefix, default_env=default_env, **kwargs)
        self.callback_keys: list[str] = []
        self._optimizers: dict[str, tuple[Any, str]] = {}
        self._lr_schedulers: dict[str, tuple[Any, str]] = {}

    def add_lightning_class_args(
        self,
        lightning_class: type | Callable[..., Any],
        nested_key: str,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Add the arguments of a Trainer, task, data module or callback.

        Args:
            lightning_class: A class that extends Trainer, TaskModule, DataModule or Callback, or a function that is
                annotated to return such an object.
            nested_key: Dotted key under which the arguments are added.
            subclass_mode: Whether the settings may name a subclass of ``lightning_class``. Default: False.
            required: In subclass mode, whether the settings must contain the object. Default: True.

        Returns:
            The dotted keys of the arguments; in subclass mode, a list with ``nested_key``.

        Raises:
            ValueError: If ``lightning_class`` is neither such a class nor such a function.
        """
        cls = lightning_class
        if callable(cls) and not isinstance(cls, type):
            cls = class_from_function(cls)
        if not isinstance(cls, type) or not issubclass(cls, _KINDS):
            raise ValueError(
                f"add_lightning_class_args({lightning_class!r}): pass a class that extends Trainer, TaskModule, "
                "DataModule or Callback, or a function that returns an instance of such a class."
            )
        if issubclass(cls, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            return self.add_subclass_arguments(cls, nested_key, fail_untyped=False, required=required)
        builds = not issubclass(cls, Trainer)
        return self.add_class_arguments(cls, nested_key, fail_untyped=False, instantiate=builds, sub_configs=True)

    def add_optimizer_args(
        self,
        optimizer_class: type[Optimizer] | tuple[type[Optimizer], ...] = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = "AUTOMATIC",
    ) -> None:
        """Add the arguments of an optimizer.

        Args:
            optimizer_class: The optimizer's class, or a tuple of classes. With a tuple, the settings name one of these
                classes or a subclass. Default: any optimizer.
            nested_key: Dotted key under which the arguments are added. Default: ``"optimizer"``.
            link_to: Argument that receives the settings, such as ``"model.optimizer"``. Default: ``"AUTOMATIC"``, which
                replaces the task's ``configure_optimizers``.

        Raises:
            TypeError: If a class does not extend ``torch.optim.Optimizer``.
        """
        self._add_class_without(optimizer_class, nested_key, "params", Optimizer)
        self._optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: Any = LRSchedulerTypeTuple,
        nested_key: str = "lr_scheduler",
        link_to: str = "AUTOMATIC",
    ) -> None:
        """Add the arguments of a learning rate scheduler.

        Args:
            lr_scheduler_class: The scheduler's class, or a tuple of classes. With a tuple, the settings name one of
                these classes or a subclass. Default: any scheduler.
            nested_key: Dotted key under which the arguments are added. Default: ``"lr_scheduler"``.
            link_to: Argument that receives the settings, such as ``"model.scheduler"``. Default: ``"AUTOMATIC"``, which
                passes the scheduler to the replaced ``configure_optimizers``.

        Raises:
            TypeError: If a class is not a scheduler.
        """
        self._add_class_without(lr_scheduler_class, nested_key, "optimizer", LRSchedulerTypeTuple)
        self._lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def _add_class_without(self, cls: Any, key: str, skipped: str, base: Any) -> None:
        """Add a class, whose argument ``skipped`` is passed when the object is built by `instantiate_class`."""
        for member in cls if isinstance(cls, tuple) else (cls,):
            if not (isinstance(member, type) and issubclass(member, base)):
                names = " or ".join(kind.__name__ for kind in (base if isinstance(base, tuple) else (base,)))
                raise TypeError(f"{member!r} must be a class that extends {names}.")
        options: dict[str, Any] = {"instantiate": False, "fail_untyped": False, "skip": {skipped}}
        if isinstance(cls, tuple):
            self.add_subclass_arguments(cls, key, **options)
        else:
            self.add_class_arguments(cls, key, sub_configs=True, **options)

    def parse_args(self, args: Any = None, *more: Any, **options: Any) -> Any:
        """Parse a command line; see ``jsonargparse.ArgumentParser.parse_args``."""
        if args is None:
            import sys

            args = sys.argv[1:]
        return super().parse_args([translate_settings(word) for word in args], *more, **options)

    def _load_config_parser_mode(self, content: str, *args: Any, **options: Any) -> Any:
        return super()._load_config_parser_mode(translate_settings(content), *args, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Report an error of the command line with the closest valid names, then exit or raise."""
        hint = ""
        if "unrecognized arguments" in message or "not accepted" in message:
            options = [action.dest for action in self._actions]
            hint = "".join(nearest(name, options) for name in _UNKNOWN_OPTION.findall(message))
        elif unknown := _UNKNOWN_CLASS.search(message):
            classes = [name for room in _ROOMS for name in room.__all__ if name[0].isupper()]
            hint = nearest(unknown[1], [*classes, *dir(torch.optim), *dir(torch.optim.lr_scheduler)])
        super().error(f"{message.rstrip('.')}.{hint}" if hint else message, ex)

    def print_usage(self, file: Any = None) -> None:
        """Print one line of usage. `format_help` lists the options."""
        print(f"usage: {self.prog.replace(' [options]', '')} [options]", file=file)


def translate_settings(text: str) -> str:
    """Replace class paths of Lightning in settings by Treadle's, and remove a flag that Treadle does not have."""
    translated = _PEER_CLASS.sub(r"\1treadle.compat.", text)
    if translated != text:
        announce("class paths of Lightning are replaced by those of Treadle's classes with the same names.")
    return _PEER_FLAG.sub("", translated)
