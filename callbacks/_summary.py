"""Table of a model's modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..common.messages import describe_error, format_count, warn
from ..common.validation import check_int
from ..engine import evaluation_mode, isolated_random_state, move_data_to_device
from ..strategies.distributed import get_original_class, is_sharded, local

_UNKNOWN = "?"
_WIDTH = 80  # of a terminal
_LIGHTNINGS_HEADS = {"parameters": "Params", "per device": "Params per Device", "in": "In sizes", "out": "Out sizes"}


@dataclass
class Part:
    """Row of a `Summary`, which describes one module.

    Attributes:
        name: Path of the module in the model; ``(own)`` for parameters that belong to the model itself.
        parameters: Number of parameters. A sharded parameter counts in full.
        lazy: Whether the module also has lazy parameters, which are not counted.
        local: Number of parameters that this process holds.
        frozen: Whether the module has parameters and all of them are frozen.
        flops: Number of FLOPs in the run with the example input, or None.
    """

    name: str
    type: str
    parameters: int
    lazy: bool
    local: int
    training: bool
    frozen: bool
    flops: int | None = None
    in_size: Any = _UNKNOWN
    out_size: Any = _UNKNOWN


class Summary:
    """Summary of a model's modules, returned by `summarize`. ``str(summary)`` returns it as a table.

    Attributes:
        layers: Rows of the table.
        measured: Whether the model was successfully run with its example input.
        total_parameters, trainable_parameters: Total number of parameters and number of trainable parameters. A sharded
            parameter counts in full. A parameter that several modules share counts once. Lazy parameters are not
            counted.
        model_size: Size of the counted parameters in MB (1,000,000 bytes).
        total_training_modes: Dict with the number of modules in training mode (``"train"``) and in evaluation mode
            (``"eval"``), not counting the model itself.
        total_flops: Number of FLOPs in the run with the example input; 0 if they were not counted.

    Examples:
        >>> import torch
        >>> from treadle.callbacks import summarize
        >>> summary = summarize(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()))
        >>> summary.layer_types, summary.param_nums, summary.total_parameters
        (['Linear', 'ReLU'], [36, 0], 36)
    """

    NUMBERS = ("parameters", "per device", "FLOPs")

    def __init__(self, module: nn.Module, layers: list[Part], total_flops: int, measured: bool) -> None:
        self.layers = layers
        self.total_flops = total_flops
        self.measured = measured
        parameters = list(module.parameters())
        self._total_count = _count_elements(parameters)
        self._trainable_count = _count_elements(p for p in parameters if p.requires_grad)
        self._frozen_count = _count_elements(p for p in parameters if not p.requires_grad)
        self.total_parameters, self.trainable_parameters = self._total_count[0], self._trainable_count[0]
        self.model_size = sum(p.numel() * p.element_size() for p in parameters if not is_lazy(p)) / 1e6
        self._sharded = any(map(is_sharded, parameters))
        modes = [part.training for part in module.modules()][1:]
        self.total_training_modes = {"train": modes.count(True), "eval": modes.count(False)}

    @property
    def layer_names(self) -> list[str]:
        """Path of each row's module in the model; ``(own)`` for the model's own parameters."""
        return [part.name for part in self.layers]

    @property
    def layer_types(self) -> list[str]:
        """Class names of the modules."""
        return [part.type for part in self.layers]

    @property
    def param_nums(self) -> list[int]:
        """Number of parameters in each row."""
        return [part.parameters for part in self.layers]

    @property
    def training_modes(self) -> list[bool]:
        """Mode of each module: True for training mode."""
        return [part.training for part in self.layers]

    @property
    def in_sizes(self) -> list[Any]:
        """Shapes of the modules' inputs."""
        return [part.in_size for part in self.layers]

    @property
    def out_sizes(self) -> list[Any]:
        """Shapes of the modules' outputs."""
        return [part.out_size for part in self.layers]

    def columns(self) -> list[tuple[str, list[str]]]:
        """Return the columns of the table: pairs of a header and its cells."""
        rows = self.layers
        columns = [
            ("name", [row.name for row in rows]),
            ("type", [row.type for row in rows]),
            ("parameters", [_format_count(row.parameters, row.lazy) for row in rows]),
            ("mode", [("train" if row.training else "eval") + (", frozen" if row.frozen else "") for row in rows]),
        ]
        if self._sharded:
            columns.insert(3, ("per device", [f"{row.local:,}" for row in rows]))
        if self.measured:
            columns.append(("FLOPs", [_UNKNOWN if row.flops is None else f"{row.flops:,}" for row in rows]))
            columns.append(("in", [str(row.in_size) for row in rows]))
            columns.append(("out", [str(row.out_size) for row in rows]))
        return columns

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:  # Lightning's name, which public projects read
        columns = self.columns()
        index = list(map(str, range(len(columns[0][1]))))
        heads = [_LIGHTNINGS_HEADS.get(head, head[0].upper() + head[1:]) for head, _ in columns]
        return [(" ", index), *zip(heads, (cells for _, cells in columns), strict=True)]

    def totals(self) -> str:
        """Return the totals below the table, in lines of at most 80 characters unless the numbers are huge."""
        modes = self.total_training_modes
        parts = [
            f"{_format_count(*self._total_count)} parameters: {_format_count(*self._trainable_count)} trainable, "
            f"{_format_count(*self._frozen_count)} frozen",
            f"{self.model_size * 1e6 / 2**20:,.1f} MiB",
            f"{format_count(modes['train'], 'module')} in train mode, {modes['eval']} in eval mode",
            *([f"{self.total_flops:,} FLOPs for the example input"] if self.measured else []),
        ]
        lines = [parts[0]]
        for part in parts[1:]:
            if len(lines[-1]) + len(part) + 2 <= _WIDTH:
                lines[-1] += f"; {part}"
            else:
                lines.append(part)
        return "\n".join(lines)

    def __str__(self) -> str:
        columns = self.columns()
        widths = [max(map(len, (head, *cells))) for head, cells in columns]
        right = [head in self.NUMBERS for head, _ in columns]
        rows = [[head for head, _ in columns], *map(list, zip(*(cells for _, cells in columns), strict=True))]
        lines = [
            "  ".join(
                f"{cell:>{width}}" if to_right else f"{cell:<{width}}"
                for cell, width, to_right in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in rows
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:], rule, self.totals()])


