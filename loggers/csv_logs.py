"""What scripts import from ``lightning.pytorch.loggers.csv_logs``: names, nothing else."""

from .csv import CSVLogger

__all__ = ["CSVLogger"]
