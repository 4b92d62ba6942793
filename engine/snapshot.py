"""What a checkpoint holds, and how it goes back: the state of everything an Accelerator has prepared."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..strategies import World, warn
from ..strategies.shards import cut_like
from . import architecture, checkpoint, disk, optimizer_state
from .export import own_name
from .manifest import Manifest, verify
from .parts import Files, encode_part, has_part, size_of
from .random_state import random_state, set_random_state
from .stored import Stored

if TYPE_CHECKING:
    from .accelerator import Accelerator


def rank_part(rank: int) -> str:
    """The name of one process's own part of a checkpoint."""
    return f"rank-{rank:05d}"


def model_part(number: int) -> str:
    """The name of the part that holds the ``number``-th prepared model."""
    return "model" if number == 0 else f"model-{number}"


def _extra_part(number: int) -> str:
    """The part for what a model's state holds beside tensors."""
    return f"extra-{model_part(number)}"


def optimizer_part(number: int, rank: int = 0) -> str:
    """The name of the part that holds the ``number``-th optimizer, or what process ``rank`` alone knows of it."""
    name = "optimizer" if number == 0 else f"optimizer-{number}"
    return f"{name}-rank-{rank:05d}" if rank else name


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


# -- saving ----------------------------------------------------------------------------------------------------------


def collect(accelerator: Accelerator, target: Path, parts: dict[str, Any], weights_only: bool) -> Files:
    """What this process is to write of a checkpoint; nothing is copied or written yet. All processes must ask.

    Raises:
        ValueError: inside a group of micro-batches.
        TypeError: for what is not data.
    """
    if accelerator.inside_group and not weights_only:
        raise ValueError(
            "save_state inside a group of micro-batches, whose gradients are in no checkpoint. Save when "
            "accelerator.sync_gradients is true, after the optimizer's step."
        )
    rank = accelerator.process_index
    files: Files = {}
    for number, (model, weights) in enumerate(zip(accelerator.models, _weights(accelerator, target), strict=True)):
        if weights is None:
            continue
        tensors, extra = _apart(weights)
        notes = architecture.notes(accelerator.strategy.unwrap(model))
        files |= encode_part(model_part(number), tensors, rank, notes)
        if extra:
            files |= encode_part(_extra_part(number), extra, rank)
    if rank == 0:
        for name, content in parts.items():
            files |= encode_part(name, content)
    if weights_only:
        return files
    for number, optimizer in enumerate(accelerator.optimizers):
        state = accelerator.strategy.optimizer_state(optimizer.optimizer)
        names = optimizer_state.parameter_names(optimizer.optimizer, accelerator.own_models)
        own = optimizer_state.named(state, optimizer.optimizer, names)
        if accelerator.strategy.keeps_apart(optimizer.optimizer):
            files |= encode_part(optimizer_part(number, rank), own)
        else:
            files |= encode_part(optimizer_part(number), own, rank)
    # Asked on every process: what is registered may exchange something to know its state.
    files |= encode_part("state", _shared_state(accelerator), rank)
    return files | encode_part(rank_part(rank), {"random": random_state()})


def publish(world: World, target: Path, files: Files, info: dict[str, Any], others: bool = False) -> None:
    """Write what `collect` returned, wait for all processes, and let the checkpoint appear in one move.

    Args:
        world: the processes; all must call it.
        target: where it is to stand.
        files: this process's.
        info: for the manifest.
        others: see `checkpoint.commit`.

    Raises:
        OSError: the disk refused. Nothing of the attempt is left then, and what stood there before still does.
    """
    entries: dict[str, Any] = {}
    error: Exception | None = None
    try:
        entries = checkpoint.write_files(checkpoint.beside(target), files)
    except Exception as caught:
        error = _explained(caught, target, files)
    every = world.gather_objects((entries, error is None))
    if world.is_main:
        try:
            if all(written for _, written in every):
                merged = {name: entry for part, _ in every for name, entry in part.items()}
                checkpoint.commit(target, merged, info, others=others)
            else:
                checkpoint.discard(target)
        except Exception as caught:
            error = error or caught
    world.raise_together(error)


def _explained(error: Exception, target: Path, files: Files) -> Exception:
    """The error itself; a full disk's with the free and the needed bytes."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return error
    needed = sum(size_of(content) for content in files.values())
    free = shutil.disk_usage(target.parent).free
    text = f"can't save {target}: {error.strerror}. It needs {needed:,} bytes, {free:,} are free. What was saved stays."
    return OSError(error.errno, text)


def _weights(accelerator: Accelerator, target: Path) -> list[dict[str, Any] | None]:
    """Each model's state, as it lies on the processes; None for one that a hook takes care of."""
    models = accelerator.models
    if not accelerator.save_hooks:
        states = (accelerator.strategy.model_state(model) for model in models)
        return [{own_name(name): value for name, value in state.items()} for state in states]
    with accelerator.world.together():
        if accelerator.is_main_process:
            checkpoint.discard(target)
            disk.make_directory(checkpoint.beside(target))
    whole = [accelerator.get_state_dict(model) for model in models]
    left = list(whole)
    for hook in accelerator.save_hooks.values():
        hook(list(models), left, str(checkpoint.beside(target)))
    # Others than rank zero may have nothing of a sharded one, and have nothing to write.
    return [
        {name: value for name, value in state.items() if value is not None} if any(state is s for s in left) else None
        for state in whole
    ]


