"""Checkpoint as hooks receive it, with weights that they may edit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...common.messages import name_type


class HookDict(dict[str, Any]):
    """Dict that checkpoint hooks receive. At a load, unlike Lightning's, it does not hold the whole checkpoint.

    Attributes:
        lost: Entries that ``on_save_checkpoint`` added but that could not be stored: what each was, by name.
    """

    lost: Mapping[str, str] | None = None

    def __missing__(self, key: str) -> Any:
        if self.lost and key in self.lost:
            raise KeyError(
                f"on_save_checkpoint added {self.lost[key]}, which a checkpoint cannot store. Pass the hyperparameters "
                "that it lacks to load_from_checkpoint; or build the task yourself, and call treadle.load_weights."
            )
        raise KeyError(
            f"{key!r} is not in the checkpoint. on_load_checkpoint gets only 'state_dict', 'epoch', 'global_step', "
            "'hyper_parameters', those of a data module ('datamodule_hyper_parameters') and entries that hooks have "
            "added, because Treadle itself restores the states of optimizers, schedulers and callbacks. To store "
            "another value, add it in on_save_checkpoint."
        )


class HookedWeights:
    """Wrapper of the state dict for checkpoint hooks, which detects their edits.

    Attributes:
        offered: Dict that hooks get as ``checkpoint["state_dict"]``.
    """

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self.offered = dict(weights)
        self._originals = {name: (value, _get_version(value)) for name, value in weights.items()}

    def get_edited(self, checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the weights as the hooks left them; None if no edit is detected.

        In-place changes of inference tensors are not detected.
        """
        weights = checkpoint.get("state_dict")
        if not isinstance(weights, Mapping):
            raise ValueError(
                f"checkpoint['state_dict'] is {name_type(weights)} after the checkpoint hooks, but it must be a dict "
                "of weights. Change the dict in place, or set the entry to another dict."
            )
        same = list(weights) == list(self._originals) and all(
            value is original and _get_version(value) == version
            for value, (original, version) in zip(weights.values(), self._originals.values(), strict=True)
        )
        return None if same else dict(weights)


def _get_version(value: Any) -> int:
    """Return a tensor's number of in-place changes; 0 for other values and inference tensors, which have no counter."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0
