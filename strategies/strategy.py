"""How a model lies on the world: the base of every strategy, which is also all that one device needs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ..common.messages import warn
from .distributed import World
from .forward_router import Router, routed
from .lightning_aliases import StrategyAliases
from .model_init import built_in_place
from .precision import Precision
from .wrap_policy import split_into_blocks


class Strategy(StrategyAliases):
    """How a model lies on the world. Third parties subclass this and register a name.

    A strategy knows models and processes; it knows no steps, epochs or files. The defaults are right for a model
    that lies whole on one device, alone or (where a subclass adds the reduction) as replicas.

    Attributes:
        name: the registry name.
        distributed: whether it can run on more than one process.
        sharded: whether a process holds only parts of the parameters.
        has_rank_buffers: whether a process's buffers go on from what they were, rather than from rank zero's.
        delays_sync: whether `set_gradient_sync` does anything, so that the loop may skip the call.
        device_mesh: the processes on a grid with named dimensions, where the strategy uses one.
        requested_device: the one device to run on, where the strategy was built for one.
    """

    name: ClassVar[str] = "base"
    distributed: ClassVar[bool] = False
    sharded: ClassVar[bool] = False
    has_rank_buffers: bool = False
    delays_sync: bool = False
    device_mesh: DeviceMesh | None = None
    requested_device: torch.device | None = None

    precision: Precision

    def attach(self, world: World, precision: Precision) -> None:
        """Say where and in which precision this strategy works. Called once, before anything else."""
        if world.size > 1 and not self.distributed:
            raise ValueError(
                f"strategy={self.name!r} is for one process, but {world.size} were started. "
                f"Use strategy='ddp' (or 'auto'), or start one."
            )
        self.world = world
        self.precision = precision
        self._votes: Tensor | None = None
        self._work: Any = None

    @property
    def replicas_equal(self) -> bool:
        """Whether the ranks' replicas are meant to be one model after each optimizer step."""
        return True

    def detach(self) -> None:
        """Let go of what belongs to the process group, which is about to end; `attach` follows."""

    @property
    def data_world(self) -> World:
        """The processes that the data is shared out to; those that hold parts of one replica get the same batches."""
        return self.world

    def construction(self, empty: bool = False) -> AbstractContextManager[Any]:
        """The context to build a model in: on the device and in the storage format at once.

        Args:
            empty: skip what initialises parameters, as a checkpoint is loaded over them.
        """
        return built_in_place(self.world.device, self.precision.storage, empty)

    def wrap(self, module: nn.Module, step: str | None = None) -> nn.Module:
        """Place ``module`` on the device and return what to call in its stead.

        Args:
            module: the user's model.
            step: the method whose returned loss is trained on, where it is not ``forward``.
        """
        self.place(module)
        context = self.precision.context(self.world.device)
        return module if context is None else Router(module, context, self.precision.compute is not None)

    def replicate(self, module: nn.Module) -> nn.Module:
        """As `wrap`, for steps that call backward themselves and then `reduce_gradients`.

        Raises:
            ValueError: where that would be silently wrong, which a strategy of several processes must know itself.
        """
        if self.sharded or self.world.size > 1:
            raise ValueError(
                f"strategy={self.name!r} can't run a task with automatic_optimization=False: it reduces gradients, or "
                "gathers the model, once for the whole of training_step. Use 'ddp', or DDP(zero=True)."
            )
        return self.wrap(module)

    def reduce_gradients(self, parameters: Iterable[Tensor], note: Tensor | None = None) -> Tensor | None:
        """Average gradients that a backward has left on its process, where `replicate` leaves them there.

        Args:
            parameters: whose.
            note: a number to sum over the processes in the same exchange (0-d tensor).

        Returns:
            The sum; None where nothing is exchanged.
        """
        return None

    def place(self, module: nn.Module) -> nn.Module:
        """Put ``module`` where it can be evaluated, in the storage format; returns what to call in its stead."""
        if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
            raise ValueError(
                f"this {type(module).__name__} was sharded by an earlier run, and strategy={self.name!r} needs it "
                "whole. Build it anew and load the weights."
            )
        return module.to(device=self.world.device, dtype=self.precision.storage)

    def compiled_parts(self, module: nn.Module, blocks: bool | None = None) -> tuple[list[nn.Module], bool]:
        """What to compile, each by itself, of a module whose methods are run; before it is wrapped.

        Args:
            module: the user's module.
            blocks: whether repeated blocks are parts of their own; by default where most are alike.

        Returns:
            The parts, and whether their hooks must stay out of what is compiled.
        """
        return split_into_blocks(module, blocks), False

    def decisions(self, module: nn.Module) -> list[str]:
        """What the user may want to know of how a wrapped model is run, and could choose otherwise; said once."""
        return []

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return what to step in the place of ``optimizer``, whose model is wrapped by now."""
        move_optimizer_state(optimizer, self.world.device)
        return optimizer

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the user's own module inside ``module``."""
        while True:
            if isinstance(module, Router | nn.parallel.DistributedDataParallel):
                module = module.module
            elif (compiled := module._modules.get("_orig_mod")) is not None:  # what `torch.compile` returned
                module = compiled
            else:
                return module

    def graph_leaves(self, module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what autograd's graph of a wrapped ``module`` ends in, each with the parameter that it belongs to.

        They differ where parameters are gathered for the computation.
        """
        return ((parameter, parameter) for parameter in self.unwrap(module).parameters())

    def method(self, wrapped: nn.Module, name: str) -> Callable[..., Any]:
        """Return method ``name`` of the user's module, run the way ``forward`` of the wrapped one runs."""
        bound = getattr(self.unwrap(wrapped), name)
        router = self._find_router(wrapped)
        return bound if router is None else routed(wrapped, router, bound)

    def local_method(self, module: nn.Module, name: str) -> Callable[..., Any]:
        """Return method ``name`` of the user's module in the run's precision, without any exchange: for evaluation."""
        bound = getattr(self.unwrap(module), name)
        context = self.precision.context(self.world.device)
        if context is None:
            return bound

        def inside(*args: Any, **kwargs: Any) -> Any:
            with context:
                return bound(*args, **kwargs)

        return inside

    @staticmethod
    def _find_router(module: nn.Module) -> Router | None:
        return next((m for m in (module, module._modules.get("module")) if isinstance(m, Router)), None)

    def set_gradient_sync(self, module: nn.Module, on: bool) -> None:
        """Say whether the coming forward and backward reduce the gradients over the processes."""

    def no_sync(self, module: nn.Module) -> Any:
        """A context in which gradients stay local."""
        return nullcontext()

    def steps_apart(self, module: nn.Module) -> AbstractContextManager[Any]:
        """A context in which each process takes optimizer steps on a model of its own, without the others."""
        if self.world.size > 1:
            raise ValueError(
                f"strategy={self.name!r} can't step apart: it needs a whole replica on each process (ddp)."
            )
        return nullcontext()

    def join(self, models: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Return a context in which a rank may train the wrapped ``models`` on fewer batches than the others.

        Only replicas can do without a rank. Everything else warns and changes nothing.
        """
        return self._warn_unjoined(f"strategy={self.name!r}")

    def _warn_unjoined(self, setting: str) -> AbstractContextManager[None]:
        if self.world.size > 1:
            warn(
                f"join_uneven_inputs has no effect with {setting}, which needs every rank in each step. Ranks that "
                "read prepared DataLoaders stay in step without it; a loop of your own must take as many steps on each "
                "rank."
            )
        return nullcontext()

    @contextmanager
    def sync_in_backward(self, module: nn.Module) -> Iterator[None]:
        """A context whose backward reduces the gradients, also of forwards that ran in `no_sync`."""
        self.set_gradient_sync(module, True)
        yield

    def sync_buffers(self, module: nn.Module) -> None:
        """Give every process rank zero's buffers, so that all evaluate (and save) one model."""
        if self.world.size > 1:
            for buffer in self.unwrap(module).buffers():
                self.world.broadcast_tensor(buffer)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients' total norm in place; returns the norm before clipping (0-d tensor).

        A norm that is NaN leaves the gradients as they are. torch multiplies all of them by it, so that nothing tells
        any more which one was NaN.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.nan_to_num(nan=0.0, posinf=math.inf))
        return norm

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp every gradient element to ``[-clip_value, clip_value]`` in place."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """The state of the user's own module under its own names, as it lies here. All processes must ask.

        Where parameters are sharded it holds this process's parts (torch's ``DTensor``).
        """
        return self.unwrap(module).state_dict()

    def load_model_state(self, module: nn.Module, state: dict[str, Any], strict: bool = True) -> None:
        """Load a state that lies on the processes as `model_state` returns it."""
        self.unwrap(module).load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of ``optimizer`` as it lies here, in the form of ``state_dict()``. All processes must ask."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a state of all parameters, sharded as the parameters are."""
        optimizer.load_state_dict(state)

    def reduction_order(self, module: nn.Module) -> list[int]:
        """What decides in which order gradients are added up, where it depends on the steps before; else nothing."""
        return []

    def take_reduction_order(self, module: nn.Module, order: list[int]) -> None:
        """Add gradients up from here on as a run does whose `reduction_order` was this. All processes must ask."""

    def keeps_apart(self, optimizer: Optimizer) -> bool:
        """Whether each process has the state of parameters of its own, so that each has to save what it has."""
        return False

    def drop_gradients(self, module: nn.Module) -> None:
        """Forget gradients of earlier micro-batches that lie elsewhere than in ``parameter.grad``."""

    def agree_on_overflow(self, overflow: Tensor) -> None:
        """Let ``overflow``, which is 1 where float16 gradients overflowed, be 1 on every process or on none.

        Called once per optimizer step. Replicas have one gradient, so there is nothing to do.
        """

    def explain(self, error: BaseException) -> BaseException:
        """Return what a backward raised in words that help, where there are any; else the error itself."""
        return error

    # -- for plans, where the model has shapes and no values -----------------------------------------------------

    def grid(self, world_size: int) -> dict[str, int]:
        """Return the number of replicas (``replicate``), shards of each, and ranks that share a sample (``tensor``)."""
        return {"replicate": world_size, "shard": 1, "tensor": 1}

    def wrap_without_values(self, module: nn.Module) -> nn.Module:
        """Wrap a module on the meta device as `wrap` would wrap one with values, and return what to call.

        Replicas are not wrapped, because torch's reducer takes no tensors without values (2.13): `reduction_buckets`
        tells what it would send.

        Raises:
            ValueError: for settings whose cost a plan can't know.
        """
        return Router(module, self.precision.context(self.world.device), self.precision.compute is not None)

    def reduction_buckets(self, ready: list[Tensor], *, ballot: bool) -> list[list[int]] | None:
        """Return which gradients replicas reduce together, as indices into ``ready``; None where nothing is reduced.

        Args:
            ready: the parameters in the order in which their gradients become ready.
            ballot: the votes of an agreement ride along, as the index -1.

        Raises:
            ValueError: for a strategy or settings whose traffic a plan can't know.
        """
        if self.world.size == 1:
            return None
        raise ValueError(f"a plan does not know what strategy={self.name!r} sends; it knows 'ddp' and 'fsdp'.")

    @property
    def reduces_unused_gradients(self) -> bool:
        """Whether gradients of parameters that took no part in the step are reduced too."""
        return False

    def gradient_copy_bytes(self, module: nn.Module) -> int:
        """Return the bytes in which copies of gradients are kept to send them from."""
        return 0

    def buffer_broadcast_bytes(self, module: nn.Module) -> list[int]:
        """Return the bytes of each broadcast that copies rank zero's buffers to the other ranks, once per step."""
        return []

    @property
    def gathers_in_storage_dtype(self) -> bool:
        """Whether shards are gathered in the dtype they are stored in."""
        return False

    @property
    def recomputes_activations(self) -> bool:
        """Whether blocks keep only their inputs for backward."""
        return False

    def variant(
        self, *, replicate: int | None = None, recompute: bool | None = None, gather: torch.dtype | None = None
    ) -> Strategy:
        """Return a copy of this strategy with other settings, for a plan to compare.

        Args:
            replicate: number of replicas; each is sharded over the rest.
            recompute: recompute the activations of every block in backward.
            gather: dtype to gather parameters in; gradients are reduced in float32.

        Raises:
            ValueError: for a setting that this strategy does not have.
        """
        settings = {
            "shards to replicate": replicate,
            "activations to compute again": recompute,
            "parameters to gather": gather,
        }
        for setting in (setting for setting, value in settings.items() if value is not None):
            raise ValueError(f"strategy={self.name!r} has no {setting}: that is for 'fsdp'.")
        return copy.copy(self)

    # -- what the processes agree on -----------------------------------------------------------------------------

    @property
    def votes_in_backward(self) -> bool:
        """Whether votes that are cast before the coming backward ride in its reduction of the gradients.

        Its gradients must then be the same on every process, as they can't be voted on. Otherwise votes are an exchange
        of their own, which is better begun when the gradients are known.
        """
        return False

    def start_agreement(self, votes: Tensor) -> None:
        """Begin to sum ``votes`` over the processes; called before the last backward of a step, or after it."""
        self._votes = votes
        self._work = self.world.start_all_reduce(votes)

    def agreement(self) -> Tensor:
        """The summed votes, on the device. Called after that backward."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        assert self._votes is not None
        return self._votes


class SingleDevice(Strategy):
    """One model on one device: CPU, CUDA or MPS.

    Args:
        device: such as ``"cuda:1"``. Default: what ``accelerator`` and ``devices`` of the Trainer select.
    """

    name = "single"

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        self.requested_device = None if device is None else torch.device(device)


def move_optimizer_state(optimizer: Optimizer, device: torch.device) -> None:
    """Bring what an optimizer has gathered so far (momenta, not step counts) to the parameters' device."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                state[name] = value.to(device)
