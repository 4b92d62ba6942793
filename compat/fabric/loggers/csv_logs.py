"""Fabric's CSV logger: ``root_dir`` in place of ``save_dir``."""

from __future__ import annotations

import os

from ....loggers import CSVLogger as LightningCSVLogger


class CSVLogger(LightningCSVLogger):
    """Writer of ``metrics.csv`` in ``root_dir/name/version_N``.

    Args:
        root_dir: local directory above all experiments.
        name: directory of the experiment below it; None or ``""`` for none.
        version: a number N for ``version_N``, or a directory name. Default: the next free number.
        prefix: put before every metric's name, as ``prefix-name``.
        flush_logs_every_n_steps: write to the file at the latest when rows of this many steps are waiting.
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
        """Directory above all experiments."""
        return self.save_dir
