"""A checkpoint goes back into what an Accelerator has prepared, once it is known that it fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..strategies import warn
from ..strategies.shards import cut_like
from . import architecture, checkpoint, optimizer_state
from .export import own_name
from .manifest import Manifest, verify
from .optimizer import PreparedScheduler
from .parts import has_part
from .random_state import set_random_state
from .snapshot import extra_part, facts, model_part, optimizer_part, rank_part, scheduler_kinds
from .stored import Stored

if TYPE_CHECKING:
    from .accelerator import Accelerator

_STATE = {"schedulers": list, "steps_since": list, "loaders": list, "evaluation_loaders": list} | {
    "scheduler_kinds": list,
    "reduction_orders": list,
    "registered": dict,
}
_RANK = {"random": dict, "buffers": list}
_OPTIMIZER = {"class": str, "groups": list} | dict.fromkeys(("shapes", "formats", "slots", "unnamed", "others"), dict)


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
        wanted = (getattr(own, "strict_loading", True) for own in accelerator.own_models)
        exactly = all(wanted) if strict is None else strict
        if not has_part(manifest.files, "state"):
            raise ValueError(
                f"{path} holds weights only, so no run can go on from it: load them into a model before fit."
            )
        found = _of_form(_STATE, checkpoint.read_part(path, "state"), path, "state")
        _check_counts(accelerator, found, path, manifest)
        _check_kinds(accelerator, found, path, exactly)
        _say_other_batches(accelerator, manifest)
        optimizers = _fitting_optimizers(accelerator, path, manifest, exactly)
    for model, values, exactly in weights:
        accelerator.strategy.load_model_state(model, values, exactly)
    for optimizer, saved in optimizers:
        accelerator.strategy.load_optimizer_state(optimizer, saved)
        optimizer_state.keep_formats(optimizer, saved)
    if state:
        _load_shared_state(accelerator, found)
        if accelerator.process_index < manifest.world_size:  # a process that was not there then keeps its own
            name = rank_part(accelerator.process_index)
            own = _of_form(_RANK, checkpoint.read_part(path, name), path, name)
            if accelerator.world.size == manifest.world_size:
                _load_buffers(accelerator, own["buffers"])
            set_random_state(own["random"])
    return manifest.info


def _load_buffers(accelerator: Accelerator, saved: list[dict[str, Tensor]]) -> None:
    for model, values in zip(accelerator.own_models, saved, strict=False):
        for name, buffer in model.named_buffers():
            value = values.get(own_name(name))
            if value is not None and value.shape == buffer.shape:
                buffer.copy_(value)


def _of_form(form: Mapping[str, type], value: Any, path: Path, part: str) -> dict[str, Any]:
    """``value``, if it is a dict with these keys and kinds: a file may be whole and yet not be ours."""
    wrong = [
        name for name, kind in form.items() if not isinstance(value, dict) or not isinstance(value.get(name), kind)
    ]
    if wrong:
        text = f"{path}: part {part!r} is damaged: {', '.join(wrong)} not there, or no {form[wrong[0]].__name__}"
        raise ValueError(f"{text}. Use another checkpoint.")
    return value  # type: ignore[no-any-return]


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
        if has_part(manifest.files, extra_part(number)):
            saved = saved | checkpoint.read_part(path, extra_part(number))
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
        saved: dict[str, Any] = {}
        for rank in range(manifest.world_size):
            name = optimizer_part(number, rank)
            if rank == 0 or has_part(manifest.files, name):  # others have something where each keeps a part of it
                part = _of_form(_OPTIMIZER, checkpoint.open_part(path, name)[0], path, name)
                saved = {**part, "slots": saved.get("slots", {}) | part["slots"]}
        names = optimizer_state.parameter_names(optimizer, accelerator.own_models)
        if lines := optimizer_state.differences(saved, optimizer, names):
            text = f"{path} was saved with another optimizer:\n  " + "\n  ".join(lines[:30])
            if strict:
                raise ValueError(
                    f"{text}\nTo take what fits, load with strict=False (in a task: strict_loading = False)."
                )
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
    models = len(accelerator.models)
    # Hooks may keep models apart from a checkpoint.
    more = not accelerator.load_hooks and has_part(manifest.files, model_part(models))
    pairs = {
        "models": (models, models + more),
        "optimizers": (len(accelerator.optimizers), optimizers),
        "schedulers": (len(accelerator.schedulers), len(state["schedulers"])),
        "loaders": (sum(not loader.evaluation for loader in accelerator.loaders), len(state["loaders"])),
    }
    for kind, (here, there) in pairs.items():
        if here != there:
            raise ValueError(f"{path} holds {there} {kind}, this run has {here}: prepare the same ones before loading.")


def _check_kinds(accelerator: Accelerator, state: dict[str, Any], path: Path, strict: bool) -> None:
    """See that schedulers are of the classes that were saved, and the same objects registered."""
    kinds = scheduler_kinds(accelerator.schedulers)
    pairs = zip(kinds, state["scheduler_kinds"], strict=True)
    lines = [f"scheduler: {there} in the checkpoint, {here} in this run" for here, there in pairs if here != there]
    registered = state["registered"]
    if missing := sorted(set(accelerator.registered) - set(registered)):
        lines.append(
            f"no state for {', '.join(missing)}; of what was registered it has {', '.join(registered) or 'none'}"
        )
    if lines:
        text = f"{path} was saved by another run:\n  " + "\n  ".join(lines)
        if strict:
            raise ValueError(f"{text}\nTo take what fits, load with strict=False (in a task: strict_loading = False).")
        warn(f"{text}\nWhat does not fit begins anew.")
    if left := sorted(set(registered) - set(accelerator.registered)):
        warn(f"{path} has a state for {', '.join(left)}, which nobody takes: it is not registered in this run.")


def _say_other_batches(accelerator: Accelerator, manifest: Manifest) -> None:
    now, then = facts(accelerator), manifest.info
    if then.get("precision", now["precision"]) != now["precision"]:
        there, here = then["precision"], now["precision"]
        warn(f"the checkpoint was saved with precision {there}, this run has {here}: it will train otherwise.")
    if None in (now["global_batch_size"], then.get("global_batch_size")):
        return
    if now["global_batch_size"] != then["global_batch_size"]:
        here, there = (
            f"{f['global_batch_size']} ({f['batch_size']} over {f['world_size']} processes, x {f['accumulate']})"
            for f in (now, then)
        )
        warn(f"the checkpoint was saved with a global batch of {there}, this run has {here}: it will train otherwise.")


def _load_shared_state(accelerator: Accelerator, state: dict[str, Any]) -> None:
    kinds = scheduler_kinds(accelerator.schedulers)
    there = zip(state["scheduler_kinds"], state["schedulers"], state["steps_since"], strict=True)
    for scheduler, kind, (saved_kind, saved, since) in zip(accelerator.schedulers, kinds, there, strict=True):
        if kind != saved_kind:
            continue
        scheduler.load_state_dict(saved)
        if isinstance(scheduler, PreparedScheduler):
            scheduler.resume(since)
    training = [loader for loader in accelerator.loaders if not loader.evaluation]
    evaluation = [loader for loader in accelerator.loaders if loader.evaluation]
    for loader, saved in zip(training, state["loaders"], strict=True):
        loader.load_state_dict(saved)
    for loader, saved in zip(evaluation, state["evaluation_loaders"], strict=False):
        loader.load_state_dict(saved)
    for model, order in zip(accelerator.models, state["reduction_orders"], strict=True):
        accelerator.strategy.take_reduction_order(model, order)
    if accelerator.scaler is not None and state.get("scaler") is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
    if accelerator.stream is not None and state.get("stream") is not None:
        accelerator.stream.state = state["stream"]
    for name, value in accelerator.registered.items():
        if name in state["registered"]:
            value.load_state_dict(state["registered"][name])


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
    untied = _untied(model, weights)
    lines += [f"{name}: one with {kept} in the model, other values in the checkpoint" for name, kept in untied.items()]
    if not lines:
        return weights
    more = f"\n  and {len(lines) - 30} more" if len(lines) > 30 else ""
    text = f"{path} was saved by another model:\n  " + "\n  ".join(lines[:30]) + more
    if strict:
        raise ValueError(f"{text}\nTo take what fits, load with strict=False (in a task: strict_loading = False).")
    warn(f"{text}\nWhat does not fit is left out.")
    return {name: value for name, value in weights.items() if name in own and name not in {**reshaped, **untied}}


def _untied(model: nn.Module, weights: dict[str, Any]) -> dict[str, str]:
    """Names of a tensor that the model has under another name too, where the weights have different values for both."""
    first: dict[int, str] = {}
    found = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        kept = first.setdefault(id(tensor), name)
        one, other = weights.get(kept), weights.get(name)
        if one is not other and one is not None and other is not None and not torch.equal(one[...], other[...]):
            found[name] = kept
    return found
