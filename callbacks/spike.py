"""`SpikeWatch`: detects sudden increases in the loss or the gradient norm."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..common.messages import warn
from ..common.validation import check_int, check_number, choose
from ..strategies.distributed import count_shards, is_sharded, local
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer

_WATCHED = ("loss", "grad_norm")
_ACTIONS = ("warn", "stop", "raise")
_DEVIATION = 1.4826  # standard deviation of a normal distribution in median absolute deviations


class SpikeWatch(Callback):
    """Callback that detects sudden increases in the loss or the gradient norm.

    Each step's value is compared with a window of up to ``window`` values from preceding steps. A value that is not
    finite is always a spike. A finite value is a spike if it exceeds the window's median by more than ``threshold``
    robust standard deviations and by more than ``rise`` times the median's absolute value. A robust standard deviation
    is 1.4826 times the window's median absolute deviation. Spikes are not added to the window. Skipped optimizer steps
    are ignored.

    The loss is averaged over all processes, and the gradient norm includes the gradients of all shards. All processes
    therefore react after the same step. A resumed run restores the window.

    Args:
        monitor: ``"loss"``, the mean over the step's micro-batches, or ``"grad_norm"``, the norm of all gradients
            before clipping. Default: ``"loss"``.
        action: ``"warn"`` only warns. ``"stop"`` warns and stops the run. ``"raise"`` raises an error. Default:
            ``"warn"``.
        window: Maximum number of values in the window. Must be at least 3. Default: 100.
        warmup: Number of values that the window must contain before a finite value can be a spike. Must be from 2 to
            ``window``. Default: 20.
        threshold: Number of robust standard deviations by which a spike must exceed the median. Default: 8.0.
        rise: Fraction of the median by which a spike must also exceed the median. Default: 0.1.
        every_n_steps: Number of optimizer steps between checks. The remaining values are checked at the end of each
            epoch. Default: 50.

    Attributes:
        spikes: The detected spikes, each a pair of the optimizer step and the value.

    Raises:
        ValueError, TypeError: If an argument is invalid.
        ValueError: With ``action="raise"``, if a spike is detected.

    Examples:
        >>> import treadle as tl
        >>> from treadle.callbacks import SpikeWatch
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> watch = SpikeWatch(every_n_steps=1)  # reports no spike before step 20
        >>> trainer = tl.Trainer(max_steps=3, accelerator="cpu", devices=1, barebones=True, callbacks=watch)
        >>> trainer.fit(BoringModel())
        >>> watch.spikes
        []
    """

    after_task = 1
    exchanges = True

    def __init__(
        self,
        monitor: str = "loss",
        action: str = "warn",
        window: int = 100,
        warmup: int = 20,
        threshold: float = 8.0,
        rise: float = 0.1,
        every_n_steps: int = 50,
    ) -> None:
        self.monitor = choose("monitor", monitor, _WATCHED)
        self.action = choose("action", action, _ACTIONS)
        self.window = check_int("window", window, 3)
        self.warmup = check_int("warmup", warmup, 2)
        if warmup > window:
            raise ValueError(
                f"warmup={warmup} must be at most window={window}, the maximum number of values in the window. Lower "
                "warmup or raise window."
            )
        self.threshold = check_number("threshold", threshold, 0.0)
        self.rise = check_number("rise", rise, 0.0)
        self.every_n_steps = check_int("every_n_steps", every_n_steps, 1)
        self.spikes: list[tuple[int, float]] = []
        self._window_values: list[float] = []
        self._new: dict[int, Tensor] = {}  # values since the last check by step, on the device
        self._sum: Tensor | None = None  # sum over the step's micro-batches
        self._parts = 0
        self._step = 0

    @property
    def state_key(self) -> str:
        """Name under which the callback's state is saved. It includes the class, ``monitor`` and ``action``."""
        return f"{type(self).__qualname__}({self.monitor!r}, {self.action!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state: the window, the unchecked values and the spikes."""
        return {"known": self._window_values, "new": dict(self._new), "spikes": self.spikes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._window_values, self._new = list(state_dict["known"]), dict(state_dict["new"])
        self.spikes = [tuple(spike) for spike in state_dict["spikes"]]

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """In ``fit``, discard the state of an earlier run."""
        if stage == "fit":
            self._window_values, self._new, self.spikes = [], {}, []
            self._forget()

    # -- values --------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Move restored values to the device."""
        self._new = {step: value.to(trainer.accelerator.device) for step, value in self._new.items()}
        self._step = trainer.progress.step

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: TaskModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """With ``monitor="grad_norm"``, add the optimizer's gradients to the step's norm."""
        if self.monitor == "grad_norm":
            trainer.accelerator.unscale_gradients()
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._add(_compute_squared_norm(gradients, trainer.accelerator.strategy.sharded))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """With ``monitor="loss"``, add the micro-batch's loss to the step's value."""
        loss = outputs.get("loss") if self.monitor == "loss" and isinstance(outputs, dict) else None
        if isinstance(loss, Tensor):
            self._add(loss.detach().clone())  # a CUDA graph's next replay would overwrite it
        if not trainer.progress.in_step:  # this was the step's last value
            step, self._step = self._step, trainer.progress.step
            if self._sum is not None and step != self._step:  # otherwise float16 skipped the step
                self._new[self._step] = self._sum if self._parts == 1 else self._sum / self._parts
            self._forget()

    def _add(self, value: Tensor) -> None:
        value = value.reshape(()).float()
        self._sum = value if self._sum is None else self._sum + value
        self._parts += self.monitor == "loss" or self._parts == 0

    def _forget(self) -> None:
        self._sum, self._parts = None, 0

    # -- checks --------------------------------------------------------------------------------------------------

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Check the values if a check is due."""
        if self._new and trainer.progress.step % self.every_n_steps == 0:
            self._look(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Check the remaining values."""
        if self._new:
            self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        values, steps = torch.stack(list(self._new.values())), list(self._new)
        if values.device.type != "mps":
            values = values.double()
        world = trainer.accelerator.world
        if world.size > 1:
            values = world.all_reduce(values) / world.size
        if self.monitor == "grad_norm":
            values = values.sqrt()
        self._new = {}
        new_spikes: list[tuple[int, float, float]] = []
        for step, value in zip(steps, values.tolist(), strict=True):
            usual = self._find_usual(value)
            if usual is None:
                self._window_values = [*self._window_values[-self.window + 1 :], value]
            else:
                new_spikes.append((step, value, usual))
        if new_spikes:
            self.spikes += [(step, value) for step, value, _ in new_spikes]
            self._act(trainer, new_spikes)

    def _find_usual(self, value: float) -> float | None:
        """Return the window's median if ``value`` is a spike; otherwise, None.

        During warmup, only values that are not finite are spikes, and NaN is returned for them.
        """
        if len(self._window_values) < self.warmup:
            return None if math.isfinite(value) else math.nan
        middle = median(self._window_values)
        spread = _DEVIATION * median(abs(previous - middle) for previous in self._window_values)
        above = value - middle
        fine = above <= self.threshold * spread or above <= self.rise * abs(middle)
        return None if fine and math.isfinite(value) else middle

    def _act(self, trainer: Trainer, new_spikes: list[tuple[int, float, float]]) -> None:
        words = ", ".join(
            f"{value:.4g} in step {step}" + ("" if math.isnan(usual) else f" (usual: {usual:.4g})")
            for step, value, usual in new_spikes[:5]
        )
        more = f" and {len(new_spikes) - 5} more" if len(new_spikes) > 5 else ""
        text = f"{self.monitor} spiked: {words}{more}"
        if self.action == "raise":
            steps = "this step" if len(new_spikes) == 1 else "these steps"
            raise ValueError(f"{text}. Lower the learning rate, clip gradients, or check the data of {steps}.")
        warn(text)
        if self.action == "stop":
            trainer.should_stop = True


def _compute_squared_norm(gradients: list[Tensor], sharded: bool) -> Tensor:
    """Return this process's value, whose mean over all processes is the squared norm of the full gradients.

    The squared norm of a shard is multiplied by the number of shards, because the other processes hold other shards, or
    the same shard of another replica.
    """
    if not gradients:
        return torch.zeros(())
    if not sharded:
        return torch.stack([norm.float() for norm in torch._foreach_norm(gradients)]).square().sum()
    norms = torch._foreach_norm([local(g) if is_sharded(g) else g for g in gradients])
    by_count: dict[int, list[Tensor]] = {}
    for gradient, norm in zip(gradients, norms, strict=True):
        by_count.setdefault(count_shards(gradient), []).append(norm.float())
    squares = [count * torch.stack(group).square().sum() for count, group in by_count.items()]
    return squares[0] if len(squares) == 1 else torch.stack(squares).sum()
