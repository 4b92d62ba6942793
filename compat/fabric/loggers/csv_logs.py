"""Fabric's CSV logger, with ``root_dir`` instead of ``save_dir``."""

from __future__ import annotations

import os

from ....loggers import CSVLogger as LightningCSVLogger


class FabricCSVLogger(LightningCSVLogger):
    """`treadle.loggers.CSVLogger` with ``root_dir`` instead of ``save_dir``.

    Args:
        root_dir: Parent directory of the experiments, or a URL; see `DirectoryLogger`.
        name, version, prefix, flush_logs_every_n_steps: See `treadle.loggers.CSVLogger`.
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


# The name there. Of two classes of one name, a configuration file could not name the other by its short name.
CSVLogger = FabricCSVLogger
