"""`Fabric`, Lightning's interface for a custom training loop."""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ...common.messages import name_type, warn
from ...common.remote_path import RemotePath, absolute, is_url
from ...engine import Accelerator, collectives, move_data_to_device, seed_everything
from ...engine.optim import PreparedOptimizer
from ...engine.weights import make_parent
from ...loggers import Logger
from ...strategies import ClusterEnvironment, Strategy, apply_nested, plan_function_launch
from ...strategies.distributed import Devices, LaunchEnvironment, cut_like, device_type, parse_devices
from ...strategies.launch import FunctionLaunch, supervisor
from ...trainer import TaskModule
from ...trainer.arguments import unpack_plugins
from ...trainer.core import warn_of_code
from .wrappers import FabricDataLoader, FabricModule, TaskTrainer, is_wrapped, unwrap

_FabricOptimizer = PreparedOptimizer  # the name that public programs import from this module

__all__ = ["Fabric", "is_wrapped", "seed_everything"]


def _do_nothing(fabric: Fabric) -> None:
    """Stand for the function that ``launch()`` was not given."""


class Fabric:
    """Lightning Fabric's interface to devices, precision, processes and checkpoints, for a custom training loop.

    As in Lightning Fabric, a loss is not weighted by the size of its batch, and with several processes some samples may
    be repeated. To weight losses by the number of samples and use each sample once, use a `treadle.Accelerator`.

    With several devices and no launcher, creating a Fabric starts one process per device, each of which runs the
    script. If `launch` forks the processes instead, for example in a notebook, use the Fabric only in the function that
    `launch` runs.

    Args:
        accelerator: Kind of device; see `Accelerator`. Default: ``"auto"``.
        strategy: See `Accelerator`. With ``"ddp_spawn"``, ``"ddp_fork"`` or ``"ddp_notebook"``, `launch` forks
            processes for explicit ``devices`` if there is no launcher. Default: ``"auto"``.
        devices: Devices on this machine, with one process each: a number, -1 for all GPUs, a list of indices, a string
            such as ``"0,2"``, or ``"auto"`` (default). ``"auto"`` uses the launcher's processes or, without a launcher,
            all CUDA devices if Treadle can run the script again, otherwise one device.
        num_nodes: Number of machines. More than one requires a launcher. Default: 1.
        precision: A name that `Precision` accepts, such as ``"bf16-mixed"``, or a `Precision`. Default: None, which
            means ``"32-true"``.
        plugins: A precision plugin instead of ``precision``. A `ClusterEnvironment` sets the ranks.
        callbacks: One or several objects whose methods `call` invokes. ``on_after_setup(fabric, module)`` and
            ``on_after_optimizer_step(strategy, optimizer)`` are called by this class.
        loggers: One or several loggers.

    Raises:
        ValueError, TypeError: If an argument is invalid, or contradicts another argument or the environment.
        RuntimeError: If the other processes do not connect in time.
        SystemExit: In the process that has started the other processes, after they have ended.
    """

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Logger | list[Logger] | None = None,
    ) -> None:
        precision, sync_batchnorm, *_, environment = unpack_plugins(plugins, precision, False, strategy)
        if isinstance(environment, ClusterEnvironment):
            environment.export(accelerator, devices, num_nodes)
        if sync_batchnorm:
            raise ValueError(
                "plugins=TorchSyncBatchNorm() is not supported, because the strategy converts the BatchNorm layers. "
                "Pass strategy=DDP(sync_batchnorm=True) instead."
            )
        self._options: dict[str, Any] = {
            "accelerator": accelerator,
            "strategy": strategy,
            "devices": devices,
            "num_nodes": num_nodes,
            "mixed_precision": "32-true" if precision is None else precision,
        }
        self._callbacks: list[Any] = _as_list(callbacks)
        self._loggers: list[Logger] = _as_list(loggers)
        # If no script can be run again, processes start with a function.
        launch = plan_function_launch(strategy, accelerator, devices, num_nodes)
        self._process_count = 0 if launch is None else launch.count
        if launch is None and LaunchEnvironment.read() is None and not supervisor.has_script():
            indices = parse_devices(device_type(accelerator), devices) or ()
            self._process_count = len(indices) if len(indices) > 1 else 0
        self._opened: Accelerator | None = None if self._process_count else self._open()

    def _open(self) -> Accelerator:
        return Accelerator(**self._options, spread=True)

    @property
    def _accelerator(self) -> Accelerator:
        if self._opened is None:
            raise RuntimeError(
                f"this Fabric runs in {self._process_count} processes, which fabric.launch(function) starts. Use the "
                "Fabric inside the function, which receives it as its first argument."
            )
        return self._opened

    # -- processes -----------------------------------------------------------------------------------------------

    @property
    def accelerator(self) -> Accelerator:
        """Underlying `Accelerator`."""
        return self._accelerator

    @property
    def strategy(self) -> Strategy:
        """Strategy that wraps the models."""
        return self._accelerator.strategy

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._accelerator.device

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        return self._accelerator.process_index

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self._accelerator.local_process_index

    @property
    def node_rank(self) -> int:
        """Rank of this machine."""
        return self._accelerator.world.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes in the run."""
        return self._accelerator.num_processes

    @property
    def is_global_zero(self) -> bool:
        """Return whether this process is rank zero."""
        return self._accelerator.is_main_process

    def launch(self, function: Callable[..., Any] = _do_nothing, *args: Any, **kwargs: Any) -> Any:
        """Run a function on every process, and return its result. Without a function, return None.

        The function is called as ``function(fabric, *args, **kwargs)``. It is required if this call has to start
        processes. Its result on rank zero must then be picklable, and is returned.

        Raises:
            ValueError: If this call cannot fork processes, for example because the session has used a GPU.
        """
        if function is _do_nothing:
            if self._opened is None:
                raise TypeError(
                    f"launch() needs a function, because it must start {self._process_count} processes. Pass the "
                    "function to run."
                )
            return None
        if not callable(function):
            raise TypeError(
                f"launch takes a function, not {name_type(function)}. Pass the function without calling it, as in "
                "launch(train)."
            )
        if not inspect.signature(function).parameters:
            name = getattr(function, "__name__", None) or name_type(function)
            raise TypeError(
                f"{name} has no parameters, but launch passes the Fabric as the first argument. Add a parameter for it."
            )
        if self._opened is not None:
            return function(self, *args, **kwargs)

        def run() -> Any:
            self._opened = self._open()
            return function(self, *args, **kwargs)

        return FunctionLaunch(str(self._options["strategy"]), self._process_count, "fork").run(run)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the local rank zero of each machine."""
        if self.local_rank == 0:
            print(*args, **kwargs)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called this method."""
        self._accelerator.wait_for_everyone()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src`` on every rank."""
        return self._accelerator.world.broadcast(obj, src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack all ranks' tensors along a new first dimension. With one process, no dimension is added.

        Args:
            data: A tensor or number, or a nested structure of them, with the same shapes on all ranks.
            group: A torch process group that includes this rank. Default: all ranks.
            sync_grads: Whether gradients propagate to the ranks' inputs. With one process, they always do. Default:
                False.

        Returns:
            The stacked tensors, in the structure of the input.
        """
        return collectives.all_gather(self._to_tensors(data), self._get_world(group), sync_grads)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce tensors over the ranks. With several processes, inputs on this rank's device may be overwritten.

        Args:
            data: See `all_gather`.
            group: See `all_gather`.
            reduce_op: ``"mean"`` (default) or ``"avg"``, ``"sum"``, ``"max"``, ``"min"``, torch's ``ReduceOp`` of
                these, or ``"none"`` for no reduction. With several processes, the mean of integers is float64.

        Returns:
            The reduced tensors, in the structure of the input.

        Raises:
            DistributedOperationException: If tensors that have to be reduced differ in number, shape or dtype between
                ranks.
        """
        name = str(reduce_op).rpartition(".")[-1].lower()
        tensors = self._to_tensors(data)
        world = self._get_world(group)
        results = collectives.reduce(tensors, world, {"avg": "mean"}.get(name, name), 1.0)
        if world.size == 1:
            return tensors
        inputs: list[Tensor] = []
        apply_nested(tensors, Tensor, inputs.append)
        remaining = iter(inputs)

        def put_back(result: Tensor) -> Tensor:
            original = next(remaining)
            return original.data.copy_(result) if original.dtype == result.dtype else result

        return apply_nested(results, Tensor, put_back)

    def _to_tensors(self, data: Any) -> Any:
        tensors = apply_nested(data, (bool, int, float), lambda number: torch.tensor(number))
        return apply_nested(tensors, Tensor, lambda tensor: tensor.to(self.device))

    def _get_world(self, group: Any) -> Any:
        world = self._accelerator.world
        return world if group is None or world.size == 1 else world.of_group(group)

    def rank_zero_first(self, local: bool = False) -> AbstractContextManager[None]:
        """Return a context for a block that rank zero runs first; with ``local``, local rank zero of each machine."""
        accelerator = self._accelerator
        return accelerator.local_main_process_first() if local else accelerator.main_process_first()

    # -- setting up ----------------------------------------------------------------------------------------------

    def setup(
        self,
        module: nn.Module,
        *optimizers: Optimizer,
        scheduler: Any = None,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:
        """Prepare a model and its optimizers for the device, precision and strategy.

        Args:
            module: The model.
            *optimizers: The model's optimizers.
            scheduler: A scheduler, which is returned unchanged if there are optimizers. Default: None.
            move_to_device: Whether to move the model to the device. If False, the model must already be on it. Default:
                True.
            _reapply_compile: Accepted and ignored.

        Returns:
            The model, or a tuple of the model, the optimizers and, if passed, the scheduler.

        Raises:
            ValueError: If the model or an optimizer is not supported or already set up.
        """
        prepared = self._setup_module(module, move_to_device)
        rest = [self._setup_optimizer(optimizer) for optimizer in optimizers]
        self._connect(prepared, rest)
        self.call("on_after_setup", fabric=self, module=prepared)
        if not optimizers:
            return prepared
        return (prepared, *rest) if scheduler is None else (prepared, *rest, scheduler)

    def setup_module(self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True) -> Any:
        """Return a prepared model. Create its optimizers afterwards, and pass them to `setup_optimizers`."""
        prepared = self._setup_module(module, move_to_device)
        self._connect(prepared)
        return prepared

    def _setup_module(self, module: nn.Module, move_to_device: bool) -> FabricModule:
        if is_wrapped(module):
            raise ValueError(f"this {type(unwrap(module)).__name__} is already set up. Set up each model only once.")
        accelerator = self._accelerator
        prepared = accelerator.prepare_model(module, move_to_device)
        accelerator.models.clear()  # a script may set up and release any number of models, for example one per fold
        accelerator.loop_check.set_up.add(prepared)
        return FabricModule(prepared, accelerator.strategy.unwrap(prepared), accelerator)

    def _connect(self, prepared: FabricModule, optimizers: Sequence[PreparedOptimizer] = ()) -> None:
        task = prepared.module
        if isinstance(task, TaskModule):
            task.trainer = self.make_task_trainer(optimizers)  # type: ignore[assignment]
            if not any(callback is task for callback in self._callbacks):
                self._callbacks.append(task)  # its hooks are called by `call`

    def make_task_trainer(self, optimizers: Sequence[PreparedOptimizer] = ()) -> TaskTrainer:
        """Return the ``trainer`` of a `TaskModule` in this Fabric's loop, for the task's prepared optimizers."""
        return TaskTrainer(self, optimizers)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Prepare optimizers whose model has been set up, and return them; a single one without a tuple."""
        if not optimizers:
            raise ValueError("setup_optimizers was called without an optimizer. Pass at least one.")
        prepared = tuple(map(self._setup_optimizer, optimizers))
        return prepared[0] if len(prepared) == 1 else prepared

    def _setup_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        if isinstance(optimizer, PreparedOptimizer):
            raise ValueError(
                f"this {type(optimizer.optimizer).__name__} is already set up. Set up each optimizer only once."
            )
        prepared = self._accelerator.prepare_optimizer(optimizer)
        self._accelerator.optimizers.clear()
        prepared.optimizer.register_step_post_hook(self._call_after_step)
        return prepared

    def _call_after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.call("on_after_optimizer_step", strategy=self.strategy, optimizer=optimizer)

    def setup_dataloaders(
        self, *dataloaders: DataLoader[Any], use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Prepare dataloaders: distribute their samples over the ranks, and move batches to the device.

        Args:
            *dataloaders: The dataloaders, which are not changed.
            use_distributed_sampler: Whether to distribute samples with ``DistributedSampler``. An ``IterableDataset``,
                or a dataloader that already selects a rank's share, is never distributed. Default: True.
            move_to_device: Whether to move batches to the device. Default: True.

        Returns:
            The prepared dataloader, or a list of several.
        """
        if not dataloaders:
            raise ValueError("setup_dataloaders was called without a DataLoader. Pass at least one.")
        world = self._accelerator.world
        device = self.device if move_to_device else None
        prepared = [FabricDataLoader(loader, world, device, use_distributed_sampler) for loader in dataloaders]
        return prepared[0] if len(prepared) == 1 else prepared

    # -- one step ------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, *args: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Run the backward pass of a loss. The arguments are those of ``Tensor.backward``, and ``model`` is ignored.

        Raises:
            ValueError: If gradients of parameters that are not part of a model that was set up would make the ranks
                diverge.
        """
        accelerator = self._accelerator
        # Not `Accelerator.backward`, whose checks need the list of prepared models, which Fabric keeps empty.
        accelerator.accumulation.backward(tensor, *args, **kwargs)
        check = accelerator.loop_check
        if check.active and accelerator.world.size > 1:
            check.method = "setup"
            check.after_backward(tensor, models_only=True)

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip the gradients of an optimizer's parameters by value or by norm.

        Args:
            module: Accepted and ignored.
            optimizer: The optimizer.
            clip_val: The maximum absolute value of each element. Set either this or ``max_norm``.
            max_norm: The maximum norm of all gradients.
            norm_type: The order of the norm. Default: 2.0, the Euclidean norm.
            error_if_nonfinite: Whether a norm that is not finite raises a RuntimeError. Default: True.

        Returns:
            The norm before clipping; None if clipped by value.
        """
        if (clip_val is None) == (max_norm is None):
            limits = "neither clip_val nor max_norm"
            if clip_val is not None:
                limits = f"both clip_val={clip_val} and max_norm={max_norm}"
            raise ValueError(f"clip_gradients got {limits}. Pass exactly one of them.")
        accelerator = self._accelerator
        accelerator.unscale_gradients(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if max_norm is None:
            assert clip_val is not None
            accelerator.strategy.clip_grad_value_(parameters, clip_val)
            return None
        norm = accelerator.strategy.clip_grad_norm_(parameters, max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the gradient norm is {norm.item()}, but it must be finite. Pass error_if_nonfinite=False to continue "
                "regardless."
            )
        return norm

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which gradients are not reduced over the ranks, for accumulation."""
        wrapper = getattr(module, "_orig_mod", module)
        if not isinstance(wrapper, FabricModule):
            raise TypeError(
                f"no_backward_sync takes a model that is set up, but got {name_type(module)} that is not. Call "
                "model = fabric.setup(model) first."
            )
        return self._accelerator.no_sync(wrapper._forward_module) if enabled else nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision's context for computations outside a model."""
        return self._accelerator.autocast()

    def to_device(self, obj: Any) -> Any:
        """Return a model, moved in place, a tensor or a nested structure of tensors on the device."""
        return obj.to(self.device) if isinstance(obj, nn.Module) else move_data_to_device(obj, self.device)

    # -- building models -----------------------------------------------------------------------------------------

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which models are created on the device, with parameters in the dtype of the precision.

        With a strategy that shards models, all ranks must enter it, and parameters are allocated when the model is set
        up. With ``empty_init``, parameters are left uninitialized, to load a checkpoint later.
        """
        return self._accelerator.init_module(bool(empty_init))

    @contextmanager
    def init_tensor(self) -> Iterator[None]:
        """Create tensors on the device within a ``with`` block.

        With ``"16-true"``, ``"bf16-true"`` and ``"64-true"``, their default dtype is that of the precision.
        """
        storage = self._accelerator.precision.storage
        before = torch.get_default_dtype()
        torch.set_default_dtype(storage or before)
        try:
            with self.device:
                yield
        finally:
            torch.set_default_dtype(before)

    def sharded_model(self) -> AbstractContextManager[Any]:
        """Return the context of `init_module` if the strategy shards models, otherwise an empty one. Deprecated."""
        warn("Fabric.sharded_model() is deprecated. Use Fabric.init_module() instead.")
        return self.init_module() if self.strategy.sharded else nullcontext()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save models, optimizers and data to one file for ``torch.load``. Must be called on all ranks.

        Args:
            path: Path or URL of the file. A missing folder is created.
            state: The objects by name. An object with ``state_dict`` is saved as its state.
            filter: Functions ``function(key, value)`` by name, which return whether to save an entry of the state.
                Default: none.

        Raises:
            TypeError, ValueError: If a value cannot be saved, such as the optimizer of a sharded model, or ``filter``
                is invalid.
        """
        filters = {} if filter is None else filter
        if not isinstance(filters, Mapping):
            raise TypeError(f"filter must be a dict of functions, not {name_type(filters)}.")
        for name, keeps in filters.items():
            if not callable(keeps):
                raise TypeError(f"filter[{name!r}] must be a function, not {name_type(keeps)}.")
        if unknown := sorted(set(filters) - set(state)):
            raise ValueError(
                f"filter has keys that are not in state: {unknown}. Rename or remove them. The keys of state are "
                f"{sorted(state)}."
            )
        with self._accelerator.world.failing_together():
            plain = {name: self._to_state(name, value) for name, value in state.items()}
            for name, keeps in filters.items():
                if not isinstance(plain[name], Mapping):
                    raise TypeError(f"filter[{name!r}] needs a dict, but state[{name!r}] is {name_type(plain[name])}.")
                plain[name] = {key: value for key, value in plain[name].items() if keeps(key, value)}
            if self.is_global_zero:
                make_parent(absolute(path))
                self._accelerator.save(plain, path)

    def _to_state(self, name: str, value: Any) -> Any:
        if isinstance(value := getattr(value, "_orig_mod", value), FabricModule):
            return self._accelerator.get_state_dict(value._forward_module)
        if isinstance(value, Optimizer) and self.strategy.sharded:
            raise ValueError(
                f"state[{name!r}] is the optimizer of a sharded model, whose state can't be saved to one file. "
                "Prepare the model and the optimizer with treadle.Accelerator instead of Fabric, and save both with "
                "accelerator.save_state(folder)."
            )
        return value.state_dict() if hasattr(value, "state_dict") else value

    def load(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any] | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a file that `save` wrote. Must be called on all ranks.

        Args:
            path: Path or URL of the file.
            state: Objects by name. An object with ``load_state_dict`` is restored in place, and any other value is
                replaced in this dict. Default: None, which restores nothing.
            strict: Whether all names of ``state`` must be in the file, and each model's keys must match. Default: True.
            weights_only: Accepted and ignored, because code in a file is never run.

        Returns:
            The values in the file that ``state`` does not name.

        Raises:
            KeyError: If a name is not in the file and ``strict`` is True.
            pickle.UnpicklingError: If the file contains a value that ``torch.load(weights_only=True)`` does not load.
        """
        saved = self._read(path, weights_only)
        missing = sorted((state or {}).keys() - saved.keys())
        if missing and strict:
            raise KeyError(
                f"{os.fspath(path)!r} does not contain the keys {missing} of the argument state. The keys in the file "
                f"are {sorted(saved)}. Pass strict=False to load the others."
            )
        for name in (state or {}).keys() & saved.keys():
            assert state is not None
            value = saved.pop(name)
            if hasattr(state[name], "load_state_dict"):
                self._restore(state[name], value, strict)
            else:
                state[name] = value
        self.barrier()
        return saved

    def load_raw(
        self,
        path: str | os.PathLike[str],
        obj: nn.Module | Optimizer,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> None:
        """Load the state of one model or optimizer from a file that contains nothing else; see `load`."""
        self._restore(obj, self._read(path, weights_only), strict)

    def _read(self, path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any]:
        warn_of_code(weights_only)
        source = io.BytesIO(RemotePath(os.fspath(path)).read_bytes()) if is_url(path) else path
        values: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=True)
        return values

    def _restore(self, target: Any, value: Any, strict: bool) -> None:
        target = unwrap(target)
        if not isinstance(target, nn.Module):
            target.load_state_dict(value)
            return
        own = target.state_dict()
        parts = {
            key: cut_like(entry, own[key]) if isinstance(entry, Tensor) and key in own else entry
            for key, entry in value.items()
        }
        target.load_state_dict(parts, strict=strict)

    # -- callbacks and loggers -----------------------------------------------------------------------------------

    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every callback that has it, with the keyword arguments that it accepts."""
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if method is None:
                continue
            if not callable(method):
                warn(
                    f"{type(callback).__name__}.{hook_name} is {name_type(method)}, not a method, so it is not called."
                )
                continue
            parameters = inspect.signature(method).parameters.values()
            takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
            names = {parameter.name for parameter in parameters}
            method(*args, **{name: value for name, value in kwargs.items() if takes_all or name in names})

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        return self._loggers

    @property
    def logger(self) -> Logger:
        """First logger."""
        if not self._loggers:
            raise IndexError("this Fabric has no logger. Pass one with Fabric(loggers=...).")
        return self._loggers[0]

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Log a number to all loggers."""
        self.log_dict({name: value}, step)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers to all loggers; see `log`."""
        numbers = apply_nested(dict(metrics), Tensor, _to_number)
        for logger in self._loggers:
            logger.log_metrics(metrics=numbers, step=step)

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """See `treadle.seed_everything`. ``workers`` and ``verbose`` are ignored."""
        return seed_everything(seed, bool(workers), verbose)


def _to_number(tensor: Tensor) -> Any:
    if tensor.numel() != 1:
        raise ValueError(
            f"a logged tensor has shape {tuple(tensor.shape)}, but only tensors with one element can be logged. Log "
            "its mean, or each element under its own name."
        )
    return tensor.item()


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
