"""Configuration objects of an `Accelerator`, and the checks of its arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from .. import strategies
from ..common.durations import parse_duration
from ..common.messages import announce, name_type, nearest, warn
from ..common.validation import check_int, check_optional_type, check_path, choose, parse_truth
from ..strategies import Precision, ReplicaKwargs
from .modules import Compiler, compile_modules, forget

if TYPE_CHECKING:
    from ..strategies import Strategy


@dataclass
class DataLoaderConfiguration:
    """Settings for prepared dataloaders.

    Args:
        split_batches: Whether ``batch_size`` is the global batch size. If True, ``batch_size`` must be divisible by the
            number of processes that the data is sharded over. Default: False.
        dispatch_batches: No effect, because each rank reads the data itself.
        even_batches: No effect, because no sample is counted twice to even out the batches.
        use_seedable_sampler: Let torch's ``RandomSampler`` draw the order of each epoch from a seed plus the epoch's
            number. The seed is ``data_seed`` or, if that is None, the seed of torch's generator when the dataloader is
            prepared. Default: False.
        data_seed: Seed for the order of samples. Default: the order is drawn from rank zero's RNG state.
        non_blocking: No effect, because copies to a CUDA device are always asynchronous where possible.
        use_stateful_dataloader: No effect, because every prepared dataloader has a ``state_dict`` method.

    Examples:
        >>> from treadle.engine import Accelerator, DataLoaderConfiguration
        >>> accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(data_seed=1))
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def announce_differences(self) -> None:
        """Log a message on rank zero if ``dispatch_batches`` is True, because it has no effect."""
        if self.dispatch_batches:
            announce(
                "dispatch_batches=True has no effect: every rank reads the data itself, while Accelerate reads it on "
                "rank zero. The batches are the same."
            )


@dataclass
class ProjectConfiguration:
    """Settings for a run's directories and checkpoints.

    Args:
        project_dir: Directory for the files of the run. Default: none.
        logging_dir: Directory for the files of the trackers. Default: ``project_dir``.
        automatic_checkpoint_naming: Let `Accelerator.save_state` name checkpoints
            ``project_dir/checkpoints/checkpoint_N``. Default: False.
        total_limit: The number of automatically named checkpoints to keep. Once a new checkpoint is complete, the
            oldest ones beyond this number are deleted. Default: all are kept.
        iteration: The number N of the next automatically named checkpoint. Default: 0.
        save_on_each_node: Let `Accelerator.save` and `save_model` write on local rank zero of each machine, not only on
            rank zero. Default: False.

    Raises:
        ValueError: If ``total_limit`` is not an integer of at least 1.

    Examples:
        >>> from treadle.engine import Accelerator, ProjectConfiguration
        >>> project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=2)
        >>> Accelerator(cpu=True, project_config=project).logging_dir
        'run'
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None:
            check_int("total_limit", self.total_limit, 1)
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set ``project_dir``. If ``logging_dir`` is None, set it to the same directory.

        Args:
            project_dir: Directory for the files of the run. Default: none.
        """
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


