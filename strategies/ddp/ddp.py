"""Strategy with a full copy of the model on every process."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...common.messages import announce, nearest, read_text
from ...common.validation import check_positive, choose
from ..distributed import FixedTree, PartialSums, World, strip_compile_prefix
from ..forward_router import Ballot, LikeItsModule, Router, ballot_dtype
from ..precision import Precision
from ..strategy import Strategy, make_group_options
from .backward_reduction import BackwardReduction
from .batch_norm import synchronize
from .coalesced import average_gradients, count_ranks
from .comm_hooks import CommHook
from .fixed_order import FixedOrder
from .zero import Shards

_ALIASES = {  # Lightning's and Accelerate's names
    "ddp_comm_hook": "comm_hook",
    "ddp_comm_state": "comm_state",
    "comm_state_option": "comm_state",
    "ddp_comm_wrapper": "comm_wrapper",
}


class _ReadyOrder:
    """Order in which the gradients of one replica become ready.

    torch reduces gradients in buckets, which it rebuilds in this order after the first backward pass. With three or
    more processes, the position of an element in its bucket determines the order in which the processes' gradients are
    added, and so the last bit of the sum. A resumed run would begin with the initial buckets again. It therefore
    rehearses the order of its checkpoint. ``fixed`` means that torch never rebuilds the buckets, so no order is
    recorded.

    Attributes:
        order: Indices of the trained parameters in this order; empty if it is unknown.
    """

    def __init__(self, replica: Any, fixed: bool) -> None:
        self.order: list[int] = []
        self._replica = ref(replica)
        self._parameters: list[Tensor] = [] if fixed else [p for p in replica.parameters() if p.requires_grad]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, number))
            for number, parameter in enumerate(self._parameters)
        ]

    def _note(self, number: int, _: Tensor) -> None:
        replica = self._replica()
        if replica is not None and replica.require_backward_grad_sync:
            self.order.append(number)

    @property
    def watching(self) -> bool:
        """True while hooks record the order."""
        return bool(self._handles)

    def finish_recording(self) -> None:
        """Stop recording if a backward pass with reduction was recorded. Must be called between two backward passes."""
        if self.order:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def rehearse(self, order: Iterable[int]) -> None:
        """Run a backward pass with zeros in ``order``, so that torch rebuilds its buckets in this order.

        Must be called on all ranks. Existing gradients are discarded. An order that does not match this model is
        ignored.
        """
        order, replica = list(order), self._replica()
        if replica is None or not order or sorted(order) != list(range(len(self._parameters))):
            return
        replica.reducer.prepare_for_forward()
        replica.reducer.prepare_for_backward([])  # as torch's own forward does
        with torch.enable_grad():
            for number in order:
                (self._parameters[number].sum() * 0).backward()
        for parameter in self._parameters:
            parameter.grad = None
        self.order = order
        self.finish_recording()


class _Replica(LikeItsModule, DistributedDataParallel):
    """DDP module that exposes the attributes of the user's model."""

    def __init__(self, router: Router, advance: Callable[[], None], **options: Any) -> None:
        super().__init__(router, **options)
        self._advance = advance
        names = [name for name, p in router.named_parameters() if p.requires_grad]  # the reducer's order
        self._names = [strip_compile_prefix(name) for name in names]
        self.trained = [p for p in router.module.parameters() if p.requires_grad]
        # Whether torch's reducer reduces the next backward pass. A list, because setting an attribute of a module takes
        # a microsecond.
        self.is_armed = [False]
        self.apart = 0
        self.ready: _ReadyOrder | None = None

    @property
    def module(self) -> nn.Module:
        """The user's model; while torch constructs or runs this DDP module, the `Router` around the model."""
        router: Any = self._modules["module"]
        is_torchs = "ready" not in self.__dict__ or DistributedDataParallel._active_ddp_module is self
        return router if is_torchs else router.module

    def can_skip_reduction(self) -> bool:
        """Return whether a backward pass may skip the reduction. With a static graph, the first pass may not."""
        return not self.static_graph or self._static_graph_delay_allreduce_enqueued

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        local: AbstractContextManager[Any] = nullcontext()
        if torch.is_grad_enabled():  # a rank may evaluate on its own
            self._advance()
            self.is_armed[0] = bool(self.require_backward_grad_sync)
        elif self._join_config.enable:  # otherwise ranks that have left the loop wait for this forward's backward pass
            local = self.no_sync()
        try:
            with local:
                return super().forward(*args, **kwargs)
        except RuntimeError as error:
            better = self.explain(error)
            if better is None:
                raise
            raise better from error

    def check(self) -> None:
        """Check that the reduction is complete, because torch would raise an error only in the next forward pass."""
        if self.ready is not None and self.ready.watching:
            self.ready.finish_recording()
        try:
            self.reducer._check_reducer_finalized()  # takes 0.1 us
        except RuntimeError as error:
            raise (self.explain(error) or error) from error

    def explain(self, error: BaseException) -> ValueError | None:
        """Return the error to raise instead of an error of torch's reducer, or None for any other error."""
        return explain_reducer_error(error, self._names, self.find_unused_parameters)


