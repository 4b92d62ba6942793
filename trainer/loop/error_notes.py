"""Notes on errors: the position of the run, and explanations of torch's messages."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...callbacks import Callback
from ...common.messages import read_text
from ...engine import Loader
from ...engine.optim import is_out_of_memory, nonfinite
from ...strategies.distributed import PeerFailed
from ..core import DataModule, TaskModule
from .automatic import Steps
from .closure import ClosureSteps
from .dataloaders import Sources
from .evaluation_loop import EvaluationLoop
from .fit_loop import FitLoop
from .fit_setup import Fit
from .manual import ManualSteps

if TYPE_CHECKING:
    from ..trainer import Trainer

_MISMATCH = re.compile(
    r"same device|expected device|same dtype|expected scalar type|Input type .* should be the same|same type", re.DOTALL
)
_TWICE = "backward through the graph a second time"
_MEMORY = (
    "out of memory: halve the dataloader's batch_size and double accumulate_grad_batches, which keeps the effective "
    "batch size, or use treadle.find_executable_batch_size. bf16-mixed precision and FSDP need less memory."
)
_BACKWARD = (
    "the backward pass has already run through this graph: leave the backward pass and the optimizer to the Trainer, "
    "and return the loss. A tensor kept from the previous batch needs detach()."
)
_CALL = re.compile(r"(\S+)\(\) (?:takes|missing) .*positional argument")
_SHOWN, _DEPTH = 8, 3
# Functions that process batches; their variable ``index`` is that of the current batch.
_BATCH_CODES = {
    step.__code__
    for step in (
        FitLoop._epoch,
        Steps.take,
        ManualSteps.take,
        ClosureSteps._forward_and_backward,
        EvaluationLoop._run_loader,
    )
}
# Functions whose variable ``batch`` is the one in which the error occurred, unless a dataloader was reading the next.
_WITH_BATCH = {*_BATCH_CODES, Sources._transfer.__code__} - {FitLoop._epoch.__code__}
_LONGEST_BATCH = 300
# An error before these comes from the call, or from a hook that the traceback shows.
_RUN_CODES = {FitLoop.run.__code__, EvaluationLoop.run.__code__}


def annotate(error: BaseException, trainer: Trainer) -> None:
    """Add notes to an error: the position of the run, and explanations of some of torch's messages."""
    if isinstance(error, KeyboardInterrupt):
        return  # see `announce_interrupt`
    world = trainer.accelerator.world
    location = place(trainer, str(trainer.stage), error)
    if world.size > 1:
        error.add_note(f"on rank {world.rank} of {world.size}, {location}")
    elif not _RUN_CODES.isdisjoint(frame.f_code for frame in _iterate_frames(error)):
        error.add_note(location)
    text = read_text(error)
    with contextlib.suppress(Exception):  # an error in inspecting the user's objects must not hide the original
        if not isinstance(error, PeerFailed) and (batch := _describe_last_batch(error)):
            error.add_note(f"the batch: {batch}")
    if is_out_of_memory(error):
        error.add_note(_MEMORY)
    elif isinstance(error, RuntimeError) and _TWICE in text:
        error.add_note(_BACKWARD)
    elif isinstance(error, TypeError) and (call := _CALL.match(text)) is not None:
        for line in _describe_signature(call[1], trainer):
            error.add_note(line)
    elif isinstance(error, AttributeError) and (advice := _describe_skipped_init(error.obj)):
        error.add_note(advice)
    elif isinstance(error, RuntimeError) and trainer.task is not None and _MISMATCH.search(text):
        with contextlib.suppress(Exception):  # an error in inspecting the user's objects must not hide the original
            error.add_note(_describe_mismatch(error, trainer.task))


def place(trainer: Trainer, stage: str, error: BaseException) -> str:
    """Describe where in a run an error occurred, as in ``"in fit, epoch 0, after optimizer step 3"``."""
    words = [f"in {stage}"]
    if stage == "fit":
        words += [f"epoch {trainer.progress.epoch}", f"after optimizer step {trainer.progress.step}"]
    return ", ".join([*words, *_describe_batch(trainer.progress.batch, stage == "fit", list(_iterate_frames(error)))])


def _describe_batch(next_batch: int, within_fit: bool, frames: Sequence[FrameType]) -> Iterator[str]:
    codes = [frame.f_code for frame in frames]
    kind = ""
    if within_fit and EvaluationLoop.run.__code__ in codes:
        kind = "sanity check" if Fit.sanity_check.__code__ in codes else "validation"
    position = max((n for n, code in enumerate(codes) if code in _BATCH_CODES), default=None)
    if position is None or (kind and codes[position] is not EvaluationLoop._run_loader.__code__):
        if kind:
            yield f"in {kind}"
        return
    variables = frames[position].f_locals
    reading = any(isinstance(frame.f_locals.get("self"), Loader) for frame in frames[position + 1 :])
    if codes[position] is not FitLoop._epoch.__code__:
        number = variables.get("index", -1) + reading
        if number < 0:  # an empty dataloader
            return
        yield f"{'reading' if reading else 'in'} {kind}{' ' if kind else ''}batch {number}"
    elif reading:
        yield f"reading batch {next_batch}"
    loop = variables.get("self")
    if isinstance(loop, EvaluationLoop) and len(loop.loaders) > 1:
        yield f"dataloader {variables['number']}"