class KwargsHandler:
    """Base class of settings classes that have the same names as in Accelerate, such as `AutocastKwargs`.

    Examples:
        >>> from treadle.engine import AutocastKwargs, KwargsHandler
        >>> handler = AutocastKwargs(enabled=False)
        >>> isinstance(handler, KwargsHandler), handler.to_kwargs()
        (True, {'enabled': False})
    """

    def to_kwargs(self) -> dict[str, Any]:
        """Return a dict with the names and values of the fields that differ from their defaults."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}  # type: ignore[arg-type]


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Settings for gradient accumulation.

    Args:
        num_steps: Number of micro-batches per optimizer step. Default: 1.
        adjust_scheduler: No effect.
        sync_with_dataloader: Whether the end of a dataloader ends the current group of micro-batches. If False, the
            group continues in the dataloader's next epoch. Default: True.
        sync_each_batch: Reduce gradients in every micro-batch. This saves memory if the model is sharded, but needs
            more communication. Default: False.

    Raises:
        ValueError: If ``num_steps`` is not an integer of at least 1.

    Examples:
        >>> from treadle.engine import Accelerator, GradientAccumulationPlugin
        >>> plugin = GradientAccumulationPlugin(num_steps=4)
        >>> Accelerator(cpu=True, gradient_accumulation_plugin=plugin).gradient_accumulation_steps
        4
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        check_int("num_steps", self.num_steps, 1)


@dataclass
class AutocastKwargs(KwargsHandler):
    """Settings for ``torch.autocast``.

    Args:
        enabled: Whether autocast is enabled. Default: True.
        cache_enabled: Whether autocast caches the weights that it has cast. Default: torch's default.

    Examples:
        >>> import treadle
        >>> accelerator = treadle.Accelerator(cpu=True, mixed_precision="bf16")
        >>> with accelerator.autocast(treadle.AutocastKwargs(enabled=False)):
        ...     pass  # computes in float32
    """

    enabled: bool = True
    cache_enabled: bool | None = None

    def context(self, precision: Precision, device: torch.device) -> torch.autocast:
        """Return the autocast context for a device.

        Args:
            precision: The precision whose compute dtype is used.
            device: The device to compute on.
        """
        return torch.autocast(
            device.type,
            dtype=precision.compute,
            enabled=self.enabled and precision.compute is not None,
            cache_enabled=self.cache_enabled,
        )


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of ``torch.amp.GradScaler``, which is used in mixed float16 precision.

    Args:
        init_scale: The initial loss scale. Default: 65536.
        growth_factor: The factor by which the scale grows after ``growth_interval`` steps without overflow. Default: 2.
        backoff_factor: The factor by which the scale is multiplied after an overflow. Default: 0.5.
        growth_interval: Number of consecutive steps without overflow before the scale grows. Default: 2000.
        enabled: Whether to scale the loss. Default: True.

    Examples:
        >>> import treadle
        >>> handler = treadle.GradScalerKwargs(init_scale=1024.0)
        >>> accelerator = treadle.Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[handler])
        >>> accelerator.scaler.get_scale()
        1024.0
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Settings for the process group.

    Args:
        backend: ``"nccl"``, ``"gloo"`` or another torch backend. Default: NCCL for GPUs and gloo for host memory.
        init_method: No effect; must be None or ``"env://"``.
        timeout: Maximum time that a collective waits for other processes: a timedelta, a dict of its arguments, or
            ``"DD:HH:MM:SS"``. Default: the timeout of an existing process group, else 30 minutes. If
            ``Accelerator(timeout=...)`` exceeds 29 minutes, the default is that timeout plus one minute.

    Raises:
        ValueError: If ``init_method`` or ``timeout`` is invalid.
        TypeError: If ``timeout`` has the wrong type.

    Examples:
        >>> import treadle
        >>> handler = treadle.InitProcessGroupKwargs(timeout="00:00:10:00")
        >>> handler.timeout.total_seconds()
        600.0
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.init_method not in (None, "env://"):
            raise ValueError(
                f"init_method={self.init_method!r} must be 'env://', because processes connect through environment "
                "variables. Set MASTER_ADDR and MASTER_PORT, as torchrun does."
            )
        if self.timeout is not None:
            self.timeout = parse_duration("timeout", self.timeout)

    def options(self) -> dict[str, Any]:
        """Return ``timeout`` and ``backend`` as keyword arguments for `open_world`."""
        return {"timeout": self.timeout, "backend": self.backend}


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of ``torch.profiler.profile``.

    Args:
        activities: Names of torch's profiler activities in lowercase, such as ``["cpu", "cuda"]``. Default: all
            activities that this machine supports.
        schedule_option: Dict of arguments of ``torch.profiler.schedule``, such as
            ``{"wait": 1, "warmup": 1, "active": 3}``.
        on_trace_ready: Function that is called with the profiler whenever a trace is ready.
        record_shapes: Record the shapes of the operators' inputs.
        profile_memory: Record allocations.
        with_stack: Record the source lines of operators.
        with_flops: Estimate the FLOPs of operators.
        with_modules: Record the modules that call operators.
        output_trace_dir: Directory into which each process writes its traces for ``chrome://tracing``. The first trace
            of a process is named ``profile_RANK.json``.

    Examples:
        >>> import torch, treadle
        >>> accelerator = treadle.Accelerator(cpu=True)
        >>> with accelerator.profile(treadle.ProfileKwargs(activities=["cpu"])) as profiler:
        ...     _ = torch.ones(2) + 1
        >>> len(profiler.key_averages()) > 0
        True
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of ``torch.compile`` for prepared models.

    Defaults come from the variables that ``accelerate launch`` sets: ``ACCELERATE_DYNAMO_BACKEND``,
    ``ACCELERATE_DYNAMO_MODE``, ``ACCELERATE_DYNAMO_USE_FULLGRAPH``, ``ACCELERATE_DYNAMO_USE_DYNAMIC`` and
    ``ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION``.

    Args:
        backend: A backend of ``torch.compile``; ``"no"`` disables compilation. Default: ``"no"``.
        mode: A mode of ``torch.compile``, such as ``"max-autotune"``.
        fullgraph: Raise an error if the model cannot be compiled into one graph.
        dynamic: Compile for varying shapes. Default: torch decides.
        options: Dict of options that torch passes to the backend.
        disable: Disable compilation, for testing.
        use_regional_compilation: Compile each repeated block of the model separately. Compilation then takes less time
            if the blocks have the same structure. Default: None, which enables this only in the Trainer, and only if
            enough blocks have the same structure.

    Examples:
        >>> from treadle.engine import Accelerator, TorchDynamoPlugin
        >>> accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    """

    backend: Any = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        prefix = "ACCELERATE_DYNAMO_"
        backend = getattr(self.backend, "value", self.backend) or os.environ.get(f"{prefix}BACKEND", "no")
        self.backend = backend.lower() if isinstance(backend, str) else backend
        self.mode = self.mode or os.environ.get(f"{prefix}MODE")
        for name in ("fullgraph", "dynamic", "use_regional_compilation"):
            variable = f"{prefix}USE_{name.removeprefix('use_').upper()}"
            if getattr(self, name) is None and variable in os.environ:
                setattr(self, name, parse_truth(variable, os.environ[variable]))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of ``torch.compile`` that differ from its defaults."""
        defaults = {"backend": "no", "mode": "default", "fullgraph": False}
        arguments = super().to_kwargs()
        arguments.pop("use_regional_compilation", None)  # not an argument of torch.compile
        return {name: value for name, value in arguments.items() if defaults.get(name) != value}

    def compile(self, model: nn.Module, strategy: Strategy) -> None:
        """Compile ``model`` in place unless ``backend`` is ``"no"``.

        Args:
            model: The user's module.
            strategy: The strategy, which selects the submodules for regional compilation.
        """
        if self.backend == "no":
            return
        parts, hooks_outside = [model], False
        if self.use_regional_compilation and strategies.repeated_blocks(model):
            parts, hooks_outside = strategy.compiled_parts(model, True)
        compile_modules(parts, self._make_compiler, self._collect_arguments(), hooks_outside=hooks_outside)

    def compile_parts(self, model: nn.Module, strategy: Strategy) -> None:
        """Compile the submodules that ``training_step`` and the other steps of ``model`` call.

        Args:
            model: The task. The loop calls its steps instead of ``forward``.
            strategy: The strategy, which selects the submodules.

        Raises:
            ValueError: If both ``torch.compile`` and this plugin configure compilation.
        """
        users: Compiler | None = vars(model).get("_compiler")
        if self.backend == "no" and users is None:
            forget(model)
            return
        if self.backend != "no" and users is not None:
            raise ValueError(
                "Trainer(compile=...) and torch.compile(task) both configure compilation. Use only one of them."
            )
        parts, hooks_outside = strategy.compiled_parts(model, self.use_regional_compilation)
        if not parts and type(model).forward is not nn.Module.forward:
            parts = [model]
        if not parts:
            warn(
                f"{type(model).__name__} has no submodule with parameters, so nothing is compiled. Apply "
                "torch.compile to the functions that training_step calls."
            )
        options = users or self._collect_arguments()
        compile_modules(parts, users or self._make_compiler, options, hooks_outside=hooks_outside)

    def uses_cuda_graphs(self, device: torch.device) -> bool:
        """Return whether the compiled code replays CUDA graphs.

        Args:
            device: The device of the model.
        """
        if device.type != "cuda" or self.backend == "no":
            return False
        by_option = bool((self.options or {}).get("triton.cudagraphs"))
        return by_option or self.mode in ("reduce-overhead", "max-autotune") or self.backend == "cudagraphs"

    def _make_compiler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, **self._collect_arguments())  # type: ignore[no-any-return]

    def _collect_arguments(self) -> dict[str, Any]:
        arguments = {**vars(self), "fullgraph": bool(self.fullgraph)}
        del arguments["use_regional_compilation"]  # not an argument of torch.compile
        return arguments


class _Refused:
    """Base class of Accelerate classes that raise an error when they are instantiated."""

    instead: ClassVar[str]

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ValueError(f"{type(self).__name__} is not supported. {self.instead}")


class DeepSpeedPlugin(_Refused):
    """Accelerate class that Treadle does not support. Creating an instance raises an error.

    Examples:
        >>> import treadle
        >>> treadle.DeepSpeedPlugin()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: DeepSpeedPlugin is not supported. ...
    """

    instead = "For sharded parameters, gradients and optimizer state, use strategy='fsdp'."


class MegatronLMPlugin(_Refused):
    """Accelerate class that Treadle does not support. Creating an instance raises an error.

    Examples:
        >>> from treadle.engine import MegatronLMPlugin
        >>> MegatronLMPlugin()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: MegatronLMPlugin is not supported. ...
    """

    instead = "For models that do not fit on one device, use strategy='fsdp' or ParallelismConfig."


class TorchTensorParallelPlugin(_Refused):
    """Accelerate class that Treadle does not support. Creating an instance raises an error.

    Examples:
        >>> from treadle.engine import TorchTensorParallelPlugin
        >>> TorchTensorParallelPlugin()
        Traceback (most recent call last):
        ValueError: TorchTensorParallelPlugin is not supported. Use ParallelismConfig(tp_size=N).
    """

    instead = "Use ParallelismConfig(tp_size=N)."


class FP8RecipeKwargs(_Refused):
    """Accelerate class that Treadle does not support. Creating an instance raises an error.

    Examples:
        >>> from treadle.engine import FP8RecipeKwargs
        >>> FP8RecipeKwargs()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: FP8RecipeKwargs is not supported. ...
    """

    instead = "Treadle uses torchao's float8 with its default options. Set only mixed_precision='fp8'."


class AORecipeKwargs(FP8RecipeKwargs):
    """Accelerate class that Treadle does not support.

    Examples:
        >>> from treadle.engine import AORecipeKwargs
        >>> AORecipeKwargs()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: AORecipeKwargs is not supported. ...
    """


class TERecipeKwargs(FP8RecipeKwargs):
    """Accelerate class that Treadle does not support.

    Examples:
        >>> from treadle.engine import TERecipeKwargs
        >>> TERecipeKwargs()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: TERecipeKwargs is not supported. ...
    """


class MSAMPRecipeKwargs(FP8RecipeKwargs):
    """Accelerate class that Treadle does not support.

    Examples:
        >>> from treadle.engine import MSAMPRecipeKwargs
        >>> MSAMPRecipeKwargs()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: MSAMPRecipeKwargs is not supported. ...
    """


_HANDLERS: dict[str, type] = {
    "autocast": AutocastKwargs,
    "scaler": GradScalerKwargs,
    "group": InitProcessGroupKwargs,
    "profile": ProfileKwargs,
    "replicas": ReplicaKwargs,
}


def sort_handlers(handlers: Iterable[Any] | None) -> dict[str, Any]:
    """Return the handlers by kind (autocast, scaler, group, profile, replicas), with None for a missing handler."""
    if handlers is not None and not isinstance(handlers, Iterable):
        raise TypeError(
            f"kwargs_handlers is {name_type(handlers)}, but must be a list. Pass [{type(handlers).__name__}(...)]."
        )
    sorted_handlers: dict[str, Any] = dict.fromkeys(_HANDLERS)
    for handler in handlers or ():
        name = next((name for name, kind in _HANDLERS.items() if isinstance(handler, kind)), None)
        if name is None:
            found = f"the class {handler.__name__}" if isinstance(handler, type) else name_type(handler)
            valid = [kind.__name__ for kind in _HANDLERS.values()]
            raise TypeError(
                f"kwargs_handlers contains {found}, but supports only instances of "
                f"{', '.join(valid)}.{nearest(type(handler).__name__, valid)}"
            )
        if sorted_handlers[name] is not None:
            raise ValueError(f"kwargs_handlers contains two {type(handler).__name__} objects. Pass only one.")
        sorted_handlers[name] = handler
    return sorted_handlers


def check_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments among the local variables of ``Accelerator.__init__``.

    Raises:
        TypeError: If an argument does not exist.
        ValueError: If an argument is not supported.
    """
    arguments = {name: value for name, value in given.items() if name not in ("self", "unknown", "__class__")}
    for name in given["unknown"]:
        hint = " Use ProjectConfiguration(logging_dir=...)." if name == "logging_dir" else nearest(name, arguments)
        raise TypeError(f"Accelerator() has no argument {name!r}.{hint}")
    reasons = {
        "deepspeed_plugin": DeepSpeedPlugin.instead,
        "megatron_lm_plugin": MegatronLMPlugin.instead,
        "torch_tp_plugin": TorchTensorParallelPlugin.instead,
    }
    for name, value in arguments.items():
        if value is not None and name.removesuffix("s") in reasons:
            raise ValueError(f"Accelerator({name}=...) is not supported. {reasons[name.removesuffix('s')]}")
    return arguments


