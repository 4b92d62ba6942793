"""Arguments of an `Accelerator` that belong together, under Accelerate's names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import nn

from ..common.durations import parse_duration
from ..common.messages import announce, nearest, warn
from ..common.validation import check_int, choose
from ..strategies import Precision, ReplicaKwargs, Strategy
from .modules import Compiler, compile_modules, forget


@dataclass
class DataLoaderConfiguration:
    """How prepared loaders share out their batches.

    Args:
        split_batches: ``batch_size`` is that of the global batch, which the processes share; it must divide.
        dispatch_batches: accepted; True would read on rank zero only, and each rank reads its own share instead, which
            gives the same batches.
        even_batches: accepted; all processes take part in every batch, and no sample is ever repeated for it.
        use_seedable_sampler: a shuffling loader draws each epoch's order from a seed plus the epoch's number
            (``loader.set_epoch(epoch)`` sets it). The seed is ``data_seed``, else that of torch's generator when the
            loader is prepared. Without it the order continues from epoch to epoch, as in the plain loop.
        data_seed: draw the order of samples from this seed, not from the process's random state.
        non_blocking: accepted; a pinned batch is always copied while the device computes.
        use_stateful_dataloader: accepted; every prepared loader has ``state_dict`` and is in every checkpoint.

    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def announce_differences(self) -> None:
        """Log what is done otherwise than asked. Call it when the ranks are known, so that only one of them does."""
        if self.dispatch_batches:
            announce(
                "dispatch_batches=True: every rank reads its own share of the batches, where Accelerate reads all of "
                "them on rank zero. The batches are the same."
            )


@dataclass
class ProjectConfiguration:
    """Where a run keeps its files.

    Args:
        project_dir: its directory.
        logging_dir: that of trackers; by default ``project_dir``.
        automatic_checkpoint_naming: `Accelerator.save_state` names checkpoints
            ``project_dir/checkpoints/checkpoint_N`` by itself.
        total_limit: how many of those to keep; the oldest is deleted once a new one is complete.
        iteration: the N of the next one.
        save_on_each_node: `Accelerator.save` and `save_model` write on each machine, not only on the first.
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
        """Set ``project_dir``, and ``logging_dir`` where it has none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


class KwargsHandler:
    """Base of what ``Accelerator(kwargs_handlers=[...])`` takes."""

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}  # type: ignore[arg-type]


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Which micro-batches form one optimizer step.

    Args:
        num_steps: how many.
        adjust_scheduler: accepted; a schedule advances at the end of a group only, as in Accelerate either way.
        sync_with_dataloader: a loader's end ends a group; False lets groups go on into its next epoch.
        sync_each_batch: reduce gradients in every micro-batch, which saves memory where the model is sharded.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        check_int("num_steps", self.num_steps, 1)


