"""Command line: configurations, commands, and `run` and `LightningCLI`, which give a script a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ..trainer.core import instantiate_module
    from .entry_point import COMMANDS, main
    from .lightning_cli.cli import ArgsType, LightningCLI
    from .lightning_cli.optimizers import (
        LRSchedulerCallable,
        LRSchedulerType,
        LRSchedulerTypeTuple,
        LRSchedulerTypeUnion,
        OptimizerCallable,
        ReduceLROnPlateau,
        instantiate_class,
    )
    from .lightning_cli.parser import LightningArgumentParser
    from .lightning_cli.save_config import SaveConfigCallback
    from .script import run

__getattr__, __dir__, __all__ = lazy_exports(__name__)