def resolve_timeout(timeout: Any) -> float | None:
    """Return the number of seconds that a rank may go without progress; None if the user set no limit."""
    return None if timeout is None else parse_duration("timeout", timeout).total_seconds()


def resolve_group(handler: InitProcessGroupKwargs | None, limit: float | None) -> dict[str, Any]:
    """Return the options of `open_world`. The default timeout of collectives is at least ``limit`` + 60 seconds."""
    options = (handler or InitProcessGroupKwargs()).options()
    if options["timeout"] is None and limit is not None and limit + 60 > 1800:  # the default is half an hour
        options["timeout"] = timedelta(seconds=limit + 60)
    return options


def merge_group(options: dict[str, Any], strategy: Any) -> dict[str, Any]:
    """Return ``options`` merged with those of the strategy. Raise a ValueError if they contradict each other."""
    of_strategy = getattr(strategy, "group_options", {})
    for name, value in of_strategy.items():
        if options[name] not in (None, value):
            source = "InitProcessGroupKwargs" + " or Accelerator(timeout=...)" * (name == "timeout")
            raise ValueError(
                f"the strategy's {name}={value!r} contradicts {name}={options[name]!r}, which is from {source}. Set "
                "only one of them."
            )
    return {**options, **of_strategy}


def resolve_device(accelerator: str, cpu: bool) -> str:
    """Return the kind of device to compute on. Raise a ValueError if the arguments contradict each other."""
    if cpu and accelerator not in ("auto", "cpu"):
        raise ValueError(f"cpu=True contradicts accelerator={accelerator!r}. Set only one of them.")
    return "cpu" if cpu else accelerator


