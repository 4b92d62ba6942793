"""LightningCLI: a command line built from the arguments of classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .cli import ArgsType, LightningCLI
    from .module import instantiate_module
    from .namespace import Namespace
    from .optimizers import (
        LRSchedulerCallable,
        LRSchedulerType,
        LRSchedulerTypeTuple,
        LRSchedulerTypeUnion,
        OptimizerCallable,
        ReduceLROnPlateau,
        instantiate_class,
    )
    from .parser import ActionConfigFile, LightningArgumentParser
    from .save_config import SaveConfigCallback

__getattr__, __dir__, __all__ = lazy_exports(__name__)
