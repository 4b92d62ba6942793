"""Pruned parameters of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from ..strategies.distributed import strip_compile_prefix


class PrunedParameter:
    """Parameter that is or will be pruned.

    For a parameter ``weight``, torch stores the trained values as ``weight_orig`` and the mask as a buffer
    ``weight_mask``, and sets ``weight`` to their product before each forward pass.

    Args:
        module: Module that directly contains the parameter.
        name: Name of the parameter in the module, such as ``"weight"``.
        path: Name of the module in the model; "" for the model itself.
        keep_first: Whether to keep the current value as the initial value.

    Attributes:
        first: The initial value; None if it is not kept.
    """

    def __init__(self, module: nn.Module, name: str, path: str, keep_first: bool) -> None:
        self.module = module
        self.name = name
        self.full_name = f"{path}.{name}" if path else name
        self.first: Tensor | None = self.parameter.detach().clone() if keep_first else None
        self._hooks: list[Any] = []
        if (previous := _find_pruned(module, name)) is not None:
            previous._remove_hooks()
        self.register_hooks()

    @property
    def is_pruned(self) -> bool:
        """True if the parameter has a mask."""
        return f"{self.name}_mask" in self.module._buffers

    @property
    def parameter(self) -> nn.Parameter:
        """The trained parameter, with the unmasked values."""
        table = self.module._parameters
        return table[f"{self.name}_orig"] if f"{self.name}_orig" in table else table[self.name]  # type: ignore

    @property
    def mask(self) -> Tensor:
        """Mask: 1 for remaining weights, 0 for pruned weights."""
        return self.module._buffers[f"{self.name}_mask"]  # type: ignore[return-value]

    def count_zeros(self) -> int:
        """Return the number of pruned weights."""
        return int((self.mask == 0).sum()) if self.is_pruned else 0

    def refresh(self) -> None:
        """Recompute the masked ``weight``, which optimizer steps do not update."""
        if self.is_pruned:
            setattr(self.module, self.name, (self.parameter * self.mask.to(self.parameter.dtype)).detach())

    def register_hooks(self) -> None:
        """Make the module's state dict contain the pruned value under its own name."""
        if self.is_pruned and _find_pruned(self.module, self.name) is None:  # of another ModelPruning
            self._hooks = [  # torch sets an attribute on the hook, which a bound method does not allow
                self.module.register_state_dict_post_hook(partial(self._hide)),
                self.module.register_load_state_dict_pre_hook(self._seek),
            ]

    def make_permanent(self) -> None:
        """Replace the parameter with its pruned value and remove the mask."""
        if self.is_pruned:
            prune.remove(self.module, self.name)
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def get_state(self) -> dict[str, Any]:
        """Return the initial value and, if pruned, the mask and unmasked values."""
        if not self.is_pruned:
            return {"first": self.first}
        return {"first": self.first, "mask": self.mask, "value": self.parameter.detach()}

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Restore the state that `get_state` returned. Its tensors may be read lazily.

        Args:
            saved: The saved state.

        Raises:
            ValueError: If ``saved`` is None.
        """
        if saved is None:
            raise ValueError(
                f"the checkpoint was saved by a run that did not prune {self.full_name}. Prune the same parameters as "
                "that run."
            )
        if self.first is not None and saved["first"] is not None:
            self.first.copy_(saved["first"][...])
        if "mask" not in saved:
            self.make_permanent()
            return
        mask = saved["mask"][...].to(self.parameter.device, copy=True)
        if self.is_pruned:
            self.mask.copy_(mask)  # torch would combine it with the current mask
        else:
            prune.custom_from_mask(self.module, self.name, mask)
        self.parameter.copy_(saved["value"][...])
        self.register_hooks()

    def _hide(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        value, mask = state.pop(f"{prefix}{self.name}_orig"), state.pop(f"{prefix}{self.name}_mask")
        state[f"{prefix}{self.name}"] = (value * mask.to(value.dtype)).detach()

    def _seek(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Split a value in a loaded state dict into weights and mask. Its nonzero weights are no longer pruned."""
        if (value := state.pop(f"{prefix}{self.name}", None)) is not None:
            mask = self.mask
            if value.shape == mask.shape:  # otherwise torch raises an error that describes the mismatch
                mask = torch.where(value.to(mask.device) == 0, mask, torch.ones_like(mask))
            state[f"{prefix}{self.name}_orig"] = value
            state[f"{prefix}{self.name}_mask"] = mask


def _find_pruned(module: nn.Module, name: str) -> PrunedParameter | None:
    owners = (getattr(getattr(hook, "func", None), "__self__", None) for hook in module._state_dict_hooks.values())
    return next((owner for owner in owners if isinstance(owner, PrunedParameter) and owner.name == name), None)


def collect_masks(model: nn.Module) -> dict[str, Tensor]:
    """Return the masks of a model's pruned parameters, by their original names."""
    buffers = dict(model.named_buffers(remove_duplicate=False))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False) if name.endswith("_orig")]
    stems = [name.removesuffix("_orig") for name in names]
    return {strip_compile_prefix(stem): buffers[f"{stem}_mask"] for stem in stems if f"{stem}_mask" in buffers}


def find_prunable(model: nn.Module, names: Iterable[str]) -> list[tuple[nn.Module, str]]:
    """Return all parameters with these names in a model, except those of containers and of the model itself.

    Args:
        model: The model.
        names: Names of the parameters in their modules.

    Returns:
        Pairs of module and name.
    """
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    parts = [part for part in model.modules() if part is not model and not isinstance(part, containers)]
    return [
        (part, name)
        for name in names
        for part in parts
        if part._parameters.get(name) is not None or part._parameters.get(f"{name}_orig") is not None
    ]
