"""Where the time of a run goes."""

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports
from .profiler import PassThroughProfiler, Profiler, choose_profiler

if TYPE_CHECKING:
    from .advanced import AdvancedProfiler
    from .pytorch import PyTorchProfiler
    from .simple import SimpleProfiler

_HOMES = {"AdvancedProfiler": "advanced", "PyTorchProfiler": "pytorch", "SimpleProfiler": "simple"}

__all__ = [
    "AdvancedProfiler",
    "PassThroughProfiler",
    "Profiler",
    "PyTorchProfiler",
    "SimpleProfiler",
    "choose_profiler",
]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES, __all__)
