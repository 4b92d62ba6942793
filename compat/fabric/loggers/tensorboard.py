"""Fabric's TensorBoard logger, with ``root_dir`` instead of ``save_dir``."""

from __future__ import annotations

import os
from typing import Any

from ....loggers import TensorBoardLogger as LightningTensorBoardLogger


class TensorBoardLogger(LightningTensorBoardLogger):
    """Logger that writes event files for TensorBoard, and ``hparams.yaml``, to ``root_dir/name/version_N``.

    `log_graph` records the graph at its first call.

    Args:
        root_dir: Parent directory of the experiments, or a URL; see `DirectoryLogger`.
        name: Directory of the experiment in ``root_dir``; None or ``""`` for none. Default: ``"treadle_logs"``.
        version: A number N for ``version_N``, or the name of a directory. Default: the next unused number.
        default_hp_metric: Whether `log_hyperparams` without metrics records ``hp_metric`` = -1. Default: True.
        prefix: Text before every metric's name, as ``prefix-name``. Default: none.
        sub_dir: Directory below ``version_N`` for the files. Default: none.
        **kwargs: Arguments of ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        TypeError: If an argument is unknown or has the wrong type.
        ValueError: If an argument has an invalid value.
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
