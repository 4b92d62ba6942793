"""One process's share of a training run: devices, precision, accumulation, exchange, checkpoints.

This file holds the whole public surface of the `Accelerator`, except for what it shares with `PartialState`; see
`process_state`. The work is done by the objects that it owns. The Trainer owns an Accelerator and uses its public calls
only; a hand-written loop uses the same ones.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from ..common.messages import warn
from ..common.remote_path import AnyPath
from ..strategies import ParallelismConfig, Strategy, choose_strategy, open_world, resolve_devices
from ..strategies.distributed import SHARD, TENSOR, Devices, Watchdog, name_phase, watch
from . import configuration
from .checkpoint import Checkpointer, Job, OpenCheckpoint
from .configuration import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from .data import CombinedLoader, JointLoader, Loader, choose_mover, replace_random_sampler, skip_first_batches
from .garbage_collection import collect, is_memory_short
from .modules import CompiledBatches, is_compiled
from .optim import (
    Accumulation,
    Agreement,
    BuiltSchedule,
    GradientGuard,
    PreparedOptimizer,
    PreparedScheduler,
    join_uneven_inputs,
    replica_check,
)
from .preemption import Preemption, preemptible
from .process_state import AcceleratorState, GradientState, Process, register_accelerator
from .profilers import profile
from .quantization import convert_to_float8
from .rank_consistency import check_loaders_match, check_model_matches, check_values_match
from .rng import RandomStream
from .run_rng import RunRng
from .trackers import GeneralTracker, Trackers, tracker_sources

# Lists that public code reads, though they are private in Accelerate.
_PEERS_NAMES = {
    "_models": "models",
    "_optimizers": "optimizers",
    "_schedulers": "schedulers",
    "_dataloaders": "loaders",
}
_UNSUPPORTED = {
    "lomo_backward": "LOMO steps inside backward; use any optimizer whose step comes after it.",
    "maybe_context_parallel": "a sequence is not split over processes here.",
    "deepspeed_ulysses_dl_adapter": "a sequence is not split over processes here.",
    "fp8_backend": "float8 is always torchao's here.",
    "megatron_lm_plugin": "Megatron-LM is not used here.",
    "build_parallelism_config": "give Accelerator(parallelism_config=...) itself.",
}


name_phase("backward", Accumulation.backward)
name_phase("save", Checkpointer.save_state)
name_phase("data wait", Loader.__iter__, Loader.groups)


def _locate(accelerator: Accelerator) -> tuple[str, Any]:
    """Return how far a loop is: in words, and what moves with every micro-batch."""
    accumulation = accelerator.accumulation
    moving = accumulation.position, id(accelerator.cursor.micro), [loader.batches for loader in accelerator.loaders]
    return f"optimizer step {accumulation.steps + 1}", moving


def _find_directory(accelerator: Accelerator) -> Any:
    return accelerator.logging_dir or accelerator.project_dir


class Accelerator(Process):
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
        timeout: how long a rank may make no progress, until its script ends: ``"DD:HH:MM:SS"``, a timedelta or a dict
            of its arguments. Then the run ends with exit status 124; the rank that hangs is named, and the Python
            stacks of all ranks are written. By default this holds only for a rank that waits for others, and nearly as
            long as a collective may wait (30 minutes).
        on_nonfinite: a prepared optimizer is about to apply a gradient that is not finite: ``"raise"`` on all ranks (on
            accelerators one step later, and in `end_training`), ``"skip"`` the step on all ranks (which waits for the
            device in every step), or ``"ignore"``. With float16 the loss scaler leaves out such steps.

    Attributes:
        strategy: how models are laid out over the processes.
        precision: the number formats that they compute in.
        models, optimizers, schedulers, loaders: what was prepared.
        accumulation: the micro-batches of an optimizer step.
        checkpointer: saves and loads.
        tracking: the trackers that ``log_with`` named.
        rng: the random numbers that ranks share.
        watchdog: ends the run if a rank hangs; None where nobody watches.
        deepspeed_plugin: None; scripts ask for it before they do something else.

    Raises:
        TypeError: for an argument that does not exist, with the nearest one that does.
        ValueError: for a value that can not be honoured here.
    """

    deepspeed_plugin = None

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
        timeout: Any = None,
        on_nonfinite: str = "raise",
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
        configuration.check_choices(rng_types, on_nonfinite)
        handlers = configuration.sort_handlers(kwargs_handlers)
        self.device_placement, self.step_scheduler_with_optimizer = device_placement, step_scheduler_with_optimizer
        self.dataloader_config = configuration.resolve_dataloader_config(dataloader_config, split_batches)
        self.project_configuration = configuration.resolve_project(project_config, project_dir)
        self.gradient_accumulation_plugin = configuration.resolve_accumulation(
            gradient_accumulation_plugin, gradient_accumulation_steps
        )
        self.dynamo_plugin = configuration.resolve_compilation(dynamo_plugin, dynamo_backend)
        self.precision, self.mixed_precision = configuration.resolve_precision(mixed_precision, handlers["autocast"])
        self.fsdp_plugin, self.parallelism_config, self.on_nonfinite = fsdp_plugin, parallelism_config, on_nonfinite
        self.profile_handler, sources = handlers["profile"], tracker_sources(log_with, self.project_configuration)
        group = configuration.resolve_group(handlers["group"], limit := configuration.resolve_timeout(timeout))
        kind, devices = resolve_devices(strategy, configuration.resolve_device(accelerator, cpu), devices)
        world = open_world(kind, devices, num_nodes, spread=spread, **group)
        self.strategy = choose_strategy(strategy, world, fsdp_plugin, parallelism_config, handlers["replicas"])
        self.strategy.attach(world, self.precision)
        super().__init__(world, self.strategy.data_world)
        self._begin(handlers["scaler"], Trackers(world, sources), watch(world, limit))

    def _begin(self, scaling: Any, trackers: Trackers, watchdog: Watchdog | None) -> None:
        self.precision.warn_if_emulated(self.device)
        scaler = configuration.build_scaler(scaling, self.precision, self.device)
        self.watchdog = watchdog
        self.models: list[nn.Module] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[Any] = []
        self.schedules_built: list[BuiltSchedule] = []
        self.loaders: list[Loader] = []
        self._compared = False
        self._trained: dict[int, frozenset[int]] = {}  # by model, the parameters that it was wrapped to train
        self.strategy.prepared = self.models, self.optimizers
        self.rng = RunRng(self.world, self.strategy)
        self.accumulation = Accumulation(
            self.gradient_accumulation_plugin,
            self.world,
            self.strategy,
            scaler,
            self.cursor,
            self.models,
            self.optimizers,
        )
        self._gradient_guard = GradientGuard(self.on_nonfinite, self.loaders, on_host=self.device.type == "cpu")
        self.accumulation.guard = None if self.on_nonfinite == "ignore" else self._gradient_guard
        self.checkpointer = Checkpointer(self)
        self.tracking = trackers
        self.dataloader_config.announce_differences()
        register_accelerator(self)
        if watchdog is not None:
            watchdog.follow(self, _locate, _find_directory)

    # -- preparing -----------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Make models, optimizers, schedulers and loaders ready for this process; returns them in the same order.

        Args:
            objects: what to prepare. Objects of other kinds are returned as they are, with one warning that names them.
            device_placement: for each, in place of the Accelerator's ``device_placement``.
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
            models[id(value)] if id(value) in models else self._prepare_object(value, place)
            for value, place in zip(objects, placement, strict=True)
        )
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_object(self, value: Any, place: bool | None) -> Any:
        if value is None:
            return None
        if isinstance(value, Optimizer):
            return self.prepare_optimizer(value, place)
        if isinstance(value, DataLoader | Loader | CombinedLoader):
            return self.prepare_data_loader(value, place)
        if hasattr(value, "step") and hasattr(value, "state_dict") and not isinstance(value, type):
            return self.prepare_scheduler(value)
        is_class = isinstance(value, type)
        kind = f"the class {value.__name__}" if is_class else f"an object of type {type(value).__name__}"
        is_iterable = isinstance(value, Iterable) and not isinstance(value, type | str | Mapping | Tensor)
        advice = " Every rank gets all of it; prepare_data_loader shares out an iterable of batches." * is_iterable
        warn(f"prepare returns {kind} as it is: it prepares models, optimizers, schedulers and DataLoaders.{advice}")
        return value

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
        module = self.strategy.unwrap(model)
        trained = _collect_trained_ids(module)
        index = next((n for n, inner in enumerate(self.unwrapped_models) if inner is module), None)
        if index is not None and self._trained.get(id(module)) == trained:
            return self.models[index]
        if self.verify_device_map(module):
            raise ValueError("this model is spread over several devices by a device map, for inference only.")
        if not (self.device_placement if device_placement is None else device_placement):
            self._check_device(module)
        if index is None and self.precision.float8 and not evaluation_mode:
            convert_to_float8(module, self.device)
        if index is None and by_parts:
            self.dynamo_plugin.compile_parts(module, self.strategy)
        elif index is None:
            self.dynamo_plugin.compile(module)
        elif model is self.models[index]:
            model = module
        if self.cursor.around is None and is_compiled(model):
            self._refuse_graphs_under_accumulation()
            self.cursor.around = CompiledBatches(self.dynamo_plugin.uses_cuda_graphs(self.device))
        if evaluation_mode:  # which one rank may do alone
            wrapped = self.strategy.place(model)
        else:
            if trained or step:
                self.compare_settings()
                check_model_matches(module, self.world)
            wrapped = self.strategy.replicate(model) if by_hand else self.strategy.wrap(model, step)
        self._trained[id(module)] = _collect_trained_ids(module)
        if index is None:
            self.models.append(wrapped)
        else:
            self.models[index] = wrapped
        return wrapped

    def compare_settings(self, settings: Mapping[str, Any] | None = None) -> None:
        """Check that every rank is configured alike. Happens by itself when the first model or loader is prepared.

        Args:
            settings: what to compare in place of the Accelerator's own arguments.

        Raises:
            ValueError: on every rank, with the settings that differ, their values and ranks.
        """
        if not self._compared:
            values = self._collect_settings() if settings is None else settings
            check_values_match("the ranks are configured differently", values, self.world)
            self._compared = True

    def _collect_settings(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.name,
            "mixed_precision": self.mixed_precision,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "sync_with_dataloader": self.accumulation.groups_end_with_loader,
            "sync_each_batch": self.gradient_accumulation_plugin.sync_each_batch,
            "step_scheduler_with_optimizer": self.step_scheduler_with_optimizer,
            "split_batches": self.split_batches,
            "use_seedable_sampler": self.use_seedable_sampler,
            "on_nonfinite": self.on_nonfinite,
        }

    def _check_device(self, model: nn.Module) -> None:
        for name, tensor in model.named_parameters():
            if tensor.device != self.device:
                raise ValueError(
                    f"device_placement=False, but {name} is on {tensor.device} and this process computes on "
                    f"{self.device}: move the model there, or leave device_placement out."
                )

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Make an optimizer act at the end of each group of micro-batches; its state follows its parameters."""
        for prepared in self.optimizers:
            if optimizer in (prepared, prepared.optimizer):
                return prepared
        prepared = PreparedOptimizer(self.strategy.wrap_optimizer(optimizer), self.accumulation, self.optimizers)
        self.optimizers.append(prepared)
        replica_check.watch(self, prepared.optimizer)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Make a scheduler advance with its optimizer's steps that really happened.

        Size the schedule by the loader as it is before `prepare`: each ``step()`` advances it by the number of
        processes that share the data, as in Accelerate, or by one with ``split_batches``.
        """
        for prepared in self.schedulers:
            if scheduler is prepared or scheduler is getattr(prepared, "scheduler", None):
                return prepared
        if self.step_scheduler_with_optimizer:
            advances = 1 if self.split_batches else self.data_world.size
            scheduler = PreparedScheduler(scheduler, self.accumulation, advances)
        self.add_scheduler(scheduler)
        return scheduler

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
        if "base_dataloader" in getattr(loader, "__dict__", ()):  # of prepare_data_loader without an Accelerator
            raise TypeError(
                f"prepare got a {type(loader).__name__}, which is shared out among the processes already: pass the "
                "DataLoader that it was made from, or iterate it as it is."
            )
        if self.stream is None:
            self.compare_settings()
            self.start_order()
        stream = self.stream
        assert stream is not None
        if move is None and (self.device_placement if device_placement is None else device_placement):
            move = choose_mover(self.device, self.precision)
        if self.use_seedable_sampler:
            loader = self._replace_random_samplers(loader, shard)
        prepared = (JointLoader if isinstance(loader, CombinedLoader) else Loader)(
            loader,
            world=self.data_world,
            cursor=self.cursor,
            stream=stream,
            accumulate=self.accumulation.loader_group_size,
            shard=shard,
            evaluation=evaluation,
            move=move,
            split=self.split_batches and shard,
            on_begin=self.rng.draw_apart,
        )
        if shard:
            sources = loader.flattened if isinstance(loader, CombinedLoader) else [loader]
            check_loaders_match(sources, self.data_world)
        prepared.agree(self.data_world)
        self.loaders.append(prepared)
        return prepared

    def _replace_random_samplers(self, loader: Any, shared: bool) -> Any:
        seed = self.dataloader_config.data_seed
        if seed is None:
            seed = torch.initial_seed()
        if shared:
            seed = self.world.broadcast(seed)
        if not isinstance(loader, CombinedLoader):
            return replace_random_sampler(loader, seed)
        combined = copy.copy(loader)
        combined.flattened = [replace_random_sampler(source, seed) for source in loader.flattened]
        return combined

    @property
    def stream(self) -> RandomStream | None:
        """What the order of samples is drawn from; None until the first loader is prepared."""
        return self.rng.stream

    def start_order(self) -> None:
        """Draw the order of data from here on from rank zero's current RNG state, which all ranks get.

        So what a script draws until its loops begin (a split of the data, weights) is the same on all ranks. With the
        first batch `draw_apart` happens.

        Happens when the first loader is prepared; call it for a new run with the same Accelerator.
        """
        self.rng.start(self.dataloader_config.data_seed)

    def draw_apart(self) -> None:
        """Let each rank draw numbers of its own from here on: one seed would drop the same units of different samples.

        Ranks that work on one sample together draw alike. Happens with the first batch of a prepared loader.
        """
        self.rng.draw_apart()

    def drawing_alike(self, purpose: str) -> AbstractContextManager[None]:
        """Return a context in which all ranks draw the same numbers, for data that is made once each draws its own.

        The numbers follow from the run's first ones and from ``purpose``. In a world of one nothing changes.
        """
        return self.rng.drawing_alike(purpose)

    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
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
        return join_uneven_inputs(self, joinables, even_batches)

    def init_module(self, empty_init: bool = False) -> AbstractContextManager[Any]:
        """Return the context to build a model in, so that it is made where and as it will be used.

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
        """Check that all processes hold the same parameters, bit for bit. Call it on all processes.

        Under ``TREADLE_DEBUG=1`` it happens by itself after the first and every 100th step of each optimizer.

        Args:
            model: one prepared model. Default: all of them.
            buffers: compare buffers too. Most (BatchNorm's statistics) are each process's own between two forwards.

        Raises:
            ReplicasDiffer: on all processes, with the names, the ranks, and how far they are apart.
        """
        models = self.models if model is None else [model]
        replica_check.check((self.strategy.unwrap(m) for m in models), self.world, buffers)

    # -- one optimizer step --------------------------------------------------------------------------------------

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step; may be changed between steps."""
        return self.accumulation.micro_batches

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.accumulation.micro_batches = value
        if self.cursor.around is not None:
            self._refuse_graphs_under_accumulation()

    def _refuse_graphs_under_accumulation(self) -> None:
        plugin, count = self.dynamo_plugin, self.gradient_accumulation_steps
        if count > 1 and plugin.uses_cuda_graphs(self.device):
            setting = f"mode={plugin.mode!r}" if plugin.mode else f"options={plugin.options!r}"
            raise ValueError(
                f"torch.compile's {setting} replays CUDA graphs, whose gradients each micro-batch writes into the same "
                f"memory, and gradient_accumulation_steps={count} adds them up: use "
                "mode='max-autotune-no-cudagraphs', or accumulate 1."
            )

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is its group's last, after which the optimizer steps."""
        return self.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.accumulation.sync_gradients = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step was left out because a float16 gradient overflowed."""
        return self.accumulation.optimizer_step_was_skipped

    @property
    def inside_group(self) -> bool:
        """Whether a group has begun that no loader knows of; no checkpoint holds its gradients."""
        return self.accumulation.position > 0

    @property
    def agreement(self) -> Agreement:
        """What all processes decide together in each step."""
        return self.accumulation.agreement

    @property
    def steps(self) -> int:
        """Optimizer steps that were taken, before and after a resume; of several optimizers, the most."""
        return self.accumulation.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self.accumulation.steps = value

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        """Return the context of one micro-batch. A group's last one reduces gradients, and then the optimizer steps."""
        self.accumulation.note_entered()
        return self.accumulation.accumulate(*models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which gradients stay on their process."""
        return self.accumulation.no_sync(model)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward reduces the gradients, also those of forwards that ran in `no_sync`."""
        return self.accumulation.trigger_sync_in_backward(model)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the context of the run's precision, for computations outside a prepared model.

        Args:
            autocast_handler: how; ``AutocastKwargs(enabled=False)`` computes in full precision within a prepared one.
        """
        if autocast_handler is None:
            return self.precision.context(self.device) or nullcontext()
        return autocast_handler.context(self.precision, self.device)

    def backward(
        self,
        loss: Tensor,
        *,
        weight: float | Tensor | None = None,
        by: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add this micro-batch's share of the gradient.

        Give the plain mean loss: it is weighed by the samples the loader put into the micro-batch, so that the step's
        gradient is the mean over all samples of the group, on all processes.

        Args:
            loss: 0-d tensor.
            weight: what the loss is a mean over, where that is not samples (tokens): then the step's gradient is the
                mean over all of these. Give it in every micro-batch of a group, or in none.
            by: what to call with the weighed and scaled loss in place of ``Tensor.backward``.
            kwargs: for ``Tensor.backward``.
        """
        self.accumulation.backward(loss, weight=weight, by=by, **kwargs)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip the gradients' total norm in place, at the end of a group.

        Returns:
            The norm before clipping (0-d tensor); None inside a group, where there is nothing to clip yet.
        """
        if not self.accumulation.sync_gradients:
            return None
        self.unscale_gradients()
        return self.strategy.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp every gradient element to ``[-clip_value, clip_value]`` in place, at the end of a group."""
        if self.accumulation.sync_gradients:
            self.unscale_gradients()
            self.strategy.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Make the gradients the true ones: divide by reported weights, and by float16's loss scale."""
        self.accumulation.unscale_gradients(optimizer)

    def finish_gradients(self) -> None:
        """Divide the group's gradients by the weights that all processes reported. Happens by itself when needed."""
        self.accumulation.finish_gradients()

    def reduce_gradients(self, optimizer: PreparedOptimizer) -> None:
        """Average the gradients that backward left on their process. Happens by itself when needed."""
        self.accumulation.reduce_gradients(optimizer)

    def drop_gradients(self) -> None:
        """Drop the gradients of the current group, which will not be finished."""
        self.accumulation.drop_gradients()

    def agree_on_steps(self, *, finite: bool, at_once: bool) -> None:
        """Let every step's backward carry what all processes must agree on; read it with `agree`.

        Args:
            finite: whether losses are watched (with float16 the loss scaler does that).
            at_once: read it in the same step on accelerators too, which waits for the device.
        """
        self.accumulation.agree_on_steps(finite=finite, at_once=at_once)

    def agree(self) -> Agreement:
        """Read what all processes agreed on in the backward that has just run. For loops with ``always_agree``."""
        return self.accumulation.agree()

    def not_finite_on(self) -> list[int]:
        """Return the ranks whose loss was not finite, once `agree` said there are some, and forget them."""
        return self.accumulation.not_finite_on()

    def preemptible(
        self, *, grace: str | timedelta | dict[str, int] | None = None, interrupts: bool = False
    ) -> AbstractContextManager[Preemption]:
        """Return a context in which SIGTERM, SIGUSR1 and SIGHUP ask a loop to end, rather than end the process.

        Ask `Preemption.should_stop` after each step: on every rank it becomes True after the same one, whichever rank
        got the signal. Then save, and call `Preemption.leave`, which ends the process with status 143 (129 for SIGHUP)
        and has SLURM requeue a job that got SIGUSR1. A signal that came after the last step ends the process behind the
        block.

        Args:
            grace: seconds from the signal to the end of all ranks, whatever they do then: ``"DD:HH:MM:SS"``, a
                timedelta or a dict of its arguments. Default: as long as it takes.
            interrupts: treat Ctrl-C likewise; `Preemption.leave` then raises KeyboardInterrupt. A second Ctrl-C, and
                one that came after the last step, raise it at once. Default: Ctrl-C raises it at once.

        Raises:
            ValueError: for several processes with a torch older than 2.8, or a ``grace`` that is not positive.
            TypeError: for a ``grace`` of another type.

        Example:
            >>> import treadle as tl
            >>> accelerator = tl.Accelerator(cpu=True)
            >>> with accelerator.preemptible() as preemption:
            ...     for step in range(3):
            ...         if preemption.should_stop():
            ...             preemption.leave()
        """
        return preemptible(self, grace, interrupts)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def unwrapped_models(self) -> list[nn.Module]:
        """The user's own modules inside the prepared models."""
        return [self.strategy.unwrap(model) for model in self.models]

    @property
    def registered(self) -> dict[str, Any]:
        """The objects of `register_for_checkpointing`, by name."""
        return self.checkpointer.registered

    @property
    def saving(self) -> Job | None:
        """The ``save_state(blocking=False)`` that is under way beside the training."""
        return self.checkpointer.saving

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Add objects with ``state_dict``/``load_state_dict`` to every checkpoint, by name or by order."""
        self.checkpointer.register(objects, named)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` before `save_state` writes; returns a handle with ``remove()``.

        What it takes out of ``weights`` is not saved; what it writes to ``output_dir`` becomes part of the checkpoint.
        """
        return self.checkpointer.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` before `load_state` reads; what it takes out of ``models`` is not loaded."""
        return self.checkpointer.add_load_hook(hook)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        info: dict[str, Any] | None = None,
        parts: dict[str, Any] | None = None,
        weights_only: bool = False,
        trainable_only: bool = False,
        blocking: bool = True,
        also: Sequence[str | os.PathLike[str]] = (),
    ) -> AnyPath:
        """Save everything prepared or registered, and every process's RNG state. Call it on all processes.

        Args:
            output_dir: the checkpoint, a directory that is put in place in one move once it is complete, or a URL such
                as ``s3://bucket/run/last``, which one request replaces once all its files are uploaded. With
                ``ProjectConfiguration(automatic_checkpoint_naming=True)`` it may be left out.
            safe_serialization: only True; there is no other format.
            info: numbers and names for its manifest (``step``, ``epoch``, ...).
            parts: further states to keep in files of their own, by name.
            weights_only: the models and ``parts`` only.
            trainable_only: leave out the weights that training leaves as they are (``requires_grad=False``): those of a
                pretrained model under adapters, say. The checkpoint has their digests, and loads into a model that
                has the same ones.
            blocking: False returns when the state is copied to host memory; the rest happens beside the training. One
                save is under way at a time: the next waits for it. `poll_saving` and `finish_saving` tell of its end.
            also: further directories for the same state, each a checkpoint of its own.

        Raises:
            ValueError: without a directory, or inside a group of micro-batches.
            TypeError: for a state that is not data.
            OSError: the disk refused. Nothing of the attempt is left then, and what stood there before still does.
        """
        return self.checkpointer.save_state(
            output_dir,
            safe_serialization,
            info=info,
            parts=parts,
            weights_only=weights_only,
            trainable_only=trainable_only,
            blocking=blocking,
            also=also,
        )

    def poll_saving(self) -> bool:
        """Return whether no ``save_state(blocking=False)`` is under way; costs nothing.

        Raises:
            Exception: whatever the last one failed with, once.
        """
        return self.checkpointer.poll_saving()

    def finish_saving(self) -> None:
        """Wait for a ``save_state(blocking=False)`` that is under way; raises what it failed with, once."""
        self.checkpointer.finish_saving()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | OpenCheckpoint | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        models: bool = True,
        state: bool = True,
        strict: bool | None = None,
        schedule: str | None = None,
        finish_epoch: bool = True,
    ) -> dict[str, Any]:
        """Restore what `save_state` saved; returns its ``info``. Call it on all processes.

        A group of micro-batches that has begun begins anew. What a registered object gets is laid out over the
        processes as what its own ``state_dict`` has at the same place.

        Args:
            input_dir: a checkpoint's directory, or the checkpoint if it is open already. With
                ``automatic_checkpoint_naming`` it may be left out: the newest that is intact is loaded, and a warning
                names each that had to be skipped.
            load_kwargs: accepted empty; loading has no options.
            models: restore the models.
            state: restore everything else.
            strict: False takes what fits of another model's or optimizer's state, and says what does not. Default: what
                the model's ``strict_loading`` says, else True.
            schedule: whose learning rates and schedules hold: ``"saved"``, those of the checkpoint, or ``"script"``,
                those of the prepared optimizers and schedulers, as they are after as many steps. Default: the saved
                ones, with a warning if the script's are others.
            finish_epoch: where the state was saved with the last batch of an epoch, start the next epoch and return
                its number as ``epoch``, so that a script that derives its first epoch from its steps gets a whole one.
                With False the first pass over the loader is empty, for loops that resume in the saved epoch. The first
                pass over a stream whose length is not known is always empty then.

        Raises:
            ValueError: if it is no checkpoint, is damaged, another model's or optimizer's, or was replaced while it was
                read; nothing is changed then on any process. What the ``load_state_dict`` of a scheduler or a
                registered object itself raises comes later, when models and optimizers are loaded.
        """
        return self.checkpointer.load_state(
            input_dir,
            load_kwargs,
            models=models,
            state=state,
            strict=strict,
            schedule=schedule,
            finish_epoch=finish_epoch,
        )

    # -- weights for other programs ------------------------------------------------------------------------------

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own module.

        Args:
            model: a prepared one.
            keep_fp32_wrapper: accepted; no ``forward`` is ever replaced.
            keep_torch_compile: return what ``torch.compile`` made of it, if that was what was prepared.
        """
        module = self.strategy.unwrap(model)
        if not keep_torch_compile:
            return module
        return next((m for m in model.modules() if m._modules.get("_orig_mod") is module), module)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state of the user's own module, whole and under its own names. Call it on all processes.

        Args:
            model: the model, prepared or not.
            unwrap: False leaves the names that the prepared model gives, with DDP's ``module.`` before them.

        Returns:
            On rank zero the tensors: those that were sharded whole, in host memory; others are the model's own, which
            training changes, so clone what is to be kept. Other processes get None for each that was sharded.
        """
        return self.checkpointer.get_state_dict(model, unwrap)

    @property
    def should_save_model(self) -> bool:
        """True: `save_model` knows which process writes."""
        return True

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write data to a file on the main process, for others to load: a state dict, numbers, nested as you like.

        It may be called on the main process alone.

        The file appears in one move. It holds data only, and ``torch.load(f, weights_only=True)`` reads it: tensors,
        numbers, text, bytes, None, dtypes, devices, in dicts, lists, tuples and sets. numpy's numbers are written as
        Python's, a defaultdict as a dict.

        Args:
            obj: what to write; for a module give its ``state_dict()``, for a sharded one what `get_state_dict` returns.
            f: a path, or an open file.
            safe_serialization: as safetensors; ``obj`` is a dict of tensors then. Tied ones are written once, and the
                header says so.

        Raises:
            TypeError: for anything else (numpy arrays, paths, objects), with its place and what to do.
        """
        self.checkpointer.save(obj, f, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights for others to load: ``model.safetensors``, or shards and their index.

        Call it on all processes. Where nothing of the model is sharded, the main process may call it alone.

        Args:
            model: the model, prepared or not.
            save_directory: made if it is not there; no checkpoint's. Files of an earlier save, of either kind, go once
                the new ones are complete.
            max_shard_size: the most bytes of a file, a number or ``"500MB"``, ``"2GiB"``.
            safe_serialization: False writes ``pytorch_model.bin`` in torch's format.
        """
        self.checkpointer.save_model(model, save_directory, max_shard_size, safe_serialization)

    # -- trackers and profiles -----------------------------------------------------------------------------------

    @property
    def log_with(self) -> dict[str, Any]:
        """What makes each tracker, by its name."""
        return self.tracking.sources

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that `init_trackers` started."""
        return self.tracking.started

    @trackers.setter
    def trackers(self, value: list[GeneralTracker]) -> None:
        self.tracking.started = value

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Start the trackers that ``log_with`` named.

        Args:
            project_name: what the run belongs to.
            config: what it is configured with; trackers keep it.
            init_kwargs: by a tracker's name, further arguments of its logger.

        Raises:
            ValueError: for arguments of a tracker that was not asked for.
        """
        self.tracking.start(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Hand numbers of this process to the trackers; the main process's, unless a tracker wants all.

        Args:
            values: numbers, or tensors of one element, by name. `reduce` them first for those of all processes.
            step: what they belong to, such as the optimizer steps taken.
            log_kwargs: by a tracker's name, further arguments of its ``log``.

        Raises:
            RuntimeError: before `init_trackers`, where ``log_with`` named some.
        """
        self.tracking.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker, or with ``unwrap`` what it writes with (which does nothing on other processes).

        Raises:
            ValueError: if there is none of that name.
        """
        return self.tracking.get(name, unwrap)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[torch.profiler.profile]:
        """Measure a block with torch's profiler; with a schedule, call ``step()`` of what it yields.

        Args:
            profile_handler: how to measure; by default that of ``kwargs_handlers``.
        """
        return profile(profile_handler or self.profile_handler or ProfileKwargs(), self.world)

    # -- the end -------------------------------------------------------------------------------------------------

    def end_training(self) -> None:
        """Finish saves and trackers, and wait for everyone. Another Accelerator may follow.

        Raises:
            ValueError: if gradients of the latest step were not finite, which accelerators tell one step later.
        """
        self.finish_saving()
        self.world.release_beside()
        self.tracking.finish()
        self._gradient_guard.settle()
        self.wait_for_everyone()

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
        for prepared in (self.models, self.optimizers, self.schedulers, self.schedules_built, self.loaders):
            prepared.clear()  # type: ignore[attr-defined]
        self.cursor.micro = self.rng.stream = None
        self._compared = False
        self._trained.clear()
        self.checkpointer.forget_prepared()
        self.accumulation.reset()
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
        """Return whether a device map spread ``model`` over several devices, so that it can not be prepared."""
        from .big_models import is_dispatched  # 25 ms, for which no import has to wait

        return any(is_dispatched(part) for part in (model, *model.children()))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """See `skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

    # -- configuration -------------------------------------------------------------------------------------------

    @property
    def state(self) -> AcceleratorState:
        """Who this process is among the others, and in which precision it computes."""
        return AcceleratorState.of(self)

    @property
    def gradient_state(self) -> GradientState:
        """Where the loop is in its group of micro-batches."""
        return GradientState.of(self)

    @property
    def project_dir(self) -> Any:
        """Where the run keeps its files."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Any:
        """Where trackers keep theirs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint that names itself."""
        return self.project_configuration.iteration

    @property
    def split_batches(self) -> bool:
        """Whether ``batch_size`` is that of the global batch."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """As it was given; each process reads its own share either way."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """As it was given; all processes see equally many batches either way."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of an epoch follows from a seed and the epoch's number alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """As it was given; pinned batches are copied while the device computes either way."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """As it was given; every prepared loader has a state either way."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def native_amp(self) -> bool:
        """Whether prepared models compute in a smaller number format."""
        return self.mixed_precision != "no"

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        if bool(value) != self.native_amp:
            raise ValueError(
                f"native_amp={value} with mixed_precision={self.mixed_precision!r}: "
                "Accelerator(mixed_precision=...) alone decides."
            )

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """torch's loss scaler, where the precision is float16. Another one may be set between steps."""
        return self.accumulation.scaler

    @scaler.setter
    def scaler(self, value: torch.amp.GradScaler | None) -> None:
        self.accumulation.scaler = value

    @property
    def step(self) -> int:
        """Micro-batches of the current pass through a loader; 0 at its last, and outside of loaders."""
        loader = self.gradient_state.active_dataloader
        if loader is None:
            return self.accumulation.position
        return 0 if self.gradient_state.end_of_dataloader else loader.batches

    def _get_batch_size(self) -> int | None:
        loader = self.gradient_state.active_dataloader
        if getattr(loader, "batch_size", None) is None:  # a user-defined batch sampler decides
            return None
        return loader.total_batch_size // self.data_world.size

    @property
    def multi_device(self) -> bool:
        """Whether there is more than one process."""
        return self.world.size > 1

    @property
    def is_fsdp2(self) -> bool:
        """Whether each process keeps only a part of the model."""
        return self.strategy.sharded

    @property
    def torch_device_mesh(self) -> Any:
        """The grid of processes that the model is sharded over, or None."""
        return getattr(self.strategy, "device_mesh", None)

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether each process keeps only a shard of the model."""
        return self.is_fsdp2

    @property
    def data_parallel_rank(self) -> int:
        """This process among those that the data is shared out to."""
        return self.data_world.rank

    @property
    def data_parallel_shard_rank(self) -> int:
        """This process among those that the parameters of one replica are sharded over; 0 if they are not sharded."""
        return self._mesh_rank(SHARD)

    @property
    def tensor_parallel_rank(self) -> int:
        """This process among those that work on one sample together; 0 if each works alone."""
        return self._mesh_rank(TENSOR)

    @property
    def pipeline_parallel_rank(self) -> int:
        """0: there is no pipeline parallelism."""
        return 0

    @property
    def context_parallel_rank(self) -> int:
        """0: a sequence is not split over processes."""
        return 0

    def _mesh_rank(self, dimension: str) -> int:
        mesh = self.torch_device_mesh
        names = () if mesh is None else mesh.mesh_dim_names or ()
        return mesh.get_local_rank(dimension) if dimension in names else 0

    def _is_sharded(self) -> bool:
        return self.strategy.sharded

    def __getattr__(self, name: str) -> Any:
        if name in _PEERS_NAMES:
            return getattr(self, _PEERS_NAMES[name])
        reason = _UNSUPPORTED.get(name)
        raise AttributeError(f"Accelerator has no {name!r}{'' if reason is None else ': ' + reason}")

    def __repr__(self) -> str:
        return f"Accelerator:\n{self.state!r}"


def _collect_trained_ids(module: nn.Module) -> frozenset[int]:
    return frozenset(id(p) for p in module.parameters() if p.requires_grad)
