"""The dict that `Trainer.callback_metrics` returns."""

from __future__ import annotations

from collections.abc import Container, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from .metric_logger import Logbook

if TYPE_CHECKING:
    from ..trainer import Trainer


class CallbackMetrics(dict[str, Any]):
    """Latest logged values by name, to which scripts may add values of their own, as in Lightning.

    A number that is written under a name can be monitored like a logged value. Anything else is only kept.

    Args:
        values: The current values.
        logbook: Destination of values that are written.
    """

    def __init__(self, values: Mapping[str, Any], logbook: Logbook) -> None:
        super().__init__(values)
        self._logbook = logbook

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._logbook.write_value(name, value)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._logbook.forget_value(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a name and return its value."""
        value = super().pop(name, *default)
        self._logbook.forget_value(name)
        return value

    # In terms of the methods above; those of a dict would bypass them.
    update: Any = MutableMapping.update
    setdefault: Any = MutableMapping.setdefault
    popitem: Any = MutableMapping.popitem
    clear: Any = MutableMapping.clear

    def __ior__(self, other: Any) -> CallbackMetrics:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def collect_callback_metrics(trainer: Trainer) -> CallbackMetrics:
    """Return the value of `Trainer.callback_metrics`.

    Args:
        trainer: The Trainer.
    """
    metrics, logbook = trainer.metrics, trainer.logbook
    latest, wide = metrics.latest(), logbook.wide.union(metrics.wide_names())
    values = {**latest, **logbook.callback_values, **latest}  # the task's values come first, as in Lightning
    if trainer.stage == "fit" and not trainer.progress.epoch_is_trained:
        evaluation = () if metrics.evaluation is None else metrics.evaluation.entries
        newer = logbook.latest_validation.just_measured(trainer).union(entry.name for entry in evaluation)
        values |= {name: value for name, value in metrics.latest_of_both().items() if name not in newer}
    return CallbackMetrics(tensors_by_name(values, wide) | logbook.other_values, logbook)


def tensors_by_name(values: Mapping[str, Any], wide: Container[str] = ()) -> dict[str, torch.Tensor]:
    """Return numbers as tensors, which scripts written for Lightning expect.

    Args:
        values: Numbers by name.
        wide: Names whose values are float64 if the default dtype would round them.
    """
    return {name: _as_tensor(value, name in wide) for name, value in values.items()}


def _as_tensor(value: Any, wide: bool) -> torch.Tensor:
    tensor = torch.as_tensor(value, dtype=torch.get_default_dtype(), device="cpu")
    if wide and tensor.dtype is not torch.float64 and tensor.ndim == 0:
        exact = torch.as_tensor(value, device="cpu").double() if isinstance(value, torch.Tensor) else float(value)
        if not tensor.isnan() and tensor.double() != exact:
            return torch.as_tensor(exact, dtype=torch.float64, device="cpu")
    return tensor