def summarize(
    module: nn.Module,
    max_depth: int = 1,
    *,
    forward: Callable[..., Any] | None = None,
    prepare: Callable[[Any], Any] | None = None,
) -> Summary:
    """Return a summary of a model's modules.

    A model with an ``example_input_array`` is run once with this input, in evaluation mode, to record shapes and count
    FLOPs. If the run fails, a warning is issued. The input may be a single argument, a list or tuple of arguments, or a
    dict of arguments by name. A model with lazy parameters or buffers is not run.

    Args:
        module: The model.
        max_depth: Levels of nested modules to show; -1 shows all. Default: 1.
        forward: Function that runs the model. Default: the model itself.
        prepare: Function that prepares the example input. Default: a function that moves it to the device of the model.

    Raises:
        ValueError: If ``max_depth`` is invalid.
    """
    check_int("max_depth", max_depth, -1, "shows all")
    parts = {
        name: part for name, part in module.named_modules() if name and (max_depth == -1 or name.count(".") < max_depth)
    }
    rows = {name: _describe(name, part, list(part.parameters())) for name, part in parts.items()}
    total = 0
    example = getattr(module, "example_input_array", None)
    measured = example is not None and not any(map(is_lazy, (*module.parameters(), *module.buffers())))
    if measured:
        try:
            total = _run(module, parts, rows, forward or module, (prepare or _make_mover(module))(example))
        except Exception as error:
            measured = False
            warn(
                f"the model failed on example_input_array ({describe_error(error).rstrip('.')}), so the "
                "summary shows neither FLOPs nor input and output sizes. Fix or remove example_input_array."
            )
    layers = list(rows.values())
    if direct_parameters := list(module.parameters(recurse=False)):
        layers.append(_describe("(own)", module, direct_parameters))
    return Summary(module, layers, total, measured)


def _describe(name: str, part: nn.Module, parameters: list[nn.Parameter]) -> Part:
    count, lazy = _count_elements(parameters)
    local_count = sum(local(p).numel() for p in parameters if not is_lazy(p))
    frozen = bool(parameters) and not any(p.requires_grad for p in parameters)
    return Part(name, get_original_class(part).__name__, count, lazy, local_count, part.training, frozen)


def _run(
    module: nn.Module, parts: dict[str, nn.Module], rows: dict[str, Part], forward: Callable[..., Any], example: Any
) -> int:
    """Run the model once, record shapes and FLOPs, and return the total number of FLOPs."""
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with ExitStack() as stack:
        for name, part in parts.items():
            if not isinstance(part, torch.jit.ScriptModule):  # ScriptModules do not support hooks
                _watch(part, rows[name], counter.get_total_flops, stack)
        stack.enter_context(isolated_random_state())
        stack.enter_context(evaluation_mode(module))
        stack.enter_context(_disable_compilation(module))
        stack.enter_context(torch.no_grad())
        stack.enter_context(counter)
        if isinstance(example, Mapping):
            forward(**example)
        elif isinstance(example, list | tuple):
            forward(*example)
        else:
            forward(example)
    return int(counter.get_total_flops())


def _watch(part: nn.Module, row: Part, flops: Callable[[], int], stack: ExitStack) -> None:
    flops_at_start: list[int] = []

    def record_start(_: nn.Module, args: Any) -> None:
        flops_at_start.append(flops())

    def record_result(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        row.flops = (row.flops or 0) + flops() - flops_at_start.pop()
        if row.in_size == _UNKNOWN:
            inputs = (*args, *kwargs.values())
            row.in_size = _collect_shapes(inputs[0] if len(inputs) == 1 else inputs)
            row.out_size = _collect_shapes(output)

    row.flops = 0
    stack.callback(part.register_forward_pre_hook(record_start).remove)
    stack.callback(part.register_forward_hook(record_result, with_kwargs=True).remove)


def _collect_shapes(value: Any) -> Any:
    if hasattr(value, "shape"):
        return list(value.shape)
    if isinstance(value, Mapping):
        return {name: _collect_shapes(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_collect_shapes(item) for item in value]
    return _UNKNOWN


def _disable_compilation(module: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which compiled modules run eagerly, because compiling takes time."""
    compiled = any(getattr(part, "_compiled_call_impl", None) is not None for part in module.modules())
    if compiled or any(type(part).__name__ == "OptimizedModule" for part in module.modules()):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def _make_mover(module: nn.Module) -> Callable[[Any], Any]:
    first = next(iter((*module.parameters(), *module.buffers())), None)
    return lambda example: example if first is None else move_data_to_device(example, first.device)


def _count_elements(parameters: Iterable[nn.Parameter]) -> tuple[int, bool]:
    parameter_list = list(parameters)
    return sum(p.numel() for p in parameter_list if not is_lazy(p)), any(map(is_lazy, parameter_list))


def _format_count(count: int, lazy: bool) -> str:
    if lazy:
        return f"{count:,} + lazy" if count else "lazy"
    return f"{count:,}"
