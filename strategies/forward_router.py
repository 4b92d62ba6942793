"""The module that stands between a wrapper (autocast, DDP) and the user's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

BALLOT_SIZE = 7


class Ballot:
    """What one process alone knows and all must decide on: a few numbers that are summed over the processes.

    Args:
        device: where the model is.
        dtype: float64 for a model of that type, so that its gradients and this one share a bucket; else float32,
            the smallest in which a count of tokens is exact.

    Attributes:
        value: the votes of the coming backward.
        carrier: the parameter whose gradient they are.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.value = torch.zeros(BALLOT_SIZE, device=device, dtype=dtype)
        self.carrier = nn.Parameter(torch.zeros_like(self.value))

    def clear(self) -> None:
        """No votes."""
        self.value = torch.zeros_like(self.carrier)


def ballot_dtype(parameters: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of a ballot that shares a bucket with the gradients of ``parameters``."""
    return torch.float64 if all(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32


class _Carry(torch.autograd.Function):
    """Pass the loss through, and hand the ballot to the carrier parameter as its gradient.

    DDP then sums it with the first gradient bucket: an agreement of all processes without a collective of its own.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, carrier: Tensor, ballot: Ballot) -> Tensor:
        ctx.ballot = ballot
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.ballot.value.clone(), None


def _cast_to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class Router(nn.Module):
    """Run any method of ``module`` as a ``forward``, inside the precision's context.

    Wrappers such as DDP act on ``forward`` alone; a task's ``training_step`` has to pass through it.

    Args:
        module: the user's model.
        context: what to run it in, or None.
        upcast: what ``forward`` returns in half precision is handed out as float32, so that a loss computed outside is
            exact; a method that is run instead computes its own inside.
        ballot: where given, the step's loss carries it through the gradient reduction.
    """

    def __init__(
        self,
        module: nn.Module,
        context: AbstractContextManager[Any] | None,
        upcast: bool,
        ballot: Ballot | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        # Underscored, so that the user's own attributes of such names stay within reach.
        self._context = context
        self._upcast = upcast
        self._ballot = ballot
        self._carrier = ballot.carrier if ballot is not None else None
        # A list, as setting an attribute of a module costs a microsecond.
        self._route: list[Callable[..., Any]] = []
        self.register_load_state_dict_pre_hook(_rename_for_load)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the parts of the user's model under its own names: this module shows in no name."""
        if self._carrier is not None or type(self) is not Router:  # DDP, or FSDP, which changes the class, looks for it
            yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of the user's model under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the routed method, or the module itself."""
        call = self._route[-1] if self._route else self.module
        if self._context is None:
            output = call(*args, **kwargs)
        else:
            with self._context:
                output = call(*args, **kwargs)
        if self._route:
            return output if self._carrier is None else self._carry(output)
        return apply_to_collection(output, Tensor, _cast_to_float32) if self._upcast else output

    def _carry(self, output: Any) -> Any:
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return output  # the loop names what is wrong with it
        loss = _Carry.apply(loss, self._carrier, self._ballot)
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def __getattr__(self, name: str) -> Any:
        # `model.config` keeps working on a prepared model.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _rename_for_load(router: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put the names of `Router.state_dict` where torch looks for the values of a child."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)


def routed(wrapped: nn.Module, router: Router, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, run through ``wrapped``'s forward, which ends in ``router``."""
    route = router._route

    def run(*args: Any, **kwargs: Any) -> Any:
        route.append(call)
        try:
            return wrapped(*args, **kwargs)
        finally:
            route.pop()

    return run
