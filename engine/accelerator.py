"""The `Accelerator`: device, precision, gradient accumulation, collectives and checkpoints of one process."""

from __future__ import annotations

import copy
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

from .. import strategies
from ..common.messages import format_count, name_type, warn
from ..common.remote_path import AnyPath
from ..strategies.distributed import Devices, Watchdog, watch
from . import checkpoint, configuration, data, optim, preemption, profilers
from .configuration import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from .garbage_collection import collect, is_memory_short
from .modules import CompiledBatches, is_compiled
from .process import Prepared
from .process_state import AcceleratorState, GradientState, register_accelerator
from .quantization import convert_to_float8
from .rank_consistency import check_loaders_match, check_model_matches, check_values_match
from .rng import RandomStream
from .run_environment import warn_if_kernels_differ
from .trackers import GeneralTracker, Trackers, tracker_sources

# Lists that public code reads although they are private in Accelerate.
_PEERS_NAMES = {
    "_models": "models",
    "_optimizers": "optimizers",
    "_schedulers": "schedulers",
    "_dataloaders": "loaders",
}
_UNSUPPORTED = {
    "lomo_backward": "LOMO updates the weights during the backward pass, which is unsupported. Use another optimizer.",
    "maybe_context_parallel": "Treadle does not split sequences over processes.",
    "deepspeed_ulysses_dl_adapter": "Treadle does not split sequences over processes.",
    "fp8_backend": "Treadle always uses torchao for float8.",
    "megatron_lm_plugin": "Treadle does not use Megatron-LM.",
    "build_parallelism_config": "Use Accelerator(parallelism_config=...) instead.",
    **{f"{kind}_parallel_rank": "Use torch_device_mesh.get_local_rank(name) instead." for kind in ("data", "tensor")},
}


def _locate(accelerator: Accelerator) -> tuple[str, Any]:
    """Return, for the watchdog, a description of the loop's position and a value that every micro-batch changes."""
    accumulation = accelerator.accumulation
    moving = accumulation.position, id(accelerator.cursor.micro), [loader.batches for loader in accelerator.loaders]
    return f"optimizer step {accumulation.steps + 1}", moving


def _find_directory(accelerator: Accelerator) -> Any:
    return accelerator.logging_dir or accelerator.project_dir


