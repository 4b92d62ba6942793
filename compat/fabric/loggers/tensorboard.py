"""Fabric's TensorBoard logger: ``root_dir`` in place of ``save_dir``."""

from __future__ import annotations

import os
from typing import Any

from ....loggers import TensorBoardLogger as LightningTensorBoardLogger


class TensorBoardLogger(LightningTensorBoardLogger):
    """Writer of event files for TensorBoard in ``root_dir/name/version_N``. `log_graph` records whenever it is called.

    Args:
        root_dir: local directory above all experiments.
        name: directory of the experiment below it; None or ``""`` for none.
        version: a number N for ``version_N``, or a directory name. Default: the next free number.
        default_hp_metric: whether `log_hyperparams` without metrics records ``hp_metric`` = -1.
        prefix: put before every metric's name, as ``prefix-name``.
        sub_dir: directory below ``version_N`` for the files.
        **kwargs: arguments of ``torch.utils.tensorboard.SummaryWriter``.
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
        """Directory above all experiments."""
        return self.save_dir

    @property
    def sub_dir(self) -> str | None:
        """Directory below the version's for the files."""
        return self._sub_dir
