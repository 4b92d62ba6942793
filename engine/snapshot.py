"""What a checkpoint holds, and how it goes back: the state of everything an Accelerator has prepared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from . import checkpoint
from .export import own_name
from .manifest import Manifest, verify
from .random_state import random_state, set_random_state

if TYPE_CHECKING:
    from .accelerator import Accelerator


def rank_part(rank: int) -> str:
    """The name of one process's own part of a checkpoint."""
    return f"rank-{rank:05d}"


def model_part(number: int) -> str:
    """The name of the part that holds the ``number``-th prepared model."""
    return "model" if number == 0 else f"model-{number}"


def has_part(manifest: Manifest, name: str) -> bool:
    """Whether a checkpoint holds the part ``name``."""
    return f"{name}.json" in manifest.files or f"{name}.safetensors" in manifest.files


def register(registered: dict[str, Any], objects: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Add objects to those that are saved, by name or by order.

    Raises:
        TypeError: for an object without ``state_dict`` and ``load_state_dict``.
    """
    for number, value in enumerate(objects, start=len(registered)):
        named[f"{type(value).__name__}_{number}"] = value
    for name, value in named.items():
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise TypeError(f"{name} ({type(value).__name__}) needs state_dict and load_state_dict to be saved.")
        registered[name] = value


def save(
    accelerator: Accelerator, target: Path, info: dict[str, Any], parts: dict[str, Any], weights_only: bool
) -> Path:
    """Write a checkpoint; every process writes its own part, rank zero the rest, and it appears in one move.

    Raises:
        ValueError: inside a group of micro-batches.
    """
    world = accelerator.world
    if accelerator.inside_group and not weights_only:
        raise ValueError(
            "save_state inside a group of micro-batches, whose gradients are in no checkpoint. Save when "
            "accelerator.sync_gradients is true, after the optimizer's step."
        )
    if accelerator.save_hooks:
        with world.together():
            if world.is_main:
                checkpoint.discard(target)
                checkpoint.staging(target)
    files: dict[str, Any] = {}
    error: BaseException | None = None
    try:
        files = _write(accelerator, target, parts, weights_only)
    except Exception as caught:
        error = caught
    world.raise_together(error)
    every = world.gather_objects(files)
    error = None
    if world.is_main:
        try:
            merged = {name: entry for part in every for name, entry in part.items()}
            checkpoint.commit(target, merged, {"world_size": world.size, **info}, others=bool(accelerator.save_hooks))
        except Exception as caught:
            error = caught
    world.raise_together(error)
    return target


def _write(
    accelerator: Accelerator, target: Path, parts: dict[str, Any], weights_only: bool
) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = {}
    # Asked on every process: what is registered may exchange something to know its state.
    shared = {} if weights_only else _shared_state(accelerator)
    for number, weights in _weights(accelerator, target):
        if accelerator.is_main_process:
            files |= checkpoint.write_part(target, model_part(number), weights)
    if accelerator.is_main_process:
        for name, content in parts.items():
            files |= checkpoint.write_part(target, name, content)
        if not weights_only:
            files |= checkpoint.write_part(target, "state", shared)
    if not weights_only:
        own = {"random": random_state()}
        files |= checkpoint.write_part(target, rank_part(accelerator.process_index), own)
    return files


def _weights(accelerator: Accelerator, target: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each model's number and state, but for those that a hook takes care of."""
    models = accelerator.models
    if not accelerator.save_hooks:
        for number, model in enumerate(models):
            yield number, accelerator.get_state_dict(model)
        return
    states = [accelerator.get_state_dict(model) for model in models]
    left = list(states)
    for hook in accelerator.save_hooks.values():
        hook(list(models), left, str(checkpoint.staging(target)))
    for number, state in enumerate(states):
        if any(state is kept for kept in left):
            yield number, state


def _shared_state(accelerator: Accelerator) -> dict[str, Any]:
    if accelerator.loss_scale is not None:
        accelerator.loss_scale.settle()
    return {
        "optimizers": [accelerator.strategy.optimizer_state(o.optimizer) for o in accelerator.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in accelerator.schedulers],
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "loaders": [loader.state_dict() for loader in accelerator.loaders],
        "stream": None if accelerator.stream is None else accelerator.stream.state,
        "registered": {name: value.state_dict() for name, value in accelerator.registered.items()},
    }


def load(accelerator: Accelerator, path: Path, *, models: bool, state: bool) -> dict[str, Any]:
    """Restore a checkpoint, or a part of it; returns its info.

    Raises:
        ValueError: if it is no checkpoint, is damaged, or was saved by another model or set-up.
    """
    manifest = verify(path)
    if models:
        wanted = list(accelerator.models)
        for hook in accelerator.load_hooks.values():
            hook(wanted, str(path))
        for number, model in enumerate(accelerator.models):
            if not any(model is kept for kept in wanted):
                continue
            own = accelerator.strategy.unwrap(model)
            strict = getattr(own, "strict_loading", True)
            weights = _as_named_in(own, checkpoint.read_part(path, model_part(number)))
            check_weights(own, weights, path, strict)
            accelerator.strategy.load_model_state(model, weights, strict)
    if state:
        if not has_part(manifest, "state"):
            raise ValueError(
                f"{path} holds weights only, so no run can go on from it: load them into a model before fit."
            )
        _load_shared_state(accelerator, checkpoint.read_part(path, "state"), path)
        if accelerator.process_index < manifest.world_size:  # a process that was not there then keeps its own
            set_random_state(checkpoint.read_part(path, rank_part(accelerator.process_index))["random"])
    return manifest.info


def _as_named_in(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Weights under the names in ``model``, of which parts may be compiled."""
    renamed = {own_name(name): name for name in model.state_dict() if name != own_name(name)}
    return {renamed.get(name, name): value for name, value in weights.items()} if renamed else weights


def _load_shared_state(accelerator: Accelerator, state: dict[str, Any], path: Path) -> None:
    for kind in ("optimizers", "schedulers", "loaders"):
        prepared = getattr(accelerator, kind)
        if len(prepared) != len(state[kind]):
            raise ValueError(
                f"{path} holds {len(state[kind])} {kind}, this run has {len(prepared)}: prepare the same ones before "
                "loading."
            )
        for target, saved in zip(prepared, state[kind], strict=True):
            if kind == "optimizers":
                accelerator.strategy.load_optimizer_state(target.optimizer, saved)
            else:
                target.load_state_dict(saved)
    if accelerator.scaler is not None and state["scaler"] is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    if accelerator.stream is not None and state["stream"] is not None:
        accelerator.stream.state = state["stream"]
    missing = sorted(set(accelerator.registered) - set(state["registered"]))
    if missing:
        raise ValueError(f"{path} has no state for {', '.join(missing)}; it has {', '.join(state['registered'])}.")
    for name, value in accelerator.registered.items():
        value.load_state_dict(state["registered"][name])


def load_model(model: nn.Module, weights: dict[str, Any], path: Path, strict: bool = True) -> None:
    """Load weights by name; raises as `check_weights` does."""
    check_weights(model, weights, path, strict)
    model.load_state_dict(weights, strict=strict)


def check_weights(model: nn.Module, weights: dict[str, Any], path: Path, strict: bool = True) -> None:
    """See that ``weights`` are those of ``model``.

    Raises:
        ValueError: lists the names that are missing, unexpected or of another shape.
    """
    own = model.state_dict()
    missing = sorted(set(own) - set(weights))
    unexpected = sorted(set(weights) - set(own))
    reshaped = [
        f"{name}: {tuple(weights[name].shape)} in the checkpoint, {tuple(own[name].shape)} in the model"
        for name in own
        if name in weights and hasattr(own[name], "shape") and own[name].shape != weights[name].shape
    ]
    if reshaped or (strict and (missing or unexpected)):
        lines = [f"missing: {n}" for n in missing] + [f"unexpected: {n}" for n in unexpected] + reshaped
        raise ValueError(f"{path} was saved by another model:\n  " + "\n  ".join(lines[:30]))
