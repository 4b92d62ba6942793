"""Communication hooks for gradients: compression, or a user-defined function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...common.messages import announce
from ...common.validation import choose
from ..distributed import World

_NAMES = ("no", "fp16", "bf16", "power_sgd", "batched_power_sgd")


class CommHook:
    """Communication hook, validated when it is created and registered when a model is wrapped.

    The arguments are ``comm_hook``, ``comm_state`` and ``comm_wrapper`` of `DDP`.

    Source: PowerSGD (Vogels et al., 2019), https://arxiv.org/abs/1905.13727
    """

    def __init__(self, hook: Any, state: Any = None, wrapper: Any = None) -> None:
        self.hook = hook if hook is None or callable(hook) else choose("comm_hook", hook, _NAMES)
        self.wrapper = wrapper if wrapper is None or callable(wrapper) else choose("comm_wrapper", wrapper, _NAMES[:3])
        self.state = state
        self.hook = None if self.hook == "no" else self.hook
        self.wrapper = None if self.wrapper == "no" else self.wrapper
        if self.hook == "batched_power_sgd" or getattr(self.hook, "__name__", "") == "batched_powerSGD_hook":
            # Since pytorch/pytorch#75157, observed in 2.13: torch passes 2-d matrices to a function for 3-d ones.
            raise ValueError(
                "comm_hook='batched_power_sgd' is broken in torch: it raises an AssertionError in its first compressed "
                "step. Use comm_hook='power_sgd'."
            )
        if self.hook is None and (self.wrapper is not None or state):
            argument = "comm_state" if self.wrapper is None else "comm_wrapper"
            raise ValueError(f"{argument} needs a comm_hook, but none is set. Set comm_hook, or remove {argument}.")
        if self.hook in ("fp16", "bf16") and state:
            raise ValueError(f"comm_hook={str(self.hook)!r} takes no state. Remove comm_state={state!r}.")
        if getattr(self.hook, "__name__", "") == "post_localSGD_hook":
            raise ValueError(
                "comm_hook=post_localSGD_hook stops gradient reduction but does not average the parameters. Use "
                "treadle.LocalSGD in your own loop, which does both."
            )

    def __bool__(self) -> bool:
        return self.hook is not None

    def register(self, module: torch.nn.parallel.DistributedDataParallel, world: World) -> None:
        """Register the hook with a replica."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook, state = self._resolve_hook(world)
        compresses = isinstance(self.hook, str) or isinstance(self.wrapper, str)
        if callable(self.wrapper):
            hook = self.wrapper(hook)
        elif self.wrapper is not None:
            hook = getattr(default_hooks, f"{self.wrapper}_compress_wrapper")(hook)

        def send(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
            if compresses and bucket.buffer().is_complex():
                # The others drop the imaginary part.
                return default_hooks.allreduce_hook(world.group, bucket)  # type: ignore[arg-type]  # None: all ranks
            return hook(state, bucket)

        module.register_comm_hook(state, send)

    def _resolve_hook(self, world: World) -> tuple[Callable[..., Any], Any]:
        if callable(self.hook):
            return self.hook, self.state
        if self.hook == "fp16":
            return scaled_fp16, world.group
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if self.hook == "bf16":
            return default_hooks.bf16_compress_hook, world.group
        announce("PowerSGD's error memory is not saved in checkpoints, so a resumed run starts with an empty memory")
        if self.state is not None and not isinstance(self.state, dict):
            return powerSGD_hook.powerSGD_hook, self.state
        # torch's default epsilon is 0, with which a gradient of zeros becomes NaN.
        options = {"process_group": world.group, "orthogonalization_epsilon": 1e-8, **(self.state or {})}
        return powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(**options)


def scaled_fp16(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in float16, divided by the largest absolute value on any process.

    torch's hook does not scale, so a gradient multiplied by a number of tokens can exceed float16's maximum, 65504.
    """
    buffer = bucket.buffer()
    if not buffer.numel():
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done
    largest = buffer.abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))
    small = buffer.div(scale).div_(dist.get_world_size(group)).half()

    def grow(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        if scale.is_cuda:  # this runs on another stream, and the scale would be freed before it has run
            scale.record_stream(torch.cuda.current_stream())
        return buffer.copy_(future.value()[0]).mul_(scale)

    return dist.all_reduce(small, group=group, async_op=True).get_future().then(grow)
