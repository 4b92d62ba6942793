"""Which part of the model is the first to compute something that is not finite."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..common.validation import check_bool
from ..engine import strip_compile_prefix
from ..strategies.distributed import local
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class NonFiniteWatch(Callback):
    """Looks at every module's output and every gradient, and names the first one that holds NaN or infinity.

    For the search of an error: it looks at all numbers, and waits for the device after each backward. It acts before
    the task's own hooks (``after_task`` is 0). A process that finds something raises, which ends the run on all.

    Args:
        outputs: look at modules' outputs, in the order in which they are computed.
        gradients: look at parameters' gradients, from the end of the model on. Not with float16, where the loss scale
            lets them overflow now and then.

    Raises:
        ValueError: if it is to look at nothing; in training, naming step, part and what was found.
        TypeError: for a value that is neither True nor False.
    """

    def __init__(self, outputs: bool = True, gradients: bool = True) -> None:
        self.outputs = check_bool("outputs", outputs)
        self.gradients = check_bool("gradients", gradients)
        if not (outputs or gradients):
            raise ValueError("outputs=False, gradients=False leaves nothing to look at.")
        self._handles: list[Any] = []
        self._output_flags: list[tuple[str, Tensor]] = []

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Begin to look."""
        for name, part in pl_module.named_modules() if self.outputs else ():
            if part is not pl_module:
                label = f"{strip_compile_prefix(name)} ({type(part).__name__})"
                self._handles.append(part.register_forward_hook(partial(self._look, label)))

    def on_train_batch_start(self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int) -> None:
        """Forget what validation computed."""
        self._output_flags.clear()

    def on_after_backward(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Read what was seen."""
        finite_flags = [(f"the output of {name}", flag) for name, flag in self._output_flags]
        self._output_flags.clear()
        if self.gradients and trainer.scaler is None:
            for name, parameter in reversed(list(pl_module.named_parameters())):
                if parameter.grad is not None:
                    finite = torch.isfinite(local(parameter.grad)).all()
                    finite_flags.append((f"the gradient of {strip_compile_prefix(name)}", finite))
        if not finite_flags:
            return
        device = trainer.accelerator.device
        fine = torch.stack([flag.to(device) for _, flag in finite_flags]).tolist()
        bad = [name for (name, _), good in zip(finite_flags, fine, strict=True) if not good]
        if bad:
            more = f" (and {len(bad) - 1} later ones)" if len(bad) > 1 else ""
            raise ValueError(
                f"{bad[0]} is the first to hold NaN or infinity{more}, on rank {trainer.global_rank} in optimizer step "
                f"{trainer.progress.step + 1} (epoch {trainer.progress.epoch}, micro-batch {trainer.progress.batch})."
            )

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Look no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._output_flags.clear()

    def _look(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            flags = [torch.isfinite(tensor.detach()).all() for tensor in _iterate_tensors(output)]
            self._output_flags.extend((name, local(flag)) for flag in flags)


def _iterate_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _iterate_tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iterate_tensors(item)
