"""Command line: configurations, commands, and `run` and `LightningCLI`, which give a script a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .entry_point import COMMANDS, main
    from .lightning_cli import (
        ArgsType,
        LightningArgumentParser,
        LightningCLI,
        LRSchedulerCallable,
        LRSchedulerType,
        LRSchedulerTypeTuple,
        LRSchedulerTypeUnion,
        OptimizerCallable,
        ReduceLROnPlateau,
        SaveConfigCallback,
        instantiate_class,
        instantiate_module,
    )
    from .script import run

__getattr__, __dir__, __all__ = lazy_exports(__name__)
