"""Which profiler a name stands for."""

from __future__ import annotations

from typing import Any

from ...common.messages import nearest
from .profiler import PassThroughProfiler, Profiler


def choose_profiler(asked: Any) -> Profiler:
    """Return the profiler that ``Trainer(profiler=asked)`` names.

    Args:
        asked: None, ``"simple"``, ``"advanced"``, ``"pytorch"``, or a `Profiler`.

    Raises:
        ValueError: for another name, with the nearest one.
        TypeError: for anything else.
    """
    if asked is None:
        return PassThroughProfiler()
    if isinstance(asked, Profiler):
        return asked
    if not isinstance(asked, str):
        hint = " Put () behind it." if isinstance(asked, type) and issubclass(asked, Profiler) else ""
        raise TypeError(f"profiler={asked!r} must be a name, a treadle.profilers.Profiler or None.{hint}")
    # Each is imported only when it is asked for: torch.profiler and cProfile take time that most runs need not spend.
    if asked == "simple":
        from .simple import SimpleProfiler

        return SimpleProfiler()
    if asked == "advanced":
        from .advanced import AdvancedProfiler

        return AdvancedProfiler()
    if asked == "pytorch":
        from .pytorch import PyTorchProfiler

        return PyTorchProfiler()
    names = ("simple", "advanced", "pytorch")
    hint = " TPUs are not supported." if asked == "xla" else nearest(asked, names)
    raise ValueError(f"profiler={asked!r} is not one of {', '.join(names)}.{hint}")
