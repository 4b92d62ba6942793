"""Profiler of the functions that each action calls, based on Python's ``cProfile``."""

from __future__ import annotations

import cProfile
import io
import pstats
from pathlib import Path

from .profiler import Profiler, find_running


class AdvancedProfiler(Profiler):
    """Profiler that uses Python's ``cProfile`` to record every function that an action calls.

    The profiler makes Python code several times slower, so use `SimpleProfiler` first to find the slow actions.

    Args:
        dirpath: See `Profiler`.
        filename: See `Profiler`.
        line_count_restriction: Number (int) or fraction (float from 0.0 to 1.0) of functions to show for each
            action. The functions with the longest cumulative times are shown. As in ``pstats``, any other number
            shows all of them. Default: 1.0.
        dump_stats: If True, `summary` also writes each action's statistics to a file that ``python -m pstats`` can
            read. Default: False.

    Raises:
        TypeError: If ``dirpath`` or ``filename`` is neither a string nor a path.

    Examples:
        >>> from treadle.profilers import AdvancedProfiler
        >>> profiler = AdvancedProfiler(line_count_restriction=5)
        >>> with profiler.profile("sort"):
        ...     numbers = sorted(range(1000), key=lambda n: -n)
        >>> profiler.summary().startswith("Profile of sort")
        True
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        self._running: list[tuple[str]] = []

    @property
    def needs_directory(self) -> bool:
        """True if the profiler writes files; see `Profiler.needs_directory`."""
        return self.dump_stats or self.filename is not None

    def _begin(self) -> None:
        self.profiled_actions.clear()
        self._running.clear()

    def start(self, action_name: str) -> None:
        """Begin recording an action; see `Profiler.start`.

        Args:
            action_name: The name of the action.
        """
        if self._running:
            self.profiled_actions[self._running[-1][0]].disable()
        self._running.append((action_name,))
        self.profiled_actions.setdefault(action_name, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        """End the recording of an action; see `Profiler.stop`.

        Args:
            action_name: The name that `start` received.

        Raises:
            ValueError: If no action with this name is running.
        """
        place = find_running(self._running, action_name)
        self.profiled_actions[self._running[-1][0]].disable()
        del self._running[place]
        if self._running:
            self.profiled_actions[self._running[-1][0]].enable()

    def summary(self) -> str:
        """Return the report as text. If ``dump_stats`` is True, also write the statistics to files."""
        parts = []
        for name, profile in self.profiled_actions.items():
            profile.create_stats()
            if not profile.stats:  # type: ignore[attr-defined]  # nothing was called
                continue
            if self.dump_stats:
                profile.dump_stats(self.path_for(".prof", name))
            text = io.StringIO()
            pstats.Stats(profile, stream=text).strip_dirs().sort_stats("cumulative").print_stats(
                self.line_count_restriction
            )
            parts.append(f"Profile of {name}\n{text.getvalue().strip()}\n")
        return "\n".join(parts)