def check_choices(rng_types: Iterable[Any] | None, on_nonfinite: str) -> None:
    """Check that ``on_nonfinite`` is valid, and that ``rng_types`` contains nothing but ``"generator"``."""
    choose("on_nonfinite", on_nonfinite, ("raise", "skip", "ignore"))
    if rng_types is not None and not isinstance(rng_types, Iterable):
        raise TypeError(f"rng_types={rng_types!r} must be a list, such as ['generator'].")
    for kind in rng_types or ():
        if getattr(kind, "value", kind) != "generator":
            raise ValueError(
                f"rng_types contains {kind!r}, but only 'generator' is supported, because only the order of the data "
                f"is synchronized. Remove {kind!r}. To synchronize RNG states, call seed_everything(seed) or "
                "utils.synchronize_rng_states."
            )


def resolve_dataloader_config(config: DataLoaderConfiguration | None, split_batches: bool) -> DataLoaderConfiguration:
    """Return ``config``, or the default settings; ``split_batches=True`` overrides the field of the same name."""
    check_optional_type("dataloader_config", config, DataLoaderConfiguration)
    config = config or DataLoaderConfiguration()
    return replace(config, split_batches=True) if split_batches else config


def resolve_project(
    config: ProjectConfiguration | None, directory: str | os.PathLike[str] | None
) -> ProjectConfiguration:
    """Return the project configuration, with ``directory`` set in it. Raise a ValueError if the directories differ."""
    check_optional_type("project_config", config, ProjectConfiguration)
    if directory is not None:
        check_path("project_dir", directory)
    if config is None:
        return ProjectConfiguration(directory)
    if directory is not None and config.project_dir is None:
        config.set_directories(directory)
    if directory is not None and os.fspath(directory) != os.fspath(config.project_dir or ""):
        raise ValueError(
            f"project_dir={directory!r} contradicts ProjectConfiguration(project_dir={config.project_dir!r}). Set only "
            "one of them."
        )
    return config


