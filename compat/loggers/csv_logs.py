"""CSV logger, and Lightning's writer of its files."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from typing import Any

from ...loggers import CSVLogger, plain
from ...loggers.csv_logs import MetricsFile
from ..core.saving import save_hparams_to_yaml

__all__ = ["CSVLogger", "ExperimentWriter"]


class ExperimentWriter:
    """Writer of ``metrics.csv`` and ``hparams.yaml`` in a folder.

    Args:
        log_dir: The folder, which is created if it is missing. Rows of an existing ``metrics.csv`` are kept.

    Attributes:
        metrics: Rows that have not been saved.
        hparams: Logged hyperparameters by name.
    """

    NAME_HPARAMS_FILE = "hparams.yaml"
    NAME_METRICS_FILE = "metrics.csv"

    def __init__(self, log_dir: str) -> None:
        self.log_dir = log_dir
        self._file = MetricsFile(log_dir)
        self.metrics_file_path = self._file.path
        self.metrics: list[dict[str, Any]] = []
        self.hparams: dict[str, Any] = {}

    def log_hparams(self, params: Mapping[str, Any]) -> None:
        """Add hyperparameters, and write all of them to ``hparams.yaml``."""
        self.hparams.update(params)
        save_hparams_to_yaml(os.path.join(self.log_dir, self.NAME_HPARAMS_FILE), self.hparams)

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row that `save` will write. The default step is the number of rows not yet saved."""
        self.metrics.append({**plain(metrics_dict), "step": len(self.metrics) if step is None else step})

    def save(self) -> None:
        """Write the unsaved rows to ``metrics.csv``."""
        for row in self.metrics:
            self._file.log_metrics({name: value for name, value in row.items() if name != "step"}, row["step"])
        self._file.save()
        self.metrics = []

    @property
    def metrics_keys(self) -> list[str]:
        """Columns of ``metrics.csv``; empty if the file does not exist."""
        if not os.path.exists(self.metrics_file_path):
            return []
        with open(self.metrics_file_path, newline="", encoding="utf-8") as file:
            return next(csv.reader(file), [])
