"""`ModelSummary`: prints a table of the model's modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..common.messages import announce
from ..common.validation import check_int
from ._summary import Summary, summarize
from .best_effort import BestEffortCallback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class ModelSummary(BestEffortCallback):
    """Callback that prints a table of the model's modules when ``fit`` begins.

    If the task has an ``example_input_array`` and no lazy layers, its ``forward`` is called once with this input, so
    that the table also shows shapes and FLOPs. Override `show` to print the table differently. A subclass written for
    Lightning, which defines ``summarize``, gets its arguments, with counts such as ``"1,234"``.

    Args:
        max_depth: Levels of nested modules to show; -1 shows all, 0 prints no table. Default: 1.

    Raises:
        ValueError: If ``max_depth`` is invalid.

    Examples:
        >>> import treadle as tl
        >>> from treadle.callbacks import ModelSummary
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> class PrintTotals(ModelSummary):
        ...     def show(self, summary):
        ...         print(summary.total_parameters, "parameters")
        >>> trainer = tl.Trainer(
        ...     max_steps=1,
        ...     accelerator="cpu",
        ...     devices=1,
        ...     logger=False,
        ...     enable_checkpointing=False,
        ...     enable_progress_bar=False,
        ...     callbacks=PrintTotals(),
        ... )
        >>> trainer.fit(BoringModel())
        66 parameters
    """

    def __init__(self, max_depth: int = 1) -> None:
        self.max_depth = check_int("max_depth", max_depth, -1, "shows all")
        self._summarize_kwargs: dict[str, Any] = {}

    @property
    def _max_depth(self) -> int:  # Lightning's name, which public projects read
        return self.max_depth

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Print the table."""
        if self.max_depth and (trainer.is_global_zero or pl_module.example_input_array is not None):
            self._safely(self._look, trainer, pl_module)

    def _look(self, trainer: Trainer, task: TaskModule) -> None:
        summary = self._summary(trainer, task)
        if not trainer.is_global_zero:
            return
        if (print_columns := getattr(self, "summarize", None)) is None:
            self.show(summary)
        else:  # Lightning's method, which public projects override
            sizes = summary.total_parameters, summary.trainable_parameters, summary.model_size
            modes, options = summary.total_training_modes, self._summarize_kwargs
            print_columns(summary._get_summary_data(), *sizes, modes, total_flops=summary.total_flops, **options)

    def _summary(self, trainer: Trainer, pl_module: TaskModule) -> Summary:  # Lightning's name
        accelerator = trainer.accelerator

        def prepare(example: Any) -> Any:
            return accelerator.precision.cast(pl_module.transfer_batch_to_device(example, accelerator.device, 0))

        forward = accelerator.local_method(pl_module, "forward")
        return summarize(pl_module, self.max_depth, forward=forward, prepare=prepare)

    def show(self, summary: Summary) -> None:
        """Print the table of modules. Runs only on rank zero.

        Args:
            summary: The summary to print.
        """
        announce(str(summary))
