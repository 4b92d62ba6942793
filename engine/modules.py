"""Modules compiled in place, so that the names in their state, and what they are, stay their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..strategies import describe_kind

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def compile_modules(
    modules: Iterable[nn.Module], compiler: Compiler, options: Any = None, *, hooks_outside: bool = False
) -> None:
    """Let each of ``modules`` run compiled when it is called, by any of its callers.

    Those that are alike share what the compiler makes. What the user has compiled stays as it is.

    Args:
        modules: what to compile; nothing is compiled before it is called.
        compiler: ``torch.compile`` with its arguments.
        options: what tells this compilation from another one; with None it is the user's own, which `forget` leaves.
        hooks_outside: compile ``forward`` alone, as the hooks exchange parameters, which no graph can hold.
    """
    shared: dict[Any, Callable[..., Any]] = {}
    for module in modules:
        if is_users(module) or (options is not None and _get_compile_options(module) == options):
            continue
        alike = describe_kind(module)
        if alike not in shared:
            shared[alike] = compiler(_copy_function(_forward if hooks_outside else _call, type(module).__name__))
        run = _bind_forward if hooks_outside else _bind_compiled
        module._compiled_call_impl = _note_first_call(module, run(module, shared[alike]), options)  # type: ignore[assignment]


def is_users(module: nn.Module) -> bool:
    """Whether the user has compiled it."""
    call = module._compiled_call_impl
    return "_orig_mod" in module._modules or (call is not None and not hasattr(call, "options"))


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of ``model`` runs compiled, on whoever's word."""
    return any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in model.modules())


def forget(model: nn.Module) -> None:
    """Undo what `compile_modules` did to the parts of ``model`` on the word of an option."""
    for part in model.modules():
        if _get_compile_options(part) is not None:
            part._compiled_call_impl = None


def list_unused(model: nn.Module) -> list[str]:
    """The compiled parts of ``model`` that have never been called: other methods of them run as they are."""
    return [name for name, part in model.named_modules() if getattr(part._compiled_call_impl, "unused", False)]


def list_compiled_names(model: nn.Module) -> list[str]:
    """The names of the modules in ``model`` that run compiled; its class's name is its own."""
    parts = ((name, part) for name, part in model.named_modules() if part._compiled_call_impl is not None)
    return [name or type(part).__name__ for name, part in parts]


def describe_compilations(since: float) -> str:
    """Say how many graphs torch has made since a moment (``time.time()``), how many anew, and why; "" for none."""
    if "torch._dynamo" not in sys.modules:
        return ""
    from torch._dynamo.utils import get_compilation_metrics

    made = [metric for metric in get_compilation_metrics() if metric.co_name and (metric.start_time or 0) >= since]
    again = [metric for metric in made if getattr(metric, "recompile_reason", None)]
    if not made:
        return ""
    text = f"torch.compile: {len(made)} graph{'s' * (len(made) > 1)}"
    if again:
        name, reason = str(again[0].co_name).removeprefix("_call_").removeprefix("_forward_"), again[0].recompile_reason
        reason = str(reason).partition("\n")[0].partition(": ")[2] or str(reason)
        text += f", {len(again)} of them as another did not fit; the first, of {name}: {reason}"
    return text


def _get_compile_options(module: nn.Module) -> Any:
    return getattr(module._compiled_call_impl, "options", None)


# Not `nn.Module.compile`: it leaves torch's own containers, such as a `Sequential`, as they are without a word (torch
# 2.13). A function gets the module as an argument: a closure would be compiled anew for each one (torch 2.6).


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def _copy_function(function: Any, name: str) -> Callable[..., Any]:
    """A copy of ``function`` with code of its own: torch keeps at most eight graphs for one code, of all modules."""
    return FunctionType(function.__code__.replace(co_name=f"{function.__name__}_{name}"), function.__globals__)


def _bind_compiled(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(module, *args, **kwargs)

    return call


def _bind_forward(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    attributes, plain = module.__dict__, _bind_compiled(module, compiled)

    def call(*args: Any, **kwargs: Any) -> Any:
        # Only for the call: a copy of the module would compute with this one's parameters else.
        attributes["forward"] = plain
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            attributes.pop("forward", None)

    return call


def _note_first_call(module: nn.Module, call: Any, options: Any) -> Callable[..., Any]:
    """``call``, which also notes that it was called at all."""

    def first(*args: Any, **kwargs: Any) -> Any:
        module._compiled_call_impl = call
        return call(*args, **kwargs)

    call.options = first.options = options  # type: ignore[attr-defined]
    first.unused = True  # type: ignore[attr-defined]
    return first


class CompiledBatches:
    """What each batch means to the code that is compiled for it.

    The short last batch of an epoch runs as it would without compilation, where no graph is there that fits it. A graph
    of its own would have to be made; torch would make one for any size, and use it for the full batches that follow.

    Args:
        graphs: the code replays CUDA graphs, which are to be told where an iteration begins.
    """

    def __init__(self, graphs: bool) -> None:
        self._graphs = graphs
        self._in_short_batch = False

    def __call__(self, is_short: bool) -> AbstractContextManager[Any]:
        """Return the context that one batch is worked on in; a validation may come within that of a training batch."""
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()
        if is_short:
            return self._run_short()
        return torch.compiler.set_stance("default") if self._in_short_batch else nullcontext()

    @contextmanager
    def _run_short(self) -> Iterator[None]:
        before, self._in_short_batch = self._in_short_batch, True
        try:
            with torch.compiler.set_stance("eager_on_recompile"):
                yield
        finally:
            self._in_short_batch = before


@contextmanager
def plain_calls(model: nn.Module) -> Iterator[None]:
    """A context in which no part of ``model`` runs compiled."""
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
    """Evaluation mode inside; afterwards each part is in the mode it was in, frozen parts too.

    Args:
        module: whose parts.
        enter: sets the modes for the inside; by default all are in evaluation mode.
    """
    modes = {part: part.training for part in module.modules()}
    (enter or module.eval)()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training
