"""Profiler of operations on the CPU and the device, based on ``torch.profiler``."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import EventList, record_function
from torch.profiler import ProfilerAction, ProfilerActivity, schedule

from ...common.messages import format_count, nearest, warn
from ...common.validation import choose
from ...strategies import World
from ..configuration import ProfileKwargs
from .profiler import Profiler, find_running


class PyTorchProfiler(Profiler):
    """Profiler that records the operations of selected steps with ``torch.profiler``, and writes a trace per process.

    Open a trace, such as ``fit-0.pt.trace.json``, in https://ui.perfetto.dev or in TensorBoard.

    Args:
        dirpath: See `Profiler`.
        filename: See `Profiler`.
        group_by_input_shapes: In the report's table of operations, show a separate row for each combination of input
            shapes. Default: False.
        emit_nvtx: Emit NVTX ranges for Nsight Systems instead of recording operations. Requires a CUDA device.
            Default: False.
        export_to_chrome: Write each recorded cycle of the schedule to a trace file in Chrome's format. Default: True.
        row_limit: Maximum number of rows in the table; -1 for all. Default: 20.
        sort_by_key: Column by which the table is sorted, one of `AVAILABLE_SORT_KEYS`. Default: the device time, or the
            CPU time if only CPU activity is recorded.
        record_module_names: Create a range for each call of a submodule, except within compiled code. Default: True.
        table_kwargs: Further arguments of torch's ``EventList.table``.
        profiler_kwargs: Arguments of ``torch.profiler.profile``, such as ``activities``. The default ``schedule``
            records steps 3 to 5. ``schedule=None`` records all steps, and keeps them in memory until the recording
            ends. If ``on_trace_ready`` is passed, it is called for each recorded cycle, and no traces are written.

    Raises:
        ValueError: If a sort key or an argument is unknown.
        TypeError: If ``schedule``, ``dirpath`` or ``filename`` has the wrong type.

    Examples:
        >>> import treadle
        >>> from treadle.profilers import PyTorchProfiler
        >>> profiler = PyTorchProfiler(row_limit=10, profile_memory=True)
        >>> trainer = treadle.Trainer(profiler=profiler, logger=False)
    """

    AVAILABLE_SORT_KEYS = frozenset(
        (
            *(f"{unit}_time{total}" for unit in ("cpu", "cuda", "device") for total in ("", "_total")),
            *(f"{prefix}{unit}_memory_usage" for prefix in ("", "self_") for unit in ("cpu", "cuda", "device")),
            *(f"self_{unit}_time_total" for unit in ("cpu", "cuda", "device")),
            "count",
        )
    )

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: dict[str, Any] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        if sort_by_key is not None:
            choose("sort_by_key", sort_by_key, sorted(self.AVAILABLE_SORT_KEYS))
        _check_names("table_kwargs", table_kwargs or {}, EventList.table, ("self", "sort_by", "row_limit"))
        _check_names("PyTorchProfiler", profiler_kwargs, torch.profiler.profile.__init__, ("self",))
        self.plan = profiler_kwargs.pop("schedule", schedule(wait=1, warmup=1, active=3, repeat=1))
        if self.plan is not None and not (callable(self.plan) and isinstance(self.plan(0), ProfilerAction)):
            raise TypeError(f"schedule={self.plan!r} must be None or a result of torch.profiler.schedule(...).")
        self.on_trace_ready: Callable[..., Any] | None = profiler_kwargs.pop("on_trace_ready", None)
        profiler_kwargs["record_shapes"] = group_by_input_shapes or profiler_kwargs.get("record_shapes", False)
        self.group_by_input_shapes = group_by_input_shapes
        self.emit_nvtx = emit_nvtx
        self.export_to_chrome = export_to_chrome
        self.row_limit = row_limit
        self.sort_by_key = sort_by_key
        self.record_module_names = record_module_names
        self.table_kwargs = dict(table_kwargs or {})
        self.profiler_kwargs = profiler_kwargs
        self.profiler: Any = None
        self.traces: list[Path] = []
        self.function_events: EventList | None = None
        self._table = ""
        self._steps = 0
        self._running: list[tuple[str, Any]] = []
        self._names: ModuleNames | None = None

    # -- a stage -------------------------------------------------------------------------------------------------

    @property
    def needs_directory(self) -> bool:
        """True if the profiler writes traces or a report; see `Profiler.needs_directory`."""
        traces = self.export_to_chrome and not self.emit_nvtx and self.on_trace_ready is None
        return traces or self.filename is not None

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Prepare for a stage, and begin recording; see `Profiler.setup`.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            local_rank: Rank to include in file names; None to omit it.
            log_dir: Directory of the profiler's files if ``dirpath`` is not set.

        Raises:
            ValueError: If ``emit_nvtx`` is set without a CUDA device.
        """
        self._end()  # of actions before the stage
        super().setup(stage, local_rank, log_dir)

    def _begin(self) -> None:
        self.traces, self._table, self._steps, self._running = [], "", 0, []
        self.function_events = None
        if self.emit_nvtx:
            if not torch.cuda.is_available():
                raise ValueError(
                    "PyTorchProfiler(emit_nvtx=True) needs a CUDA device, but this process has none. Remove emit_nvtx."
                )
            options = {name: value for name, value in self.profiler_kwargs.items() if name == "record_shapes"}
            self.profiler = torch.autograd.profiler.emit_nvtx(**options)
        else:
            # Merged first, so that a command line takes torch's arguments, which differ by version, as they are.
            options = self.profiler_kwargs | {"schedule": self.plan, "on_trace_ready": self._export_cycle}
            self.profiler = torch.profiler.profile(**options)
        self.profiler.__enter__()
        if self.record_module_names and self.model is not None:
            self._names = ModuleNames(self.model)

    def start(self, action_name: str) -> None:
        """Begin the range of an action in the trace; see `Profiler.start`.

        Outside of a Trainer, the first action also begins the recording, which `describe` and `summary` end.

        Args:
            action_name: The name of the action.
        """
        if self.profiler is None and self._stage is None:
            self._begin()
        record = record_function(f"[treadle]{action_name}")
        record.__enter__()
        self._running.append((action_name, record))

    def stop(self, action_name: str) -> None:
        """End the range of an action in the trace; see `Profiler.stop`.

        Args:
            action_name: The name that `start` received.

        Raises:
            ValueError: If no action with this name is running.
        """
        self._running.pop(find_running(self._running, action_name))[1].__exit__(None, None, None)

    def step(self) -> None:
        """Advance the recording schedule by one step; see `Profiler.step`."""
        self._steps += 1
        if not self.emit_nvtx and self.profiler is not None:
            self.profiler.step()

    def describe(self) -> None:
        """End the recording and show or write the report; see `Profiler.describe`."""
        self._end()
        super().describe()

    def summary(self) -> str:
        """End the recording, and return the table of operations in its last cycle; "" if no cycle was recorded."""
        self._end()
        return self._table

    def teardown(self, stage: str | None) -> None:
        """End the recording; see `Profiler.teardown`.

        Args:
            stage: The stage.
        """
        self._end()

    def _end(self) -> None:
        if self._names is not None:
            self._names.remove()
            self._names = None
        profiler, self.profiler = self.profiler, None
        if profiler is None:
            return
        while self._running:  # actions that an error left open
            self._running.pop()[1].__exit__(None, None, None)
        profiler.__exit__(None, None, None)
        if not self.emit_nvtx and not self._table:
            warn(
                f"PyTorchProfiler has recorded nothing: {self._stage or 'the run'} ended after "
                f"{format_count(self._steps, 'step')}, before the schedule began to record. Use "
                "PyTorchProfiler(schedule=None) to record all steps."
            )

    def _export_cycle(self, profiler: Any) -> None:
        self.function_events = profiler.events()
        rows = profiler.key_averages(group_by_input_shape=self.group_by_input_shapes)
        on_device = any(activity.name != "CPU" for activity in profiler.activities)
        key = self.sort_by_key or ("device_time_total" if on_device else "cpu_time_total")
        head = f"Operations of {self._stage or 'the block'}, up to step {self._steps}"
        self._table = f"{head}\n{rows.table(sort_by=key, row_limit=self.row_limit, **self.table_kwargs)}"
        if self.on_trace_ready is not None:
            self.on_trace_ready(profiler)
        elif self.export_to_chrome:
            cycle = str(len(self.traces)) if self.traces else ""
            path = self.path_for(".pt.trace.json", cycle)
            profiler.export_chrome_trace(str(path))
            self.traces.append(path)


