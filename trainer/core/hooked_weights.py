"""Weights that checkpoint hooks may edit under ``checkpoint["state_dict"]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class HookedWeights:
    """A state dict that is offered to checkpoint hooks, and what they made of it.

    Args:
        weights: Tensors, and what else modules keep in their state, by name.

    Attributes:
        offered: The dict for ``checkpoint["state_dict"]``.
    """

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self.offered = dict(weights)
        self._before = {name: (value, _get_version(value)) for name, value in weights.items()}

    def get_edited(self, checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the weights as the hooks left them; None if nothing was dropped, added, replaced or changed in place.

        Args:
            checkpoint: The dict that the hooks got.

        Raises:
            ValueError: If no state dict is there any more.
        """
        weights = checkpoint.get("state_dict")
        if not isinstance(weights, Mapping):
            raise ValueError(
                f"a checkpoint hook left {type(weights).__name__} as checkpoint['state_dict']: leave a dict of weights."
            )
        same = list(weights) == list(self._before) and all(
            value is before and _get_version(value) == version
            for value, (before, version) in zip(weights.values(), self._before.values(), strict=True)
        )
        return None if same else dict(weights)


def _get_version(value: Any) -> int:
    """Return the number of changes in place; tensors made in inference mode count none."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0
