"""Base class of callbacks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..common.messages import nearest

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..trainer import TaskModule, Trainer


def _refuse_unknown(init: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor with an error about unknown arguments that names the closest valid one."""
    code = init.__code__
    valid = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    if code.co_flags & inspect.CO_VARKEYWORDS:  # it passes them on
        return init

    @functools.wraps(init)
    def checked(self: Callback, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in valid:
                raise TypeError(f"{type(self).__name__}() has no argument {name!r}.{nearest(name, valid)}")
        init(self, *args, **kwargs)

    return checked


class Callback:
    """Base class of callbacks. Override the hooks that you need.

    The page ``docs/hooks.md`` lists the hooks in the order in which they run. A callback's hook runs before the task's
    own hook if ``after_task`` is 0, otherwise after it. In ``on_load_checkpoint``, the task's own hook always runs
    first.

    Attributes:
        after_task: Position of the callback's hooks. With 0, they run before the task's own hooks. With a higher value,
            they run after the task's own hooks, in ascending order of ``after_task``: 1 for callbacks that stop the
            run, 2 for callbacks that save, 3 for callbacks that display. Default: 0.
        searches: True if the callback searches for a setting before the stage begins, as `BatchSizeFinder` does.
            Default: False.
        exchanges: True if the callback's hooks use collectives. Every rank must have the same callbacks of this kind,
            in the same order. Default: False.

    Examples:
        >>> import treadle as tl
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> class StepCounter(tl.Callback):
        ...     steps = 0
        ...     def on_step_end(self, trainer, pl_module):
        ...         self.steps += 1
        >>> counter = StepCounter()
        >>> trainer = tl.Trainer(max_steps=3, accelerator="cpu", devices=1, barebones=True, callbacks=counter)
        >>> trainer.fit(BoringModel())
        >>> counter.steps
        3
    """

    after_task: int = 0
    searches: bool = False
    exchanges: bool = False
    _task: TaskModule | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # A user's class stays as it was written.
        if cls.__module__.startswith("treadle.") and "__init__" in vars(cls):
            cls.__init__ = _refuse_unknown(cls.__init__)  # type: ignore[method-assign, misc]

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log one value, as in `TaskModule.log`.

        Args:
            name: Name under which the value is logged.
            value: A number, a tensor with one element, or a ``torchmetrics.Metric``.
            args: Further positional arguments of `TaskModule.log`.
            kwargs: Further keyword arguments of `TaskModule.log`.

        Raises:
            RuntimeError: If no stage with this callback is running.
            ValueError, TypeError: If an argument is invalid.
        """
        self._get_attached_task().log(name, value, *args, **kwargs)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log each value of a dictionary, all with the same keyword arguments.

        Args:
            dictionary: Values to log, by name.
            args: Positional arguments of `log` after the value.
            kwargs: Keyword arguments of `log`.

        Raises:
            RuntimeError: If no stage with this callback is running.
            ValueError, TypeError: If an argument is invalid.
        """
        self._get_attached_task().log_dict(dictionary, *args, **kwargs)

    def _get_attached_task(self) -> TaskModule:
        if self._task is None:
            raise RuntimeError(f"{type(self).__name__}.log was called outside of a stage. Call it in a hook.")
        return self._task

    @property
    def state_key(self) -> str:
        """Name under which the callback's state is saved and restored. Default: the name of the class.

        Two callbacks with a state must have different names. Otherwise, ``fit`` raises a ValueError.
        """
        return type(self).__qualname__

    def _generate_state_key(self, **kwargs: Any) -> str:  # Lightning's name, which public projects call
        return f"{type(self).__qualname__}{kwargs!r}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint: plain data and tensors. Default: an empty dict."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Args:
            state_dict: The saved state.
        """

    def added_layout(self) -> dict[str, Any]:
        """Return the layout for loading the sharded tensors that `on_save_checkpoint` adds.

        Override this method if `on_save_checkpoint` adds sharded tensors. Return a dict of the same structure, with
        tensors that are sharded as in this run. Their values are not used.
        """
        return {}

    def leave_validation(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Undo the changes that ``on_validation_start`` made to the model.

        Called on all ranks if a signal such as SIGTERM interrupts validation in ``fit``, so that the trained weights
        can be saved before the run ends.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def return_to_validation(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Redo the changes that `leave_validation` undid.

        Called on all ranks if the model still does not hold the trained weights after `leave_validation`, so that
        validation can continue.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def _guard(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook of this callback in the form in which the Trainer calls it; see `BestEffortCallback`."""
        return hook

    # -- the run -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Prepare for a stage. Runs on every process, before ``configure_model`` and ``configure_optimizers``.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Clean up after a stage, whether it succeeded or failed.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after the model and the optimizers are created. In a resumed run, the weights are already loaded.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_fit_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run at the end of ``fit``, unless an error or a signal ends it.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_exception(self, trainer: Trainer, pl_module: TaskModule, exception: BaseException) -> None:
        """React to an exception on this process. Do not use collectives, because other ranks may not reach them.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            exception: Exception that ended the stage.
        """

    # -- training ------------------------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before the sanity check, which runs validation batches before training begins.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_sanity_check_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after the sanity check.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before training begins or, in a resumed run, continues.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_train_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run at the end of training, unless an error or a signal ends ``fit``.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before each epoch, and before the rest of a resumed epoch.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after each epoch, even if a limit or a requested stop cuts it short.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_train_batch_start(self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int) -> int | None:
        """Run before each micro-batch, once it is on the device.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            batch: The batch.
            batch_idx: Index of the micro-batch in the epoch.

        Returns:
            -1, on every rank, to end the epoch; None to continue.
        """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Run after each micro-batch. For the last micro-batch before an optimizer step, the hook runs after the step.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            outputs: Dict with the detached ``"loss"``, if any, and the other entries that ``training_step`` returned.
                With manual optimization, a result that is not a tensor, a dict or None is passed unchanged.
            batch: The batch.
            batch_idx: Index of the micro-batch in the epoch.
        """

    def on_before_backward(self, trainer: Trainer, pl_module: TaskModule, loss: Any) -> None:
        """Run after the loss is computed and before its backward pass.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            loss: The unscaled loss.
        """

    def on_after_backward(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after each backward pass.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TaskModule, optimizer: Optimizer) -> None:
        """Run before each optimizer step. The gradients are complete and unscaled, but not yet clipped by the Trainer.

        With automatic optimization and an optimizer that needs a closure, such as LBFGS, the hook runs in each closure
        call.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            optimizer: Optimizer that is about to step.
        """

    def on_before_zero_grad(self, trainer: Trainer, pl_module: TaskModule, optimizer: Optimizer) -> None:
        """Run before the gradients are reset. Does not run with manual optimization.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            optimizer: Optimizer whose gradients are reset.
        """

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after each optimizer step, even a skipped one, and after any scheduler steps and validation that are due.

        With manual optimization, the hook runs after each batch.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    # -- evaluation ----------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before validation begins.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after validation ends. The logged values are in ``trainer.callback_metrics``.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before the first batch of the validation dataloaders.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after the last batch of the validation dataloaders.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before each validation batch, once it is on the device.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            batch: The batch.
            batch_idx: Index of the batch in its dataloader.
            dataloader_idx: Index of the dataloader. Default: 0.
        """

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run after each validation batch.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            outputs: Result of ``validation_step``.
            batch: The batch.
            batch_idx: Index of the batch in its dataloader.
            dataloader_idx: Index of the dataloader. Default: 0.
        """

    def on_test_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before testing begins.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_test_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after testing ends.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_test_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before the first batch of the test dataloaders.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_test_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after the last batch of the test dataloaders.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before each test batch, once it is on the device.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            batch: The batch.
            batch_idx: Index of the batch in its dataloader.
            dataloader_idx: Index of the dataloader. Default: 0.
        """

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run after each test batch.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            outputs: Result of ``test_step``.
            batch: The batch.
            batch_idx: Index of the batch in its dataloader.
            dataloader_idx: Index of the dataloader. Default: 0.
        """

    def on_predict_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before prediction begins.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_predict_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after prediction ends.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before the first batch of the prediction dataloaders.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after the last batch of the prediction dataloaders.

        Args:
            trainer: The Trainer.
            pl_module: The task.
        """

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before each prediction batch, once it is on the device.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            batch: The batch.
            batch_idx: Index of the batch in its dataloader.
            dataloader_idx: Index of the dataloader. Default: 0.
        """

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run after each prediction batch.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            outputs: Result of ``predict_step``.
            batch: The batch.
            batch_idx: Index of the batch in its dataloader.
            dataloader_idx: Index of the dataloader. Default: 0.
        """

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Add plain data or tensors to a checkpoint, under user-defined names.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            checkpoint: Dict to which the hook adds entries.
        """

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Restore the entries that `on_save_checkpoint` added to a checkpoint from which ``fit`` resumes.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            checkpoint: The entries that hooks added, plus ``"state_dict"``, ``"epoch"``, ``"global_step"`` and any
                ``"hyper_parameters"``. The weights are already loaded.
        """


HOOKS: tuple[str, ...] = tuple(
    name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")
)
