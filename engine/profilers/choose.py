"""Selection of a profiler by name."""

from __future__ import annotations

from typing import Any

from ...common.messages import nearest
from .profiler import PassThroughProfiler, Profiler


def choose_profiler(profiler: Any) -> Profiler:
    """Return the profiler that the argument of ``Trainer(profiler=...)`` selects.

    Args:
        profiler: ``"simple"``, ``"advanced"``, ``"pytorch"``, a `Profiler` object, or None for a `PassThroughProfiler`.

    Raises:
        ValueError: If the name is unknown.
        TypeError: If ``profiler`` has the wrong type.
    """
    if profiler is None:
        return PassThroughProfiler()
    if isinstance(profiler, Profiler):
        return profiler
    if not isinstance(profiler, str):
        hint = f" Pass {profiler.__name__}()." if isinstance(profiler, type) and issubclass(profiler, Profiler) else ""
        raise TypeError(f"profiler={profiler!r} must be a profiler's name, a treadle.profilers.Profiler or None.{hint}")
    given, profiler = profiler, profiler.lower()
    # Each is imported only when it is requested, because torch.profiler and cProfile take time to import.
    if profiler == "simple":
        from .simple import SimpleProfiler

        return SimpleProfiler()
    if profiler == "advanced":
        from .advanced import AdvancedProfiler

        return AdvancedProfiler()
    if profiler == "pytorch":
        from .pytorch import PyTorchProfiler

        return PyTorchProfiler()
    names = ("simple", "advanced", "pytorch")
    hint = " TPUs are not supported." if profiler == "xla" else nearest(profiler, names)
    raise ValueError(f"profiler={given!r} is not one of {', '.join(names)}.{hint}")
