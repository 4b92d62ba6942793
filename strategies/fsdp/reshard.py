"""Release of the state that FSDP2 keeps after a forward or backward pass that no optimizer step follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..forward_router import Router


class ShardedRouter(Router):
    """Root module of a sharded model.

    After a forward pass without gradients, the model's parameters are resharded. Such a pass does not run in torch's
    inference mode, because parameters first gathered in that mode could not be trained (torch 2.13).
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Afterwards, reshard its parameters if gradients are disabled."""
        if torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            try:
                return super().__call__(*args, **kwargs)
            finally:
                reshard_parameters(self)


def reshard_parameters(root: Any) -> None:
    """Free the gathered parameters that a forward pass has kept, because they would miss optimizer steps."""
    for part in root._parts_to_reshard:
        part.reshard()


def start_anew(root: Any) -> None:
    """Reset FSDP2's state after an error has interrupted a forward or backward pass."""
    forget_gradients(root)
    if hasattr(root, "reset_iter_state"):  # torch 2.13
        root.reset_iter_state()
        return
    for state, group in _iterate_sharded_groups(root):
        for record in (state, group):
            record._training_state = type(record._training_state).IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        group._all_gather_result = None  # it may contain old values
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()
        group.comm_ctx.reduce_scatter_state = None
        group._to_sharded()


def forget_gradients(root: nn.Module) -> None:
    """Discard the unreduced gradients of gathered parameters.

    An optimizer's ``zero_grad`` resets only the gradients of shards.
    """
    for _, group in _iterate_sharded_groups(root):
        for fsdp_parameter in group.fsdp_params:
            fsdp_parameter.unsharded_accumulated_grad = None
            if hasattr(fsdp_parameter, "_unsharded_param"):  # it exists after the first gathering
                fsdp_parameter._unsharded_param.grad = None


def gathered_parameters(root: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the unsharded and the sharded tensor of each parameter that has been gathered."""
    for _, group in _iterate_sharded_groups(root):
        for fsdp_parameter in group.fsdp_params:
            if hasattr(fsdp_parameter, "_unsharded_param"):
                yield fsdp_parameter._unsharded_param, fsdp_parameter.sharded_param


def _iterate_sharded_groups(root: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield FSDP2's internal state of each module, together with each of the module's parameter groups."""
    for part in root.modules():
        get_state: Any = getattr(part, "_get_fsdp_state", None)
        if get_state is not None:
            state = get_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # older versions (2.6) have one group each
                groups = [group for group in (state._fsdp_param_group,) if group is not None]
            for group in groups:
                yield state, group
