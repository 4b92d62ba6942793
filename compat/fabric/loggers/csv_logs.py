"""Fabric's CSV logger, with ``root_dir`` instead of ``save_dir``."""

from __future__ import annotations

import os

from ....loggers import CSVLogger as LightningCSVLogger


class CSVLogger(LightningCSVLogger):
    """Logger that writes ``metrics.csv`` and ``hparams.yaml`` to ``root_dir/name/version_N``.

    Args:
        root_dir: Parent directory of the experiments, or a URL; see `DirectoryLogger`.
        name: Directory of the experiment in ``root_dir``; None or ``""`` for none. Default: ``"treadle_logs"``.
        version: A number N for ``version_N``, or the name of a directory. Default: the next unused number.
        prefix: Text before every metric's name, as ``prefix-name``. Default: none.
        flush_logs_every_n_steps: Buffered rows are written once there are this many of them or they span as many steps.
            Default: 100.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has an invalid value.
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
