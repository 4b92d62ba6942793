"""Compilation of modules in place, and contexts in which modules are called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..common.messages import format_count
from ..strategies import describe_kind

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def compile_modules(
    modules: Iterable[nn.Module], compiler: Compiler, options: Any, *, hooks_outside: bool = False
) -> None:
    """Compile each of ``modules`` in place, so that calling the module runs compiled code.

    Modules of the same kind share compiled code. Modules that the user has compiled are left unchanged, and so are
    modules that were compiled with equal ``options``, which identify the compiler settings. With ``hooks_outside``,
    only ``forward`` is compiled, because hooks that gather a sharded module's parameters must run uncompiled.
    """
    shared: dict[Any, Callable[..., Any]] = {}
    for module in modules:
        if is_users(module) or getattr(module._compiled_call_impl, "options", None) == options:
            continue
        alike = describe_kind(module)
        if alike not in shared:
            shared[alike] = compiler(_copy_function(_forward if hooks_outside else _call, type(module).__name__))
        run = _bind_forward if hooks_outside else _bind_compiled
        module._compiled_call_impl = _note_first_call(module, run(module, shared[alike]), options)  # type: ignore[assignment]


def is_users(module: nn.Module) -> bool:
    """Return whether the user, rather than Treadle, compiled the module."""
    call = module._compiled_call_impl
    return "_orig_mod" in module._modules or (call is not None and not hasattr(call, "options"))


def is_compiled(model: nn.Module) -> bool:
    """Return whether ``model`` or one of its submodules is compiled."""
    return any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in model.modules())


def forget(model: nn.Module) -> None:
    """Undo what `compile_modules` compiled in ``model``."""
    for part in model.modules():
        if hasattr(part._compiled_call_impl, "options"):
            part._compiled_call_impl = None


def list_unused(model: nn.Module) -> list[str]:
    """Return the names of the modules that Treadle compiled but that were never called.

    Args:
        model: The model to search.
    """
    return [name for name, part in model.named_modules() if getattr(part._compiled_call_impl, "unused", False)]


def list_compiled_names(model: nn.Module) -> list[str]:
    """Return the names of the modules in ``model`` that are compiled in place.

    If ``model`` itself is compiled, it is listed under the name of its class.

    Args:
        model: The model to search.
    """
    parts = ((name, part) for name, part in model.named_modules() if part._compiled_call_impl is not None)
    return [name or type(part).__name__ for name, part in parts]


def describe_compilations(since: float) -> str:
    """Describe the graphs that torch has compiled since a point in time.

    Args:
        since: A time as returned by ``time.time()``, in seconds.

    Returns:
        Text such as ``"torch.compile: 2 graphs"``; "" if torch compiled no graph.
    """
    if "torch._dynamo" not in sys.modules:
        return ""
    from torch._dynamo.utils import get_compilation_metrics

    metrics = [metric for metric in get_compilation_metrics() if metric.co_name and (metric.start_time or 0) >= since]
    recompiled = [metric for metric in metrics if getattr(metric, "recompile_reason", None)]
    if not metrics:
        return ""
    text = f"torch.compile: {format_count(len(metrics), 'graph')}"
    if recompiled:
        name, reason = (
            str(recompiled[0].co_name).removeprefix("_call_").removeprefix("_forward_"),
            recompiled[0].recompile_reason,
        )
        reason = str(reason).partition("\n")[0].partition(": ")[2] or str(reason)
        text += f", {len(recompiled)} recompiled (first {name}: {reason})"
    return text


# Not `nn.Module.compile`: it silently leaves torch's own containers, such as a `Sequential`, uncompiled (torch 2.13).
# The module is passed to a function as an argument, because a closure would be compiled anew for each module (torch
# 2.6).


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _copy_function(function: Any, name: str) -> Callable[..., Any]:
    """Copy ``function`` with a code object of its own, because torch limits the number of graphs per code object."""
    return FunctionType(function.__code__.replace(co_name=f"{function.__name__}_{name}"), function.__globals__)


def _bind_compiled(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(module, *args, **kwargs)

    return call


def _bind_forward(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    attributes, plain = module.__dict__, _bind_compiled(module, compiled)

    def call(*args: Any, **kwargs: Any) -> Any:
        # Only during the call, because a copy of the module would otherwise compute with this module's parameters.
        attributes["forward"] = plain
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            attributes.pop("forward", None)

    return call


def _note_first_call(module: nn.Module, call: Any, options: Any) -> Callable[..., Any]:

    def first(*args: Any, **kwargs: Any) -> Any:
        module._compiled_call_impl = call
        return call(*args, **kwargs)

    call.options = first.options = options  # type: ignore[attr-defined]
    first.unused = True  # type: ignore[attr-defined]
    return first


class CompiledBatches:
    """Factory of the contexts in which batches run compiled code.

    A short last batch of an epoch runs uncompiled if no existing graph fits it. Otherwise, torch would compile a graph
    with dynamic shapes for it, and also use this graph for the full batches that follow.
    """

    def __init__(self, graphs: bool) -> None:
        self._graphs = graphs
        self._in_short_batch = False

    def __call__(self, is_short: bool) -> AbstractContextManager[Any]:
        """Return the context for one batch, which may be nested in that of another batch."""
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()
        if is_short:
            return self._run_short()
        return torch.compiler.set_stance("default") if self._in_short_batch else nullcontext()

    @contextmanager
    def _run_short(self) -> Iterator[None]:
        previous, self._in_short_batch = self._in_short_batch, True
        try:
            with torch.compiler.set_stance("eager_on_recompile"):
                yield
        finally:
            self._in_short_batch = previous


@contextmanager
def plain_calls(model: nn.Module) -> Iterator[None]:
    """Return a context in which the modules of ``model`` that are compiled in place run uncompiled.

    Args:
        model: The model to run uncompiled.
    """
    compiled = {part: part._compiled_call_impl for part in model.modules() if part._compiled_call_impl is not None}
    for part in compiled:
        part._compiled_call_impl = None
    try:
        yield
    finally:
        for part, call in compiled.items():
            part._compiled_call_impl = call


@contextmanager
def evaluation_mode(module: nn.Module, enter: Callable[[], Any] | None = None) -> Iterator[None]:
    """Return a context that sets evaluation mode and restores the mode of each submodule afterwards.

    Args:
        module: The module to evaluate.
        enter: Function that puts the module into evaluation mode. Default: ``module.eval``.
    """
    modes = {part: part.training for part in module.modules()}
    (enter or module.eval)()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def refuse_batch_norm(models: Iterable[nn.Module]) -> None:
    """Raise a ValueError if a layer in training mode tracks statistics, which can't be combined with a `FixedTree`."""
    for model in models:
        for name, module in model.named_modules():
            tracks = isinstance(module, _NormBase) and module.track_running_stats
            if module.training and (tracks or isinstance(module, nn.SyncBatchNorm)):
                raise ValueError(
                    f"step_micro_batches can't be combined with {type(module).__name__} in training mode ({name}), "
                    "whose statistics depend on the micro-batches that a process has computed before. Use GroupNorm or "
                    "LayerNorm, or call eval() of the layer after train()."
                )