def _apart(weights: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a model's state, and what else modules keep there (``get_extra_state``)."""
    extra = {name: value for name, value in weights.items() if not isinstance(value, Tensor)}
    return {name: value for name, value in weights.items() if name not in extra}, extra


def _shared_state(accelerator: Accelerator) -> dict[str, Any]:
    if accelerator.loss_scale is not None:
        accelerator.loss_scale.settle()
    return {
        "schedulers": [scheduler.state_dict() for scheduler in accelerator.schedulers],
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "loaders": [loader.state_dict() for loader in accelerator.loaders if not loader.evaluation],
        "evaluation_loaders": [loader.state_dict() for loader in accelerator.loaders if loader.evaluation],
        "stream": None if accelerator.stream is None else accelerator.stream.state,
        "registered": {name: value.state_dict() for name, value in accelerator.registered.items()},
    }


def facts(accelerator: Accelerator) -> dict[str, Any]:
    """What the manifest notes of the run, for people and for the resume."""
    training = next((loader for loader in accelerator.loaders if not loader.evaluation), None)
    accumulate = accelerator.gradient_accumulation_steps
    batch = None if training is None else training.total_batch_size
    return {
        "world_size": accelerator.world.size,
        "strategy": accelerator.strategy.name,
        "precision": accelerator.precision.name,
        "accumulate": accumulate,
        "batch_size": batch,  # of a micro-batch, over all processes
        "global_batch_size": None if batch is None else batch * accumulate,
        "models": [architecture.fingerprint(model) for model in accelerator.own_models],
    }


# -- loading ---------------------------------------------------------------------------------------------------------


def load(
    accelerator: Accelerator, path: Path, *, models: bool, state: bool, strict: bool | None = None
) -> dict[str, Any]:
    """Restore a checkpoint, or a part of it; returns its info.

    Raises:
        ValueError: if it is no checkpoint, is damaged, or another model's or set-up's; nothing is changed then.
    """
    manifest = verify(path)
    weights = _fitting_weights(accelerator, path, manifest, strict) if models else []
    found: dict[str, Any] = {}
    optimizers: list[tuple[Any, dict[str, Any]]] = []
    if state:
        if not has_part(manifest.files, "state"):
            raise ValueError(
                f"{path} holds weights only, so no run can go on from it: load them into a model before fit."
            )
        found = checkpoint.read_part(path, "state")
        _check_counts(accelerator, found, path, manifest)
        _say_other_batches(accelerator, manifest)
        optimizers = _fitting_optimizers(accelerator, path, manifest, strict is not False)
    for model, values, exactly in weights:
        accelerator.strategy.load_model_state(model, values, exactly)
    for optimizer, saved in optimizers:
        accelerator.strategy.load_optimizer_state(optimizer, saved)
    if state:
        _load_shared_state(accelerator, found, path, strict is not False)
        if accelerator.process_index < manifest.world_size:  # a process that was not there then keeps its own
            set_random_state(checkpoint.read_part(path, rank_part(accelerator.process_index))["random"])
    return manifest.info


def _fitting_weights(
    accelerator: Accelerator, path: Path, manifest: Manifest, strict: bool | None
) -> list[tuple[nn.Module, dict[str, Any], bool]]:
    """For each model what it is to load, laid out over the processes as it is."""
    wanted = list(accelerator.models)
    for hook in accelerator.load_hooks.values():
        hook(wanted, str(path))
    loads = []
    for number, model in enumerate(accelerator.models):
        if not any(model is kept for kept in wanted):
            continue
        own = accelerator.strategy.unwrap(model)
        exactly = getattr(own, "strict_loading", True) if strict is None else strict
        saved, notes = checkpoint.open_part(path, model_part(number))
        architecture.compare(own, notes, path)
        if has_part(manifest.files, _extra_part(number)):
            saved = saved | checkpoint.read_part(path, _extra_part(number))
        now = own.state_dict()
        saved = _as_named_in(now, saved)
        fits = check_weights(own, saved, path, exactly)
        values = {n: cut_like(v, now.get(n)) if isinstance(v, Stored) else v for n, v in fits.items()}
        loads.append((model, values, exactly))
    return loads


def _fitting_optimizers(
    accelerator: Accelerator, path: Path, manifest: Manifest, strict: bool
) -> list[tuple[Any, dict[str, Any]]]:
    """For each optimizer the state that it is to load."""
    loads = []
    for number, prepared in enumerate(accelerator.optimizers):
        optimizer = prepared.optimizer
        saved, _ = checkpoint.open_part(path, optimizer_part(number))
        for rank in range(1, manifest.world_size):
            if has_part(manifest.files, optimizer_part(number, rank)):
                saved["slots"] |= checkpoint.open_part(path, optimizer_part(number, rank))[0]["slots"]
        names = optimizer_state.parameter_names(optimizer, accelerator.own_models)
        if lines := optimizer_state.differences(saved, optimizer, names):
            text = f"{path} was saved with another optimizer:\n  " + "\n  ".join(lines[:30])
            if strict:
                raise ValueError(f"{text}\nTo take what fits, load with strict=False (Trainer: strict_loading=False).")
            warn(f"{text}\nWhat does not fit begins anew.")
            if saved["class"] != optimizer_state.class_of(optimizer):
                continue
        loads.append((optimizer, optimizer_state.numbered(saved, optimizer, names)))
    return loads


def _as_named_in(now: Iterable[str], weights: dict[str, Any]) -> dict[str, Any]:
    """Weights under the names in a model's own state, of which parts may be compiled."""
    renamed = {own_name(name): name for name in now if name != own_name(name)}
    return {renamed.get(name, name): value for name, value in weights.items()} if renamed else weights


def _check_counts(accelerator: Accelerator, state: dict[str, Any], path: Path, manifest: Manifest) -> None:
    """See that as much is prepared as was saved. Evaluation may change: its loaders have no part in training."""
    optimizers = sum(has_part(manifest.files, optimizer_part(n)) for n in range(len(accelerator.optimizers) + 1))
    pairs = {
        "optimizers": (len(accelerator.optimizers), optimizers),
        "schedulers": (len(accelerator.schedulers), len(state["schedulers"])),
        "loaders": (sum(not loader.evaluation for loader in accelerator.loaders), len(state["loaders"])),
    }
    for kind, (here, there) in pairs.items():
        if here != there:
            raise ValueError(f"{path} holds {there} {kind}, this run has {here}: prepare the same ones before loading.")


def _say_other_batches(accelerator: Accelerator, manifest: Manifest) -> None:
    now, then = facts(accelerator), manifest.info
    if None in (now["global_batch_size"], then.get("global_batch_size")):
        return
    if now["global_batch_size"] != then["global_batch_size"]:
        here, there = (
            f"{f['global_batch_size']} ({f['batch_size']} over {f['world_size']} processes, x {f['accumulate']})"
            for f in (now, then)
        )
        warn(f"the checkpoint was saved with a global batch of {there}, this run has {here}: it will train otherwise.")


def _load_shared_state(accelerator: Accelerator, state: dict[str, Any], path: Path, strict: bool) -> None:
    missing = sorted(set(accelerator.registered) - set(state["registered"]))
    if missing:
        there = ", ".join(state["registered"]) or "none"
        text = f"{path} has no state for {', '.join(missing)}; of what was registered it has {there}."
        if strict:
            raise ValueError(text)
        warn(text)
    for scheduler, saved in zip(accelerator.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    training = [loader for loader in accelerator.loaders if not loader.evaluation]
    evaluation = [loader for loader in accelerator.loaders if loader.evaluation]
    for loader, saved in zip(training, state["loaders"], strict=True):
        loader.load_state_dict(saved)
    for loader, saved in zip(evaluation, state["evaluation_loaders"], strict=False):
        loader.load_state_dict(saved)
    if accelerator.scaler is not None and state["scaler"] is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    if accelerator.stream is not None and state["stream"] is not None:
        accelerator.stream.state = state["stream"]
    for name, value in accelerator.registered.items():
        if name in state["registered"]:
            value.load_state_dict(state["registered"][name])


def load_model(model: nn.Module, weights: dict[str, Any], path: Path, strict: bool = True) -> None:
    """Load weights by name; raises as `check_weights` does."""
    model.load_state_dict(check_weights(model, weights, path, strict), strict=strict)


def check_weights(model: nn.Module, weights: dict[str, Any], path: Path | str, strict: bool = True) -> dict[str, Any]:
    """See that ``weights`` are those of ``model``; returns those that fit, which with ``strict`` are all.

    Args:
        model: whose names and shapes count.
        weights: what has a ``shape``, by name.
        path: where they are from, for the error.
        strict: False takes what fits, and says what was left out.

    Raises:
        ValueError: lists the names that are missing, unexpected or of another shape.
    """
    own = model.state_dict()
    reshaped = {
        name: f"{name}: {tuple(weights[name].shape)} in the checkpoint, {tuple(own[name].shape)} in the model"
        for name in own
        if name in weights and hasattr(own[name], "shape") and own[name].shape != weights[name].shape
    }
    lines = [f"missing: {name}" for name in sorted(set(own) - set(weights))]
    lines += [f"unexpected: {name}" for name in sorted(set(weights) - set(own))]
    lines += reshaped.values()
    if not lines:
        return weights
    more = f"\n  and {len(lines) - 30} more" if len(lines) > 30 else ""
    text = f"{path} was saved by another model:\n  " + "\n  ".join(lines[:30]) + more
    if strict:
        raise ValueError(f"{text}\nTo take what fits, load with strict=False.")
    warn(f"{text}\nWhat does not fit is left out.")
    return {name: value for name, value in weights.items() if name in own and name not in reshaped}