class ModuleNames:
    """Hooks that record each call of a submodule as a range with its name in the trace, until `remove` is called.

    Compiled submodules are excluded, because a range would cause graph breaks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._open: list[Any] = []
        self._handles: list[Any] = []
        compiled: set[nn.Module] = set()
        for name, part in model.named_modules():
            if part in compiled or part._compiled_call_impl is not None or "_orig_mod" in part._modules:
                compiled.update(part.modules())
            elif name:
                text = f"[treadle][module]{type(part).__module__}.{type(part).__name__}: {name}"
                self._handles.append(part.register_forward_pre_hook(partial(self._enter, text)))
                self._handles.append(part.register_forward_hook(self._exit, always_call=True))

    def _enter(self, text: str, *_: Any) -> None:
        record = record_function(text)
        record.__enter__()
        self._open.append(record)

    def _exit(self, *_: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _check_names(owner: str, options: dict[str, Any], function: Any, reserved: tuple[str, ...]) -> None:
    valid_names = [name for name in inspect.signature(function).parameters if name not in reserved]
    for name in options:
        if name not in valid_names:
            hint = nearest(name, valid_names) or f" Use one of {', '.join(valid_names)}."
            raise ValueError(f"{owner} does not support the argument {name!r}.{hint}")


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
    options = handler.to_kwargs()
    plan, directory = options.pop("schedule_option", None), options.pop("output_trace_dir", None)
    if handler.activities is not None:
        members = {name.lower(): member for name, member in ProfilerActivity.__members__.items()}
        options["activities"] = [members[choose("activities", name, members)] for name in handler.activities]
    if plan is not None:
        options["schedule"] = schedule(**plan)
    cycles = itertools.count()

    def export_trace(profiler: Any) -> None:
        folder, cycle = Path(directory), next(cycles)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{rank}{f'_{cycle}' if cycle else ''}.json"))
        if handler.on_trace_ready is not None:
            handler.on_trace_ready(profiler)

    if directory is not None:
        options["on_trace_ready"] = export_trace
    return torch.profiler.profile(**options)
