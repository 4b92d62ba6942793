"""Average the weights while they are trained, and validate with the averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..common.messages import nearest, warn
from ..common.validation import check_bool, check_int, check_number
from ._averaging import KEYS, Average, Averages, Averaging, average_equally, find_saved_averages, lerp, wrap_avg_fn

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer

_FUNCTIONS = ("avg_fn", "multi_avg_fn")


class WeightAveraging(Averaging):
    """Keeps an average of the weights, which validation runs with, and which the model has when training is over.

    Each process averages what it holds, after optimizer steps, without a word to the others, also where the model is
    sharded. Until the first update there is no average, and validation sees the weights themselves.

    A checkpoint's model is the weights that are trained. The averages are in it too: a run that goes on has them
    again, on any number of processes; ``validate``, ``test`` and ``predict`` with a ``ckpt_path`` run with them where
    the Trainer has this callback; and `averaged_weights` reads them for any other use.

    It acts before the task's own hooks (``after_task`` is 0), so everyone validates with the averages.

    Args:
        device: Where the averages lie; by default where the weights are. Elsewhere each update waits for the device.
        use_buffers: Average the buffers that are saved, too; else the model's own are used.
        kwargs: ``avg_fn(averaged, current, num_averaged)``, or ``multi_avg_fn`` with lists of these, as in torch's
            ``AveragedModel``. By default all that is averaged counts the same.

    Raises:
        TypeError: For an argument that doesn't exist, or something that is no function.
        ValueError: Where a run can't be averaged, before its first step.
    """

    _key = KEYS[0]
    _position = ("latest_epoch", "latest_step")

    def __init__(self, device: torch.device | str | int | None = None, use_buffers: bool = True, **kwargs: Any) -> None:
        super().__init__()
        self._device = device
        self._use_buffers = check_bool("use_buffers", use_buffers)
        self._average = _choose_average(type(self).__name__, kwargs)
        self._borrowed: Averages | None = None  # of a checkpoint that is evaluated
        self._epoch = 0
        self._latest_step = 0

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to average now; override it.

        Args:
            step_idx: After an optimizer step its number, from 0.
            epoch_idx: After an epoch its number, from 0.
        """
        return step_idx is not None

    # -- averaging -----------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The model lies as it will be trained: make room for its averages."""
        self._make_room(trainer, pl_module, self._use_buffers, self._device, strict=True)
        self._latest_step = trainer.progress.step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Average after an optimizer step, before its validation."""
        self._follow(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Average after the step that an error came after, before this was told of it."""
        self._follow(trainer)

    def _follow(self, trainer: Trainer) -> None:
        step = trainer.progress.step
        if step != self._latest_step:
            self._latest_step = step
            self._epoch = trainer.progress.epoch
            if self.should_update(step_idx=step - 1):
                self._averages.update(self._average)  # type: ignore[union-attr]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Average after an epoch, if that is asked for."""
        progress = trainer.progress
        if progress.epoch_is_over and progress.epoch > self._latest_epoch:
            self._latest_epoch = progress.epoch
            if self.should_update(epoch_idx=progress.epoch):
                self._averages.update(self._average)  # type: ignore[union-attr]

    # -- in the model --------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Validate with the averages."""
        self._begin(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Go on with the weights."""
        self._end()

    def leave_validation(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Go on with the weights."""
        self._end()

    def return_to_validation(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Validate with the averages."""
        self._begin(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Test with a checkpoint's averages."""
        self._begin(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Put the weights back."""
        self._end()

    def on_predict_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Predict with a checkpoint's averages."""
        self._begin(trainer, pl_module)

    def on_predict_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Put the weights back."""
        self._end()

    def on_train_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The model gets the averages for good."""
        averages = self._averages
        if averages is not None and averages.count:
            self._ended = True
            _apply_averages(trainer, averages)

    def _begin(self, trainer: Trainer, pl_module: TaskModule) -> None:
        if trainer.stage == "fit":
            if self._averages is not None and self._averages.count:
                _apply_averages(trainer, self._averages)
        elif trainer.opened_checkpoint is not None:
            saved = find_saved_averages(trainer.opened_checkpoint)
            if saved is None or not saved["weights"]:
                warn(f"{trainer.ckpt_path} holds no averaged weights: those that were trained are used.")
                return
            with torch.inference_mode(False):
                self._borrowed = Averages(pl_module, self._use_buffers)
                self._borrowed.load_state_dict(saved)
            self._borrowed.apply_to_model()

    def _end(self) -> None:
        super()._end()
        if self._borrowed is not None:
            self._borrowed.restore_model()
        self._borrowed = None

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Add the averages.

        Raises:
            ValueError: In a validation, while the model has the averages.
        """
        if self._averages is not None and self._averages.is_applied and not self._ended:
            raise ValueError(
                "a checkpoint holds the weights that are trained, and in a validation the model has the averaged ones: "
                "save in on_step_end; or in on_validation_end, and list the averaging callback before the one that "
                "saves."
            )
        super().on_save_checkpoint(trainer, pl_module, checkpoint)


class EMAWeightAveraging(WeightAveraging):
    """An exponential moving average: after each update it is ``decay * average + (1 - decay) * weights``.

    The first update takes the weights as they are.

    Args:
        device: See `WeightAveraging`.
        use_buffers: See `WeightAveraging`.
        decay: How much of the average stays, from 0 to 1.
        update_every_n_steps: Optimizer steps between updates; 0 updates at the ends of epochs only.
        update_starting_at_step: The first step to average after, counted from 0.
        update_starting_at_epoch: The first epoch to average in, counted from 0.

    Raises:
        ValueError: For a value that can't be.
        TypeError: For one of another kind, or an argument that doesn't exist.
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
            raise ValueError(f"decay={decay!r} must be at most 1: the share of the average that stays.")
        self._average = lerp(1.0 - decay)
        self.decay = decay
        self.update_every_n_steps = check_int(
            "update_every_n_steps", update_every_n_steps, 0, "is at epochs' ends only"
        )
        step, epoch = update_starting_at_step, update_starting_at_epoch
        self.update_starting_at_step = None if step is None else check_int("update_starting_at_step", step, 0)
        self.update_starting_at_epoch = None if epoch is None else check_int("update_starting_at_epoch", epoch, 0)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """See `WeightAveraging.should_update`."""
        if step_idx is None:
            return not self.update_every_n_steps and (epoch_idx or 0) >= (self.update_starting_at_epoch or 0)
        return (
            bool(self.update_every_n_steps)
            and step_idx % self.update_every_n_steps == 0
            and step_idx >= (self.update_starting_at_step or 0)
            and self._epoch >= (self.update_starting_at_epoch or 0)
        )


def _apply_averages(trainer: Trainer, averages: Averages) -> None:
    averages.apply_to_model()
    world = trainer.accelerator.world
    if world.size > 1:  # buffers go on apart on each process; all evaluate one model
        for buffer in averages.buffers:
            world.broadcast_tensor(buffer)


def _choose_average(name: str, kwargs: dict[str, Any]) -> Average:
    for key, value in kwargs.items():
        if key not in _FUNCTIONS:
            raise TypeError(f"{name} has no argument {key!r}.{nearest(key, _FUNCTIONS)}")
        if value is not None and not callable(value):
            raise TypeError(f"{name}: {key}={value!r} is no function.")
    avg_fn, multi_avg_fn = (kwargs.get(key) for key in _FUNCTIONS)
    if avg_fn is not None and multi_avg_fn is not None:
        raise ValueError(f"{name}: give avg_fn or multi_avg_fn, not both.")
    if multi_avg_fn is not None:
        return _wrap_multi_avg_fn(multi_avg_fn)
    return average_equally if avg_fn is None else wrap_avg_fn(avg_fn)


def _wrap_multi_avg_fn(function: Callable[[list[Tensor], list[Tensor], Tensor], Any]) -> Average:
    def average(averages: list[Tensor], current: list[Tensor], count: int) -> None:
        function(averages, current, torch.tensor(count, device="cpu"))

    return average
