"""Result of a step with manual optimization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ....common.messages import name_type
from .closure import OutputResult

__all__ = ["ManualResult"]


@dataclass
class ManualResult(OutputResult):
    """Outputs of a step with manual optimization, by name."""

    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_training_step_output(cls, training_step_output: Any) -> ManualResult:
        """Return the result for the output of a training step. The loss is detached from its graph.

        Args:
            training_step_output: A loss, a dict whose ``"loss"``, if any, is a tensor, or None.

        Raises:
            ValueError: If the output is neither a tensor, a dict, nor None.
        """
        output = {"loss": training_step_output} if isinstance(training_step_output, Tensor) else training_step_output
        if output is not None and not isinstance(output, Mapping):
            raise ValueError(
                f"training_step returned {name_type(output)}. It must return the loss (a tensor), a dict, or None."
            )
        extra = dict(output or {})
        if "loss" in extra:
            extra["loss"] = extra["loss"].detach()
        return cls(extra)

    def asdict(self) -> dict[str, Any]:
        """Return the outputs by name."""
        return self.extra
