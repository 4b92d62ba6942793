"""One process's share of a training run: devices, precision, accumulation, exchange, checkpoints.

The Trainer owns one and uses only its public calls; a hand-written loop uses the same ones.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..strategies import ParallelismConfig, Strategy, choose_strategy, open_world
from ..strategies.distributed import Devices
from . import configuration
from .checkpoint import Saving
from .configuration import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from .data import CombinedLoader, JointLoader, Loader, mover, skip_first_batches, with_seedable_sampler
from .facts import Facts
from .garbage_collection import collect, is_memory_short
from .optim import (
    Agreement,
    BuiltSchedule,
    LossScale,
    PreparedOptimizer,
    PreparedScheduler,
    Stepping,
    join_uneven_inputs,
    replica_check,
)
from .profilers import Profiling
from .rank_consistency import check_same, check_same_loaders, check_same_model
from .rng import RandomStream, State, isolated_random_state, random_state, seed_everything, seed_from, set_random_state
from .trackers import Tracking


class Accelerator(Stepping, Saving, Tracking, Profiling, Facts):
    """Everything distributed, every precision and every checkpoint, for a loop of your own.

    Args:
        device_placement: whether models and batches are moved to the device; False expects models to be there.
        split_batches: ``batch_size`` of a prepared loader is that of the global batch.
        mixed_precision: ``"no"``, ``"bf16"``, ``"fp16"``, or any of `Precision`'s names.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: same as ``accelerator="cpu"``.
        dataloader_config: how loaders share out their batches.
        deepspeed_plugin: refused, as are ``deepspeed_plugins``, ``torch_tp_plugin`` and ``megatron_lm_plugin``.
        fsdp_plugin: shards models; the same as ``strategy=FSDP(...)``, in Accelerate's words.
        rng_types: only ``["generator"]``, which holds anyway: the order of data is one on all processes.
        log_with: trackers: ``"tensorboard"``, ``"csv"``, ``"wandb"``, ``"mlflow"``, ``"all"``, loggers of
            `treadle.loggers`, a `GeneralTracker`, or a list of these.
        project_dir: where the run keeps its files.
        project_config: the same in more detail.
        gradient_accumulation_plugin: which micro-batches form a step, in more detail.
        step_scheduler_with_optimizer: False leaves prepared schedulers as they are: each ``step()`` counts once. For
            schedules that count epochs.
        kwargs_handlers: arguments of what torch does: autocast, the loss scaler, the process group, replicas, profiler.
        dynamo_backend: compile prepared models, in place: a backend of ``torch.compile``.
        dynamo_plugin: the same in more detail.
        parallelism_config: a grid of replicas, shards and tensor parallel parts.
        strategy: a name (``"auto"``, ``"single"``, ``"ddp"``, ``"fsdp"``, a registered one) or a `Strategy`.
        accelerator: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"mps"``.
        devices: processes on this machine, see `open_world`; ``"auto"`` is what the launcher started, else one.
        num_nodes: machines.
        spread: whether ``devices="auto"`` may start a process for each GPU; see `open_world`.

    Raises:
        TypeError: for an argument that does not exist, with the nearest one that does.
        ValueError: for a value that can not be honoured here.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        strategy: str | Strategy = "auto",
        accelerator: str = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        spread: bool = False,
        **unknown: Any,
    ) -> None:
        configuration.refuse(
            unknown,
            inspect.signature(Accelerator.__init__).parameters if unknown else (),
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            megatron_lm_plugin=megatron_lm_plugin,
            torch_tp_plugin=torch_tp_plugin,
        )
        configuration.check_random_types(rng_types)
        handlers = configuration.sort_handlers(kwargs_handlers)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.dataloader_config = configuration.loading_of(dataloader_config, split_batches)
        self.project_configuration = configuration.project_of(project_config, project_dir)
        self.gradient_accumulation_plugin = configuration.groups_of(
            gradient_accumulation_plugin, gradient_accumulation_steps
        )
        self.dynamo_plugin = configuration.compilation_of(dynamo_plugin, dynamo_backend)
        self.precision, self.mixed_precision = configuration.precision_of(mixed_precision, handlers["autocast"])
        self.fsdp_plugin, self.parallelism_config = fsdp_plugin, parallelism_config
        self._choose_trackers(log_with)
        group = (handlers["group"] or InitProcessGroupKwargs()).options()
        kind = configuration.device_kind(accelerator, cpu)
        super().__init__(open_world(kind, devices, num_nodes, spread=spread, **group))
        self.strategy = choose_strategy(strategy, self.world, fsdp_plugin, parallelism_config, handlers["replicas"])
        self._begin(handlers)

    def _begin(self, handlers: dict[str, Any]) -> None:
        self.strategy.attach(self.world, self.precision)
        self.data_world = self.strategy.data_world
        scaling = handlers["scaler"] or GradScalerKwargs()
        scaled = self.precision.scaled and scaling.enabled
        self.scaler = torch.amp.GradScaler(self.device.type, **scaling.to_kwargs()) if scaled else None
        self.loss_scale = None if self.scaler is None else LossScale(self.scaler, self.strategy)
        self.agreement = Agreement(self.world, self.strategy)
        self.profile_handler = handlers["profile"]
        self.models: list[nn.Module] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[Any] = []
        self.schedules_built: list[BuiltSchedule] = []
        self.loaders: list[Loader] = []
        self.stream: RandomStream | None = None
        self.stream_start: State = {}
        self._draws_apart = False
        self._compared = False
        self._trained: dict[int, frozenset[int]] = {}
        self._begin_steps(self.gradient_accumulation_plugin)
        self._begin_saving()

    # -- preparing -----------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Make models, optimizers, schedulers and loaders ready for this process; returns them in the same order.

        Args:
            objects: what to prepare; None stays None.
            device_placement: for each, in place of the Accelerator's ``device_placement``.

        Raises:
            TypeError: for an object of any other kind.
        """
        placement: Sequence[bool | None] = [None] * len(objects) if device_placement is None else device_placement
        if len(placement) != len(objects):
            raise ValueError(f"device_placement has {len(placement)} values for {len(objects)} objects.")
        # Models first: an optimizer may have to follow its parameters to where they are then.
        models = {
            id(value): self.prepare_model(value, place)
            for value, place in zip(objects, placement, strict=True)
            if isinstance(value, nn.Module)
        }
        prepared = tuple(
            models[id(value)] if id(value) in models else self._prepare_one(value, place)
            for value, place in zip(objects, placement, strict=True)
        )
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_one(self, value: Any, place: bool | None) -> Any:
        if value is None:
            return None
        if isinstance(value, Optimizer):
            return self.prepare_optimizer(value, place)
        if isinstance(value, DataLoader | Loader | CombinedLoader):
            return self.prepare_data_loader(value, place)
        if hasattr(value, "step") and hasattr(value, "state_dict"):
            return self.prepare_scheduler(value)
        raise TypeError(
            f"prepare takes models, optimizers, schedulers and DataLoaders, not {type(value).__name__}. "
            "An iterable of batches goes through prepare_data_loader."
        )

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        *,
        step: str | None = None,
        by_hand: bool = False,
        by_parts: bool = False,
    ) -> nn.Module:
        """Place and wrap one model; one whose trained parameters have changed since is wrapped anew.

        Args:
            model: the user's module.
            device_placement: False expects it on this process's device already; None is what the Accelerator has.
            evaluation_mode: place it only; it will not be trained.
            step: the method whose returned loss is trained on, where it is not ``forward``; run it by `method`.
            by_hand: leave gradients on their process until an optimizer steps; run methods by `local_method`.
            by_parts: methods of it run, not ``forward``: where it is to be compiled, compile the parts that they call.

        Raises:
            ValueError: if it is elsewhere, and may not be moved.
        """
        own = self.strategy.unwrap(model)
        trained = frozenset(id(p) for p in own.parameters() if p.requires_grad)
        number = next((n for n, known in enumerate(self.models) if self.strategy.unwrap(known) is own), None)
        if number is not None and self._trained.get(id(own)) == trained:
            return self.models[number]
        if self.verify_device_map(own):
            raise ValueError("this model is spread over several devices by a device map, for inference only.")
        if not (self.device_placement if device_placement is None else device_placement):
            self._see_that_it_is_here(own)
        if number is None and by_parts:
            self.dynamo_plugin.compile_parts(own, self.strategy)
        elif number is None:
            self.dynamo_plugin.compile(own)
        elif model is self.models[number]:
            model = own
        if evaluation_mode:  # which one rank may do alone
            wrapped = self.strategy.place(model)
        else:
            if trained or step:
                self.compare_settings()
                check_same_model(own, self.world)
            wrapped = self.strategy.replicate(model) if by_hand else self.strategy.wrap(model, step)
        self._trained[id(own)] = frozenset(id(p) for p in own.parameters() if p.requires_grad)
        if number is None:
            self.models.append(wrapped)
        else:
            self.models[number] = wrapped
        return wrapped

    def compare_settings(self, settings: Mapping[str, Any] | None = None) -> None:
        """See that every rank is configured alike. Happens by itself when the first model or loader is prepared.

        Args:
            settings: what to compare in place of the Accelerator's own arguments.

        Raises:
            ValueError: on every rank, with the settings that differ, their values and ranks.
        """
        if not self._compared:
            values = self._settings() if settings is None else settings
            check_same("the ranks are configured differently", values, self.world)
            self._compared = True

    def _settings(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.name,
            "mixed_precision": self.mixed_precision,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "sync_with_dataloader": self.groups_end_with_loader,
            "sync_each_batch": self.gradient_accumulation_plugin.sync_each_batch,
            "step_scheduler_with_optimizer": self.step_scheduler_with_optimizer,
            "split_batches": self.split_batches,
            "use_seedable_sampler": self.use_seedable_sampler,
        }

    def _see_that_it_is_here(self, model: nn.Module) -> None:
        for name, tensor in model.named_parameters():
            if tensor.device != self.device:
                raise ValueError(
                    f"device_placement=False, but {name} is on {tensor.device} and this process computes on "
                    f"{self.device}: move the model there, or leave device_placement out."
                )

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Make an optimizer act at the end of each group of micro-batches; its state follows its parameters."""
        for known in self.optimizers:
            if optimizer in (known, known.optimizer):
                return known
        prepared = PreparedOptimizer(self.strategy.wrap_optimizer(optimizer), self)
        self.optimizers.append(prepared)
        replica_check.watch(self, prepared.optimizer)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Make a scheduler advance with its optimizer's steps that really happened.

        Size the schedule by the loader as it is before `prepare`: each ``step()`` advances it by the number of
        processes that share the data, as in Accelerate, or by one with ``split_batches``.
        """
        for known in self.schedulers:
            if scheduler is known or scheduler is getattr(known, "scheduler", None):
                return known
        prepared = PreparedScheduler(scheduler, self) if self.step_scheduler_with_optimizer else scheduler
        self.add_scheduler(prepared)
        return prepared

    def add_scheduler(self, scheduler: Any) -> None:
        """Make a scheduler, which others step, a part of every checkpoint."""
        self.schedules_built.append(BuiltSchedule(scheduler))
        self.schedulers.append(scheduler)

    def prepare_data_loader(
        self,
        loader: Iterable[Any],
        device_placement: bool | None = None,
        *,
        shard: bool = True,
        evaluation: bool = False,
        move: Callable[[Any], Any] | None = None,
    ) -> Loader:
        """Share a loader out over the processes.

        Args:
            loader: a ``DataLoader``, a `CombinedLoader` or any iterable of batches.
            device_placement: whether to move batches to the device; None is what the Accelerator has.
            shard: False leaves each process with all that its own loader yields.
            evaluation: no accumulation groups, and every process takes part in every batch.
            move: what to apply to each batch in place of the move to the device.
        """
        if isinstance(loader, Loader):
            return loader
        if self.stream is None:
            self.compare_settings()
            self.start_order()
        assert self.stream is not None
        if move is None and (self.device_placement if device_placement is None else device_placement):
            move = mover(self.device, self.precision)
        if self.use_seedable_sampler:
            loader = self._with_seedable_samplers(loader, shard)
        prepared = (JointLoader if isinstance(loader, CombinedLoader) else Loader)(
            loader,
            world=self.data_world,
            cursor=self.cursor,
            stream=self.stream,
            accumulate=lambda: self._accumulate if self.groups_end_with_loader else 1,
            shard=shard,
            evaluation=evaluation,
            move=move,
            split=self.split_batches and shard,
            on_begin=self.draw_apart,
        )
        if shard:
            each = loader.flattened if isinstance(loader, CombinedLoader) else [loader]
            check_same_loaders(each, self.data_world)
        prepared.agree(self.data_world)
        self.loaders.append(prepared)
        return prepared

    def _with_seedable_samplers(self, loader: Any, shared: bool) -> Any:
        seed = self.dataloader_config.data_seed
        if seed is None:
            seed = torch.initial_seed()
        if shared:
            seed = self.world.broadcast(seed)
        if not isinstance(loader, CombinedLoader):
            return with_seedable_sampler(loader, seed)
        combined = copy.copy(loader)
        combined.flattened = [with_seedable_sampler(each, seed) for each in loader.flattened]
        return combined

    def start_order(self) -> None:
        """Take the random state that data order is drawn from: rank zero's, as it is now, which all ranks get.

        So what a script draws until its loops begin (a split of the data, weights) is the same on all ranks. With the
        first batch `draw_apart` happens.

        Happens when the first loader is prepared; call it for a new run with the same Accelerator.
        """
        with isolated_random_state():
            if self.dataloader_config.data_seed is not None:
                seed_everything(self.dataloader_config.data_seed)
            order = random_state()
        # A CUDA generator's state is of no use to others, and of different size where they see other devices.
        order, common = self.world.broadcast((_host_part(order), _host_part(random_state())))
        self.stream, self.stream_start = RandomStream(order), order
        self._draws_apart = False
        if self.world.rank:
            set_random_state(common)

    def draw_apart(self) -> None:
        """Let each rank draw numbers of its own from here on: one seed would drop the same units of different samples.

        Ranks that work on one sample together draw alike. Happens with the first batch of a prepared loader.
        """
        if self._draws_apart or self.stream is None:
            return
        self._draws_apart = True
        if self.data_world.rank:
            seed_everything(seed_from(self.stream_start, f"process {self.data_world.rank}") % 2**32)

    @contextmanager
    def drawing_alike(self, purpose: str) -> Iterator[None]:
        """Inside, all ranks draw the same numbers, which follow from the run's first ones and from ``purpose``.

        For data that is made once each rank draws numbers of its own. In a world of one nothing changes.
        """
        if self.world.size == 1 or not self._draws_apart:
            yield
            return
        with isolated_random_state():
            seed_everything(seed_from(self.stream_start, purpose) % 2**32)
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Train on user-defined batches of which some ranks have more than others.

        A rank that runs out of batches waits at the end of the context. Each step of the remaining ranks uses the mean
        of their gradients. All ranks leave with the parameters, buffers, optimizer states and schedules of the rank
        that took the most steps. Prepared DataLoaders keep all ranks in step, so with them the context changes nothing.

        Only replicas can do without a rank: with sharded models, and with ``comm_hook``, ``sync_batchnorm``, ``zero``
        or ``local_sgd_steps`` of DDP, the context warns and has no effect.

        Args:
            joinables: prepared models; optimizers may be among them and need nothing.
            even_batches: True states that all ranks have the same number of batches, so none is waited for. Unlike in
                Accelerate the default never means True, and no loader repeats samples either way.

        Raises:
            TypeError: for arguments of other types.
            ValueError: for a model that is not prepared; for ``backward(weight=...)`` on batches from elsewhere than a
                prepared DataLoader, since a rank that has left reports no weight.

        Example:
            >>> with accelerator.join_uneven_inputs([model]):
            ...     for batch in own_batches:
            ...         accelerator.backward(model(batch).mean())
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        with join_uneven_inputs(self, joinables, even_batches):
            yield

    def init_module(self, empty_init: bool = False) -> AbstractContextManager[Any]:
        """The context to build a model in, so that it is made where and as it will be used.

        Where the strategy shards, parameters get no memory in it: `prepare_model` gives each process its shard, with
        the values of a model that is built for real.

        Args:
            empty_init: leave parameters without values, as a checkpoint will be loaded.
        """
        return self.strategy.construction(empty_init)

    def method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """Return method ``name`` of a prepared model, run so that its gradients are synchronised."""
        return self.strategy.method(model, name)

    def local_method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """Return method ``name`` of a prepared model in the run's precision, without exchange, for evaluation."""
        return self.strategy.local_method(model, name)

    def check_replicas(self, model: nn.Module | None = None, *, buffers: bool = False) -> None:
        """See whether all processes hold the same parameters, bit for bit. Call it on all processes.

        Under ``TREADLE_DEBUG=1`` it happens by itself after the first and every 100th step of each optimizer.

        Args:
            model: one prepared model. Default: all of them.
            buffers: compare buffers too. Most (BatchNorm's statistics) are each process's own between two forwards.

        Raises:
            ReplicasDiffer: on all processes, with the names, the ranks, and how far they are apart.
        """
        models = self.models if model is None else [model]
        replica_check.check((self.strategy.unwrap(m) for m in models), self.world, buffers)

    # -- the end -------------------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> Any:
        """Forget everything prepared; returns a None for each object given, to rebind their names."""
        self.forget_prepared()
        collect(self.device)
        return [None for _ in objects]

    clear = free_memory

    def forget_prepared(self) -> None:
        """Release what was prepared, without the search for garbage of `free_memory`: tenths of a second.

        Nothing that was prepared refers back to the Accelerator, so reference counts free it. What user code or torch
        holds in cycles stays until Python's next collection, or until memory is short.
        """
        self.finish_saving()
        self.close_loaders()
        schedules = (self.schedulers, self.schedules_built)
        for known in (self.models, self.optimizers, *schedules, self.loaders, self.registered):
            known.clear()  # type: ignore[attr-defined]
        self.cursor.micro = self.stream = None
        self._compared = False
        self._copies.clear()
        self._trained.clear()
        self.forget_group()
        self.agreement.reset()
        self.steps = 0
        if is_memory_short(self.device):
            collect(self.device)

    def reconnect(self, renew: Callable[[], None]) -> None:
        """Let go of the process group, and go on with the one that ``renew`` puts in its place; nothing is prepared."""
        self.free_memory()
        self.world.forget_parts()
        self.strategy.detach()
        renew()
        self.strategy.attach(self.world, self.precision)
        self.data_world = self.strategy.data_world

    def close_loaders(self) -> None:
        """End the workers of all prepared loaders; the next iteration starts new ones."""
        for loader in self.loaders:
            loader.close()

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether ``model`` was spread over several devices by a device map, so that it can not be prepared."""
        from .big_models import is_dispatched  # 25 ms, for which no import has to wait

        return any(is_dispatched(part) for part in (model, *model.children()))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """See `skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)


def _host_part(state: State) -> State:
    return {name: state[name] for name in ("python", "numpy", "torch")}
