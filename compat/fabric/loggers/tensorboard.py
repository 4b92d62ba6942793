"""Fabric's TensorBoard logger, with ``root_dir`` instead of ``save_dir``."""

from __future__ import annotations

import os
from typing import Any

from ....loggers import TensorBoardLogger as LightningTensorBoardLogger


class TensorBoardLogger(LightningTensorBoardLogger):
    """`treadle.loggers.TensorBoardLogger` with ``root_dir`` instead of ``save_dir``.

    `log_graph` records the graph at its first call.

    Args:
        root_dir: Parent directory of the experiments, or a URL; see `DirectoryLogger`.
        name, version, default_hp_metric, prefix, sub_dir: See `treadle.loggers.TensorBoardLogger`.
        **kwargs: Arguments of ``torch.utils.tensorboard.SummaryWriter``.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "treadle_logs",
        version: int | str | None = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(root_dir, name, version, True, default_hp_metric, prefix, sub_dir, **kwargs)

    @property
    def root_dir(self) -> str:
        """Parent directory of all experiments."""
        return self.save_dir

    @property
    def sub_dir(self) -> str | None:
        """Directory below ``version_N`` for the files, or None."""
        return self._sub_dir