def _describe_signature(method: str, trainer: Trainer) -> Iterator[str]:
    name = method.rpartition(".")[2]
    owners = ((trainer.task, TaskModule), (trainer.datamodule, DataModule), *((c, Callback) for c in trainer.callbacks))
    for owner, base in owners:
        hook = getattr(base, name, None)
        if hook is not None and getattr(getattr(owner, name, None), "__qualname__", "") == method:
            parameters = inspect.signature(hook).parameters.values()
            names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            if name.endswith("_step") and len(names) == 1:  # the base class takes (self, *args, **kwargs)
                names += ["batch", "batch_idx"]
            yield f"the signature of this hook is {base.__name__}.{name}({', '.join(names)})"
            return


def _describe_skipped_init(owner: Any) -> str:
    """Return a sentence if the ``__init__`` of a user's callback does not call that of a callback of Treadle."""
    if not isinstance(owner, Callback):
        return ""
    own, *inherited = [kind for kind in type(owner).__mro__ if "__init__" in vars(kind)]
    names = getattr(vars(own)["__init__"], "__code__", _describe_skipped_init.__code__).co_names
    base = next((kind.__name__ for kind in inherited if kind.__module__.startswith("treadle.")), None)
    if own.__module__.startswith("treadle.") or base is None or "__init__" in names:
        return ""
    return f"{own.__name__}.__init__ must call super().__init__() first, with the arguments of {base}."


def _describe_last_batch(error: BaseException) -> str:
    """Describe the batch of the step or hook in which an error occurred; "" if there is none."""
    frames = list(_iterate_frames(error))
    position = max((n for n, frame in enumerate(frames) if frame.f_code in _WITH_BATCH), default=None)
    if position is None or any(isinstance(frame.f_locals.get("self"), Loader) for frame in frames[position + 1 :]):
        return ""
    variables = frames[position].f_locals
    text = " ".join(_describe_value(variables["batch"]).split()) if "batch" in variables else ""
    return text if len(text) <= _LONGEST_BATCH else f"{text[:_LONGEST_BATCH]} ..."


def _describe_value(value: Any, depth: int = 0) -> str:
    """Describe the structure of a batch, such as ``[Tensor (16, 4) float32, Tensor (16,) int64]``."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        on_device = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{kind} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{on_device}"
    if isinstance(value, Mapping) and depth < _DEPTH:
        text = f"{kind} with {_join_items(((f'{key} ', item) for key, item in value.items()), len(value), depth)}"
        return f"({text})" if depth else text
    if isinstance(value, list | tuple) and depth < _DEPTH:
        fields = getattr(value, "_fields", None)
        labels = [f"{field}=" for field in fields] if fields else itertools.repeat("")
        inner = _join_items(zip(labels, value, strict=False), len(value), depth)
        return f"{kind}({inner})" if fields else f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(getattr(value, "shape", None), tuple):  # such as a NumPy array
        return f"{kind} {tuple(value.shape)} {getattr(value, 'dtype', '')}".rstrip()
    return kind


def _join_items(items: Iterable[tuple[str, Any]], count: int, depth: int) -> str:
    texts = [label + _describe_value(item, depth + 1) for label, item in itertools.islice(items, _SHOWN)]
    return ", ".join([*texts, f"and {count - _SHOWN} more"] if count > _SHOWN else texts)


def _describe_mismatch(error: BaseException, task: nn.Module) -> str:
    names = {id(module): name for name, module in task.named_modules()}
    task_frames = [frame for frame in _iterate_frames(error) if id(frame.f_locals.get("self")) in names]
    if not task_frames:
        return "look for tensors with different dtypes or devices."
    frame = task_frames[-1]
    module = frame.f_locals["self"]
    name = names[id(module)]
    module_label = f"{name} ({type(module).__name__})" if name else type(module).__name__
    formats = sorted({_describe_format(p) for p in module.parameters()})
    lines = (
        [f"in {module_label}.{frame.f_code.co_name}: its parameters are {' and '.join(formats)}"]
        if formats
        else [f"in {module_label}"]
    )
    tensor_lines = [
        f"{key}: {_describe_format(value)}"
        for name, local in frame.f_locals.items()
        for key, value in nonfinite.iterate_tensors(local, name, _DEPTH)
    ]
    return "\n  ".join([*lines, *tensor_lines[:_SHOWN]])


def _iterate_frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _describe_format(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
