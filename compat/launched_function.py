"""`PrepareForLaunch`, Accelerate's wrapper of a function that launched processes run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from ..strategies.distributed import DistributedType


class PrepareForLaunch:
    """Callable for ``torch.multiprocessing`` that sets this process's rank and runs a function.

    Args:
        launcher: Function to run.
        distributed_type: A `DistributedType` or its value. With ``MULTI_*``, the rank is computed from the process's
            index and the environment variables ``NODE_RANK`` and ``NPROC``; other types set no rank. Default: ``"NO"``.
        debug: Whether to connect the processes with gloo instead, through the file ``ACCELERATE_DEBUG_RDV_FILE``.
            Default: False.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: Any = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Set the rank or connect the processes, as configured, and run the function with ``args``."""
        if self.debug:
            size = int(os.environ["WORLD_SIZE"])
            store = torch.distributed.FileStore(os.environ["ACCELERATE_DEBUG_RDV_FILE"], size)
            torch.distributed.init_process_group("gloo", rank=index, store=store, world_size=size)
        elif self.distributed_type.startswith("MULTI_"):
            os.environ["LOCAL_RANK"] = str(index)
            before = int(os.environ.get("NPROC", 1)) * int(os.environ.get("NODE_RANK", 0))
            os.environ["RANK"] = str(before + index)
        os.environ["FORK_LAUNCHED"] = "1"
        self.launcher(*args)
