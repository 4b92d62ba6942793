"""Hyperparameters that are settings: those of a task that `LightningCLI` builds, and a task built from them.

In a checkpoint, such hyperparameters may name classes, as ``{"class_path": ..., "init_args": ...}``. Building a task
from them imports nothing that they name. It instantiates only classes that the program has imported and that the
annotation of the argument allows, and passes on only functions of torch and of the task's own module.
"""

from __future__ import annotations

import inspect
import sys
from argparse import ArgumentError
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ...common.optional import require

CLASS_PATH = "_class_path"
INSTANTIATOR = "_instantiator"
# Marks hyperparameters that are settings. Lightning reads it too, so the value is that of its CLI.
_MARK = "lightning.pytorch.cli.instantiate_module"
_FUNCTIONS = ("torch", "torch.nn.functional")

given_settings: ContextVar[tuple[type, dict[str, Any]] | None] = ContextVar("given_settings", default=None)


@contextmanager
def giving_settings(cls: type, settings: Mapping[str, Any]) -> Iterator[None]:
    """Let instances of ``cls`` that are built in this context save ``settings`` as their hyperparameters."""
    token = given_settings.set((cls, {**settings, INSTANTIATOR: _MARK}))
    try:
        yield
    finally:
        given_settings.reset(token)


def _find_imported(value: Any) -> dict[str, Any]:
    """Return the imported classes and functions whose import paths are texts in nested settings, by path."""
    if isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return {path: target for item in items for path, target in _find_imported(item).items()}
    module, _, name = value.rpartition(".") if isinstance(value, str) else ("", "", "")
    target = vars(sys.modules.get(module) or object).get(name)
    return {value: target} if isinstance(target, type) or inspect.isroutine(target) else {}


def _make_parser(cls: Any, subclass: bool = False) -> Any:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    if subclass:
        parser.add_subclass_arguments(cls, "module", fail_untyped=False, required=True)
    else:
        parser.add_class_arguments(cls, "module", fail_untyped=False, sub_configs=True)
    return parser


def _find_allowed(cls: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the classes and functions, by import path, that settings of ``cls`` may name."""
    homes = {*_FUNCTIONS, cls.__module__, str(settings.get(CLASS_PATH)).rpartition(".")[0]}
    named = {
        path: target
        for path, target in _find_imported(settings).items()
        if isinstance(target, type) or (getattr(target, "__module__", None) or path.rpartition(".")[0]) in homes
    }
    allowed = dict(named)
    for owner in {cls, *(target for target in named.values() if isinstance(target, type))}:
        allowed |= _find_imported(_make_parser(owner).get_defaults().as_dict())
    return allowed


@contextmanager
def _importing_nothing(cls: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """Restrict jsonargparse to what the program has imported and the settings may name.

    Its default list of refused modules, such as ``os``, stays in force.
    """
    from jsonargparse import set_parsing_settings
    from jsonargparse._common import denying_import_path_entry, parsing_settings

    allowed = _find_allowed(cls, settings)
    paths = {*allowed, *(f"{target.__module__}.{target.__qualname__}" for target in allowed.values())}
    saved_settings = dict(parsing_settings)
    try:
        set_parsing_settings(
            import_path_denylist=["*"],
            import_path_allowlist=[p for p in paths if "<" not in p and denying_import_path_entry(p) is None],
            instantiate_subclass_spec_in_any=False,
        )
        yield
    finally:
        parsing_settings.update(saved_settings)


def instantiate_module(class_type: Any, config: Mapping[str, Any], build: bool = True) -> Any:
    """Build a task or data module from the hyperparameters that `LightningCLI` gave it.

    Args:
        class_type: The class to instantiate or, if ``config`` names a subclass, its base class.
        config: The arguments by name; objects as ``{"class_path": ..., "init_args": {...}}``. The key ``"_class_path"``
            may name a subclass. All classes must have been imported.
        build: Whether to build the object. If False, the hyperparameters, which may be a part, are only checked.
            Default: True.

    Returns:
        An instance of ``class_type`` or of the named subclass.

    Raises:
        ModuleNotFoundError: If jsonargparse is not installed.
        ValueError: If the settings are invalid, or name a class that has not been imported.
    """
    require("instantiate_module", "jsonargparse", "docstring_parser", extra="cli")
    settings: dict[str, Any] = {name: value for name, value in config.items() if name not in (CLASS_PATH, INSTANTIATOR)}
    if CLASS_PATH in config:
        settings = {"class_path": config[CLASS_PATH], "dict_kwargs": settings}
    parser = _make_parser(class_type, CLASS_PATH in config)
    with _importing_nothing(class_type, config):
        try:
            # Without validation, arguments may be missing; types are checked all the same.
            parsed = parser.parse_object({"module": settings}, _skip_validation=not build)
        except ArgumentError as error:
            raise ValueError(
                f"the hyperparameters cannot be used: {error}\nA class that a checkpoint names is not imported: import "
                "its module first, or pass the argument to load_from_checkpoint."
            ) from error
        return parser.instantiate(parsed).module if build else None
