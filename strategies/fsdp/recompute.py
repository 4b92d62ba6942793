"""Activation checkpointing: activations are freed after the forward pass and recomputed in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...common.messages import announce
from ...common.validation import check_int, check_number
from ..wrap_policy import Policy, check_policy, chosen_blocks

PRODUCTS = "products"
FLAG = "activation_checkpointing_policy"


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Selection of the activations that `FSDP` recomputes in the backward pass instead of keeping them.

    Recomputing fewer activations takes less time and more memory.

    Args:
        blocks: Modules that recompute their activations, in any form that ``auto_wrap_policy`` accepts. Default: the
            modules that ``auto_wrap_policy`` selects.
        every: Select only every n-th of these modules, starting with the first. Default: 1, which selects all of them.
        keep: Operations whose results are kept, such as ``torch.ops.aten.mm.default``. ``"products"`` keeps the results
            of matrix products, convolutions and attention. Default: none.
        budget: Limit on the activation memory of a compiled model, as a fraction of its usual activation memory: from
            0.0 (recompute as much as possible) to 1.0 (no limit). It applies to all compiled models of the process and
            cannot be combined with other arguments.

    Raises:
        ValueError, TypeError: If an argument is invalid, or if arguments contradict each other.

    Examples:
        >>> from treadle.strategies import FSDP, Recompute
        >>> strategy = FSDP(activation_checkpointing_policy=Recompute(every=2, keep="products"))

    Source: https://pytorch.org/blog/activation-checkpointing-techniques/
    """

    blocks: Policy | None = None
    every: int = 1
    keep: str | Collection[Any] = ()
    budget: float | None = None

    def __post_init__(self) -> None:
        check_int("every", self.every, 1)
        if self.blocks is not None:
            # Only here can the policy be a bool, which is a valid value of the argument itself.
            check_policy(self.blocks, "blocks" if isinstance(self.blocks, bool) else FLAG)
        if isinstance(self.keep, str) and self.keep != PRODUCTS:
            raise ValueError(f"keep={self.keep!r} must be {PRODUCTS!r} or a list of operations.")
        for operation in () if isinstance(self.keep, str) else self.keep:
            if not isinstance(operation, torch._ops.OpOverload):
                raise TypeError(
                    f"keep contains {operation!r}, but must contain only operations, such as torch.ops.aten.mm.default."
                )
        if self.budget is not None:
            if not 0.0 <= check_number("budget", self.budget) <= 1.0:
                raise ValueError(f"budget={self.budget!r} must be a fraction from 0.0 to 1.0.")
            others = {"blocks=...": self.blocks is not None, "every=...": self.every != 1, "keep=...": bool(self.keep)}
            if any(others.values()):
                clashing = " and ".join(name for name, is_set in others.items() if is_set)
                raise ValueError(
                    f"budget={self.budget!r} can't be combined with {clashing}, because with a budget the compiler "
                    "chooses what to recompute. Pass budget alone, or remove it."
                )

    @classmethod
    def parse(cls, value: Any) -> Recompute | None:
        """Return the `Recompute` for a value of ``activation_checkpointing_policy``; None if checkpointing is disabled.

        Args:
            value: True, False, None, a policy, or a `Recompute`, which is returned unchanged.

        Raises:
            ValueError: If the policy is invalid.
        """
        if value is None or value is False:
            return None
        if isinstance(value, Recompute):
            return value
        return cls() if value is True else cls(blocks=value)

    def apply(self, module: nn.Module, blocks: list[nn.Module]) -> None:
        """Make the selected submodules of ``module`` recompute their activations.

        Args:
            module: The user's model.
            blocks: The modules that ``auto_wrap_policy`` has selected.

        Raises:
            ValueError, TypeError: If a policy is invalid or selects no module, or if ``budget`` is set and the model
                is not compiled.
        """
        if self.budget is not None:
            self._set_budget(module)
            return
        # The form that keeps the names of the model's submodules; torch has no public one (2.13).
        from torch.distributed._composable import checkpoint

        chosen = blocks if self.blocks is None else chosen_blocks(module, self.blocks, FLAG)
        if not chosen:
            policy = True if self.blocks is None else self.blocks
            raise ValueError(
                f"{FLAG}={policy!r} selects no module of {type(module).__name__}. List classes of its modules."
            )
        options: dict[str, Callable[[], Any]] = {}
        if self.keep:
            from torch.utils.checkpoint import create_selective_checkpoint_contexts

            kept = _list_products() if isinstance(self.keep, str) else list(self.keep)
            options["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
        every_block = set(chosen)
        in_order = [part for part in module.modules() if part in every_block]
        for part in in_order[:: self.every]:
            checkpoint(part, **options)

    def _set_budget(self, module: nn.Module) -> None:
        if not any(part._compiled_call_impl is not None for part in module.modules()):
            raise ValueError(
                f"Recompute(budget={self.budget}) needs a compiled model, but {type(module).__name__} is not "
                "compiled. Set Trainer(compile=True), or use every=... or keep=... instead of budget."
            )
        import torch._functorch.config as settings

        if settings.activation_memory_budget != self.budget:
            settings.activation_memory_budget = self.budget  # type: ignore[assignment]
            announce(
                f"torch.compile limits activations to {self.budget:.0%} of their usual memory, for every model in this "
                "process"
            )


def _list_products() -> list[Any]:
    names = (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )  # fmt: skip
    return [getattr(torch.ops.aten, name).default for name in names]
