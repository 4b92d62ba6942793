"""Fabric's CSV logger, with ``root_dir`` instead of ``save_dir``."""

from __future__ import annotations

import os

from ....loggers import CSVLogger as LightningCSVLogger


class CSVLogger(LightningCSVLogger):
    """Writer of ``metrics.csv`` in ``root_dir/name/version_N``.

    Args:
        root_dir: Local directory above all experiments.
        name: Directory of the experiment below ``root_dir``; None or ``""`` for no such directory.
        version: A number N for ``version_N``, or a directory name. Default: the next free number.
        prefix: Prefix of every metric's name, as ``prefix-name``.
        flush_logs_every_n_steps: Steps after which pending rows are written to the file.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "treadle_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(root_dir, name, version, prefix, flush_logs_every_n_steps)

    @property
    def root_dir(self) -> str:
        """Parent directory of all experiments."""
        return self.save_dir
