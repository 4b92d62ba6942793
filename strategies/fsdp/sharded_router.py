"""Root module of a sharded model, and the state that torch's `fully_shard` keeps of its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from ..forward_router import Router

if TYPE_CHECKING:
    from ..strategy import Strategy

_OUTSIDE = (
    "with FSDP and automatic_optimization=False, a parameter was used outside of the forward pass of its submodule, "
    "which gathers it. Call the submodule itself, as in self.generator(x). For another method, call "
    "torch.distributed.fsdp.register_fsdp_forward_method(self.generator, 'method') at the start of "
    "configure_optimizers. To call a part of a submodule, name the part's class in auto_wrap_policy."
)
_MANUAL_RULES = {  # by words of torch's error (2.13)
    "mixed torch.Tensor and DTensor": _OUTSIDE,
    "placement": _OUTSIDE,
    "not have been used in the graph": "with FSDP and automatic_optimization=False, torch.autograd.grad can't compute "
    "gradients with respect to parameters, which are shards. Call self.manual_backward, which leaves the gradients in "
    "parameter.grad, or use strategy='ddp'.",
}


def _refuse(gradient: Any) -> None:
    """Refuse the gradient of a shard: FSDP2 sets those itself. Before torch 2.13, training went on with wrong ones."""
    raise RuntimeError(f"a shard got a gradient with placement {gradient.placements}")


class ShardedRouter(Router):
    """Root module of a sharded model.

    After a forward pass without gradients, the model's parameters are resharded. Such a pass does not run in torch's
    inference mode, because parameters first gathered in that mode could not be trained (torch 2.13).

    In manual optimization, the root itself is not sharded, but each submodule of the task is.
    """

    _is_apart: bool
    _strategy: ref[Strategy]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Afterwards, reshard its parameters if gradients are disabled."""
        try:
            return self._run(*args, **kwargs)
        except RuntimeError as error:
            rules = [rule for words, rule in _MANUAL_RULES.items() if words in str(error)]
            if not (self._is_apart and rules):
                raise
            raise ValueError(f"{rules[0]} ({str(error).splitlines()[0]})") from error

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            try:
                return super().__call__(*args, **kwargs)
            finally:
                reshard_parameters(self)


class BackwardPasses:
    """Hooks of a block that manual optimization shards on its own, for any number of backward passes through any graph.

    - A pass that builds a graph (``create_graph=True``) leaves the parameters gathered until the end of the next pass,
      which needs them.
    - At the end of a pass, gradients are reduced that FSDP2 has not reduced. FSDP2 relies on hooks of the block's
      results and inputs, but a pass through the graph of an earlier pass may not reach them (torch 2.13).
    - The gradients of ``loss.backward()`` are weighted by the rank's share of an uneven batch; see `Strategy`.

    Args:
        root: Root of the task.
        block: The block, as sharded by ``fully_shard``.
    """

    def __init__(self, root: ShardedRouter, block: Any) -> None:
        self.root, self.block = root, block
        self._keeps = False
        self._pass: int | None = None
        self._followed: Any = WeakIdKeyDictionary()  # the gathered parameters that have hooks
        block.register_forward_hook(self._follow)  # after FSDP2's own

    def _follow(self, block: Any, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for result in tree_iter(output):
            if isinstance(result, Tensor) and result.requires_grad:
                result.register_hook(self._enter)
        for _, group in iterate_groups_of(block):
            for fsdp_parameter in group.fsdp_params:
                parameter = fsdp_parameter.unsharded_param
                if parameter.requires_grad and parameter not in self._followed:
                    self._followed[parameter] = parameter.register_hook(self._weigh)
                    parameter.register_post_accumulate_grad_hook(self._enter)
                    fsdp_parameter.sharded_param.register_hook(_refuse)

    def _weigh(self, gradient: Tensor) -> Tensor | None:
        weight = self.root._strategy().backward_weight  # type: ignore[union-attr]
        return None if weight == 1.0 else gradient * weight

    def _enter(self, _: Tensor) -> None:
        if torch.is_grad_enabled():
            self._keep(True)
            return
        current = torch._C._current_graph_task_id()
        if self._pass != current:  # not a flag, which a pass that raised an error would leave set
            self._pass = current
            self.block._get_fsdp_state()._register_root_post_backward_final_callback()  # which runs before `_leave`
            Variable._execution_engine.queue_callback(self._leave)

    def _leave(self) -> None:
        for state, group in iterate_groups_of(self.block):
            if any(p.unsharded_param.grad is not None for p in group.fsdp_params if hasattr(p, "_unsharded_param")):
                group.post_backward()
                group.finalize_backward()
                group._training_state = state._training_state
        if self._keeps:
            self._keep(False)
            self.block.reshard()

    def _keep(self, keeps: bool) -> None:
        if keeps is not self._keeps:
            self._keeps = keeps
            self.block.set_reshard_after_backward(not keeps, recurse=False)
            self.block.set_reshard_after_forward(not keeps, recurse=False)


def reshard_parameters(root: Any) -> None:
    """Free the gathered parameters that a forward pass has kept, because they would miss optimizer steps."""
    for part in root._parts_to_reshard:
        part.reshard()


def start_anew(root: Any) -> None:
    """Reset FSDP2's state after an error has interrupted a forward or backward pass."""
    forget_gradients(root)
    if getattr(root, "_is_apart", False):
        for part in root.module.modules():
            if hasattr(part, "_get_fsdp_state") and part._get_fsdp_state()._is_root:
                start_anew(part)
        return
    if hasattr(root, "reset_iter_state"):  # torch 2.13
        root.reset_iter_state()
        return
    for state, group in iterate_sharded_groups(root):
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
    for _, group in iterate_sharded_groups(root):
        for fsdp_parameter in group.fsdp_params:
            fsdp_parameter.unsharded_accumulated_grad = None
            if hasattr(fsdp_parameter, "_unsharded_param"):  # it exists after the first gathering
                fsdp_parameter._unsharded_param.grad = None


def gathered_parameters(root: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the unsharded and the sharded tensor of each parameter that has been gathered."""
    for _, group in iterate_sharded_groups(root):
        for fsdp_parameter in group.fsdp_params:
            if hasattr(fsdp_parameter, "_unsharded_param"):
                yield fsdp_parameter._unsharded_param, fsdp_parameter.sharded_param


def iterate_sharded_groups(root: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield FSDP2's internal state of each module, together with each of the module's parameter groups."""
    for part in root.modules():
        yield from iterate_groups_of(part)


def iterate_groups_of(part: Any) -> Iterator[tuple[Any, Any]]:
    """Yield FSDP2's internal state of one module, together with each of the module's parameter groups."""
    get_state: Any = getattr(part, "_get_fsdp_state", None)
    if get_state is not None:
        state = get_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # in torch 2.11, each has at most one
            groups = [group for group in (state._fsdp_param_group,) if group is not None]
        for group in groups:
            yield state, group
