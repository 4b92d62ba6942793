"""Notice a loss, or a gradient, that leaps out of its usual range."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..common.messages import warn
from ..common.remote_path import as_path
from ..common.validation import check_int, check_number, choose
from ..strategies.distributed import is_sharded, local
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer

_WATCHED = ("loss", "grad_norm")
_ACTIONS = ("warn", "stop", "save", "raise")
_DEVIATION = 1.4826  # of a normal distribution, in median absolute deviations


class SpikeWatch(Callback):
    """Notices when the loss, or the gradients' norm, leaps above what the last steps had.

    A step is a spike if its value is not finite, or above the median of the ``window`` steps before by more than
    ``threshold`` robust standard deviations (1.4826 times the median absolute deviation) and ``rise`` of the median.
    Spikes themselves don't enter the window.

    Values stay on the device and are looked at together, every ``every_n_steps``, as the mean over the processes (the
    norm of all gradients together); so all processes act after the same step, and no step waits for the device. It
    acts after the task's own hooks (``after_task`` is 1). A run that goes on remembers the window; what rank zero saw
    since the last look then stands for all processes.

    Args:
        monitor: ``"loss"``, the mean over the step's micro-batches, or ``"grad_norm"``, before it is clipped.
        action: ``"warn"``; ``"stop"`` the run; ``"save"`` it (which holds the steps after the spike, too) and go on;
            or ``"raise"`` an error.
        window: Steps to compare with.
        warmup: Steps that must be known before anything is a spike.
        threshold: Robust standard deviations.
        rise: The least that is a spike, as a share of the median.
        every_n_steps: Optimizer steps between looks.
        dirpath: Where ``"save"`` saves; by default ``spikes`` in the run's folder.

    Attributes:
        spikes: The optimizer step and value of each.

    Raises:
        ValueError: For a value that can't be; in training, with ``action="raise"``.
        TypeError: For a value of another kind.
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
        dirpath: str | Path | None = None,
    ) -> None:
        self.monitor = choose("monitor", monitor, _WATCHED)
        self.action = choose("action", action, _ACTIONS)
        self.window = check_int("window", window, 3)
        self.warmup = check_int("warmup", warmup, 2)
        if warmup > window:
            raise ValueError(f"warmup={warmup} is more than window={window}, the steps that are remembered.")
        self.threshold = check_number("threshold", threshold, 0.0)
        self.rise = check_number("rise", rise, 0.0)
        self.every_n_steps = check_int("every_n_steps", every_n_steps, 1)
        if dirpath is not None and action != "save":
            raise ValueError(f"dirpath={str(dirpath)!r} is for action='save'; with {action!r} nothing is saved.")
        self.dirpath = dirpath
        self.spikes: list[tuple[int, float]] = []
        self._window_values: list[float] = []
        self._new: list[Tensor] = []  # since the last look, on the device
        self._sum: Tensor | None = None  # of the step's micro-batches
        self._parts = 0
        self._step = 0

    @property
    def state_key(self) -> str:
        """See `Callback.state_key`."""
        return f"SpikeWatch({self.monitor!r}, {self.action!r})"

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {"known": self._window_values, "new": list(self._new), "spikes": self.spikes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`."""
        self._window_values, self._new = list(state_dict["known"]), list(state_dict["new"])
        self.spikes = [tuple(spike) for spike in state_dict["spikes"]]

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """A new run begins with nothing; one that goes on gets it back after this."""
        if stage == "fit":
            self._window_values, self._new, self.spikes = [], [], []
            self._forget()

    # -- values --------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Values that were saved go where the others are."""
        self._new = [value.to(trainer.accelerator.device) for value in self._new]
        self._step = trainer.progress.step

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: TaskModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Measure the gradients of this process."""
        if self.monitor == "grad_norm":
            trainer.accelerator.unscale_gradients()
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._add(_compute_squared_norm(gradients))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add a micro-batch's loss; keep the step's value if it is over."""
        loss = outputs.get("loss") if self.monitor == "loss" and isinstance(outputs, dict) else None
        if isinstance(loss, Tensor):
            self._add(loss.detach().clone())  # a CUDA graph's next replay would overwrite it
        if not trainer.progress.in_step:  # the step's last one
            step, self._step = self._step, trainer.progress.step
            if self._sum is not None and step != self._step:  # else float16 has left it out
                self._new.append(self._sum if self._parts == 1 else self._sum / self._parts)
            self._forget()

    def _add(self, value: Tensor) -> None:
        value = value.reshape(()).float()
        self._sum = value if self._sum is None else self._sum + value
        self._parts += self.monitor == "loss" or self._parts == 0

    def _forget(self) -> None:
        self._sum, self._parts = None, 0

    # -- looks ---------------------------------------------------------------------------------------------------

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Look, if it is time."""
        if self._new and trainer.progress.step % self.every_n_steps == 0:
            self._look(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Look before the epoch is saved."""
        if self._new:
            self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        values = torch.stack(self._new).double() if self._new[0].device.type != "mps" else torch.stack(self._new)
        world = trainer.accelerator.world
        if world.size > 1:
            values = world.all_reduce(values)
            if self.monitor == "loss" or not trainer.accelerator.strategy.sharded:
                values = values / world.size
        if self.monitor == "grad_norm":
            values = values.sqrt()
        first = trainer.progress.step - len(self._new) + 1
        self._new = []
        new_spikes: list[tuple[int, float, float]] = []
        for step, value in enumerate(values.tolist(), first):
            usual = self._find_usual(value)
            if usual is None:
                self._window_values = [*self._window_values[-self.window + 1 :], value]
            else:
                new_spikes.append((step, value, usual))
        if new_spikes:
            self.spikes += [(step, value) for step, value, _ in new_spikes]
            self._act(trainer, new_spikes)

    def _find_usual(self, value: float) -> float | None:
        """The median, if ``value`` is a spike; else None."""
        if len(self._window_values) < self.warmup:
            return None if math.isfinite(value) else math.nan
        middle = median(self._window_values)
        spread = _DEVIATION * median(abs(previous - middle) for previous in self._window_values)
        above = value - middle
        fine = above <= self.threshold * spread or above <= self.rise * abs(middle)
        return None if fine and math.isfinite(value) else middle

    def _act(self, trainer: Trainer, new_spikes: list[tuple[int, float, float]]) -> None:
        words = ", ".join(f"{value:.4g} in step {step} (usual: {usual:.4g})" for step, value, usual in new_spikes[:5])
        more = f" and {len(new_spikes) - 5} more" if len(new_spikes) > 5 else ""
        text = f"{self.monitor} leapt: {words}{more}"
        if self.action == "raise":
            raise ValueError(f"{text}. Lower the learning rate, clip gradients, or look at the data of these steps.")
        warn(text)
        if self.action == "stop":
            trainer.should_stop = True
        elif self.action == "save":
            run = trainer.logbook.agree_on_directory(trainer.default_root_dir)
            folder = self.dirpath or as_path(run) / "spikes"  # type: ignore[attr-defined]
            trainer.save_checkpoint(str(as_path(folder) / f"step={trainer.progress.step}.ckpt"))


def _compute_squared_norm(gradients: list[Tensor]) -> Tensor:
    """The squared norm of what this process has of them."""
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm([local(g) if is_sharded(g) else g for g in gradients])
    return torch.stack([norm.float() for norm in norms]).square().sum()
