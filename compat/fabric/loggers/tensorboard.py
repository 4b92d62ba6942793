"""Fabric's TensorBoard logger, with ``root_dir`` instead of ``save_dir``."""

from __future__ import annotations

import os
from typing import Any

from ....loggers import TensorBoardLogger as LightningTensorBoardLogger


class TensorBoardLogger(LightningTensorBoardLogger):
    """Writer of event files for TensorBoard in ``root_dir/name/version_N``.

    `log_graph` records the graph at its first call.

    Args:
        root_dir: Local directory above all experiments.
        name: Directory of the experiment below ``root_dir``; None or ``""`` for no such directory.
        version: A number N for ``version_N``, or a directory name. Default: the next free number.
        default_hp_metric: Whether `log_hyperparams` without metrics records ``hp_metric`` = -1.
        prefix: Prefix of every metric's name, as ``prefix-name``.
        sub_dir: Directory below ``version_N`` for the files.
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
        """Directory below ``version_N`` for the files."""
        return self._sub_dir
