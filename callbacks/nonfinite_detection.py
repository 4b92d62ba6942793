"""`NonFiniteWatch`: finds the first tensor that contains NaN or infinity."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..common.messages import format_count
from ..strategies import iter_tensors
from ..strategies.distributed import local, strip_compile_prefix
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class NonFiniteWatch(Callback):
    """Callback that raises an error naming the first checked tensor that contains NaN or infinity.

    The callback is for debugging only, because it slows training down. It checks the outputs of the task's submodules,
    in the order of the forward pass, the gradients of these outputs in the order of the backward pass, and then the
    gradients of the parameters. Gradients are not checked if a gradient scaler is used, and outputs not if they are
    computed with gradients disabled. With automatic optimization, the error is raised on all ranks.

    Raises:
        ValueError: During training, if a value is not finite. The error names the tensor and the step.

    Examples:
        >>> import treadle as tl
        >>> from treadle.callbacks import NonFiniteWatch
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> class Broken(BoringModel):
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch / 0).sum()
        >>> trainer = tl.Trainer(max_steps=1, accelerator="cpu", devices=1, barebones=True, callbacks=NonFiniteWatch())
        >>> trainer.fit(Broken())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ValueError: the output of layer (Linear) is the first tensor to contain NaN or infinity, ...
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._scaled = False
        self._output_flags: list[tuple[str, Tensor]] = []
        self._gradient_flags: list[tuple[str, Tensor]] = []

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Register forward hooks."""
        self._scaled = trainer.scaler is not None
        for name, part in pl_module.named_modules():
            if part is not pl_module:
                label = f"{strip_compile_prefix(name)} ({type(part).__name__})"
                self._handles.append(part.register_forward_hook(partial(self._look, label)))

    def on_train_batch_start(self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int) -> None:
        """Discard the results of earlier micro-batches."""
        self._forget()

    def on_after_backward(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Raise an error if a checked tensor of this micro-batch is not finite."""
        reduced_names: list[str] = []
        flags = [[*self._output_flags, *self._gradient_flags], []]
        self._forget()
        if not self._scaled:
            for name, parameter in reversed(list(pl_module.named_parameters())):
                if parameter.grad is not None:
                    finite = torch.isfinite(local(parameter.grad)).all()
                    flags[1].append((f"the gradient of {strip_compile_prefix(name)}", finite))
        world = trainer.accelerator.world
        bad_names = [_find_bad(some, world.device) for some in flags]
        if trainer.accelerator.accumulation.unreduced or world.size == 1:  # as in `no_sync`, in manual optimization
            bad_by_rank = {world.rank: bad_names[0] + bad_names[1]}
        elif world.any(any(bad_names)):
            gathered = world.gather_objects(bad_names)
            bad_by_rank = {rank: names for rank, (names, _) in enumerate(gathered)}
            reduced_names = next((names for _, names in gathered if names), [])
        else:
            return
        rank, names = next(((rank, names) for rank, names in bad_by_rank.items() if names), (None, reduced_names))
        if not names:
            return
        later = len(names) - 1
        more = f"; {format_count(later, 'other')} followed" if later else ""
        where = "after the gradients were reduced over all ranks" if rank is None else f"on rank {rank}"
        raise ValueError(
            f"{names[0]} is the first tensor to contain NaN or infinity, {where} in optimizer step "
            f"{trainer.progress.step + 1} (epoch {trainer.progress.epoch}, micro-batch {trainer.progress.batch}){more}"
            ". Check this micro-batch, or lower the learning rate."
        )

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Remove the forward hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget()

    def _forget(self) -> None:
        self._output_flags, self._gradient_flags = [], []

    def _look(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for tensor in iter_tensors(output):
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            self._output_flags.append((f"the output of {name}", local(torch.isfinite(tensor.detach()).all())))
            if not self._scaled and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._look_back, f"the gradient of the output of {name}"))

    def _look_back(self, name: str, gradient: Tensor) -> None:
        self._gradient_flags.append((name, local(torch.isfinite(gradient).all())))


def _find_bad(flags: list[tuple[str, Tensor]], device: torch.device) -> list[str]:
    if not flags:
        return []
    finite = torch.stack([flag.to(device) for _, flag in flags]).tolist()
    return [name for (name, _), good in zip(flags, finite, strict=True) if not good]