class Accelerator(Prepared):
    """Distributed training, mixed precision and checkpoints for a user-defined loop.

    Args:
        device_placement: Whether to move models and batches to the device. Default: True.
        split_batches: Whether the ``batch_size`` of dataloaders is the global batch size, not the size per process.
            Default: False.
        mixed_precision: ``"no"``, ``"bf16"``, ``"fp16"``, or any name that `Precision` accepts. Default: ``"no"``.
        gradient_accumulation_steps: Number of micro-batches per optimizer step. Default: 1.
        cpu: If True, same as ``accelerator="cpu"``. Default: False.
        dataloader_config: Settings for prepared dataloaders.
        deepspeed_plugin: Not supported; must be None.
        deepspeed_plugins: Not supported; must be None.
        fsdp_plugin: Accelerate's equivalent of ``strategy=FSDP(...)``.
        torch_tp_plugin: Not supported; must be None.
        megatron_lm_plugin: Not supported; must be None.
        rng_types: No effect; must be None or ``["generator"]``.
        log_with: A tracker's name (``"tensorboard"``, ``"csv"``, ``"wandb"``, ``"mlflow"``, ``"clearml"``,
            ``"comet_ml"``, ``"swanlab"``, ``"trackio"``, or a registered one), ``"all"`` for the installed built-in
            trackers, a logger of `treadle.loggers`, a `GeneralTracker`, or a list of these. Default: none.
        project_dir: Directory for the files of the run. Default: none.
        project_config: Settings for the run's directories and checkpoints.
        gradient_accumulation_plugin: Further settings for gradient accumulation.
        step_scheduler_with_optimizer: Set to False for schedulers that the loop steps once per epoch. Default: True.
        kwargs_handlers: At most one each of `AutocastKwargs`, `GradScalerKwargs`, `InitProcessGroupKwargs`,
            `DistributedDataParallelKwargs` and `ProfileKwargs`.
        dynamo_backend: The ``torch.compile`` backend for prepared models. Default: models are not compiled.
        dynamo_plugin: Settings for ``torch.compile``; cannot be combined with ``dynamo_backend``.
        parallelism_config: The numbers of replicas, shards and tensor parallel ranks.
        strategy: A name (``"single"``, ``"ddp"``, ``"fsdp"``, or a registered one), a `Strategy`, or ``"auto"``.
            ``"auto"`` uses the strategy that other arguments select. If they select none, it uses DDP for several
            processes, or a single device for one process. Default: ``"auto"``.
        accelerator: Kind of device: ``"cpu"``, ``"cuda"`` (``"gpu"``), ``"mps"``, or ``"auto"`` (CUDA if available,
            else MPS, else the CPU). Default: ``"auto"``.
        devices: Number of processes on this machine, or the indices of their GPUs; see `open_world`. ``"auto"`` uses
            the processes that a launcher started. Without a launcher, it uses one process, or one for each GPU if
            ``spread`` permits this. Default: ``"auto"``.
        num_nodes: Number of machines. Default: 1.
        spread: Whether ``devices="auto"`` may start a process for each GPU; see `open_world`. Trainer and Fabric do,
            and leave the layout that ``accelerate launch`` sets unread. Default: False.
        timeout: Maximum time that a rank may go without progress: ``"DD:HH:MM:SS"``, a timedelta or a dict of its
            arguments. If a rank exceeds this time, Treadle writes the Python stacks of the ranks to files and ends the
            run with exit status 124. Default: slightly less than the timeout of collectives; this default applies only
            to ranks that wait for other ranks.
        on_nonfinite: Policy for gradients that are not finite when a prepared optimizer is about to apply them.
            ``"raise"`` raises an error. On accelerators, the error is raised one step later or, after the last step, in
            `end_training`. ``"skip"`` skips the step, and makes the host wait for the device in every step.
            ``"ignore"`` does not check gradients. In mixed float16 precision, the loss scaler skips steps with
            non-finite gradients under every policy. Default: ``"raise"``.
        step_micro_batches: Number of micro-batches per optimizer step over all processes, a power of two. Each has the
            dataloader's ``batch_size``, draws its own random numbers, and is added in a fixed order, so weights and
            losses have the same bits on any number of processes up to this one. Default: None, which does not fix
            them.
        unknown: Any other argument raises a TypeError.

    Attributes:
        models, optimizers, schedulers, loaders: The prepared objects, in the order of preparation.
        registered: The objects registered with `register_for_checkpointing`, by name.
        tracking: The trackers that ``log_with`` selects.
        rng: The RNG states of the ranks, and the random stream from which the order of samples is drawn.
        watchdog: Monitor that ends the run if a rank hangs, or None.
        deepspeed_plugin: Always None.

    Raises:
        TypeError: If an argument is unknown or has the wrong type.
        ValueError: If an argument is invalid.
        ModuleNotFoundError: If ``log_with`` names a tracker whose package is not installed.
        SystemExit: If this call has run the script again in several processes. It is raised once these processes have
            ended.

    Examples:
        >>> import torch, treadle
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> accelerator = treadle.Accelerator(cpu=True)
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=4)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        >>> for x, y in loader:
        ...     accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> accelerator.steps
        2
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
        parallelism_config: strategies.ParallelismConfig | None = None,
        *,
        strategy: str | strategies.Strategy = "auto",
        accelerator: str = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        spread: bool = False,
        timeout: Any = None,
        on_nonfinite: str = "raise",
        step_micro_batches: int | None = None,
        **unknown: Any,
    ) -> None:
        arguments = configuration.check_arguments(locals())
        self._arguments = arguments if type(self).__init__ is Accelerator.__init__ else None
        configuration.check_choices(rng_types, on_nonfinite)
        handlers = configuration.sort_handlers(kwargs_handlers)
        self.device_placement, self.step_scheduler_with_optimizer = device_placement, step_scheduler_with_optimizer
        self.dataloader_config = configuration.resolve_dataloader_config(dataloader_config, split_batches)
        sources = tracker_sources(log_with, project := configuration.resolve_project(project_config, project_dir))
        plugin = configuration.resolve_accumulation(gradient_accumulation_plugin, gradient_accumulation_steps)
        self.dynamo_plugin = configuration.resolve_compilation(dynamo_plugin, dynamo_backend)
        precision, mixed_precision = configuration.resolve_precision(mixed_precision, handlers["autocast"])
        self.on_nonfinite, self.profile_handler = on_nonfinite, handlers["profile"]
        group = configuration.resolve_group(handlers["group"], limit := configuration.resolve_timeout(timeout))
        place = strategies.resolve_devices(strategy, configuration.resolve_device(accelerator, cpu), devices)
        world = strategies.open_world(*place, num_nodes, spread=spread, **configuration.merge_group(group, strategy))
        layout = fsdp_plugin, parallelism_config, handlers["replicas"], not spread
        chosen, self.fsdp_plugin, self.parallelism_config = strategies.choose_strategy(strategy, world, *layout)
        chosen.attach(world, precision)
        scaler = configuration.build_scaler(handlers["scaler"], precision, world.device)
        super().__init__(chosen, precision, mixed_precision, project, plugin, scaler, step_micro_batches)
        self._begin(Trackers(world, sources), watch(world, limit))

    def _begin(self, trackers: Trackers, watchdog: Watchdog | None) -> None:
        strategies.report_uncaught()
        self.precision.warn_if_emulated(self.device)
        self.watchdog = watchdog
        self._compared = False
        self._trained: dict[int, frozenset[int]] = {}  # by model, the parameters that it was wrapped to train
        self._gradient_guard = optim.GradientGuard(self.on_nonfinite, self.loaders, on_host=self.device.type == "cpu")
        self.accumulation.guard = None if self.on_nonfinite == "ignore" else self._gradient_guard
        self.loop_check = optim.LoopCheck(self.accumulation)
        self.accumulation.check_models = self.loop_check.check_models
        self.checkpointer = checkpoint.Checkpointer(self)
        self.tracking = trackers
        self.dataloader_config.announce_differences()
        self._make_current()

    def _make_current(self) -> None:
        """Let `GradientState()` and the watchdog's reports describe this Accelerator, also after a newer one."""
        register_accelerator(self)
        if self.watchdog is not None:
            self.watchdog.follow(self, _locate, _find_directory)

    # -- preparing -----------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Move and wrap models, wrap optimizers and schedulers, and shard dataloaders over the processes.

        Args:
            objects: Models, optimizers, schedulers and dataloaders. Other objects are returned unchanged.
            device_placement: One value per object: True or False to override the Accelerator's setting, or None to use
                it. Default: None for each.

        Returns:
            The prepared objects as a tuple in the same order; for a single object, the prepared object itself.

        Raises:
            ValueError: If an object or an argument is invalid.
            TypeError: If an argument has the wrong type.
            ModuleNotFoundError: If the precision is float8 and torchao is not installed.
        """
        placement: Sequence[bool | None] = [None] * len(objects) if device_placement is None else device_placement
        if isinstance(placement, bool):
            raise TypeError(f"device_placement={placement} must be a list with one value per object, such as [True].")
        if len(placement) != len(objects):
            raise ValueError(
                f"device_placement has {format_count(len(placement), 'value')}, but prepare got "
                f"{format_count(len(objects), 'object')}. Pass one value per object."
            )
        # Models first, because preparing them may move their parameters, which the optimizers must then refer to.
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
        if isinstance(value, DataLoader | data.Loader | data.CombinedLoader):
            return self.prepare_data_loader(value, place)
        if hasattr(value, "step") and hasattr(value, "state_dict") and not isinstance(value, type):
            return self.prepare_scheduler(value)
        is_class = isinstance(value, type)
        kind = f"the class {value.__name__}" if is_class else name_type(value)
        is_iterable = isinstance(value, Iterable) and not isinstance(value, type | str | Mapping | Tensor)
        advice = " Pass an instance of the class." * is_class
        advice += " Every rank reads all items of this object. To shard batches, use prepare_data_loader." * is_iterable
        warn(
            f"prepare returns {kind} unchanged, because it supports only models, optimizers, schedulers and "
            f"DataLoaders.{advice}"
        )
        return value

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        *,
        step: str | None = None,
        manual_optimization: bool = False,
        by_parts: bool = False,
    ) -> nn.Module:
        """Move a model to the device, wrap it for training, and return the model to call in the loop.

        Args:
            model: The user's module.
            device_placement: Whether to move the model to the device. Default: the Accelerator's setting.
            evaluation_mode: Prepare the model for evaluation only. Default: False.
            step: Name of the method that the loop calls through `method` to compute the loss. Default: ``forward``.
            manual_optimization: Reduce gradients in every backward pass, whatever computed the loss. Call methods
                through `local_method`.
            by_parts: Compile the submodules instead of the model, for loops that do not call ``forward``.

        Raises:
            ValueError: If the model or a setting is not supported or differs between ranks, or if ``device_placement``
                is False and the model is on another device.
            ModuleNotFoundError: If the precision is float8 and torchao is not installed.
        """
        module = self.strategy.unwrap(model)
        trained = _collect_trained_ids(module)
        index = next((n for n, inner in enumerate(self.unwrapped_models) if inner is module), None)
        if index is not None and self._trained.get(id(module)) == trained:
            return self.models[index]
        if self.verify_device_map(module):
            raise ValueError(
                f"{type(module).__name__} has a device map, which is for inference. To train it, load it without one."
            )
        if not (self.device_placement if device_placement is None else device_placement):
            self._check_device(module)
        if index is None:
            checkpoint.note_nan_buffers(module)
            if self.precision.float8 and not evaluation_mode:
                convert_to_float8(module, self.device)
            (self.dynamo_plugin.compile_parts if by_parts else self.dynamo_plugin.compile)(module, self.strategy)
        elif model is self.models[index]:
            model = module
        if self.cursor.around is None and is_compiled(model):
            self._refuse_graphs_under_accumulation()
            self.cursor.around = CompiledBatches(self.dynamo_plugin.uses_cuda_graphs(self.device))
        if evaluation_mode and not (manual_optimization and self.strategy.sharded):  # one rank alone may do this
            wrapped = self.strategy.place(model)
        else:
            if trained or step:
                self.compare_settings()
                check_model_matches(module, self.world)
            wrapped = self.strategy.replicate(model) if manual_optimization else self.strategy.wrap(model, step)
        self._trained[id(module)] = _collect_trained_ids(module)
        if index is None:
            self.models.append(wrapped)
        else:
            self.models[index] = wrapped
        return wrapped

    def compare_settings(self, settings: Mapping[str, Any] | None = None) -> None:
        """Check that all ranks have the same settings.

        Repeated calls have no effect until `free_memory` or `forget_prepared` is called.

        Args:
            settings: The values to compare, by name. Default: the arguments of the Accelerator that affect training.

        Raises:
            ValueError: If settings differ. Every rank raises the error.
        """
        if not self._compared:
            if self._tree is not None:
                warn_if_kernels_differ(self.world)
            values = self._collect_settings() if settings is None else settings
            check_values_match("the ranks are configured differently", values, self.world)
            self._compared = True

    def record_weights(self) -> str:
        """Record a digest of the parameters at the current step, and return it. Must be called on all processes.

        ``treadle runs compare`` finds the first step at which the digests of two runs differ. Checkpoints call this
        method if ``step_micro_batches`` is set.
        """
        return self.checkpointer.record_weights()

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
            "step_micro_batches": self.step_micro_batches,
        }

    def _check_device(self, model: nn.Module) -> None:
        for name, tensor in model.named_parameters():
            if tensor.device != self.device:
                raise ValueError(
                    f"device_placement=False, but {name} is on {tensor.device}, and this process computes on "
                    f"{self.device}. Move the model to {self.device}, or remove device_placement=False."
                )

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> optim.PreparedOptimizer:
        """Wrap an optimizer so that it steps only at the end of an accumulation group.

        An accumulation group consists of the micro-batches of one optimizer step.

        Args:
            optimizer: The user's optimizer.
            device_placement: No effect.

        Returns:
            The optimizer to call in the loop.

        Raises:
            ValueError: If the strategy does not support the optimizer.
        """
        for prepared in self.optimizers:
            if optimizer in (prepared, prepared.optimizer):
                return prepared
        prepared = optim.PreparedOptimizer(self.strategy.wrap_optimizer(optimizer), self.accumulation, self.optimizers)
        self.optimizers.append(prepared)
        optim.replica_check.watch_replicas(self.accumulation, prepared.optimizer)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap a scheduler so that it advances only if the optimizer step was applied.

        As in Accelerate, each call to ``step()`` advances the schedule by one step for every process that the data is
        sharded over. With ``split_batches``, it advances the schedule by a single step. Therefore, compute the length
        of the schedule from the length that the dataloader has before `prepare`.

        Args:
            scheduler: The user's scheduler.

        Returns:
            The scheduler to call in the loop. With ``step_scheduler_with_optimizer=False``, each call of its ``step``
            is passed to ``scheduler``.
        """
        for prepared in self.schedulers:
            if scheduler is prepared or scheduler is getattr(prepared, "scheduler", None):
                return prepared
        follows = self.step_scheduler_with_optimizer
        advances = self.data_world.size if follows and not self.split_batches else 1
        prepared = optim.PreparedScheduler(scheduler, self.accumulation, advances, follows_optimizer=follows)
        self.add_scheduler(prepared)
        return prepared

    def add_scheduler(self, scheduler: Any) -> None:
        """Include the state of a scheduler in checkpoints. The caller steps the scheduler.

        Args:
            scheduler: An object with ``state_dict`` and ``load_state_dict``.
        """
        self.schedules_built.append(optim.BuiltSchedule(scheduler))
        self.schedulers.append(scheduler)

    def prepare_data_loader(
        self,
        data_loader: Iterable[Any],
        device_placement: bool | None = None,
        *,
        shard: bool = True,
        evaluation: bool = False,
        move: Callable[[Any], Any] | None = None,
        in_tree: bool = True,
    ) -> data.Loader:
        """Shard a dataloader over the processes.

        Args:
            data_loader: A ``DataLoader``, a `CombinedLoader`, or another iterable of batches.
            device_placement: Whether to move batches to the device. Default: the Accelerator's setting.
            shard: If False, each process gets all batches of its own dataloader. Default: True.
            evaluation: Do not group batches for gradient accumulation; see `Loader`. Default: False.
            move: Function to apply to each batch instead of moving it to the device.
            in_tree: Assign whole batches to processes if ``step_micro_batches`` is set. Default: True.

        Returns:
            The prepared dataloader.

        Raises:
            TypeError: If ``data_loader`` is not iterable, or is already sharded.
            ValueError: If dataloaders or settings differ between ranks, or are not supported.
        """
        if isinstance(data_loader, data.Loader):
            return data_loader
        if getattr(type(data_loader), "is_sharded", False):  # by the function of this name, without an Accelerator
            raise TypeError(
                f"prepare got {name_type(data_loader)}, which is already sharded over the processes. Pass the "
                f"original DataLoader, or use the {type(data_loader).__name__} without preparing it."
            )
        if self.stream is None:
            self.compare_settings()
            self.rng.start(self.dataloader_config.data_seed)
        if move is None and (self.device_placement if device_placement is None else device_placement):
            move = data.choose_mover(self.device, self.precision)
        if self.use_seedable_sampler:
            data_loader = self._replace_random_samplers(data_loader, shard)
        prepared = (data.JointLoader if isinstance(data_loader, data.CombinedLoader) else data.Loader)(
            data_loader,
            world=self.data_world,
            cursor=self.cursor,
            stream=self.stream,  # type: ignore[arg-type]  # it has started
            accumulate=self.accumulation.loader_group_size,
            shard=shard,
            evaluation=evaluation,
            move=move,
            split=self.split_batches and shard,
            on_begin=self.rng.draw_apart,
            tree=self._tree if in_tree else None,
        )
        if shard:
            check_loaders_match(data_loader, self.data_world)
        prepared.decide_sharding(self.data_world)
        prepared.dispatch_batches = self.dispatch_batches
        self.loaders.append(prepared)
        return prepared

    def _replace_random_samplers(self, loader: Any, shared: bool) -> Any:
        seed = self.dataloader_config.data_seed
        if seed is None:
            seed = torch.initial_seed()
        if shared:
            seed = self.world.broadcast(seed)
        if not isinstance(loader, data.CombinedLoader):
            return data.replace_random_sampler(loader, seed)
        combined = copy.copy(loader)
        combined.flattened = [data.replace_random_sampler(source, seed) for source in loader.flattened]
        return combined

    @property
    def stream(self) -> RandomStream | None:
        """Random stream that the order of samples is drawn from; None before the first dataloader."""
        return self.rng.stream

    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return a context for a loop over user-defined batches whose number differs between ranks.

        A rank that runs out of batches waits at the end of the context. Each step of the remaining ranks uses the mean
        of their gradients. At the end, all ranks get the parameters, buffers, optimizer states and schedules of the
        rank that took the most steps. Prepared DataLoaders do not need this context. With sharded models, and with some
        settings of DDP, the context warns and has no effect.

        Args:
            joinables: Prepared models. Optimizers are accepted, but have no effect.
            even_batches: Pass True if all ranks have the same number of batches; the context then has no effect. None
                is the same as False, whereas in Accelerate it means the Accelerator's ``even_batches``. Default: None.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: With several processes, if a model is not prepared, or if `backward` gets a ``weight`` for a
                user-defined batch.

        Examples:
            >>> import torch, treadle
            >>> accelerator = treadle.Accelerator(cpu=True)
            >>> model = torch.nn.Linear(4, 1)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> with accelerator.join_uneven_inputs([model]):
            ...     for batch in torch.randn(3, 2, 4):
            ...         accelerator.backward(model(batch).mean())
            ...         optimizer.step()
            ...         optimizer.zero_grad()
        """
        configuration.refuse_in_tree("join_uneven_inputs", self.step_micro_batches)
        return optim.join_uneven_inputs(self.accumulation, self.schedulers, joinables, even_batches)

    def init_module(self, empty_init: bool = False) -> AbstractContextManager[Any]:
        """Return a context in which a model's parameters are created on the run's device and in the run's dtype.

        If the strategy shards models, all ranks must enter the context. Memory for the parameters is then allocated
        only when `prepare_model` creates each process's shards.

        Args:
            empty_init: Skip common initializers of ``torch.nn.init``, such as ``normal_`` and ``kaiming_uniform_``. Use
                this if a checkpoint will be loaded into the model. Default: False.
        """
        return self.strategy.construction(empty_init)

    def method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """Return method ``name`` of a prepared model, wrapped so that ``backward`` on its result reduces gradients.

        Args:
            model: A prepared model.
            name: The method's name, such as ``"compute_loss"``.
        """
        return self.strategy.method(model, name)

    def local_method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        """Return method ``name`` of a prepared model, wrapped for evaluation in the run's precision.

        Without a sharding strategy, one rank may call the method alone.

        Args:
            model: A prepared model.
            name: The method's name, such as ``"generate"``.
        """
        return self.strategy.local_method(model, name)

    def check_replicas(self, model: nn.Module | None = None, *, buffers: bool = False) -> None:
        """Check that all processes hold the same replicated parameters, bit for bit. Call it on all processes.

        Args:
            model: The prepared model to check. Default: all prepared models.
            buffers: Compare buffers too. BatchNorm's statistics usually differ between processes. Default: False.

        Raises:
            ValueError: On all processes, if the compared tensors differ in their names, shapes or dtypes.
            ReplicasDiffer: On all processes, if they differ in their values.
        """
        models = self.models if model is None else [model]
        optim.replica_check.check((self.strategy.unwrap(m) for m in models), self.world, buffers)

    # -- one optimizer step --------------------------------------------------------------------------------------

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of micro-batches per optimizer step; it may be changed between steps."""
        return self.accumulation.micro_batches

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.accumulation.micro_batches = value
        if self.cursor.around is not None:
            self._refuse_graphs_under_accumulation()

    def _refuse_graphs_under_accumulation(self) -> None:
        plugin, count = self.dynamo_plugin, self.gradient_accumulation_steps
        if count > 1 and plugin.uses_cuda_graphs(self.device):
            if (plugin.options or {}).get("triton.cudagraphs"):
                setting, fix = f"options={plugin.options!r}", "Remove 'triton.cudagraphs' from the options"
            elif plugin.backend == "cudagraphs":
                setting, fix = "backend='cudagraphs'", "Use backend='inductor'"
            else:
                setting, fix = f"mode={plugin.mode!r}", "Use mode='max-autotune-no-cudagraphs'"
            raise ValueError(
                f"torch.compile's {setting} replays CUDA graphs. Each replay overwrites the gradients of the previous "
                f"micro-batch, but gradient_accumulation_steps={count} needs their sum. {fix}, or set "
                "gradient_accumulation_steps=1."
            )

    @property
    def sync_gradients(self) -> bool:
        """True if the current micro-batch is the last of its group, after which the optimizer steps.

        `accumulate` sets the value. Without it, the value stays True.
        """
        return self.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last call to an optimizer's ``step`` skipped the step, for example after a float16 overflow."""
        return self.accumulation.optimizer_step_was_skipped

    @property
    def steps(self) -> int:
        """Number of optimizer steps taken, including those before a resume; with several optimizers, the maximum."""
        return self.accumulation.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self.accumulation.steps = value

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for the forward and backward pass of one micro-batch, and for the optimizer's ``step``.

        The batches of a prepared dataloader form the groups. If a loop enters a batch again with the same models after
        a backward pass, or takes each batch only within the context, each call counts as a micro-batch from then on.

        Args:
            models: The prepared models whose gradients are reduced only in the last micro-batch of a group, if the
                strategy permits this. The gradients of other models are reduced in every micro-batch.
        """
        self.accumulation.note_entered(models)
        return self.accumulation.accumulate(*models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which gradients are not reduced over the processes.

        Args:
            model: A prepared model.

        Raises:
            ValueError: If ``static_graph`` of `DDP` is set and no backward pass has reduced gradients yet.
        """
        configuration.refuse_in_tree("no_sync", self.step_micro_batches)
        return self.strategy.no_sync(model)  # type: ignore[no-any-return]

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes reduce gradients, even if the forward pass ran in `no_sync`.

        Args:
            model: A prepared model.

        Raises:
            ValueError: If ``static_graph`` or ``find_unused_parameters`` of `DDP` is set.
        """
        configuration.refuse_in_tree("trigger_sync_in_backward", self.step_micro_batches)
        return self.strategy.sync_in_backward(model)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the autocast context of the run's precision, for computations outside of a prepared model.

        Args:
            autocast_handler: Settings of the context. ``AutocastKwargs(enabled=False)`` disables autocast.
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
        """Run the backward pass of one micro-batch, with the loss weighted and scaled.

        Pass the unscaled mean loss. While `sync_gradients` is True, `backward` leaves the mean gradient of the step,
        except for the float16 loss scale. With a prepared dataloader, this is the mean over all samples of the group on
        all processes. Without one, all micro-batches of a group have the same weight. So they have in a loop that takes
        the batches of a step ahead, or sets `sync_gradients`, without `accumulate`, as transformers' ``Trainer`` does:
        it divides its losses by the items on all processes itself.

        Args:
            loss: The mean loss of the micro-batch, as a 0-d tensor.
            weight: The number of items, such as tokens, over which the loss is averaged. The gradient of the step is
                then the mean over all items of the group on all processes.
            by: Function to call with the weighted and scaled loss in place of ``Tensor.backward``.
            kwargs: Keyword arguments of ``Tensor.backward`` or ``by``.

        Raises:
            ValueError: If only some micro-batches of a group have a ``weight``, or if gradients of parameters that are
                not part of a prepared model would make the ranks diverge.
        """
        self.accumulation.backward(loss, weight=weight, by=by, **kwargs)
        if self.loop_check.active:
            self.loop_check.after_backward(loss)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip the total norm of the gradients in place, at the end of an accumulation group.

        Args:
            parameters: The parameters whose gradients are clipped.
            max_norm: The maximum total norm.
            norm_type: The p of the p-norm; ``inf`` is the maximum norm. Default: 2.

        Returns:
            The norm before clipping, as a 0-d tensor; None if the group is not complete.
        """
        if not self.accumulation.sync_gradients:
            return None
        if self.accumulation.loss_scale is not None and len(self.accumulation.optimizers) > 1:
            parameters = self._unscale_owners(parameters)
        else:
            self.unscale_gradients()
        return self.strategy.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp every gradient element to ``[-clip_value, clip_value]`` in place, at the end of an accumulation group.

        Args:
            parameters: The parameters whose gradients are clamped.
            clip_value: The largest absolute value.
        """
        if self.accumulation.sync_gradients:
            if self.accumulation.loss_scale is not None and len(self.accumulation.optimizers) > 1:
                parameters = self._unscale_owners(parameters)
            else:
                self.unscale_gradients()
            self.strategy.clip_grad_value_(parameters, clip_value)

    def _unscale_owners(self, parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
        """Unscale the gradients of the optimizers that have any of ``parameters``, and return the parameters.

        Other optimizers may be in the middle of their own groups, whose later gradients are still scaled.
        """
        chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids = set(map(id, chosen))
        owners = [o for o in self.accumulation.optimizers if not ids.isdisjoint(map(id, optim.list_parameters(o)))]
        for owner in owners or (None,):
            self.unscale_gradients(owner)
        return chosen

    def unscale_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Divide the gradients by the total ``weight`` passed to `backward` and by the float16 loss scale.

        Args:
            optimizer: The optimizer whose gradients are divided by the loss scale. Default: all prepared optimizers.
        """
        self.accumulation.unscale_gradients(optimizer)

    def preemptible(
        self, *, grace: str | timedelta | dict[str, int] | None = None, interrupts: bool = False
    ) -> AbstractContextManager[preemption.Preemption]:
        """Return a context in which SIGTERM, SIGUSR1 and SIGHUP ask a loop to end instead of ending the process.

        Call `Preemption.should_stop` once per step. After a signal to any rank, it returns True in the same step on
        every rank. Then save a checkpoint and call `Preemption.leave`, which ends the process with status 143, or 129
        after SIGHUP. After SIGUSR1, `Preemption.leave` first asks SLURM to requeue the job. Signals are handled only if
        the context is entered in the main thread.

        Args:
            grace: Maximum time from the signal until all ranks have left the context: ``"DD:HH:MM:SS"``, a timedelta or
                a dict of its arguments. A process that exceeds it is ended. Default: no limit.
            interrupts: Handle Ctrl-C in the same way, except that `Preemption.leave` raises KeyboardInterrupt. A second
                Ctrl-C takes effect immediately. Default: False.

        Raises:
            ValueError: If ``grace`` is not a valid positive duration, or the process group does not support preemption.
            TypeError: If ``grace`` has the wrong type.

        Examples:
            >>> import treadle as tl
            >>> accelerator = tl.Accelerator(cpu=True)
            >>> with accelerator.preemptible() as preemption:
            ...     for step in range(3):
            ...         if preemption.should_stop():
            ...             preemption.leave()
        """
        return preemption.preemptible(self.accumulation, self.watchdog, grace, interrupts)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def unwrapped_models(self) -> list[nn.Module]:
        """The user's own modules inside the prepared models."""
        return self.strategy.unwrapped_models

    @property
    def saving(self) -> checkpoint.Job | None:
        """Job of the last ``save_state(blocking=False)``, or None.

        It is None once `finish_saving` has waited for the job, or `poll_saving` has returned True.
        """
        return self.checkpointer.saving

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Save the states of objects in later checkpoints, and restore them in `load_state`.

        Checkpoints that are saved with ``weights_only=True`` do not contain the states.

        Args:
            objects: Objects with ``state_dict`` and ``load_state_dict``. `load_state` matches them by class name and
                position.
            named: Further objects as keyword arguments. `load_state` matches them by name.

        Raises:
            TypeError: If an object lacks one of these methods.
            ValueError: If another object is registered under one of the names.
        """
        self.checkpointer.register(objects, named)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` before `save_state` writes.

        The hook is called on all ranks. ``models`` is the list of prepared models, and ``weights`` is the list of their
        state dicts; see `get_state_dict`. State dicts that the hook removes from ``weights`` are not saved. Files that
        it writes to ``output_dir`` become part of the checkpoint, which must not be at a URL.

        Args:
            hook: The function to call.

        Returns:
            A handle whose ``remove()`` unregisters the hook.
        """
        return self.checkpointer.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` before `load_state` loads models.

        The hook is called on all ranks. Models that it removes from ``models`` are not loaded.

        Args:
            hook: The function to call.

        Returns:
            A handle whose ``remove()`` unregisters the hook.
        """
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
        """Save all prepared and registered objects, and every process's RNG state. Call it on all processes.

        Args:
            output_dir: The checkpoint directory, or a URL such as ``s3://bucket/run/last``. An existing checkpoint in
                the directory is replaced only once the new one is complete. Default: an automatically named directory,
                if ``automatic_checkpoint_naming`` and ``project_dir`` are set.
            safe_serialization: False has no effect, with a warning, because there is no other format. Default: True.
            info: Plain data, such as numbers and names, that `load_state` returns.
            parts: Further states to save, by name.
            weights_only: Save only the models, ``parts`` and ``info``. Default: False.
            trainable_only: Omit frozen weights (``requires_grad=False``). To load the checkpoint, create the model with
                the same frozen weights. Default: False.
            blocking: If False, write the checkpoint in the background, from copies of the state in host memory. Until
                the save has ended, change optimizer states only by optimizer steps. If the save fails, the next
                `poll_saving`, `finish_saving`, save or load raises its error. Default: True.
            also: Further directories or URLs for copies of the checkpoint. Not supported together with a save hook.

        Returns:
            The path of the checkpoint.

        Raises:
            RuntimeError: On ranks that did not fail themselves, if another rank raises an error.
            ValueError: If an argument is invalid, or the state cannot be saved, for example because weights are not
                finite.
            TypeError: If an argument has the wrong type, or a state contains something that cannot be saved.
            OSError: If a disk operation or an upload fails.
        """
        self.loop_check.warn_if_nothing_is_saved(self.registered)
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
        """Return True if no ``save_state(blocking=False)`` is in progress, without waiting for one.

        Raises:
            Exception: The error of the last save, if it failed. It is raised only once.
        """
        return self.checkpointer.poll_saving()

    def finish_saving(self) -> None:
        """Wait for a ``save_state(blocking=False)`` that is in progress.

        Raises:
            Exception: The error of the save, if it failed. It is raised only once.
        """
        self.checkpointer.finish_saving()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | checkpoint.OpenCheckpoint | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        map_location: Any = None,
        models: bool = True,
        state: bool = True,
        strict: bool | None = None,
        schedule: str | None = None,
        finish_epoch: bool = True,
    ) -> dict[str, Any]:
        """Restore a checkpoint that `save_state` wrote. Call it on all processes.

        The gradients of an unfinished accumulation group are discarded.

        Args:
            input_dir: Path or URL of a checkpoint, or an `OpenCheckpoint`. Default: the latest automatically named
                checkpoint that can be loaded, if ``automatic_checkpoint_naming`` and ``project_dir`` are set.
            load_kwargs: No effect, with a warning, because loading has no options.
            map_location: No effect: a state is loaded onto the device of its object.
            models: Restore the models. Default: True.
            state: Restore everything else. Default: True.
            strict: If False, load only the entries that fit, and warn about the others. Default: the model's
                ``strict_loading`` if it has one, else True.
            schedule: The source of learning rates and schedules: ``"saved"`` for the checkpoint, or ``"script"`` for
                the prepared optimizers and schedulers. With ``"script"``, the schedules are advanced to the position of
                the saved ones. Default: ``"saved"``, with a warning if the script configures its optimizers or
                schedules differently.
            finish_epoch: If the state was saved after the last batch of an epoch whose length is known, start the next
                epoch. The returned ``epoch`` is then the number of the new epoch, unless the saved ``info`` contains an
                ``epoch`` that differs from the dataloader's. If False, the first iteration over the dataloader is
                empty. Use False for loops that resume in the saved epoch. Default: True.

        Returns:
            The ``info`` that was passed to `save_state`, and metadata such as ``step``, ``epoch`` and ``world_size``.

        Raises:
            RuntimeError: On ranks that did not fail themselves, if another rank raises an error.
            ValueError: If an argument is invalid, or the checkpoint is damaged, does not fit the prepared objects, or
                was replaced while it was being read.
            TypeError: If ``input_dir`` has the wrong type.
            OSError: If a file cannot be read, or remote storage cannot be reached.
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
        """Return the user's own module inside a prepared model.

        Args:
            model: A prepared model.
            keep_fp32_wrapper: No effect.
            keep_torch_compile: If a module returned by ``torch.compile`` was prepared, return that module. Default:
                True.
        """
        module = self.strategy.unwrap(model)
        if not keep_torch_compile:
            return module
        return next((m for m in model.modules() if m._modules.get("_orig_mod") is module), module)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a model, with the names of the user's own module. Call it on all processes.

        Args:
            model: The model, prepared or not.
            unwrap: False keeps the names of the prepared model, with DDP's ``module.`` prefix. Default: True.

        Returns:
            On rank zero, the tensors by name. Sharded tensors are gathered in host memory. Other tensors share memory
            with the model; clone those that you keep. Other ranks get None for each sharded tensor.
        """
        return self.checkpointer.get_state_dict(model, unwrap)

    should_save_model = True
    """Always True, because `save_model` decides which process writes."""

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write data, such as a state dict, to a file on rank zero. Rank zero may call this method alone.

        With ``ProjectConfiguration(save_on_each_node=True)``, local rank zero of each machine writes the file. A write
        to a path or URL is atomic. Files in torch's format can be read with ``torch.load(f, weights_only=True)``.

        Args:
            obj: Tensors, numbers, text and other plain data. For a module, pass the result of `get_state_dict`.
            f: A path, a URL, or an open file.
            safe_serialization: Write a safetensors file; ``obj`` must then be a dict of tensors. Tied tensors are
                written once. Default: False.

        Raises:
            TypeError: If ``obj`` contains something that cannot be saved, or ``f`` has the wrong type.
            ValueError: If ``obj`` contains itself or is nested too deeply.
            OSError, RuntimeError: If the file cannot be written.
        """
        self.checkpointer.save(obj, f, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights for other programs: ``model.safetensors``, or several files and their index.

        Call it on all processes. Rank zero may call it alone if no part of the model is sharded. With
        ``ProjectConfiguration(save_on_each_node=True)``, local rank zero of each machine writes the files.

        Args:
            model: The model, prepared or not.
            save_directory: The directory or URL, which must not be a checkpoint. Files of an earlier save are deleted
                once the new ones are complete.
            max_shard_size: The maximum size of a file: a number of bytes, or text such as ``"500MB"`` or ``"2GiB"``. A
                larger tensor gets a file of its own. Default: ``"10GB"``.
            safe_serialization: If False, write files in torch's format, such as ``pytorch_model.bin``. Default: True.

        Raises:
            ValueError: If ``max_shard_size`` or ``save_directory`` is invalid.
            TypeError: If the model's state contains something that cannot be exported.
            OSError, RuntimeError: If a file cannot be written.
        """
        self.checkpointer.save_model(model, save_directory, max_shard_size, safe_serialization)

    # -- trackers and profiles -----------------------------------------------------------------------------------

    @property
    def log_with(self) -> dict[str, Any]:
        """The functions that create the trackers, by tracker name."""
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
        """Create and start the trackers that ``log_with`` selects.

        Args:
            project_name: The project that the run belongs to.
            config: The run's configuration values by name, for the trackers to store. Default: none.
            init_kwargs: Further arguments of the trackers' constructors, by tracker name.

        Raises:
            ValueError: If ``init_kwargs`` contains an unknown tracker name.
        """
        self.tracking.start(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Send values of this process to the trackers.

        On ranks other than zero, only trackers whose ``main_process_only`` is False receive values. A tracker that
        fails is disabled with a warning, unless it or its logger is ``strict``.

        Args:
            values: Values by name. To log a mean or sum over all processes, compute it with `reduce` first.
            step: The step that the values belong to.
            log_kwargs: Further arguments of each tracker's ``log``, by tracker name.

        Raises:
            RuntimeError: On rank zero, if ``log_with`` selects trackers but none has been started.
        """
        self.tracking.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name.

        Args:
            name: The tracker's ``name``, such as ``"wandb"``.
            unwrap: Return the underlying object, such as a ``SummaryWriter``, instead of the tracker. Default: False.

        Raises:
            ValueError: If no started tracker has this name.
        """
        return self.tracking.get(name, unwrap)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[torch.profiler.profile]:
        """Return a context that profiles a block and yields torch's profiler.

        If the settings contain a schedule, call the profiler's ``step()`` after each step of the loop.

        Args:
            profile_handler: Settings of the profiler. Default: the `ProfileKwargs` in ``kwargs_handlers``, otherwise
                ``ProfileKwargs()``.

        Raises:
            ValueError: If a setting is invalid.
        """
        return profilers.profile(profile_handler or self.profile_handler or ProfileKwargs(), self.world)

    # -- the end -------------------------------------------------------------------------------------------------

    def end_training(self) -> None:
        """Finish saves and trackers, and wait for all processes. You may create another Accelerator afterwards.

        Raises:
            ValueError: With ``on_nonfinite="raise"``, if gradients of the last step were not finite.
            Exception: The error of an asynchronous save, if it failed.
        """
        self.finish_saving()
        self.world.release_background_world()
        self.tracking.finish()
        self._gradient_guard.read_pending()
        self.wait_for_everyone()

    def free_memory(self, *objects: Any) -> Any:
        """Release all prepared and registered objects, collect garbage and empty the device's memory cache.

        Args:
            objects: Prepared objects that the caller still refers to.

        Returns:
            A list with one None for each of ``objects``, to assign to the caller's variables.

        Raises:
            Exception: The error of an asynchronous save, if it failed.
        """
        self.forget_prepared()
        collect(self.device)
        return [None for _ in objects]

    clear = free_memory

    def forget_prepared(self) -> None:
        """Release prepared and registered objects. Garbage is collected only if memory is short.

        Raises:
            Exception: The error of an asynchronous save, if it failed.
        """
        self.finish_saving()
        self.close_loaders()
        for prepared in (self.models, self.optimizers, self.schedulers, self.schedules_built, self.loaders):
            prepared.clear()  # type: ignore[attr-defined]
        self.cursor.micro = self.rng.stream = None
        self._compared = False
        self.weight_digests.clear()
        self.loop_check.reset()
        self._trained.clear()
        self.checkpointer.forget_prepared()
        self.accumulation.reset()
        if is_memory_short(self.device):
            collect(self.device)

    def reconnect(self, renew: Callable[[], None]) -> None:
        """Release all prepared objects, and replace the process group with the one that ``renew`` creates.

        Args:
            renew: Function that disconnects this process and connects it to a new process group.
        """
        self.free_memory()
        self.world.forget_parts()
        self.strategy.detach()
        renew()
        self.strategy.attach(self.world, self.precision)
        self.data_world = self.strategy.data_world

    def close_loaders(self) -> None:
        """End the workers of all prepared dataloaders; the next iteration starts new ones."""
        for loader in self.loaders:
            loader.close()

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a device map spreads ``model`` over several devices, or weights of ``model`` are offloaded.

        Args:
            model: The model to check.
        """
        from .big_models import is_dispatched  # takes 25 ms, which no import should wait for

        return any(is_dispatched(part) for part in (model, *model.children()))

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return an iterable over a dataloader without its first batches; see `treadle.skip_first_batches`.

        Args:
            dataloader: A prepared dataloader, a ``DataLoader``, or any other iterable of batches.
            num_batches: Number of batches to skip on each process. Default: 0.

        Raises:
            ValueError: If ``num_batches`` is invalid.
        """
        return data.skip_first_batches(dataloader, num_batches)

    # -- configuration -------------------------------------------------------------------------------------------

    @property
    def state(self) -> AcceleratorState:
        """Rank, world size and precision of this process."""
        return AcceleratorState.from_accelerator(self)

    @property
    def gradient_state(self) -> GradientState:
        """Position of the loop in its accumulation group."""
        return GradientState.from_accelerator(self)

    @property
    def project_dir(self) -> Any:
        """Directory for the files of the run, or None."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> Any:
        """Directory for the files of the trackers, or None."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    @property
    def split_batches(self) -> bool:
        """True if the ``batch_size`` of a prepared dataloader is the global batch size."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """The ``dispatch_batches`` setting, which has no effect."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """The ``even_batches`` setting, which has no effect."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """The ``use_seedable_sampler`` setting; see `DataLoaderConfiguration`."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """The ``non_blocking`` setting, which has no effect."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """The ``use_stateful_dataloader`` setting, which has no effect."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def native_amp(self) -> bool:
        """True if the attribute ``mixed_precision`` is not ``"no"``."""
        return self.mixed_precision != "no"

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        if bool(value) != self.native_amp:
            raise ValueError(
                f"native_amp={value} contradicts mixed_precision={self.mixed_precision!r}. Set "
                "Accelerator(mixed_precision=...) instead."
            )

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """PyTorch's gradient scaler for mixed float16 precision, or None. It may be replaced between steps."""
        return self.accumulation.scaler

    @scaler.setter
    def scaler(self, value: torch.amp.GradScaler | None) -> None:
        self.accumulation.scaler = value

    @property
    def step(self) -> int:
        """Number of micro-batches read or skipped in the current epoch of the dataloader.

        It is 0 during the last micro-batch if the length of the dataloader is known. Outside a loop over a dataloader,
        it is the number of micro-batches in the current accumulation group.
        """
        loader = self.gradient_state.active_dataloader
        if not hasattr(loader, "batches"):  # none, or one that was prepared without this Accelerator
            return self.accumulation.position
        return 0 if self.gradient_state.end_of_dataloader else loader.batches

    def _get_batch_size(self) -> int | None:
        loader = self.gradient_state.active_dataloader
        if getattr(loader, "batch_size", None) is None:  # a user-defined batch sampler decides, and may have a size
            return getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        return loader.total_batch_size // self.data_world.size

    @property
    def multi_device(self) -> bool:
        """True if the world size is larger than one."""
        return self.world.size > 1

    @property
    def is_fsdp2(self) -> bool:
        """True if the strategy shards the model."""
        return self.strategy.sharded

    @property
    def torch_device_mesh(self) -> Any:
        """Device mesh of the strategy, or None."""
        return getattr(self.strategy, "device_mesh", None)

    def _is_sharded(self) -> bool:
        return self.strategy.sharded

    def __getattr__(self, name: str) -> Any:
        if name in _PEERS_NAMES:
            return getattr(self, _PEERS_NAMES[name])
        reason = _UNSUPPORTED.get(name)
        raise AttributeError(f"Accelerator has no attribute {name!r}.{'' if reason is None else ' ' + reason}")

    def __repr__(self) -> str:
        return f"Accelerator:\n{self.state!r}"


def _collect_trained_ids(module: nn.Module) -> frozenset[int]:
    return frozenset(id(p) for p in module.parameters() if p.requires_grad)
