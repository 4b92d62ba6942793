"""Print a table of the model's modules when training begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..common.messages import announce
from ..common.validation import check_int
from ._summary import Summary, summarize
from .best_effort import BestEffortCallback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class ModelSummary(BestEffortCallback):
    """Print a table of the model's parts when ``fit`` begins: type, parameters, training or evaluation mode, frozen.

    Where the task has an ``example_input_array``, it is run on it once, and the table shows what goes into each part,
    what comes out, and how many floating-point operations that takes. Of a sharded model it also says how many of
    the parameters one process holds. Override `show` to print it otherwise.

    Args:
        max_depth: How many levels of parts to show; -1 for all, 0 for no table.

    Raises:
        ValueError: For a depth that is none.
    """

    def __init__(self, max_depth: int = 1) -> None:
        self.max_depth = check_int("max_depth", max_depth, -1, "shows all")

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Print the table. To run a sharded model on its example takes all processes."""
        if self.max_depth and (trainer.is_global_zero or pl_module.example_input_array is not None):
            self._safely(self._look, trainer, pl_module)

    def _look(self, trainer: Trainer, task: TaskModule) -> None:
        accelerator = trainer.accelerator

        def prepare(example: Any) -> Any:
            return accelerator.precision.cast(task.transfer_batch_to_device(example, accelerator.device, 0))

        forward = accelerator.local_method(task, "forward")
        summary = summarize(task, self.max_depth, forward=forward, prepare=prepare)
        if trainer.is_global_zero:
            self.show(summary)

    def show(self, summary: Summary) -> None:
        """Print it. Called on rank zero."""
        announce(str(summary))
