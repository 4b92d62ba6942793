"""Callbacks that average the weights during training."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..common.messages import nearest, warn
from ..common.validation import check_bool, check_int, check_number
from ._averaging import (
    KEYS,
    Average,
    Averages,
    Averaging,
    average_all,
    average_each,
    average_equally,
    average_exponentially,
    find_saved_averages,
)

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer

_FUNCTIONS = ("avg_fn", "multi_avg_fn")


class WeightAveraging(Averaging):
    """Callback that averages the weights, validates with the averages, and leaves them in the model after training.

    If the model is sharded, each process averages its own shards. Before the first update, validation uses the trained
    weights.

    Checkpoints saved during training contain the model's trained weights. They also contain the averages, if there are
    any. A resumed run restores the averages, even with a different world size. With this callback, ``validate``,
    ``test`` and ``predict`` use the averages in the checkpoint that ``ckpt_path`` selects. If the checkpoint has none,
    they use the trained weights and issue a warning. `averaged_weights` returns a checkpoint's averages for other uses.

    Args:
        device: Device of the averages. If it differs from the weights' device, each update waits until the weights have
            been copied. Default: the weights' device.
        use_buffers: Also average the persistent buffers. Default: True.
        kwargs: The averaging function, as in torch's ``AveragedModel``: ``avg_fn(averaged, current, num_averaged)`` for
            single tensors, or ``multi_avg_fn`` for lists of tensors. Default: an equally weighted average.

    Raises:
        ValueError, TypeError, RuntimeError: If an argument is invalid.
        ValueError: In ``fit``, if another callback also averages weights, or if the strategy does not support averaging
            or ``device``. If the averages in a checkpoint do not match the model.

    References:
        Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", SIAM Journal on Control and
        Optimization, 1992.

    Examples:
        >>> import treadle as tl
        >>> from treadle.callbacks import WeightAveraging
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> class AverageEpochs(WeightAveraging):
        ...     def should_update(self, step_idx=None, epoch_idx=None):
        ...         return epoch_idx is not None
        >>> trainer = tl.Trainer(
        ...     max_epochs=2,
        ...     limit_train_batches=1,
        ...     accelerator="cpu",
        ...     devices=1,
        ...     barebones=True,
        ...     callbacks=AverageEpochs(),
        ... )
        >>> trainer.fit(BoringModel())
    """

    _key = KEYS[0]
    _position = ("latest_epoch", "latest_step")

    def __init__(self, device: torch.device | str | int | None = None, use_buffers: bool = True, **kwargs: Any) -> None:
        super().__init__()
        self._device = device
        self._use_buffers = check_bool("use_buffers", use_buffers)
        self._average = _choose_average(type(self).__name__, kwargs)
        self._borrowed: Averages | None = None  # the averages of an evaluated checkpoint
        self._epoch = 0
        self._latest_step = 0

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the averages. The default is True after optimizer steps and False after epochs.

        Args:
            step_idx: Index of the optimizer step that was just taken; None after an epoch. Default: None.
            epoch_idx: Index of the epoch that just ended; None after a step. Default: None.
        """
        return step_idx is not None

    # -- averaging -----------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Create the averages."""
        self._make_room(trainer, pl_module, self._use_buffers, self._device, strict=True)
        self._latest_step = trainer.progress.step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update the averages if an update is due."""
        self._follow(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Perform the update that the interrupted run missed, if any."""
        self._follow(trainer)

    def _follow(self, trainer: Trainer) -> None:
        step = trainer.progress.step
        if step != self._latest_step:
            self._latest_step = step
            self._epoch = trainer.progress.epoch
            if self.should_update(step_idx=step - 1):
                self._averages.update(self._average)  # type: ignore[union-attr]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Update the averages if an update is due."""
        progress = trainer.progress
        if progress.epoch_is_over and progress.epoch > self._latest_epoch:
            self._latest_epoch = progress.epoch
            if self.should_update(epoch_idx=progress.epoch):
                self._averages.update(self._average)  # type: ignore[union-attr]

    # -- in the model --------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Put the averages, if any, into the model."""
        averages = self._averages
        if averages is not None and averages.count:
            self._ended = True
            _apply_averages(trainer, averages)

    def on_validation_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Put the averages, if any, into the model; outside of ``fit``, those of the evaluated checkpoint."""
        if trainer.stage == "fit":
            if self._averages is not None and self._averages.count:
                _apply_averages(trainer, self._averages)
        elif trainer.opened_checkpoint is not None:
            saved = find_saved_averages(trainer.opened_checkpoint)
            if saved is None or not saved["weights"]:
                warn(f"{trainer.ckpt_path} has no averaged weights, so the trained weights are used.")
                return
            with torch.inference_mode(False):
                self._borrowed = Averages(pl_module, self._use_buffers)
                self._borrowed.load_state_dict(saved)
            self._borrowed.apply_to_model()

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Restore the model's own weights."""
        self._end()

    return_to_validation = on_test_start = on_predict_start = on_validation_start
    leave_validation = on_test_end = on_predict_end = on_validation_end

    def _end(self) -> None:
        super()._end()
        if self._borrowed is not None:
            self._borrowed.restore_model()
        self._borrowed = None

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Add the averages to the checkpoint."""
        if self._averages is not None and self._averages.is_applied and not self._ended:
            raise ValueError(
                "a checkpoint must contain the trained weights, but during validation, the model contains their "
                f"averages. Save in on_step_end, or list {type(self).__name__} before the callback that saves in "
                "on_validation_end."
            )
        super().on_save_checkpoint(trainer, pl_module, checkpoint)


class EMAWeightAveraging(WeightAveraging):
    """Callback that keeps an exponential moving average (EMA) of the weights.

    The first update copies the weights. Each later update computes
    ``average = decay * average + (1 - decay) * weights``.

    Args:
        device: Device of the averages. Default: the weights' device.
        use_buffers: Also average the persistent buffers. Default: True.
        decay: Fraction of the average that is kept, from 0 to 1. Default: 0.999.
        update_every_n_steps: Number of optimizer steps between updates. If 0, the averages are updated only at the end
            of each epoch. Default: 1.
        update_starting_at_step: Index of the first optimizer step after which the averages may be updated. Ignored if
            ``update_every_n_steps`` is 0. Default: None, which is equivalent to 0.
        update_starting_at_epoch: Index of the first epoch in which the averages may be updated. Default: None, which is
            equivalent to 0.
        kwargs: Not supported.

    Raises:
        ValueError, TypeError, RuntimeError: If an argument is invalid.
        ValueError: In ``fit`` and in evaluations, for the same reasons as `WeightAveraging`.

    References:
        Morales-Brotons et al., "Exponential Moving Average of Weights in Deep Learning: Dynamics and Benefits", 2024,
        https://arxiv.org/abs/2411.18704.

    Examples:
        >>> import treadle as tl
        >>> from treadle.callbacks import EMAWeightAveraging
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> trainer = tl.Trainer(
        ...     max_steps=2, accelerator="cpu", devices=1, barebones=True, callbacks=EMAWeightAveraging(decay=0.9)
        ... )
        >>> trainer.fit(BoringModel())
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            valid_names = ("decay", "update_every_n_steps", "update_starting_at_step", "update_starting_at_epoch")
            raise TypeError(f"EMAWeightAveraging has no argument {min(kwargs)!r}.{nearest(min(kwargs), valid_names)}")
        super().__init__(device, use_buffers)
        if check_number("decay", decay, 0.0) > 1.0:
            raise ValueError(f"decay={decay!r} must be at most 1.0, because it is the fraction of the average to keep.")
        self._average = partial(average_exponentially, decay)
        self.decay = decay
        self.update_every_n_steps = check_int(
            "update_every_n_steps", update_every_n_steps, 0, "means only at the ends of epochs"
        )
        step, epoch = update_starting_at_step, update_starting_at_epoch
        self.update_starting_at_step = None if step is None else check_int("update_starting_at_step", step, 0)
        self.update_starting_at_epoch = None if epoch is None else check_int("update_starting_at_epoch", epoch, 0)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether an update is due."""
        if step_idx is None:
            return not self.update_every_n_steps and (epoch_idx or 0) >= (self.update_starting_at_epoch or 0)
        return (
            bool(self.update_every_n_steps)
            and step_idx % self.update_every_n_steps == 0
            and step_idx >= (self.update_starting_at_step or 0)
            and self._epoch >= (self.update_starting_at_epoch or 0)
        )


def _apply_averages(trainer: Trainer, averages: Averages) -> None:
    """Put the averages into the model, and broadcast rank zero's buffers to all processes."""
    averages.apply_to_model()
    world = trainer.accelerator.world
    if world.size > 1:  # buffers differ between processes, but all must evaluate the same model
        for buffer in averages.buffers:
            world.broadcast_tensor(buffer)


def _choose_average(name: str, kwargs: dict[str, Any]) -> Average:
    for key, value in kwargs.items():
        if key not in _FUNCTIONS:
            raise TypeError(f"{name} has no argument {key!r}.{nearest(key, _FUNCTIONS)}")
        if value is not None and not callable(value):
            raise TypeError(f"{name}: {key}={value!r} must be a function.")
    avg_fn, multi_avg_fn = (kwargs.get(key) for key in _FUNCTIONS)
    if avg_fn is not None and multi_avg_fn is not None:
        raise ValueError(f"{name}: avg_fn and multi_avg_fn can't be combined. Pass only one.")
    if multi_avg_fn is not None:
        return partial(average_all, multi_avg_fn)
    return average_equally if avg_fn is None else partial(average_each, avg_fn)
