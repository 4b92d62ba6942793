"""Names that scripts import from ``lightning.pytorch.utilities.memory``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ..compat.environment import clear_device_cache as garbage_collection_cuda
    from ..compat.oom import is_cuda_out_of_memory, is_oom_error, is_out_of_cpu_memory

__getattr__, __dir__, __all__ = lazy_exports(__name__)