class DDP(Strategy):
    """Strategy with a full copy of the model on every process. By default, backward passes average the gradients.

    Args:
        find_unused_parameters: Permit parameters that are not used in a step. To find them, the autograd graph is
            traversed before each backward pass.
        static_graph: Assume that every step computes the same graph and leaves the same parameters unused.
        gradient_as_bucket_view: Store gradients in the buffers in which they are sent, without a second copy.
        bucket_cap_mb: Size in MiB of the buffers in which gradients are sent. Default: 25, as in torch.
        broadcast_buffers: Broadcast rank zero's buffers to every process before forward passes.
        comm_hook: Compression of gradients: ``"fp16"``, ``"bf16"``, ``"power_sgd"`` or a function for torch's
            ``register_comm_hook``. None or ``"no"`` disables compression.
        comm_state: First argument of a function passed as ``comm_hook``. For PowerSGD, torch's ``PowerSGDState`` or a
            dict of its arguments.
        comm_wrapper: ``"fp16"`` or ``"bf16"`` to cast gradients to this dtype before ``comm_hook`` runs, or a function
            that receives the hook and returns a new one. None or ``"no"`` leaves the hook unchanged.
        sync_batchnorm: Compute the statistics of BatchNorm layers over the samples of all processes. This is also
            supported on the CPU.
        zero: Keep each parameter's optimizer state on one process only (ZeRO stage 1). For optimizers that update each
            parameter separately, the results are bit-identical to those of ``zero=False``.
        timeout: Time limit of one collective: a timedelta, a dict of its arguments, or ``"DD:HH:MM:SS"``. Default: 30
            minutes, unless the Accelerator or an existing process group sets another limit.
        process_group_backend: ``"nccl"``, ``"gloo"`` or another torch backend. Default: NCCL for GPUs and gloo for host
            memory.
        start_method: ``"spawn"`` or ``"fork"`` starts the processes for each stage, as ``strategy="ddp_spawn"`` and
            ``"ddp_fork"`` do. None or ``"popen"`` runs the script in each process. Default: None.
        other: ``accelerator``, ``cluster_environment``, ``checkpoint_io`` and ``precision_plugin``, which act like the
            Trainer's ``accelerator`` and ``plugins``, and Lightning's and Accelerate's names for some of the arguments
            above, such as ``ddp_comm_hook``.

    Raises:
        TypeError, ValueError: If an argument is invalid, or if arguments contradict each other.

    Examples:
        >>> import treadle
        >>> from treadle.strategies import DDP
        >>> trainer = treadle.Trainer(strategy=DDP(gradient_as_bucket_view=True), accelerator="cpu", logger=False)

    Source: ZeRO (Rajbhandari et al., 2020), https://arxiv.org/abs/1910.02054
    """

    name = "ddp"
    distributed = True

    def __init__(
        self,
        find_unused_parameters: bool = False,
        *,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool = True,
        comm_hook: Any = None,
        comm_state: Any = None,
        comm_wrapper: Any = None,
        sync_batchnorm: bool = False,
        zero: bool = False,
        timeout: Any = None,
        process_group_backend: str | None = None,
        start_method: str | None = None,
        **other: Any,
    ) -> None:
        if start_method not in (None, "popen"):
            self.start_method = choose("start_method", start_method, ("popen", "spawn", "fork"))
        self.group_options = make_group_options(timeout, process_group_backend)
        self.process_group_backend = process_group_backend
        arguments = {"comm_hook": comm_hook, "comm_state": comm_state, "comm_wrapper": comm_wrapper}
        _resolve_aliases(arguments, self.take_flags(other))
        if bucket_cap_mb is not None:
            check_positive("bucket_cap_mb", bucket_cap_mb, "or None for torch's default")
        self.options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
            "broadcast_buffers": broadcast_buffers,
        }
        self.has_rank_buffers = not broadcast_buffers
        self.comm_hook = CommHook(arguments["comm_hook"], arguments["comm_state"], arguments["comm_wrapper"])
        self.sync_batchnorm = sync_batchnorm
        self.zero = zero
        self._steps_apart = 0  # number of active `steps_apart` contexts

    def attach(self, world: World, precision: Precision) -> None:
        """See `Strategy.attach`."""
        super().attach(world, precision)
        world.form_group()  # also for a single process, whose script may use torch.distributed
        self.delays_sync = world.size > 1
        self._order: FixedOrder | None = None
        self._ballot: Ballot | None = None
        self._ballot_replica: _Replica | None = None
        self._by_ballot = False
        # By the model's id and in the order of wrapping, which is the same on all ranks, as their collectives need it.
        self._replicas: WeakValueDictionary[int, _Replica] = WeakValueDictionary()
        self._shards: WeakKeyDictionary[Optimizer, Shards] = WeakKeyDictionary()
        self._reduction: BackwardReduction | None = None
        self._manual: WeakSet[nn.Module] = WeakSet()  # the models that it covers
        ineffective = ["comm_hook"] * bool(self.comm_hook) + ["zero=True"] * self.zero
        if world.size == 1 and ineffective:
            announce(f"without effect with a world size of 1: DDP's {' and '.join(ineffective)}")

    @property
    def replicas_equal(self) -> bool:
        """False while each rank takes optimizer steps on its own replica, otherwise True."""
        return not self._steps_apart

    def wrap(self, module: nn.Module, step: str | None = None) -> nn.Module:
        """See `Strategy.wrap`."""
        if self.world.size == 1 or not (step or any(p.requires_grad for p in module.parameters())):
            return super().wrap(module)
        self.place(module)
        if self.sync_batchnorm:
            synchronize(module, self.world)
        device = self.world.device
        ballot = None
        if step and not self.comm_hook:  # compression would change the counts
            ballot = self._ballot = Ballot(device, ballot_dtype(module.parameters()))
        router = Router(module, self.precision.context(device), self.precision.compute is not None, ballot)
        replica = _Replica(
            router,
            self.world.advance,
            # With device_ids, torch would rebuild every batch, and move tensors that the user has left on the host.
            device_ids=None,
            process_group=self.world.group,
            **_translate_options(self.options),
        )
        if self.comm_hook:
            self.comm_hook.register(replica, self.world)
        if self._order is not None:
            self._order.register(replica)
        fixed = bool(self.comm_hook or self._order) or replica.static_graph or replica.find_unused_parameters
        replica.ready = _ReadyOrder(replica, fixed)
        if ballot is not None:
            self._ballot_replica = replica
        self._replicas[id(module)] = replica  # a model is wrapped again if other parameters are trained
        self.set_gradient_sync(replica, True)
        return replica

    def replicate(self, module: nn.Module) -> nn.Module:
        """See `Strategy.replicate`."""
        if self.world.size == 1:
            return super().wrap(module)
        if self.comm_hook:
            raise ValueError(
                "DDP(comm_hook=...) can't be combined with automatic_optimization=False. Remove comm_hook."
            )
        self.place(module)
        if self.sync_batchnorm:
            synchronize(module, self.world)
        for tensor in (*module.parameters(), *module.buffers()):
            self.world.broadcast_tensor(tensor.detach())
        if self._reduction is None:
            self._reduction = BackwardReduction(self)
        self._reduction.add(module.named_parameters())
        self._manual.add(module)
        context = self.precision.context(self.world.device)
        return Router(module, context, self.precision.compute is not None, no_sync=self._reduction.no_sync)

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """See `Strategy.reduce_gradients`.

        Raises:
            ValueError: If a gradient is sparse.
        """
        if self._reduction is not None:
            self._reduction.finish(parameters)

    def check_updates(self, updated: Iterable[Tensor] = ()) -> None:
        """See `Strategy.check_updates`."""
        if self._reduction is not None:
            self._reduction.check_replicas(updated)

    def stop_reducing(self) -> None:
        """See `Strategy.stop_reducing`."""
        if self._reduction is not None:
            self._reduction.close()
        self._reduction = None

    def _find_reduction(self, module: nn.Module) -> BackwardReduction | None:
        return self._reduction if self._reduction is not None and self.unwrap(module) in self._manual else None

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """See `Strategy.wrap_optimizer`. Returns ``optimizer`` itself.

        Raises:
            ValueError: If ``zero`` does not support the optimizer.
        """
        super().wrap_optimizer(optimizer)
        if self.world.size == 1:
            return optimizer
        optimizer_parameters = {p for group in optimizer.param_groups for p in group["params"]}
        models = [
            model
            for model, replica in self._replicas.items()
            if not optimizer_parameters.isdisjoint(replica.parameters())
        ]

        def check(*_: Any) -> None:
            for replica in filter(None, map(self._replicas.get, models)):
                replica.check()

        optimizer.register_step_pre_hook(check)
        if self.zero and optimizer not in self._shards:
            self._shards[optimizer] = Shards(optimizer, self.world)
        return optimizer

    def explain(self, error: BaseException) -> BaseException:
        """See `Strategy.explain`."""
        explanations = (replica.explain(error) for replica in self._replicas.values())
        return next((better for better in explanations if better is not None), error)

    # -- reduction of gradients ----------------------------------------------------------------------------------

    def set_gradient_sync(self, module: nn.Module, on: bool) -> None:
        """See `Strategy.set_gradient_sync`."""
        replica = _find_replica(module)
        if replica is None:
            if (reduction := self._find_reduction(module)) is not None:
                reduction.enabled = on
            return
        if replica.apart:
            on = False
        elif not on and not replica.can_skip_reduction():
            # torch learns a static graph in the first backward pass with reduction, or fails. Reducing a part of a
            # group is exact: the mean of values that are equal on all ranks, and of values that are added to them.
            on = True
        replica.require_backward_grad_sync = on  # type: ignore[assignment]

    def before_backward(self) -> Any:
        """See `Strategy.before_backward`."""
        marks = []
        for replica in self._replicas.values():
            watched = replica.trained
            if replica.is_armed[0] and not (replica.find_unused_parameters or replica.static_graph):
                watched = [watched[0], watched[-1]]  # torch reduces all of them, or raises an error
            marks.append((replica, [(p, p.grad, p.grad is not None and p.grad._version) for p in watched]))
        return marks

    def after_backward(self, before: Any) -> None:
        """See `Strategy.after_backward`.

        torch reduces only the first backward pass after a forward pass of the wrapped module. A second one through the
        same graph, or through the user's own module, adds gradients of this process alone. The mean over the processes
        is still exact, because what was reduced earlier is equal on all of them.
        """
        for replica, marks in before:
            if all(p.grad is grad and (grad is None or grad._version == version) for p, grad, version in marks):
                continue  # this pass did not reach the model
            if replica.is_armed[0]:
                replica.is_armed[0] = False
            elif self._order is not None:
                raise ValueError(
                    "with step_micro_batches, a loss must be computed by one call of the prepared model, because "
                    "gradients of the model inside it would be added in another order. Call the prepared model."
                )
            elif replica.require_backward_grad_sync and not replica.apart and not replica._join_config.enable:
                (counts,) = count_ranks([[p.grad is not None for p in replica.trained]], self.world)  # on some rank
                average_gradients([p for p, count in zip(replica.trained, counts, strict=True) if count], self.world)

    def add_in_tree(self, tree: FixedTree) -> PartialSums:
        """See `Strategy.add_in_tree`."""
        clashes = {
            "comm_hook": (self.comm_hook, "adds gradients in its own way"),
            "sync_batchnorm": (self.sync_batchnorm, "adds statistics over the processes"),
            "static_graph": (self.options["static_graph"], "reduces the first micro-batch on its own"),
        }
        for option, (on, reason) in clashes.items():
            if on:
                raise ValueError(
                    f"step_micro_batches={tree.leaves} can't be combined with DDP({option}=...), which {reason}, so "
                    f"the result depends on the number of processes. Remove {option}."
                )
        self.tree = tree
        if self.world.size == 1:
            return PartialSums()
        # Without find_unused_parameters, torch raises an error if a parameter has no gradient.
        self._order = FixedOrder(tree, self.world, fills=self.options["find_unused_parameters"])
        return self._order

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """See `Strategy.no_sync`. Inside the context, `set_gradient_sync` has no effect.

        Raises:
            ValueError: If ``static_graph`` is set and no backward pass has reduced gradients yet.
        """
        replica = _find_replica(module)
        if replica is None:
            reduction = self._find_reduction(module)
            with nullcontext() if reduction is None else reduction.no_sync():
                yield
            return
        if not replica.can_skip_reduction():
            raise ValueError(
                "static_graph=True needs a gradient reduction in the first backward pass, so no_sync can't be used in "
                "that pass. Remove static_graph, or use no_sync only after the first step."
            )
        before = replica.require_backward_grad_sync
        replica.apart += 1
        replica.require_backward_grad_sync = False  # type: ignore[assignment]
        try:
            yield
        finally:
            replica.apart -= 1
            replica.require_backward_grad_sync = before

    @contextmanager
    def sync_in_backward(self, module: nn.Module) -> Iterator[None]:
        """See `Strategy.sync_in_backward`.

        Raises:
            ValueError: If ``find_unused_parameters`` or ``static_graph`` is set.
        """
        replica = _find_replica(module)
        if replica is None:
            yield
            return
        if replica.find_unused_parameters or replica.static_graph:
            option = "static_graph" if replica.static_graph else "find_unused_parameters"
            raise ValueError(
                f"{option}=True inspects the graph in the forward pass, but this forward pass ran inside no_sync. "
                f"Remove {option}, or run the forward pass outside no_sync."
            )
        before = replica.require_backward_grad_sync
        replica.require_backward_grad_sync = True  # type: ignore[assignment]
        replica.reducer.prepare_for_backward([])  # as a forward pass outside no_sync ends
        replica.is_armed[0] = True
        try:
            yield
        finally:
            replica.require_backward_grad_sync = before

    @contextmanager
    def steps_apart(self, module: nn.Module) -> Iterator[None]:
        """See `Strategy.steps_apart`."""
        if self.zero:
            raise ValueError(
                "LocalSGD can't be combined with DDP(zero=True), which exchanges parameters itself. Remove zero=True."
            )
        self._steps_apart += 1
        try:
            with self.no_sync(module):
                yield
        finally:
            self._steps_apart -= 1

    def join(self, models: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """See `Strategy.join`.

        The context has no effect with ``comm_hook``, ``sync_batchnorm`` or ``zero``.
        """
        exchanges = {
            "comm_hook": self.comm_hook,  # it divides by the world size, not by the number of remaining ranks
            "sync_batchnorm": self.sync_batchnorm,
            "zero": self.zero,
        }
        active = [f"{name}=..." for name, on in exchanges.items() if on]
        return self._warn_unjoined(f"DDP({', '.join(active)})") if active else joined(models)

    # -- agreement of the processes ------------------------------------------------------------------------------

    @property
    def votes_in_backward(self) -> bool:
        """See `Strategy.votes_in_backward`."""
        replica = self._ballot_replica
        return self._ballot is not None and replica is not None and replica.require_backward_grad_sync

    def start_agreement(self, votes: Tensor) -> None:
        """See `Strategy.start_agreement`."""
        ballot = self._ballot
        self._by_ballot = self.votes_in_backward
        if self._by_ballot:
            ballot.value = votes.to(ballot.carrier.dtype)  # type: ignore[union-attr]
        else:
            super().start_agreement(votes)

    def agreement(self) -> Tensor:
        """See `Strategy.agreement`."""
        if not self._by_ballot:
            return super().agreement()
        ballot, replica = self._ballot, self._ballot_replica
        assert ballot is not None
        assert replica is not None
        replica.check()
        summed = ballot.carrier.grad
        assert summed is not None, "the step's loss did not carry the ballot"
        ballot.carrier.grad = None
        ballot.clear()
        return summed if self._order is not None else summed * self.world.size  # because DDP averages

    # -- state ---------------------------------------------------------------------------------------------------

    def reduction_order(self, module: nn.Module) -> list[int]:
        """See `Strategy.reduction_order`."""
        replica = _find_replica(module)
        return [] if replica is None or replica.ready is None else replica.ready.order

    def take_reduction_order(self, module: nn.Module, order: list[int]) -> None:
        """See `Strategy.take_reduction_order`."""
        replica = _find_replica(module)
        if replica is not None and replica.ready is not None:
            replica.ready.rehearse(order)

    def keeps_apart(self, optimizer: Optimizer) -> bool:
        """See `Strategy.keeps_apart`."""
        return optimizer in self._shards

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """See `Strategy.load_optimizer_state`."""
        if optimizer in self._shards:
            self._shards[optimizer].load_state_dict(optimizer, state)
        else:
            super().load_optimizer_state(optimizer, state)


def _find_replica(module: nn.Module) -> _Replica | None:
    """Return the replica of a wrapped module, compiled or not; None if the module's gradients are not reduced."""
    if not isinstance(module, _Replica):
        module = module._modules.get("_orig_mod") or module
    return module if isinstance(module, _Replica) else None


@contextmanager
def joined(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Return a context in which a rank may run ``modules`` fewer times than other ranks.

    Each reduction is the mean over the ranks that still have a batch. All ranks leave the block together, with the
    parameters and buffers of a rank that had the most batches.
    """
    from torch.distributed.algorithms.join import Join, Joinable

    trained = [module for module in modules if any(p.requires_grad for p in module.parameters())]
    for module in trained:
        if not isinstance(module, Joinable):
            raise ValueError(
                f"{type(module).__name__} is not a prepared model, so its gradients are not reduced. Call "
                "join_uneven_inputs with the model that Accelerator.prepare returned."
            )
    if not trained:
        yield
        return
    join = Join(trained, divide_by_initial_world_size=False)  # type: ignore[arg-type]
    try:
        with warnings.catch_warnings():  # torch sets a warning filter
            with join:
                yield
    finally:
        Join(trained, enable=False)  # type: ignore[arg-type]  # else every later forward would announce itself


def make_ddp_factory(flag: bool) -> Callable[[], DDP]:
    """Return a factory for the registry's ``ddp_find_unused_parameters_*`` names.

    Args:
        flag: The value of ``find_unused_parameters``.
    """
    return lambda: DDP(find_unused_parameters=flag)


def _resolve_aliases(arguments: dict[str, Any], aliased: dict[str, Any]) -> None:
    """Store the values of aliases in ``arguments`` under the names that `DDP` uses."""
    for alias, value in aliased.items():
        name = _ALIASES.get(alias)
        if alias in ("model_averaging_period", "local_sgd_steps", "local_sgd_start"):
            if value is None:
                continue
            raise TypeError(f"DDP() has no argument {alias!r}. Use treadle.LocalSGD in your own loop.")
        if name is None:
            valid = [*inspect.signature(DDP.__init__).parameters, *_ALIASES]
            raise TypeError(f"DDP() has no argument {alias!r}.{nearest(alias, set(valid) - {'self', 'other'})}")
        if value is not None and arguments[name] is not None:
            raise ValueError(f"{alias}= is another name for {name}=. Pass only one of them.")
        arguments[name] = value if value is not None else arguments[name]


def _translate_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options under torch's names. torch 2.13 renamed ``broadcast_buffers`` and deprecated the old name."""
    options = dict(options)
    keep = options.pop("broadcast_buffers")
    new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    return options if keep else {**options, "forward_sync_buffers" if new else "broadcast_buffers": False}


_UNFINISHED = "Expected to have finished reduction"
_TWICE = "Expected to mark a variable ready only once"
_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_INDEX = re.compile(r"Parameter at index (\d+)")
_MAX_NAMES = 30


def explain_reducer_error(error: BaseException, names: list[str], finds_unused: bool = False) -> ValueError | None:
    """Return an error that explains ``error`` if a gradient was missing or was ready twice, otherwise None.

    ``names`` lists the parameters' names in the reducer's order. ``finds_unused`` is DDP's ``find_unused_parameters``.
    """
    text = read_text(error)
    if text.startswith(_UNFINISHED):
        match = _INDICES.search(text)
        return _unused_parameter_error([names[int(i)] for i in match[1].split()] if match else [], finds_unused)
    if text.startswith(_TWICE):
        index = _INDEX.search(text)
        return _ready_twice_error(names[int(index[1])] if index else "a parameter")
    return None


def _unused_parameter_error(names: list[str], finds_unused: bool) -> ValueError:
    shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
    which, they_are, them = (
        ("this parameter", "it is", "it") if len(names) == 1 else ("these parameters", "they are", "them")
    )
    problem = (
        f"no gradient reached {which}, so this step's gradients were not reduced: {shown}."
        if names
        else "no gradient reached some parameters, so this step's gradients were not reduced."
    )
    if finds_unused:
        return ValueError(
            f"{problem} find_unused_parameters=True skips only parameters that the model's output does not depend on, "
            f"but the output depends on {which}. Compute the loss from the complete output of the prepared model."
        )
    return ValueError(
        f"{problem} If {they_are} unused in some steps on purpose, use strategy='ddp_find_unused_parameters_true' or "
        f"DDP(find_unused_parameters=True). If {they_are} never used, freeze {them} with requires_grad_(False). "
        "Otherwise, compute the loss from the complete output of the prepared model."
    )


def _ready_twice_error(name: str) -> ValueError:
    return ValueError(
        f"the gradient of {name} was ready twice in one backward pass. This happens if layers are used more than once "
        "and checkpointed with use_reentrant=True. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint, or, "
        "if every step computes the same graph, use DDP(static_graph=True)."
    )