@dataclass
class AutocastKwargs(KwargsHandler):
    """How ``torch.autocast`` computes: at all, and whether it keeps the weights that it has cast."""

    enabled: bool = True
    cache_enabled: bool | None = None

    def context(self, precision: Precision, device: torch.device) -> torch.autocast:
        """Return the context in which torch computes so, in the number format of ``precision``."""
        return torch.autocast(
            device.type,
            dtype=precision.compute,
            enabled=self.enabled and precision.compute is not None,
            cache_enabled=self.cache_enabled,
        )


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of ``torch.amp.GradScaler``, for float16."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the processes connect.

    Args:
        backend: ``"nccl"``, ``"gloo"`` or another of torch's; by default what the device needs.
        init_method: only ``"env://"``; processes find each other by the launcher's environment.
        timeout: how long one waits for the others before it fails: a timedelta, a dict of its arguments, or
            ``"DD:HH:MM:SS"``.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.init_method not in (None, "env://"):
            raise ValueError(
                f"init_method={self.init_method!r}: processes find each other by their environment; set MASTER_ADDR "
                "and MASTER_PORT, as torchrun does."
            )
        if self.timeout is not None:
            self.timeout = parse_duration("timeout", self.timeout)

    def options(self) -> dict[str, Any]:
        """Return the options that `open_world` takes."""
        return {"timeout": self.timeout, "backend": self.backend}


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of ``torch.profiler.profile``.

    Args:
        activities: ``"cpu"``, ``"cuda"``, ``"xpu"``; by default those that are there.
        schedule_option: arguments of ``torch.profiler.schedule``: ``{"wait": 1, "warmup": 1, "active": 3, ...}``.
        on_trace_ready: called with the profiler when a trace is ready.
        output_trace_dir: where each process writes its trace, ``profile_RANK.json``, for ``chrome://tracing``.
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
    """How prepared models are compiled: arguments of ``torch.compile``; ``backend="no"`` for not at all.

    Args:
        use_regional_compilation: compile each repeated block of the model by itself, which takes less time where they
            are alike. By default the Trainer does so where most of them are, and an Accelerator does not.
    """

    backend: Any = "no"
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        backend = getattr(self.backend, "value", self.backend)
        self.backend = backend.lower() if isinstance(backend, str) else backend or "no"

    def compile(self, model: nn.Module) -> None:
        """Compile ``model`` in place, so that the names in its state stay its own."""
        if self.backend == "no":
            return
        blocks = [block for parent in model.modules() if isinstance(parent, nn.ModuleList) for block in parent]
        modules = blocks if self.use_regional_compilation and blocks else [model]
        compile_modules(modules, self._make_compiler, self._collect_arguments())

    def compile_parts(self, model: nn.Module, strategy: Strategy) -> None:
        """Compile the parts that the steps of ``model`` call; what an earlier run has compiled otherwise is undone.

        Args:
            model: one whose ``forward`` is not what is run. If it was itself given as what ``torch.compile`` returns,
                its parts are compiled so.
            strategy: knows which parts are run as one.
        """
        users: Compiler | None = vars(model).get("_compiler")
        if self.backend == "no" and users is None:
            forget(model)
            return
        if self.backend != "no" and users is not None:
            raise ValueError("Trainer(compile=...) and torch.compile(task) both say how to compile: give one of them.")
        parts, hooks_outside = strategy.compiled_parts(model, self.use_regional_compilation)
        if not parts and type(model).forward is not nn.Module.forward:
            parts = [model]
        if not parts:
            warn(
                f"{type(model).__name__} has no module with parameters in it, so nothing is compiled: put "
                "torch.compile around what its steps call."
            )
        options = None if users is not None else self._collect_arguments()
        compile_modules(parts, users or self._make_compiler, options, hooks_outside=hooks_outside)

    def uses_cuda_graphs(self, device: torch.device) -> bool:
        """Tell whether the compiled code replays CUDA graphs, into memory that each replay writes anew."""
        if device.type != "cuda" or self.backend == "no":
            return False
        by_option = bool((self.options or {}).get("triton.cudagraphs"))
        return by_option or self.mode in ("reduce-overhead", "max-autotune") or self.backend == "cudagraphs"

    def _make_compiler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, **self._collect_arguments())  # type: ignore[no-any-return]

    def _collect_arguments(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "mode": self.mode,
            "fullgraph": bool(self.fullgraph),
            "dynamic": self.dynamic,
            "options": self.options,
            "disable": self.disable,
        }


class _Refused:
    """Something of Accelerate's that is not there: its name can be imported, and says so when it is used."""

    instead: ClassVar[str]

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ValueError(f"{type(self).__name__} is not part of Treadle: {self.instead}")


class DeepSpeedPlugin(_Refused):
    """Refused."""

    instead = "for sharded parameters, gradients and optimizer state use strategy='fsdp'."


class MegatronLMPlugin(_Refused):
    """Refused."""

    instead = "for models that do not fit one device use strategy='fsdp' or ParallelismConfig."


