"""Which functions the time of each action goes into: Python's own profiler."""

from __future__ import annotations

import cProfile
import io
import pstats
from pathlib import Path

from .profiler import Profiler


class AdvancedProfiler(Profiler):
    """Records, for each action, every function called in it, with Python's ``cProfile``.

    What is called in an action within another one counts for the inner one only. It slows Python code down several
    times; `SimpleProfiler` tells where to look first.

    Args:
        dirpath, filename: see `Profiler`.
        line_count_restriction: how many functions to show of each action: a number, or a share up to 1.0.
        dump_stats: write each action's statistics to a file, for ``python -m pstats`` and viewers such as snakeviz.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        if isinstance(line_count_restriction, bool) or not isinstance(line_count_restriction, int | float):
            raise TypeError(
                f"line_count_restriction={line_count_restriction!r} must be a number, or a share up to 1.0."
            )
        if line_count_restriction < 0 or (isinstance(line_count_restriction, float) and line_count_restriction > 1):
            raise ValueError(
                f"line_count_restriction={line_count_restriction!r} must be a number, or a share up to 1.0."
            )
        self.line_count_restriction = line_count_restriction
        self.dump_stats = dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        self._running: list[str] = []

    @property
    def needs_directory(self) -> bool:
        """See `Profiler.needs_directory`."""
        return self.dump_stats or self.filename is not None

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """See `Profiler.setup`. Each stage is measured by itself."""
        super().setup(stage, local_rank, log_dir)
        self.profiled_actions.clear()
        self._running.clear()

    def start(self, action_name: str) -> None:
        """See `Profiler.start`."""
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
        self._running.append(action_name)
        self.profiled_actions.setdefault(action_name, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        """See `Profiler.stop`.

        Raises:
            ValueError: if it does not run.
        """
        if action_name not in self._running:
            raise ValueError(f"{action_name!r} can't stop: it was never started.")
        self.profiled_actions[self._running[-1]].disable()
        place = len(self._running) - 1 - self._running[::-1].index(action_name)
        del self._running[place]
        if self._running:
            self.profiled_actions[self._running[-1]].enable()

    def summary(self) -> str:
        """See `Profiler.summary`. Writes the statistics too, if it is to dump them."""
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
