"""Base class of strategies, and the strategy for a single device."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ..common.durations import parse_duration
from ..common.messages import warn
from .distributed import FixedTree, PartialSums, World, clip_to_norm
from .forward_router import Router, routed
from .lightning_aliases import StrategyAliases, check_overrides, unattached_world
from .model_init import built_in_place
from .precision import Precision
from .wrap_policy import split_into_blocks


class Strategy(StrategyAliases):
    """Base class of strategies, which distribute a model over processes. Subclass this class to add a strategy.

    Pass an instance as the ``strategy`` of a `Trainer` or `Accelerator`, or register a name with `register_strategy`.
    The default implementations of the methods are for a single device. A subclass for several processes must set
    ``distributed`` and reduce the gradients.

    Attributes:
        name: Name of the strategy, such as ``"ddp"``.
        distributed: Whether the strategy supports more than one process.
        sharded: Whether parameters are sharded over the processes.
        has_rank_buffers: Whether checkpoints for resuming contain the buffers of every process, not only rank zero's.
        delays_sync: Whether gradient reduction can be delayed until the last micro-batch of a step.
        device_mesh: Torch ``DeviceMesh`` of the processes, or None.
        requested_device: Device for which the strategy was created, or None.
        group_options: Options of the process group that were passed to the strategy.
        start_method: How multiprocessing starts processes that run a function; None if the script runs in each process.
        world: Processes of the run. Set by `attach`.
        precision: Precision of the run. Set by `attach`.
        unreduced: In manual optimization, the parameters whose gradients are not averaged yet; see `reduce_gradients`.
        backward_weight: In manual optimization, the factor for the gradients of further backward passes.
        backward_note: In manual optimization, a function whose result, a 0-d tensor, is averaged with the gradients.
        agreed_note: The latest average of these results; None if there is none.
        tree: Tree in which gradients are added; see `add_in_tree`. None without one.

    Examples:
        >>> import treadle
        >>> from treadle.strategies import SingleDevice, Strategy
        >>> class Logged(SingleDevice):
        ...     name = "logged"
        ...     def wrap(self, module, step=None):
        ...         print("wrapping", type(module).__name__)
        ...         return super().wrap(module, step)
        >>> import torch
        >>> _ = treadle.Accelerator(cpu=True, strategy=Logged()).prepare(torch.nn.Linear(2, 1))
        wrapping Linear
    """

    name: ClassVar[str] = "base"
    distributed: ClassVar[bool] = False
    sharded: ClassVar[bool] = False
    has_rank_buffers: bool = False
    delays_sync: bool = False
    device_mesh: DeviceMesh | None = None
    requested_device: torch.device | None = None
    group_options: Mapping[str, Any] = MappingProxyType({})
    start_method: str | None = None

    precision: Precision
    backward_weight: float = 1.0
    backward_note: Callable[[], Tensor] | None = None
    agreed_note: Tensor | None = None
    tree: FixedTree | None = None

    def attach(self, world: World, precision: Precision) -> None:
        """Set the processes and the precision of the run. Must be called before any model is wrapped.

        Args:
            world: Processes of the run.
            precision: Dtypes for storage and computation.

        Raises:
            ValueError: If the strategy does not support ``world`` or ``precision``, or if a user's class overrides a
                method of Lightning's without which the numbers would differ.
        """
        check_overrides(self, precision)
        if world.size > 1 and not self.distributed:
            raise ValueError(
                f"strategy={self.name!r} is for one process, but the world size is {world.size}. "
                f"Use strategy='ddp' (or 'auto'), or start one process."
            )
        self.world = world
        self.precision = precision
        self.unreduced: dict[Tensor, int] = {}
        self._votes: Tensor | None = None
        self._work: Any = None

    @property
    def replicas_equal(self) -> bool:
        """True if all replicas must be equal after an optimizer step."""
        return True

    def detach(self) -> None:
        """Release all objects that belong to the process group. Called before the group is destroyed."""

    @property
    def data_world(self) -> World:
        """Processes over which the data is sharded."""
        return self.world

    def construction(self, empty: bool = False) -> AbstractContextManager[Any]:
        """Return a context in which to create models.

        In the context, floating-point parameters and buffers get the storage dtype, if one is set.

        Args:
            empty: Skip functions of ``torch.nn.init``; see `built_in_place`. Default: False.
        """
        return built_in_place(self.world.device, self.precision.storage, empty)

    def wrap(self, module: nn.Module, step: str | None = None) -> nn.Module:
        """Prepare ``module`` for training, and return the module to call.

        Args:
            module: The user's model.
            step: Name of the method that returns the training loss, if it is not ``forward``.

        Raises:
            ValueError: If the strategy does not support the model.
        """
        self.place(module)
        context = self.precision.context(self.world.device)
        return module if context is None else Router(module, context, self.precision.compute is not None)

    def replicate(self, module: nn.Module) -> nn.Module:
        """Wrap a module for manual optimization, in which any method and any number of backward passes may run.

        Every backward pass averages the gradients that it has accumulated into, except in the `no_sync` of `DDP`.

        Args:
            module: The user's model.

        Raises:
            ValueError: If the strategy does not support manual optimization or the model.
        """
        if self.sharded or self.world.size > 1:
            raise ValueError(
                f"strategy={self.name!r} can't run a task with automatic_optimization=False, because the strategy "
                "reduces gradients or gathers the model once per training_step. Use strategy='ddp' or "
                "strategy='fsdp'."
            )
        return self.wrap(module)

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average the gradients in `unreduced` over the processes, for modules that `replicate` returned.

        Args:
            parameters: The parameters of these modules that are about to be used. Parameters that were added to a
                module after `replicate` are included from here on.
        """

    def check_updates(self, updated: Iterable[Tensor] = ()) -> None:
        """Check that no update in manual optimization used gradients of one rank. Must be called on all ranks.

        Args:
            updated: Parameters that were updated without an optimizer. Others are checked if they changed while their
                gradients were in `unreduced`.

        Raises:
            ValueError: If one of these parameters differs between the ranks.
        """

    def stop_reducing(self) -> None:
        """Remove what `replicate` has attached to the modules' parameters, and forget their gradients."""

    def place(self, module: nn.Module) -> nn.Module:
        """Prepare ``module`` for evaluation only, and return the module to call.

        Args:
            module: The user's model.

        Raises:
            ValueError: If the strategy does not support the model.
        """
        if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
            raise ValueError(
                f"this {type(module).__name__} was sharded by an earlier run, but strategy={self.name!r} needs the "
                "full model. Build a new model and load the weights."
            )
        return self.precision.cast_module(module).to(self.world.device)

    def compiled_parts(self, module: nn.Module, blocks: bool | None = None) -> tuple[list[nn.Module], bool]:
        """Return the submodules to compile separately. Must be called before `wrap`.

        Args:
            module: The user's module.
            blocks: Whether repeated blocks are compiled separately. Default: only in submodules that have at least
                three blocks of each kind on average.

        Returns:
            The submodules, and whether their hooks must run uncompiled.
        """
        return split_into_blocks(module, blocks), False

    def decisions(self, module: nn.Module) -> list[str]:
        """Return the strategy's notes for the run summary, for example on settings that affect performance.

        Args:
            module: The user's model.
        """
        return []

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Prepare an optimizer of a wrapped model, and return the optimizer to step.

        Args:
            optimizer: The user's optimizer.
        """
        move_optimizer_state(optimizer, self.world.device)
        return optimizer

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the user's module inside ``module``.

        Args:
            module: Module that `wrap` returned.
        """
        while True:
            if isinstance(module, Router | nn.parallel.DistributedDataParallel | nn.DataParallel):
                module = module.module
            elif (compiled := module._modules.get("_orig_mod")) is not None:  # the module that `torch.compile` returned
                module = compiled
            else:
                return module

    @property
    def unwrapped_models(self) -> list[nn.Module]:
        """The user's own modules inside the prepared models."""
        return [self.unwrap(model) for model in self.prepared[0]]

    def graph_leaves(self, module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each leaf in the autograd graph of a wrapped ``module``, paired with its parameter.

        Args:
            module: Module that `wrap` returned.
        """
        return ((parameter, parameter) for parameter in self.unwrap(module).parameters())

    def method(self, wrapped: nn.Module, name: str) -> Callable[..., Any]:
        """Return a function that calls the wrapped module to run a method of the user's module instead of ``forward``.

        Args:
            wrapped: Module that `wrap` returned.
            name: Name of the method, such as ``"training_step"``.
        """
        bound = getattr(self.unwrap(wrapped), name)
        while (compiled := wrapped._modules.get("_orig_mod")) is not None:  # `torch.compile` of the wrapped module
            wrapped = compiled
        router = self._find_router(wrapped)
        return bound if router is None else routed(wrapped, router, bound)

    def local_method(self, module: nn.Module, name: str) -> Callable[..., Any]:
        """Return a function that runs a method of the user's module in the run's precision.

        The function is used in evaluation and in manual optimization. It communicates only if the strategy requires it.

        Args:
            module: A module, wrapped or not.
            name: Name of the method, such as ``"training_step"``.
        """
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
        """Set whether gradients are reduced over the processes in subsequent forward and backward passes.

        Args:
            module: Module that `wrap` returned.
            on: True to reduce gradients, False to accumulate them on each process.
        """

    def before_backward(self) -> Any:
        """Return a value for `after_backward`. Called before a backward pass that reduces gradients."""

    def after_backward(self, before: Any) -> None:
        """Reduce gradients that the backward pass itself did not reduce.

        Args:
            before: Result of `before_backward`.
        """

    def no_sync(self, module: nn.Module) -> Any:
        """Return a context in which gradients are not reduced.

        Args:
            module: Module that `wrap` returned.
        """
        return nullcontext()

    def steps_apart(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which each process takes optimizer steps on its own replica.

        Args:
            module: Module that `wrap` returned.

        Raises:
            ValueError: If the strategy or its settings do not support separate optimizer steps.
        """
        if self.world.size > 1:
            raise ValueError(
                f"LocalSGD needs a full copy of the model on each process, which strategy={self.name!r} does not keep. "
                "Use strategy='ddp'."
            )
        return nullcontext()

    def join(self, models: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Return a context in which a rank may train the wrapped ``models`` on fewer batches than other ranks.

        If the strategy or its settings do not support uneven inputs, the context has no effect. In this case, a warning
        is shown if the world size is greater than 1.

        Args:
            models: Modules that `wrap` returned.
        """
        return self._warn_unjoined(f"strategy={self.name!r}")

    def _warn_unjoined(self, setting: str) -> AbstractContextManager[None]:
        if self.world.size > 1:
            warn(
                f"join_uneven_inputs has no effect with {setting}, which needs every rank in each step. Ranks that "
                "read prepared DataLoaders stay in step without it. A user-defined loop must take the same number of "
                "steps on each rank."
            )
        return nullcontext()

    @contextmanager
    def sync_in_backward(self, module: nn.Module) -> Iterator[None]:
        """Return a context in which backward passes reduce the gradients, even after forward passes in `no_sync`.

        Args:
            module: Module that `wrap` returned.
        """
        self.set_gradient_sync(module, True)
        yield

    def add_in_tree(self, tree: FixedTree) -> PartialSums:
        """Add gradients over the processes in the order of ``tree``, without a division, and return the partial sums.

        Raises:
            ValueError: If the strategy does not support this.
        """
        if self.world.size > 1 or self.sharded:
            raise ValueError(
                f"step_micro_batches={tree.leaves} is not supported by strategy={self.name!r}. Use strategy='ddp' or "
                "'fsdp', or remove step_micro_batches."
            )
        self.tree = tree
        return PartialSums()

    def sync_buffers(self, module: nn.Module) -> None:
        """Copy rank zero's buffers to every process.

        Args:
            module: Module that `wrap` returned.
        """
        if self.world.size > 1:
            for buffer in self.unwrap(module).buffers():
                self.world.broadcast_tensor(buffer)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the total norm of the gradients in place.

        If the norm is NaN, the gradients are left unchanged, unlike in torch.

        Args:
            parameters: Parameters whose gradients are clipped.
            max_norm: Maximum total norm of the gradients.
            norm_type: The p of the p-norm.

        Returns:
            The norm before clipping (0-d tensor).
        """
        if self.tree is not None:
            return clip_to_norm(parameters, max_norm, norm_type, self.world)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.nan_to_num(nan=0.0, posinf=math.inf))
        return norm

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp every gradient element to ``[-clip_value, clip_value]`` in place.

        Args:
            parameters: Parameters whose gradients are clipped.
            clip_value: Maximum absolute value of an element.
        """
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def model_state(self, module: nn.Module) -> dict[str, Any]:
        """Return the state dict of the unwrapped module. Must be called on all ranks.

        Sharded parameters are returned as torch ``DTensor`` objects.

        Args:
            module: Module that `wrap` returned.
        """
        return self.unwrap(module).state_dict()

    def load_model_state(self, module: nn.Module, state: dict[str, Any], strict: bool = True) -> None:
        """Load a state that is sharded like the result of `model_state`.

        Args:
            module: Module that `wrap` returned.
            state: State in the form that `model_state` returns.
            strict: Require that the names in the state are exactly those of the module.
        """
        self.unwrap(module).load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state on this process, in the form of ``state_dict()``. Must be called on all ranks.

        Args:
            optimizer: The user's optimizer.
        """
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load an optimizer state that covers all parameters and is sharded like them.

        Args:
            optimizer: The user's optimizer.
            state: State in the form of ``state_dict()``.
        """
        optimizer.load_state_dict(state)

    def reduction_order(self, module: nn.Module) -> list[int]:
        """Return the order in which gradients are reduced, as indices of the trained parameters.

        The order can affect the rounding of the sums. The list is empty if the order is unknown.

        Args:
            module: Module that `wrap` returned.
        """
        return []

    def take_reduction_order(self, module: nn.Module, order: list[int]) -> None:
        """Adopt the order in which an earlier run reduced gradients. Must be called on all ranks.

        Args:
            module: Module that `wrap` returned.
            order: The result of `reduction_order` in that run.
        """

    def keeps_apart(self, optimizer: Optimizer) -> bool:
        """Return True if each process holds the optimizer state of different parameters and must save it.

        Args:
            optimizer: The user's optimizer.
        """
        return False

    def drop_gradients(self, module: nn.Module) -> None:
        """Discard gradients that are stored outside ``parameter.grad``, such as FSDP's unreduced gradients.

        Args:
            module: Module that `wrap` returned.
        """

    def agree_on_overflow(self, overflow: Tensor) -> None:
        """Set ``overflow`` to 1 on every process if it is 1 on any process.

        Args:
            overflow: Flag, changed in place: 1 if float16 gradients overflowed, otherwise 0.
        """

    def explain(self, error: BaseException) -> BaseException:
        """Return the error to raise instead of ``error``, or ``error`` itself if the strategy cannot explain it better.

        Args:
            error: Error that the backward pass raised.
        """
        return error

    def wrap_without_values(self, module: nn.Module) -> nn.Module:
        """Wrap a module on the meta device for a plan, and return the module to call.

        Args:
            module: The user's model, on the meta device.

        Raises:
            ValueError: If a plan does not support the strategy's settings.
        """
        return Router(module, self.precision.context(self.world.device), self.precision.compute is not None)

    # -- agreement of the processes ------------------------------------------------------------------------------

    @property
    def votes_in_backward(self) -> bool:
        """True if votes that are cast before the next backward pass are part of its gradient reduction.

        Votes are numbers that the processes sum in order to decide together, for example whether to stop. Votes that
        are part of the reduction cannot depend on the gradients.
        """
        return False

    def start_agreement(self, votes: Tensor) -> None:
        """Start summing ``votes`` over the processes.

        If `votes_in_backward` is True, the method must be called before the last backward pass of a step. Otherwise, it
        may also be called afterwards.

        Args:
            votes: Votes of this process, which may be overwritten with the sum.
        """
        self._votes = votes
        self._work = self.world.start_all_reduce(votes)

    def agreement(self) -> Tensor:
        """Return the sum of the votes that the processes passed to `start_agreement`, as a tensor on the device.

        Must be called after the last backward pass of the step.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        assert self._votes is not None
        return self._votes


class SingleDevice(Strategy):
    """Strategy for one process with one device.

    Args:
        device: The device, such as ``"cuda:1"``, or the index of a GPU. Default: selected by the Trainer or
            Accelerator.
        accelerator: Acts like the Trainer's ``accelerator``.
        checkpoint_io: Acts like a `CheckpointIO` in the Trainer's ``plugins``.
        precision_plugin: Acts like a precision plugin in the Trainer's ``plugins``.

    Raises:
        RuntimeError, TypeError: If torch does not accept the device.

    Examples:
        >>> import treadle
        >>> from treadle.strategies import SingleDevice
        >>> treadle.Accelerator(strategy=SingleDevice("cpu")).device
        device(type='cpu')
    """

    name = "single"

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        accelerator: str | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        self.take_flags(
            {"accelerator": accelerator, "checkpoint_io": checkpoint_io, "precision_plugin": precision_plugin}
        )
        self.requested_device = None if device is None else torch.device(device)
        if self.requested_device is not None:
            self.world = unattached_world(self.requested_device)


def move_optimizer_state(optimizer: Optimizer, device: torch.device) -> None:
    """Move the state of an optimizer to a device. Scalars, such as step counts, are not moved.

    Args:
        optimizer: The user's optimizer.
        device: Device of the parameters.
    """
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                state[name] = value.to(device)


def make_group_options(timeout: Any, backend: str | None) -> dict[str, Any]:
    """Return the options of the process group that were passed to a strategy, for `Strategy.group_options`.

    Args:
        timeout: Time limit of one collective in a form that `parse_duration` accepts, or None.
        backend: Torch's name for the backend, or None.

    Raises:
        TypeError, ValueError: If the timeout is invalid.
    """
    options = {"timeout": None if timeout is None else parse_duration("timeout", timeout), "backend": backend}
    return {name: value for name, value in options.items() if value is not None}


def is_wrapped_by_user(parameters: Iterable[Tensor]) -> bool:
    """Return whether parameters belong to a module that was wrapped with torch's DDP or FSDP. It takes about 100 ms.

    Args:
        parameters: The parameters.
    """
    ids = {id(p) for p in parameters if not hasattr(p, "device_mesh")}  # FSDP's parameters have one
    for module in gc.get_objects() if ids else ():
        if issubclass(type(module), nn.parallel.DistributedDataParallel):  # isinstance would wake up lazy proxies
            ids.difference_update(map(id, module.parameters()))
    return not ids
