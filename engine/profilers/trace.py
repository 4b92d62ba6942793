"""Profiling of a block of code with ``torch.profiler``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...common.validation import choose
from ...strategies import World
from ..configuration import ProfileKwargs


@contextmanager
def profile(handler: ProfileKwargs, world: World) -> Iterator[torch.profiler.profile]:
    """Return a context manager that profiles a block with ``torch.profiler``.

    If ``handler.output_trace_dir`` is set, each rank writes its traces to this directory.

    Args:
        handler: Settings of the profiler.
        world: The ranks of the run. If traces are written, the ranks wait for each other at the end of the block.

    Yields:
        The running ``torch.profiler.profile``.

    Raises:
        ValueError, TypeError, AssertionError: If a setting of the handler is invalid.
    """
    profiler = _build_profiler(handler, world.rank)
    with profiler:
        yield profiler
    if handler.output_trace_dir is not None:
        world.barrier()


def _build_profiler(handler: ProfileKwargs, rank: int) -> torch.profiler.profile:
    from torch.profiler import ProfilerActivity, schedule

    activities = None
    if handler.activities is not None:
        members = {name.lower(): member for name, member in ProfilerActivity.__members__.items()}
        activities = [members[choose("activities", name, members)] for name in handler.activities]
    written = 0

    def export_trace(profiler: Any) -> None:
        nonlocal written
        if handler.output_trace_dir is not None:
            directory = Path(handler.output_trace_dir)
            directory.mkdir(parents=True, exist_ok=True)
            cycle = f"_{written}" if written else ""
            profiler.export_chrome_trace(str(directory / f"profile_{rank}{cycle}.json"))
            written += 1
        if handler.on_trace_ready is not None:
            handler.on_trace_ready(profiler)

    return torch.profiler.profile(
        activities=activities,
        schedule=None if handler.schedule_option is None else schedule(**handler.schedule_option),
        on_trace_ready=export_trace if handler.output_trace_dir is not None else handler.on_trace_ready,
        record_shapes=handler.record_shapes,
        profile_memory=handler.profile_memory,
        with_stack=handler.with_stack,
        with_flops=handler.with_flops,
        with_modules=handler.with_modules,
    )