def resolve_precision(mixed_precision: Any, autocast: AutocastKwargs | None) -> tuple[Precision, str]:
    """Return the precision, and Accelerate's name for it: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``."""
    if mixed_precision is None:
        mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    mixed_precision = getattr(mixed_precision, "value", mixed_precision)
    precision = Precision.parse(mixed_precision, "mixed_precision")
    word = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(precision.compute, "no")  # type: ignore[arg-type]
    word = "fp8" if precision.float8 else word
    if autocast is None:
        return precision, word
    compute = precision.compute if autocast.enabled else None
    return precision.replace(compute=compute, cached=autocast.cache_enabled is not False), word


def build_scaler(
    scaling: GradScalerKwargs | None, precision: Precision, device: torch.device
) -> torch.amp.GradScaler | None:
    """Return torch's gradient scaler, or None if the precision does not need one or the handler disables it."""
    scaling = scaling or GradScalerKwargs()
    return torch.amp.GradScaler(device.type, **scaling.to_kwargs()) if precision.scaled and scaling.enabled else None


def resolve_accumulation(plugin: GradientAccumulationPlugin | None, steps: int) -> GradientAccumulationPlugin:
    """Return ``plugin``, or the settings for ``steps`` micro-batches. Raise a ValueError if they are invalid."""
    check_optional_type("gradient_accumulation_plugin", plugin, GradientAccumulationPlugin)
    if plugin is None:
        check_int("gradient_accumulation_steps", steps, 1)
        return GradientAccumulationPlugin(steps)
    if steps not in (1, plugin.num_steps):
        raise ValueError(
            f"gradient_accumulation_steps={steps} contradicts "
            f"GradientAccumulationPlugin(num_steps={plugin.num_steps}). Set only one of them."
        )
    return plugin