class TorchTensorParallelPlugin(_Refused):
    """Refused."""

    instead = "use ParallelismConfig(tp_size=N)."


class FP8RecipeKwargs(_Refused):
    """Refused."""

    instead = "float8 is torchao's with its defaults here: give mixed_precision='fp8' alone."


class AORecipeKwargs(FP8RecipeKwargs):
    """Refused."""


class TERecipeKwargs(FP8RecipeKwargs):
    """Refused."""


class MSAMPRecipeKwargs(FP8RecipeKwargs):
    """Refused."""


_HANDLERS: dict[str, type] = {
    "autocast": AutocastKwargs,
    "scaler": GradScalerKwargs,
    "group": InitProcessGroupKwargs,
    "profile": ProfileKwargs,
    "replicas": ReplicaKwargs,
}


def sort_handlers(handlers: Iterable[Any] | None) -> dict[str, Any]:
    """Return the handler of each kind (autocast, scaler, group, profile, replicas), or None where none was given.

    Raises:
        ValueError: for two of a kind.
        TypeError: for something else.
    """
    kinds = _HANDLERS
    sorted_handlers: dict[str, Any] = dict.fromkeys(kinds)
    for handler in handlers or ():
        name = next((name for name, kind in kinds.items() if isinstance(handler, kind)), None)
        if name is None:
            valid = [kind.__name__ for kind in kinds.values()]
            raise TypeError(
                f"kwargs_handlers takes {', '.join(valid)}, not {type(handler).__name__}."
                f"{nearest(type(handler).__name__, valid)}"
            )
        if sorted_handlers[name] is not None:
            raise ValueError(f"kwargs_handlers has two {type(handler).__name__}; give one.")
        sorted_handlers[name] = handler
    return sorted_handlers


def refuse(unknown: Mapping[str, Any], valid: Iterable[str], **plugins: Any) -> None:
    """Refuse arguments that an Accelerator has no use for.

    Args:
        unknown: arguments of other names than its own, by name.
        valid: the names of its own arguments.
        plugins: by name, arguments of Accelerate that only None is accepted for.

    Raises:
        TypeError: for an argument that does not exist.
        ValueError: for a plugin of somebody else's engine.
    """
    if unknown:
        name = next(iter(unknown))
        hint = " It is ProjectConfiguration(logging_dir=)." if name == "logging_dir" else nearest(name, valid)
        raise TypeError(f"Accelerator() has no argument {name!r}.{hint}")
    reasons = {
        "deepspeed_plugin": DeepSpeedPlugin.instead,
        "deepspeed_plugins": DeepSpeedPlugin.instead,
        "megatron_lm_plugin": MegatronLMPlugin.instead,
        "torch_tp_plugin": TorchTensorParallelPlugin.instead,
    }
    for name, value in plugins.items():
        if value is not None:
            raise ValueError(f"{name}= is not part of Treadle: {reasons[name]}")


def resolve_timeout(timeout: Any) -> float | None:
    """Return the seconds that a rank may make no progress; None for none of the user's own.

    Raises:
        TypeError, ValueError: see `parse_duration`.
    """
    return None if timeout is None else parse_duration("timeout", timeout).total_seconds()


def resolve_group(handler: InitProcessGroupKwargs | None, limit: float | None) -> dict[str, Any]:
    """Return the options of `open_world`; a collective outlasts the limit that the user has set for a rank.

    Args:
        handler: what the user says of the group.
        limit: seconds that a rank may make no progress.
    """
    options = (handler or InitProcessGroupKwargs()).options()
    if options["timeout"] is None and limit is not None and limit + 60 > 1800:  # the default is half an hour
        options["timeout"] = timedelta(seconds=limit + 60)
    return options


def resolve_device(accelerator: str, cpu: bool) -> str:
    """Return the kind of device to compute on.

    Raises:
        ValueError: if both arguments name one.
    """
    if cpu and accelerator not in ("auto", "cpu"):
        raise ValueError(f"cpu=True contradicts accelerator={accelerator!r}; give one of them.")
    return "cpu" if cpu else accelerator


