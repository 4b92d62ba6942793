"""Strategy that shards models with torch's `fully_shard` (FSDP2)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ...common.messages import announce, name_type
from ..distributed import (
    REPLICATE,
    TENSOR,
    FixedTree,
    Layout,
    PartialSums,
    World,
    clip_to_norm,
    cut_like,
    is_sharded,
    keep_random_state,
    local,
)
from ..forward_router import Router
from ..model_init import built_in_place
from ..precision import Precision
from ..strategy import Strategy, make_group_options
from ..wrap_policy import Policy, check_policy, chosen_blocks, direct_parts, self_contained
from .deferred_init import Tape, get_generator
from .fixed_order import ShardedSums
from .recompute import Recompute
from .sharded_router import (
    BackwardPasses,
    ShardedRouter,
    forget_gradients,
    gathered_parameters,
    reshard_parameters,
    start_anew,
)

_ROOT = "_sharded_root"

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


class FSDP(Strategy):
    """Strategy in which each process keeps a shard of every parameter, its gradient and its optimizer state.

    Build large models in `Accelerator.init_module` or `TaskModule.configure_model`, so that the full model need not fit
    in the memory of one process. A world size of one is also supported.

    Args:
        auto_wrap_policy: Modules that are each gathered as one unit: ``"auto"`` (the repeated blocks), ``"parts"``
            (these blocks and the other direct submodules), module classes or their names, a minimum number of
            parameters (as torch's size-based policy, which never selects parts of ``MultiheadAttention``), or a
            function ``f(module) -> bool``.
        activation_checkpointing_policy: Modules that recompute their activations in the backward pass: True (the
            modules that ``auto_wrap_policy`` selects), a policy in any form that ``auto_wrap_policy`` accepts, or a
            `Recompute`. Default: none.
        reshard_after_forward: Free a block's parameters after the forward pass and gather them again in the backward
            pass. False keeps them, which is faster but uses more memory. A number reshards them over groups of that
            many processes. In manual optimization, parameters are always freed.
        cpu_offload: Keep parameters, gradients and optimizer state in host memory.
        gather_dtype: Dtype in which parameters are gathered. Default: their storage dtype. ``torch.bfloat16`` also
            rounds the weights of normalization layers. If ``gather_dtype`` is set, gradients are reduced in float32.
        mixed_precision: Torch's ``MixedPrecisionPolicy``, as an alternative to ``gather_dtype``.
        data_parallel_size: Number of processes over which the data is sharded. ``"auto"`` means the world size divided
            by ``tensor_parallel_size``.
        data_parallel_replicate: Number of replicas for hybrid sharding, such as the number of machines. Default: 1.
        tensor_parallel_size: Number of processes that share the work on one sample. If this is above 1, FSDP calls the
            model's ``parallelize(mesh)``, which must apply torch's ``parallelize_module``. Default: 1.
        sync_each_batch: Reduce gradients for every micro-batch. With accumulation, this uses less memory but more
            communication.
        timeout: Time limit of one collective: a timedelta, a dict of its arguments, or ``"DD:HH:MM:SS"``. Default: 30
            minutes, unless the Accelerator or an existing process group sets another limit.
        process_group_backend: ``"nccl"``, ``"gloo"`` or another torch backend. Default: NCCL for GPUs and gloo for host
            memory.

    Raises:
        TypeError, ValueError: If an argument is invalid, or if arguments contradict each other.

    Examples:
        >>> import treadle
        >>> from treadle.strategies import FSDP
        >>> strategy = FSDP(auto_wrap_policy="auto", activation_checkpointing_policy=True)
        >>> trainer = treadle.Trainer(strategy=strategy, accelerator="cpu", logger=False)

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    name = "fsdp"
    distributed = True
    sharded = True
    has_rank_buffers = True

    def __init__(
        self,
        *,
        auto_wrap_policy: Policy = "auto",
        activation_checkpointing_policy: Policy | Recompute | bool | None = None,
        reshard_after_forward: bool | int = True,
        cpu_offload: bool = False,
        gather_dtype: torch.dtype | None = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        data_parallel_size: int | str = "auto",
        data_parallel_replicate: int = 1,
        tensor_parallel_size: int = 1,
        sync_each_batch: bool = False,
        timeout: Any = None,
        process_group_backend: str | None = None,
    ) -> None:
        self.group_options = make_group_options(timeout, process_group_backend)
        self.process_group_backend = process_group_backend
        self.auto_wrap_policy = check_policy(auto_wrap_policy, "auto_wrap_policy")
        Recompute.parse(activation_checkpointing_policy)  # raises an error if it is not a policy
        self.activation_checkpointing_policy = activation_checkpointing_policy
        if not isinstance(reshard_after_forward, bool) and (
            not isinstance(reshard_after_forward, int) or reshard_after_forward < 1
        ):
            raise ValueError(
                f"reshard_after_forward={reshard_after_forward!r} must be True, False, or the number of processes over "
                "which to shard between forward and backward."
            )
        if tensor_parallel_size != 1 and not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward={reshard_after_forward} can't be combined with "
                f"tensor_parallel_size={tensor_parallel_size}, because torch can't reshard to a subset of the "
                "processes with tensor parallelism. Use reshard_after_forward=True or reshard_after_forward=False."
            )
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.mixed_precision = _choose_policy(gather_dtype, mixed_precision)
        self.layout = Layout(data_parallel_size, data_parallel_replicate, tensor_parallel_size)
        self.sync_each_batch = sync_each_batch
        self._is_held_back = False  # the sum of the votes
        self._sums: ShardedSums | None = None
        self._tapes: list[Tape] = []
        self._recording = False
        self._roots: WeakSet[Any] = WeakSet()
        # For optimizers that were created before: the parameters before and after sharding.
        self._moved: Any = WeakIdKeyDictionary()

    def attach(self, world: World, precision: Precision) -> None:
        """See `Strategy.attach`."""
        super().attach(world, precision)
        self.device_mesh = self._mesh = self.layout.mesh(world)
        self._data_world = self.layout.data_world(world)
        if world.device.type == "cuda":
            keep_random_state(self._mesh)
        # Nothing to delay on one process. torch would keep the sum apart from `p.grad` until a pass with reduction,
        # which never comes if the last micro-batch of a group has no loss.
        self.delays_sync = not self.sync_each_batch and world.size > 1

    def detach(self) -> None:
        """See `Strategy.detach`."""
        self._tapes.clear()
        self._moved.clear()
        self._roots.clear()
        # torch's caches of DTensor computations hold the grid, which holds the group (2.13).
        getattr(self._mesh, "_pg_registry", {}).clear()
        self.device_mesh = self._mesh = self._data_world = None  # type: ignore[assignment]

    @property
    def data_world(self) -> World:
        """See `Strategy.data_world`."""
        return self._data_world

    # -- the model -----------------------------------------------------------------------------------------------

    @contextmanager
    def construction(self, empty: bool = False) -> Iterator[None]:
        """See `Strategy.construction`. Parameters use no memory until `wrap` computes this process's shards.

        All ranks must enter the context. Inside it, they use rank zero's RNG state.
        """
        if self._recording:  # the context around this one records it
            with built_in_place(torch.device("meta"), self.precision.storage, empty):
                yield
            return
        generators = list(dict.fromkeys((torch.default_generator, get_generator(self.world.device))))
        local_states = [generator.get_state() for generator in generators]
        shared_states = self.world.broadcast(local_states)
        for generator, state in zip(generators, shared_states, strict=True):
            generator.set_state(state)
        tape = Tape(self.world.device)
        self._recording = True
        try:
            with built_in_place(torch.device("meta"), self.precision.storage, empty), tape.recording():
                yield
        finally:
            self._recording = False
            if not all(map(torch.equal, local_states, shared_states)):
                for generator, state in zip(generators, local_states, strict=True):
                    generator.set_state(state)
        self._tapes.append(tape)

    def wrap(self, module: nn.Module, step: str | None = None) -> nn.Module:
        """Shard the model in place, and return the root module to call; see `Strategy.wrap`.

        Raises:
            ValueError, TypeError: If the model or a policy is not supported.
        """
        return self._find_or_shard(module, False)

    def replicate(self, module: nn.Module) -> nn.Module:
        """Shard each submodule of a task for manual optimization; see `Strategy.replicate`.

        The parameters of a submodule are gathered only while its ``forward`` or its backward pass runs. Therefore,
        ``training_step`` always sees shards, which a backward pass leaves with their averaged gradients.

        Raises:
            ValueError, TypeError: If the model or a policy is not supported.
        """
        return self._find_or_shard(module, True)

    def _find_or_shard(self, module: nn.Module, apart: bool | None) -> Any:
        """Return the root of a model, which is sharded if it is not yet; None for ``apart`` accepts both kinds."""
        root = module.__dict__.get(_ROOT)
        if root is None:
            root = self._shard(module, bool(apart))
            self._tapes = [tape for tape in self._tapes if not tape.is_done()]
            root._layout, root._syncs = self._describe(), True
            object.__setattr__(module, _ROOT, root)  # not registered as a submodule
        elif root._layout != self._describe():
            raise ValueError(
                f"an earlier run sharded this {type(module).__name__} over {root._layout}, but this run needs "
                f"{self._describe()}. Build a new model and load the weights."
            )
        elif apart is not None and apart is not root._is_apart:
            raise ValueError(
                f"an earlier run sharded this {type(module).__name__} with automatic_optimization={apart}, and a model "
                "that is sharded for the one can't be trained with the other. Build a new model and load the weights."
            )
        elif root not in self._roots:
            start_anew(root)  # an earlier run may have failed before its end
        if self._sums is not None and root not in self._roots:
            self._sums.attach(root)
        self._roots.add(root)
        root._strategy = ref(self)  # that of this run
        return root

    def place(self, module: nn.Module) -> nn.Module:
        """See `Strategy.place`. A model that is only evaluated is also sharded."""
        return self._find_or_shard(module, None)

    def local_method(self, module: nn.Module, name: str) -> Any:
        """See `Strategy.local_method`. The returned function may gather parameters, so all ranks must call it."""
        return self.method(self.place(self.unwrap(module)), name)

    def compiled_parts(self, module: nn.Module, blocks: bool | None = None) -> tuple[list[nn.Module], bool]:
        """See `Strategy.compiled_parts`. Modules that are gathered as one unit are always compiled separately."""
        gathered = self._choose_blocks(module)
        return [*gathered, *direct_parts(module, gathered)], True

    def _describe(self) -> str:
        leaves = "" if self.tree is None else f" and step_micro_batches={self.tree.leaves}"
        return f"the mesh {self._mesh.mesh.tolist()} with precision={self.precision.name!r}{leaves}"

    def _shard(self, module: nn.Module, apart: bool) -> Any:
        before = dict(module.named_parameters(remove_duplicate=False))
        unbuilt = {(part, name): tensor for part in module.modules() for name, tensor in _iterate_tensors(part)}
        unbuilt = {place: tensor for place, tensor in unbuilt.items() if tensor.is_meta}
        blocks = self._choose_blocks(module, apart)
        if type(self.precision).cast_module is not Precision.cast_module:
            raise ValueError(
                f"strategy={self.name!r} does not support {type(self.precision).__name__}, which replaces layers. Use "
                "strategy='ddp', or another precision."
            )
        check_parameters(module, blocks, self.precision.storage)
        self._start_alike(module)
        if self.layout.tensor > 1:
            self._parallelize(module)
            blocks = self._choose_blocks(module, apart)  # the hook may have inserted other submodules
        if apart:
            check_covered(module, blocks)
            if self.reshard_after_forward is not True:
                announce(
                    f"FSDP: reshard_after_forward={self.reshard_after_forward} has no effect with "
                    "automatic_optimization=False, where training_step must see shards between the forward passes."
                )
        else:
            self._explain(module, blocks)
        recompute = Recompute.parse(self.activation_checkpointing_policy)
        if recompute is not None:
            recompute.apply(module, blocks)
        for block in blocks:
            self._build(block, unbuilt)
            self._fully_shard(block, apart or self.reshard_after_forward)
        self._build(module, unbuilt)
        # If activations are recomputed, autocast alone would keep a cast copy of the whole model until the backward
        # pass.
        precision = self.precision if recompute is None else self.precision.replace(cached=False)
        router = ShardedRouter(module, precision.context(self.world.device), precision.compute is not None)
        router._is_apart = apart
        if not apart:
            self._fully_shard(router, False)
        for block in blocks if apart else ():
            BackwardPasses(router, block)
        if self.world.size > 1:
            router.register_forward_pre_hook(self._count_step, prepend=True)  # before FSDP's own hook, which may wait
        unblocked = [part for part in module.modules() if part not in blocks and hasattr(part, "reshard")]
        kept = blocks if apart or self.reshard_after_forward is not True else ()
        router._parts_to_reshard = [*(() if apart else (router,)), *unblocked, *kept]  # type: ignore[assignment]
        after = dict(module.named_parameters(remove_duplicate=False))
        for name, parameter in before.items():
            if name in after:  # otherwise the model's `parallelize` has replaced it
                self._moved[parameter] = after[name]
        return router

    def _count_step(self, *_: Any) -> None:
        if torch.is_grad_enabled():  # an evaluation gathers too, but a training step is what other ranks may miss
            self.world.advance()

    def _choose_blocks(self, module: nn.Module, apart: bool = False) -> list[nn.Module]:
        blocks = chosen_blocks(module, self.auto_wrap_policy, "auto_wrap_policy")
        if apart:  # the submodules that contain the blocks come after them
            blocks = list(
                dict.fromkeys((*blocks, *(p for p in direct_parts(module) if any(True for _ in p.parameters()))))
            )
        return self_contained(module, blocks)

    def _explain(self, module: nn.Module, blocks: list[nn.Module]) -> None:
        """Log if the policy selects no module, or if selected modules are gathered with the rest of the model."""
        name, flag = type(module).__name__, f"auto_wrap_policy={self.auto_wrap_policy!r}"
        chosen = len(chosen_blocks(module, self.auto_wrap_policy, "auto_wrap_policy"))
        if not chosen:
            reason = "finds no repeated blocks" if self.auto_wrap_policy == "auto" else "selects no module"
            text = f"{name} is gathered as a whole, because {flag} {reason}. List module classes in auto_wrap_policy "
            announce(f"FSDP: {text}to save memory.")
        elif len(blocks) < chosen:
            sharing = chosen - len(blocks)
            share, are = ("shares", "is") if sharing == 1 else ("share", "are")
            text = f"{sharing} of {chosen} modules selected by {flag} in {name} {share} parameters with other modules "
            announce(f"FSDP: {text}and {are} gathered with the rest of the model, once per step.")

    def _start_alike(self, module: nn.Module) -> None:
        """Broadcast rank zero's values, because each process would otherwise shard its own values."""
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                if self.precision.storage is not None and tensor.is_floating_point():
                    tensor.data = tensor.data.to(self.precision.storage)
                if not tensor.is_contiguous():
                    tensor.data = tensor.data.contiguous()  # torch shards no other tensors (2.13)
                shared = tensor.data.to(self.world.device)  # over the GPUs' own links, one tensor at a time
                self.world.broadcast_tensor(shared)
                if shared.device != tensor.device:
                    tensor.data.copy_(shared)

    def _parallelize(self, module: nn.Module) -> None:
        if not hasattr(module, "parallelize"):
            raise ValueError(
                f"tensor_parallel_size={self.layout.tensor} needs {type(module).__name__}.parallelize(mesh). Define "
                "this method, and in it call torch.distributed.tensor.parallel.parallelize_module on the model's "
                "submodules."
            )
        module.parallelize(self._mesh[TENSOR])  # type: ignore[operator]
        check_parallelized(module, self.layout.tensor)

    def _build(self, module: nn.Module, unbuilt: dict[Any, Tensor]) -> None:
        """Compute the values of the tensors without memory in ``module`` and its submodules.

        ``unbuilt`` maps a submodule and the tensor's name to the tensor as it was before sharding.
        """
        built: dict[Tensor, Tensor] = {}  # so that tied parameters remain tied
        for part in module.modules():
            for name, placeholder in _iterate_tensors(part):
                if not local(placeholder).is_meta:
                    continue
                origin = unbuilt[part, name]
                if origin not in built:
                    built[origin] = self._compute_value(origin, placeholder, f"{name} of {name_type(part)}")
                table = next(table for table in _get_tables(part) if name in table)
                table[name] = built[origin]

    def _compute_value(self, origin: Tensor, placeholder: Tensor, words: str) -> Tensor:
        tape = next((tape for tape in self._tapes if tape.knows(origin)), None)
        if tape is None:
            raise ValueError(
                f"{words} has neither memory nor values. Build the model in Accelerator.init_module() or in "
                "TaskModule.configure_model, which record the values, rather than under torch.device('meta')."
            )
        check_unchanged(tape, origin, words)
        value = tape.values(origin)
        if self.precision.storage is not None and value.is_floating_point():
            value = value.to(self.precision.storage)
        value = cut_like(value.contiguous(), placeholder)  # for parameters that tensor parallelism splits
        if isinstance(origin, nn.Parameter):
            value = value.cpu() if self.cpu_offload else value
            return nn.Parameter(value, requires_grad=origin.requires_grad)
        return value.to(self.world.device)

    def _fully_shard(self, module: nn.Module, reshard: bool | int) -> None:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        if isinstance(module, FSDPModule):
            return  # sharded by the user's own configure_model
        policy = self.mixed_precision
        if policy is None:
            # In a tree, gradients have the same dtype as on one process.
            half = self.precision.storage in (torch.float16, torch.bfloat16) and self.tree is None
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None, cast_forward_inputs=False)
        elif isinstance(module, Router):  # its input is the batch, in which a target or a mask must not be rounded
            policy = replace(policy, cast_forward_inputs=False)
        if any(p.is_complex() for p in module.parameters() if p.requires_grad and not is_sharded(p)):
            if policy.param_dtype is not None and torch.__version__ < "2.13":
                raise ValueError(
                    f"with gather_dtype or mixed_precision, torch {torch.__version__} would drop the imaginary part of "
                    f"complex parameters, as in {type(module).__name__}. Upgrade torch to 2.13, or remove the option."
                )
            policy = replace(policy, reduce_dtype=None)  # a dtype for real gradients
        on_cpu = self.world.device.type == "cpu"  # everything is in host memory already
        offload = CPUOffloadPolicy() if self.cpu_offload and not on_cpu else OffloadPolicy()
        mesh = self.layout.data_mesh(self._mesh)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)

    # -- gradients -----------------------------------------------------------------------------------------------

    def add_in_tree(self, tree: FixedTree) -> PartialSums:
        """See `Strategy.add_in_tree`."""
        policy, storage = self.mixed_precision, self.precision.storage or torch.float32
        world, replicas = self.world.size, self.layout.replicate
        clashes = {
            "tensor_parallel_size": (
                self.layout.tensor > 1,
                "adds parts of one sample over the processes, so the result depends on their number",
            ),
            "data_parallel_replicate": (
                replicas > 1 and (world & (world - 1) != 0 or world == replicas),
                f"needs a power of two of processes, not {world}, with at least 2 for each of {replicas} replicas",
            ),
            "mixed_precision": (
                policy is not None and (policy.reduce_dtype or policy.param_dtype or storage) != storage,
                f"adds gradients in another dtype than the parameters' {storage}, so the result depends on the number "
                "of processes",
            ),
        }
        for option in (name for name, (is_set, _) in clashes.items() if is_set):
            raise ValueError(
                f"step_micro_batches={tree.leaves} can't be combined with FSDP({option}=...), which "
                f"{clashes[option][1]}. Remove {option}."
            )
        self.tree = tree
        if self.world.size == 1:
            return PartialSums()
        self.delays_sync = False  # the partial sums are held by the reduction
        self._sums = ShardedSums(tree, self.world, self._mesh[REPLICATE].get_group() if replicas > 1 else None)
        return self._sums

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """See `Strategy.reduce_gradients`. Backward passes have reduced the gradients of shards.

        Raises:
            ValueError: If a parameter with a gradient is not sharded, for example in a module created in a step.
        """
        others = [p for p in parameters if p.grad is not None and not is_sharded(p)] if self.world.size > 1 else []
        if others:
            raise ValueError(
                f"an optimizer is about to step a parameter of shape {tuple(others[0].shape)} that FSDP has not "
                "sharded, so its gradient is that of one rank. Create modules in __init__ or configure_model, or use "
                "strategy='ddp'."
            )

    def decisions(self, module: nn.Module) -> list[str]:
        """See `Strategy.decisions`."""
        if self.mixed_precision is not None or self.precision.compute is None or self.world.size == 1:
            return []
        size = sum(p.numel() * p.element_size() for p in module.parameters()) / self.layout.tensor / 2**30
        word = str(self.precision.compute).removeprefix("torch.")
        return [
            f"FSDP gathers {size:,.2f} GiB in each forward and backward pass, in the storage dtype; "
            f"FSDP(gather_dtype=torch.{word}) sends half as much, and also rounds the weights of normalization layers"
        ]

    def set_gradient_sync(self, module: Any, on: bool) -> None:
        """See `Strategy.set_gradient_sync`."""
        if on is not module._syncs:
            module._syncs = on
            module.set_requires_gradient_sync(on)

    @contextmanager
    def no_sync(self, module: Any) -> Iterator[None]:
        """See `Strategy.no_sync`. In manual optimization, every backward pass reduces the gradients all the same.

        The result is the same: the sum of means is the mean of sums. torch would keep a local sum outside ``p.grad``,
        which neither clipping nor ``zero_grad`` would find.
        """
        module = module.__dict__.get(_ROOT, module)
        if module._is_apart:
            yield
            return
        before = module._syncs
        self.set_gradient_sync(module, False)
        try:
            yield
        finally:
            self.set_gradient_sync(module, before)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """See `Strategy.clip_grad_norm_`. The norm covers the shards of all processes."""
        return clip_to_norm(parameters, max_norm, norm_type, None if self.tree is None else self.world)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """See `Strategy.clip_grad_value_`."""
        parameters = [parameters] if isinstance(parameters, Tensor) else parameters
        for gradient in (p.grad for p in parameters if p.grad is not None):
            local(gradient).clamp_(-clip_value, clip_value)

    def graph_leaves(self, module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Strategy.graph_leaves`."""
        return itertools.chain(super().graph_leaves(module), gathered_parameters(module))

    def drop_gradients(self, module: nn.Module) -> None:
        """See `Strategy.drop_gradients`."""
        forget_gradients(module)

    def agree_on_overflow(self, overflow: Tensor) -> None:
        """See `Strategy.agree_on_overflow`."""
        if self.layout.tensor > 1:
            self.world.all_reduce(overflow, "max")

    def explain(self, error: BaseException) -> BaseException:
        """See `Strategy.explain`. FSDP2's state is reset, because another backward pass may follow the failed one."""
        for root in self._roots:
            start_anew(root)
        return error

    def start_agreement(self, votes: Tensor) -> None:
        """See `Strategy.start_agreement`.

        On GPUs, the votes are summed only in `agreement`, because NCCL would otherwise queue the gathers of the
        backward pass behind the sum.
        """
        if self.world.device.type == "cuda":
            self._votes = votes
            self._is_held_back = True
        else:
            super().start_agreement(votes)

    def agreement(self) -> Tensor:
        """See `Strategy.agreement`."""
        if self._is_held_back:
            self._is_held_back = False
            assert self._votes is not None
            super().start_agreement(self._votes)
        return super().agreement()

    # -- optimizers ----------------------------------------------------------------------------------------------

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """See `Strategy.wrap_optimizer`.

        If the optimizer was created before its model was sharded, its parameters are replaced with their shards.

        Raises:
            ValueError: If the optimizer is not supported, or if one of its parameters does not belong to a prepared
                model.
        """
        hand_over(optimizer, self._moved, self.world)
        optimizer_parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        roots = [
            root for root in self._roots if any(parameter in optimizer_parameters for parameter in root.parameters())
        ]

        def use_the_shards(*_: Any) -> None:
            for root in roots:
                reshard_parameters(root)

        optimizer.register_step_pre_hook(use_the_shards)
        return optimizer

    def wrap_without_values(self, module: nn.Module) -> nn.Module:
        """See `Strategy.wrap_without_values`."""
        if self.cpu_offload:
            raise ValueError(
                "FSDP(cpu_offload=True) is not supported in a plan, which ignores host memory. Remove cpu_offload for "
                "the plan."
            )
        self._build = lambda module, unbuilt: None  # type: ignore[method-assign]
        return self.wrap(module)


def _choose_policy(gather_dtype: Any, mixed_precision: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy | None:
    if gather_dtype is None:
        return mixed_precision
    if not isinstance(gather_dtype, torch.dtype) or not gather_dtype.is_floating_point:
        raise TypeError(f"gather_dtype={gather_dtype!r} must be a floating-point dtype, such as torch.bfloat16.")
    if mixed_precision is not None:
        raise ValueError(
            "gather_dtype and mixed_precision both set the dtype of gathered parameters. Pass only one of them."
        )
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(gather_dtype, torch.float32)


def _get_tables(part: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the dicts in which ``part`` itself stores parameters, buffers, and plain attributes."""
    return part._parameters, part._buffers, part.__dict__


def _iterate_tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for table in _get_tables(part):
        yield from ((name, tensor) for name, tensor in list(table.items()) if isinstance(tensor, Tensor))


# They compute with all elements of a parameter, or index some of them, which torch does not support for shards (2.13).
_NEED_WHOLE = (torch.optim.LBFGS, torch.optim.Rprop, torch.optim.Adafactor)


def hand_over(optimizer: Optimizer, moved: Mapping[Tensor, Tensor], world: World) -> None:
    """Replace the parameters of ``optimizer`` with their shards, and shard their state.

    ``moved`` maps each original parameter to its sharded parameter. State tensors, except 0-d ones, are copied from
    rank zero.
    """
    if isinstance(optimizer, _NEED_WHOLE):
        raise ValueError(
            f"{type(optimizer).__name__} needs full parameters, but each process has only shards of them. Use AdamW, "
            "SGD, Adagrad or another elementwise optimizer, or strategy='ddp'."
        )
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if is_sharded(parameter):
                continue
            if parameter not in moved:
                raise ValueError(
                    f"an optimizer has a parameter of shape {tuple(parameter.shape)} that does not belong to a "
                    "prepared model. Prepare the model before its optimizer, or both in one call."
                )
            group["params"][index] = moved[parameter]
            state = optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[moved[parameter]] = {
                    name: _cut(value, parameter, moved[parameter], world) for name, value in state.items()
                }


def _cut(value: Any, before: Tensor, after: Tensor, world: World) -> Any:
    if not isinstance(value, Tensor) or not value.ndim:
        return value
    if value.is_meta:
        raise ValueError(
            "an optimizer has state for parameters that had no values when the optimizer was created. Create the "
            "optimizer after the model is prepared."
        )
    if value.shape != before.shape:
        raise ValueError(
            f"optimizer state of shape {tuple(value.shape)} for a parameter of shape {tuple(before.shape)} can't be "
            "sharded like the parameter. Prepare the optimizer before its first step."
        )
    whole = value.to(after.device, copy=True).contiguous()
    return cut_like(world.broadcast_tensor(whole), after)


def check_parameters(module: nn.Module, blocks: list[nn.Module], storage: torch.dtype | None) -> None:
    """Check that torch's ``fully_shard`` supports the parameters of each block and those outside the blocks.

    ``blocks`` must list inner modules first. ``storage`` is the dtype to which floating-point parameters are converted
    before they are sharded, or None.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    single = [name for parameter, name in names.items() if not parameter.ndim]
    if single:
        raise ValueError(
            f"0-d parameters can't be sharded: {', '.join(single[:8])}. Give each a dimension, as in "
            "nn.Parameter(torch.ones(1)) instead of nn.Parameter(torch.tensor(1.0))."
        )
    empty = [name for parameter, name in names.items() if parameter.requires_grad and not parameter.numel()]
    if empty:
        raise ValueError(
            f"torch can't reduce the gradients of parameters without elements: {', '.join(empty[:8])}. Freeze such "
            "parameters with requires_grad_(False)."
        )
    checked: set[nn.Parameter] = set()
    for block in (*blocks, module):
        formats: dict[torch.dtype, str] = {}
        for parameter in block.parameters():
            if parameter not in checked and parameter.requires_grad:
                dtype = parameter.dtype if storage is None or not parameter.is_floating_point() else storage
                formats.setdefault(dtype, names[parameter])
            checked.add(parameter)
        if len(formats) > 1:
            listed = ", ".join(f"{name} is {dtype}" for dtype, name in formats.items())
            location = type(block).__name__ if block is not module else f"{type(block).__name__}, outside of its blocks"
            raise ValueError(
                f"the parameters of {location} differ in dtype: {listed}. Parameters that are gathered together must "
                "have the same dtype. Convert them, choose a precision that converts them (such as 'bf16-true'), or "
                "list the classes of their modules in auto_wrap_policy."
            )


def check_covered(module: nn.Module, blocks: list[nn.Module]) -> None:
    """Check that each trained parameter belongs to one of the submodules that manual optimization shards."""
    covered = {parameter for block in blocks for parameter in block.parameters()}
    others = [name for name, p in module.named_parameters() if p.requires_grad and p not in covered]
    if others:
        raise ValueError(
            f"{', '.join(others[:8])} can't be sharded with automatic_optimization=False, where FSDP gathers each "
            f"submodule of {type(module).__name__} for its own forward pass. Move a parameter of "
            f"{type(module).__name__} itself, or one that several submodules share, into one submodule whose forward "
            "uses it, or use strategy='ddp'."
        )


def check_parallelized(module: nn.Module, size: int) -> None:
    """Check that the model's ``parallelize(mesh)`` has sharded parameters."""
    if not any(is_sharded(parameter) for parameter in module.parameters()):
        raise ValueError(
            f"{type(module).__name__}.parallelize(mesh) sharded no parameter, so the ranks of "
            f"tensor_parallel_size={size} would all do the same work. In parallelize, call "
            "torch.distributed.tensor.parallel.parallelize_module with the names of existing submodules."
        )


def check_unchanged(tape: Tape, tensor: Tensor, words: str) -> None:
    """Check that a parameter or buffer without memory was changed only by operations that ``tape`` has recorded."""
    if not tape.is_unchanged(tensor):
        raise ValueError(
            f"{words} was written to after it was created without memory, so the written values are lost. Write them "
            "inside init_module() or configure_model, load weights with load_state_dict(..., assign=True), or write "
            "them after the model is prepared."
        )