def check_tree_settings(plugin: GradientAccumulationPlugin, leaves: int) -> None:
    """Raise a ValueError if settings of gradient accumulation contradict ``step_micro_batches``."""
    settings = {
        f"gradient_accumulation_steps={plugin.num_steps}": plugin.num_steps != 1,
        "sync_with_dataloader=False": not plugin.sync_with_dataloader,
        "sync_each_batch=True": plugin.sync_each_batch,
    }
    for setting in (name for name, clashes in settings.items() if clashes):
        raise ValueError(
            f"step_micro_batches={leaves} can't be combined with {setting}, because it determines how many batches "
            "each process accumulates. Remove one of them."
        )


def refuse_in_tree(name: str, leaves: int | None) -> None:
    """Raise a ValueError if ``step_micro_batches`` is set, for what decides when or how gradients are reduced."""
    if leaves is not None:
        raise ValueError(
            f"{name} can't be used with step_micro_batches={leaves}, which determines when and in which order the "
            "gradients of all processes are added. Remove one of them."
        )


def resolve_compilation(plugin: TorchDynamoPlugin | None, backend: Any) -> TorchDynamoPlugin:
    """Return ``plugin``, or the settings for ``backend``. Raise a ValueError if they are invalid."""
    check_optional_type("dynamo_plugin", plugin, TorchDynamoPlugin)
    if plugin is not None and backend is not None:
        raise ValueError("dynamo_plugin and dynamo_backend both configure compilation. Set only one of them.")
    plugin = plugin or TorchDynamoPlugin(backend)
    if isinstance(plugin.backend, str) and plugin.backend != "no":
        choose("dynamo_backend", plugin.backend, ["no", *torch.compiler.list_backends(exclude_tags=None)])
    return plugin
