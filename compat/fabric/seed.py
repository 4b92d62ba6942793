"""Fabric's functions for the seed of a process."""

from __future__ import annotations

import os

from ...engine import seed_everything


def reset_seed() -> None:
    """Seed the process again as the last `seed_everything` did. Without an earlier call, do nothing."""
    if "PL_GLOBAL_SEED" in os.environ:
        seed_everything(workers=os.environ.get("PL_SEED_WORKERS") == "1")
