"""Names that only other libraries' import lines need: ``import treadle.compat as pl`` is Lightning's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .. import callbacks, loggers, plugins, profilers, strategies, tuner, utilities
    from ..callbacks import Callback
    from ..cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
    from ..common.version import __version__
    from ..engine import seed_everything
    from ..trainer import DataModule, TaskModule, Trainer
    from ..trainer import DataModule as LightningDataModule
    from ..trainer import TaskModule as LightningModule

__getattr__, __dir__, __all__ = lazy_exports(__name__)