def check_choices(rng_types: Iterable[Any] | None, on_nonfinite: str) -> None:
    """Check that ``on_nonfinite`` is known, and that nothing but the order of data is to be synchronized.

    Raises:
        ValueError: for anything else.
    """
    choose("on_nonfinite", on_nonfinite, ("raise", "skip", "ignore"))
    for kind in rng_types or ():
        if getattr(kind, "value", kind) != "generator":
            raise ValueError(
                f"rng_types has {kind!r}: only the order of data is the same everywhere by itself. For one random "
                "state everywhere call seed_everything(seed), or utils.synchronize_rng_states, where you want it."
            )


def resolve_dataloader_config(config: DataLoaderConfiguration | None, split_batches: bool) -> DataLoaderConfiguration:
    """Return how loaders share out their batches, by both arguments."""
    config = config or DataLoaderConfiguration()
    return replace(config, split_batches=True) if split_batches else config


def resolve_project(
    config: ProjectConfiguration | None, directory: str | os.PathLike[str] | None
) -> ProjectConfiguration:
    """Return where a run keeps its files, by both arguments.

    Raises:
        ValueError: if they contradict each other.
    """
    if config is None:
        return ProjectConfiguration(directory)
    if directory is not None and config.project_dir is None:
        config.set_directories(directory)
    if directory is not None and os.fspath(directory) != os.fspath(config.project_dir or ""):
        raise ValueError(f"project_dir={directory!r} contradicts project_config's {config.project_dir!r}; give one.")
    return config


def resolve_precision(mixed_precision: Any, autocast: AutocastKwargs | None) -> tuple[Precision, str]:
    """Return the number formats to compute in, and Accelerate's word: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``.

    Raises:
        ValueError: for one that is not there.
    """
    mixed_precision = getattr(mixed_precision, "value", mixed_precision)
    precision = Precision.parse(mixed_precision)
    word = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(precision.compute, "no")  # type: ignore[arg-type]
    word = "fp8" if precision.float8 else word
    if autocast is None:
        return precision, word
    compute = precision.compute if autocast.enabled else None
    return replace(precision, compute=compute, cached=autocast.cache_enabled is not False), word


def build_scaler(
    scaling: GradScalerKwargs | None, precision: Precision, device: torch.device
) -> torch.amp.GradScaler | None:
    """Return torch's loss scaler, if the precision needs one and the handler does not disable it."""
    scaling = scaling or GradScalerKwargs()
    return torch.amp.GradScaler(device.type, **scaling.to_kwargs()) if precision.scaled and scaling.enabled else None


def resolve_accumulation(plugin: GradientAccumulationPlugin | None, steps: int) -> GradientAccumulationPlugin:
    """Return which micro-batches form a step, by both arguments.

    Raises:
        ValueError: if they contradict each other.
    """
    if plugin is None:
        check_int("gradient_accumulation_steps", steps, 1)
        return GradientAccumulationPlugin(steps)
    if steps not in (1, plugin.num_steps):
        raise ValueError(
            f"gradient_accumulation_steps={steps} contradicts gradient_accumulation_plugin(num_steps="
            f"{plugin.num_steps}); give one of them."
        )
    return plugin


def resolve_compilation(plugin: TorchDynamoPlugin | None, backend: Any) -> TorchDynamoPlugin:
    """Return how to compile, by either argument.

    Raises:
        ValueError: for both, or for a backend that torch does not have.
    """
    if plugin is not None and backend is not None:
        raise ValueError("dynamo_plugin and dynamo_backend both say how to compile; give one of them.")
    plugin = plugin or TorchDynamoPlugin(backend)
    if isinstance(plugin.backend, str) and plugin.backend != "no":
        choose("dynamo_backend", plugin.backend, ["no", *torch.compiler.list_backends(exclude_tags=None)])
    return plugin
