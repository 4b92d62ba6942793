"""Which activations are dropped after forward and computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...common.messages import announce
from ...common.validation import check_int
from ..wrap_policy import Policy, check_policy, chosen_blocks

PRODUCTS = "products"
FLAG = "activation_checkpointing_policy"


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What `FSDP` computes again in backward, rather than to keep it from forward on.

    Blocks keep only their inputs: a forward's time more, and a block's activations instead of the model's. To drop less
    costs less time.

    Args:
        blocks: which modules, as ``auto_wrap_policy``, which is the default.
        every: only every n-th of them, the first one included.
        keep: operations whose results are kept within them, such as ``torch.ops.aten.mm.default``; ``"products"`` for
            those of matrix products and attention, which take longest: what is computed again is then cheap.
        budget: let the compiler choose what to keep within a share of the memory, from 0.0 (drop all) to 1.0 (keep
            all), at the least cost in time. For compiled models, and of the whole process; without the others.

    Raises:
        ValueError: for a number out of range, or a ``budget`` beside something else.
        TypeError: for something in ``keep`` that is no operation.

    Source: https://pytorch.org/blog/activation-checkpointing-techniques/
    """

    blocks: Policy | None = None
    every: int = 1
    keep: str | Collection[Any] = ()
    budget: float | None = None

    def __post_init__(self) -> None:
        check_int("every", self.every, 1)
        if self.blocks is not None:
            check_policy(self.blocks, FLAG)
        if isinstance(self.keep, str) and self.keep != PRODUCTS:
            raise ValueError(f"keep={self.keep!r} must be {PRODUCTS!r} or a list of operations.")
        for operation in () if isinstance(self.keep, str) else self.keep:
            if not isinstance(operation, torch._ops.OpOverload):
                raise TypeError(f"keep names {operation!r}: give operations, such as torch.ops.aten.mm.default.")
        if self.budget is not None:
            if isinstance(self.budget, bool) or not 0.0 <= self.budget <= 1.0:
                raise ValueError(f"budget={self.budget!r} must be a share from 0.0 to 1.0.")
            if self.blocks is not None or self.every != 1 or self.keep:
                raise ValueError("budget lets the compiler choose; leave out blocks, every and keep.")

    @classmethod
    def parse(cls, value: Any) -> Recompute | None:
        """Return what a flag asks for: nothing, all blocks, a policy's, or this.

        Raises:
            TypeError, ValueError: for a policy that is none.
        """
        if value is None or value is False:
            return None
        if isinstance(value, Recompute):
            return value
        return cls() if value is True else cls(blocks=value)

    def apply(self, module: nn.Module, blocks: list[nn.Module]) -> None:
        """Let the chosen parts of ``module`` drop their activations.

        Args:
            module: the model.
            blocks: those that ``auto_wrap_policy`` has chosen.

        Raises:
            ValueError: if there is no such part, or a ``budget`` for a model that is not compiled.
        """
        if self.budget is not None:
            self._set_budget(module)
            return
        # The form that leaves the names of the model's parts as they are; torch has no public one (2.13).
        from torch.distributed._composable import checkpoint

        chosen = blocks if self.blocks is None else chosen_blocks(module, self.blocks, FLAG)
        if not chosen:
            policy = True if self.blocks is None else self.blocks
            raise ValueError(f"{FLAG}={policy!r} finds nothing in {type(module).__name__}; name module classes.")
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
                f"Recompute(budget={self.budget}) is for the compiler, and {type(module).__name__} is not compiled: "
                "add Trainer(compile=True), or use every= or keep=."
            )
        import torch._functorch.config as settings

        if settings.activation_memory_budget != self.budget:
            settings.activation_memory_budget = self.budget  # type: ignore[assignment]
            announce(f"torch.compile keeps activations within {self.budget:.0%} of their memory, in this whole process")


def _list_products() -> list[Any]:
    names = (
        "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )  # fmt: skip
    return [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]
