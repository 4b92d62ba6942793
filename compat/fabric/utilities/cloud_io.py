"""Names of ``lightning.fabric.utilities.cloud_io``."""

from __future__ import annotations

import os
from typing import Any

import torch

from ....common.lazy_exports import lazy_exports
from ....trainer import load_checkpoint

__getattr__ = lazy_exports(__name__)[0]  # the names that the tables have


def _load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Return the content of a ``torch.save`` file, or of a run's checkpoint directory.

    Libraries import this function as ``pl_load``. By default, no code in a file is run.
    """
    if isinstance(path_or_url, str | os.PathLike) and os.path.isdir(path_or_url):
        return load_checkpoint(path_or_url, map_location)
    return torch.load(path_or_url, map_location=map_location, weights_only=weights_only is None or weights_only)
