"""What the arguments of an `Accelerator` mean together; what they can not mean is refused here."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ..common.validation import check_int
from ..strategies import Precision, choose, nearest
from ..strategies.plugins import ReplicaKwargs
from .plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    MegatronLMPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    TorchTensorParallelPlugin,
)

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
    found: dict[str, Any] = dict.fromkeys(kinds)
    for handler in handlers or ():
        name = next((name for name, kind in kinds.items() if isinstance(handler, kind)), None)
        if name is None:
            valid = [kind.__name__ for kind in kinds.values()]
            raise TypeError(
                f"kwargs_handlers takes {', '.join(valid)}, not {type(handler).__name__}."
                f"{nearest(type(handler).__name__, valid)}"
            )
        if found[name] is not None:
            raise ValueError(f"kwargs_handlers has two {type(handler).__name__}; give one.")
        found[name] = handler
    return found


def refuse(unknown: dict[str, Any], **others: Any) -> None:
    """Refuse what an Accelerator has no use for, known or not.

    Raises:
        TypeError: for an argument that does not exist.
        ValueError: for a plugin of somebody else's engine.
    """
    if unknown:
        from .accelerator import Accelerator

        name, valid = next(iter(unknown)), inspect.signature(Accelerator.__init__).parameters
        hint = " It is ProjectConfiguration(logging_dir=)." if name == "logging_dir" else nearest(name, valid)
        raise TypeError(f"Accelerator() has no argument {name!r}.{hint}")
    reasons = {
        "deepspeed_plugin": DeepSpeedPlugin.instead,
        "deepspeed_plugins": DeepSpeedPlugin.instead,
        "megatron_lm_plugin": MegatronLMPlugin.instead,
        "torch_tp_plugin": TorchTensorParallelPlugin.instead,
    }
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name}= is not part of Treadle: {reasons[name]}")


def device_kind(accelerator: str, cpu: bool) -> str:
    """Which kind of device to compute on.

    Raises:
        ValueError: if both arguments name one.
    """
    if cpu and accelerator not in ("auto", "cpu"):
        raise ValueError(f"cpu=True contradicts accelerator={accelerator!r}; give one of them.")
    return "cpu" if cpu else accelerator


def check_random_types(rng_types: Iterable[Any] | None) -> None:
    """See that nothing is to be synchronised but the order of data, which is the same everywhere by itself.

    Raises:
        ValueError: for anything else.
    """
    for kind in rng_types or ():
        if getattr(kind, "value", kind) != "generator":
            raise ValueError(
                f"rng_types has {kind!r}: only the order of data is the same everywhere by itself. For one random "
                "state everywhere call seed_everything(seed), or utils.synchronize_rng_states, where you want it."
            )


def loading_of(config: DataLoaderConfiguration | None, split_batches: bool) -> DataLoaderConfiguration:
    """How to share out batches, by both arguments."""
    config = config or DataLoaderConfiguration()
    return replace(config, split_batches=True) if split_batches else config


def project_of(config: ProjectConfiguration | None, directory: str | os.PathLike[str] | None) -> ProjectConfiguration:
    """Where a run keeps its files, by both arguments.

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


def precision_of(mixed_precision: Any, autocast: AutocastKwargs | None) -> tuple[Precision, str]:
    """In which number formats to compute, and autocast's in Accelerate's words: ``"no"``, ``"bf16"`` or ``"fp16"``.

    Raises:
        ValueError: for one that is not there.
    """
    mixed_precision = getattr(mixed_precision, "value", mixed_precision)
    if mixed_precision == "fp8":
        raise ValueError(
            "precision='fp8': float8 is not computed here; use mixed_precision='bf16' (Accelerator) or "
            "precision='bf16-mixed' (Trainer)."
        )
    precision = Precision.parse(mixed_precision)
    word = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(precision.compute, "no")  # type: ignore[arg-type]
    if autocast is None:
        return precision, word
    compute = precision.compute if autocast.enabled else None
    return replace(precision, compute=compute, cached=autocast.cache_enabled is not False), word


def groups_of(plugin: GradientAccumulationPlugin | None, steps: int) -> GradientAccumulationPlugin:
    """The accumulation that both arguments mean.

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


def compilation_of(plugin: TorchDynamoPlugin | None, backend: Any) -> TorchDynamoPlugin:
    """How to compile, by either argument.

    Raises:
        ValueError: for both, or for a backend that torch does not have.
    """
    if plugin is not None and backend is not None:
        raise ValueError("dynamo_plugin and dynamo_backend both say how to compile; give one of them.")
    plugin = plugin or TorchDynamoPlugin(backend)
    if isinstance(plugin.backend, str) and plugin.backend != "no":
        choose("dynamo_backend", plugin.backend, ["no", *torch.compiler.list_backends(exclude_tags=None)])
    return plugin
