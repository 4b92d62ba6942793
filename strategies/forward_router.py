"""Module between a wrapper, such as DDP, and the user's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .nested_data import apply_nested

BALLOT_SIZE = 8


class Ballot:
    """Votes of the processes on decisions that they make together, reduced along with the gradients.

    One of the votes is a count, such as the number of tokens. In float32, counts of up to 2**24 are exact.

    Attributes:
        value: This process's votes for the next backward pass, of shape ``(BALLOT_SIZE,)``.
        carrier: Parameter that does not affect the model. After the gradient reduction, its gradient is the mean of the
            processes' votes.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.value = torch.zeros(BALLOT_SIZE, device=device, dtype=dtype)
        self.carrier = nn.Parameter(torch.zeros_like(self.value))

    def clear(self) -> None:
        """Set all votes to zero."""
        self.value = torch.zeros_like(self.carrier)


def ballot_dtype(parameters: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of a `Ballot`: float64 if all ``parameters`` are float64, otherwise float32."""
    return torch.float64 if all(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32


class _Carry(torch.autograd.Function):
    """Autograd function that passes the loss through and makes the votes the gradient of the carrier parameter."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, carrier: Tensor, ballot: Ballot) -> Tensor:
        ctx.ballot = ballot
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.ballot.value.clone(), None


def _cast_to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class LikeItsModule(nn.Module):
    """Wrapper with the attributes of ``module``, so that `model.config` works on a prepared model."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Router(LikeItsModule):
    """Module that runs any method of ``module`` as its ``forward``, inside the precision's context.

    Wrappers such as DDP apply to ``forward`` only, so a task's ``training_step`` has to run inside ``forward``.

    Args:
        module: The user's model.
        context: Context from `Precision.context` in which methods run, or None.
        upcast: Convert half-precision results of ``forward`` to float32. Results of methods that `routed` selects are
            not converted.
        ballot: Votes to reduce together with the gradients of the step's loss, or None.
        no_sync: Function that returns a context in which gradients are not reduced, under the name that DDP gives it.
    """

    def __init__(
        self,
        module: nn.Module,
        context: AbstractContextManager[Any] | None,
        upcast: bool,
        ballot: Ballot | None = None,
        no_sync: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        if no_sync is not None:
            self.no_sync = no_sync
        # Underscored, so that the user's attributes of the same names remain accessible.
        self._context = context
        self._upcast = upcast
        self._ballot = ballot
        self._carrier = ballot.carrier if ballot is not None else None
        # A list, because setting an attribute of a module takes a microsecond.
        self._route: list[Callable[..., Any]] = []
        self.register_load_state_dict_pre_hook(_rename_for_load)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the submodules under their names in the user's model, and the router itself if DDP or FSDP needs it.

        Args:
            memo: Modules that have already been yielded.
            prefix: Prefix of all yielded names.
            remove_duplicate: Yield a module only once, even if it is registered under several names.
        """
        # DDP, or FSDP, which replaces the class, looks for it.
        if self._carrier is not None or type(self) is not Router:
            yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of the user's model under the model's own names.

        Args:
            args: Arguments of its ``state_dict``.
            kwargs: Keyword arguments of its ``state_dict``.
        """
        return self.module.state_dict(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method that `routed` selects or, without one, the user's model itself.

        Args:
            args: Arguments of the method.
            kwargs: Keyword arguments of the method.
        """
        call = self._route[-1] if self._route else self.module
        if self._context is None:
            output = call(*args, **kwargs)
        else:
            with self._context:
                output = call(*args, **kwargs)
        if self._route:
            return output if self._carrier is None else self._carry(output)
        return apply_nested(output, Tensor, _cast_to_float32) if self._upcast else output

    def _carry(self, output: Any) -> Any:
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return output  # the loop reports what is wrong with it
        loss = _Carry.apply(loss, self._carrier, self._ballot)
        return {**output, "loss": loss} if isinstance(output, dict) else loss


def _rename_for_load(router: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the entries of `Router.state_dict` to the names under which torch expects the values of a child module."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)


def routed(wrapped: nn.Module, router: Router, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs ``call`` through the ``forward`` of ``wrapped``, which calls ``router``.

    Args:
        wrapped: Module to call, such as the DDP module around ``router``.
        router: The `Router` inside ``wrapped``, or ``wrapped`` itself.
        call: Bound method of the user's model.
    """
    route = router._route

    def run(*args: Any, **kwargs: Any) -> Any:
        route.append(call)
        try:
            return wrapped(*args, **kwargs)
        finally:
            route.pop()

    return run
