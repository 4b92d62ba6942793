"""A checkpoint goes back into what an Accelerator has prepared, once it is known on every process that it fits."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from ..strategies import World, warn
from ..strategies.shards import cut_like, is_sharded
from . import architecture, as_built, checkpoint, disk, optimizer_state
from .as_built import LoadedOptimizer
from .export import own_name
from .manifest import Manifest, read_manifest, verify
from .optimizer import PreparedScheduler
from .parts import has_part
from .random_state import set_random_state
from .snapshot import extra_part, facts, in_order, model_part, optimizer_part, rank_part, scheduler_kinds
from .stored import Stored

if TYPE_CHECKING:
    from .accelerator import Accelerator
    from .loader import Loader

_STATE = {"schedulers": list, "steps_since": list, "loaders": list, "evaluation_loaders": list} | {
    "scheduler_kinds": list,
    "reduction_orders": list,
    "registered": dict,
}
_OF_SCHEDULERS = ("schedulers", "scheduler_kinds", "steps_since", "scheduler_advances")
_RANK = {"random": dict, "buffers": list}
_OPTIMIZER = {"class": str, "groups": list} | dict.fromkeys(("shapes", "formats", "slots", "unnamed", "others"), dict)


def load(
    accelerator: Accelerator,
    path: Path,
    *,
    models: bool,
    state: bool,
    strict: bool | None = None,
    schedule: str | None = None,
) -> dict[str, Any]:
    """Restore a checkpoint, or a part of it; returns its info. Gradients that were gathered before are dropped.

    All of it is read and compared before anything is changed, and nothing is on any process unless it fits on all of
    them. Each compares the digests of its share of the files: they see one file system, as they do to save.

    Raises:
        ValueError: if it is no checkpoint, is damaged, another model's or set-up's, or was replaced while it was read;
            nothing is changed then. What a scheduler's, loader's or registered object's own ``load_state_dict`` raises
            comes later: models and optimizers are loaded by then.
        RuntimeError: in the place of these on the processes that found nothing wrong.
    """
    world = accelerator.world
    with world.together():
        manifest = read_manifest(path)
    manifest = world.broadcast(manifest)
    found: dict[str, Any] = {}
    optimizers: list[LoadedOptimizer] = []
    wanted = (getattr(own, "strict_loading", True) for own in accelerator.own_models)
    exactly = all(wanted) if strict is None else strict
    with _reading(world, path, manifest):
        _verify_share(world, path, manifest)
    with _reading(world, path, manifest):  # of files that some process found whole
        if state:
            found = _checked_state(accelerator, path, manifest, exactly)
            if not models:
                _check_same(accelerator, path, manifest)
    chosen = _chosen_models(accelerator, path) if models else []
    layouts = _layouts(accelerator, found.get("registered", {}))
    own: dict[str, Any] = {}
    with _reading(world, path, manifest):
        weights = _fitting_weights(accelerator, path, manifest, chosen, strict)
        if state:
            optimizers = _fitting_optimizers(accelerator, path, manifest, exactly)
            found = in_memory(found, {"registered": layouts}, {})
            _choose_schedule(accelerator, path, optimizers, found, schedule)
            for loader, saved in zip(_training(accelerator), found["loaders"], strict=False):
                loader.check(saved)
            if accelerator.process_index < manifest.world_size:  # a process that was not there then keeps its own
                own = _own_part(accelerator, path)
    for model, values, fully in weights:
        accelerator.strategy.load_model_state(model, values, fully)
        accelerator.loaded_from[model] = os.path.abspath(path), manifest, accelerator.steps
    if state:
        _load_training(accelerator, manifest, found, own, optimizers)
        as_built.hold(accelerator, optimizers, found, script=schedule == "script")
    accelerator.drop_gradients()
    return manifest.info


def _load_training(
    accelerator: Accelerator,
    manifest: Manifest,
    found: dict[str, Any],
    own: dict[str, Any],
    optimizers: list[LoadedOptimizer],
) -> None:
    """Load all but the weights: optimizers, what all processes share, and what this one alone knew."""
    for optimizer, saved, *_ in optimizers:
        accelerator.strategy.load_optimizer_state(optimizer, saved)
        optimizer_state.keep_formats(optimizer, saved)
    _load_shared_state(accelerator, found, manifest)
    same_world = accelerator.world.size == manifest.world_size
    _load_buffers(accelerator, manifest, own["buffers"] if own and same_world else [])
    accelerator.draw_apart()  # a rank that the checkpoint knows nothing of draws numbers of its own
    if own:
        set_random_state(own["random"])
        for loader, states in zip(in_order(accelerator.loaders), own["random"].get("loaders", ()), strict=False):
            loader.load_reading_state(states)


@contextmanager
def _reading(world: World, path: Path, manifest: Manifest) -> Iterator[None]:
    """A block of reading that all processes enter; all fail if one does, or if the checkpoint was replaced meanwhile.

    Another job may save to the same path: then parts of two states would come together.
    """
    with world.together():
        error: ValueError | None = None
        try:
            yield
        except ValueError as caught:
            error = caught
        try:
            replaced = not _is(read_manifest(path), manifest)
        except ValueError:
            replaced = True
        if replaced:
            raise ValueError(f"{path} was replaced while it was read. Nothing is changed; load it again.") from error
        if error is not None:
            raise error


def _is(one: Manifest, other: Manifest) -> bool:
    """Whether both are of one save. What is noted beside may hold NaN, which equals nothing."""
    return (one.sequence, one.files) == (other.sequence, other.files)


def _verify_share(world: World, path: Path, manifest: Manifest) -> None:
    """See that all files are there, and that this process's share of them is as it was written."""
    verify(path, digests=False)
    files = sorted(manifest.files, key=lambda name: (-manifest.files[name]["bytes"], name))
    for name in files[world.rank :: world.size]:
        disk.check_file(path, name, manifest.files[name], digests=True)


def _checked_state(accelerator: Accelerator, path: Path, manifest: Manifest, strict: bool) -> dict[str, Any]:
    """What all processes share, its tensors unread."""
    if not has_part(manifest.files, "state"):
        raise ValueError(f"{path} holds weights only, so no run can go on from it: load them into a model before fit.")
    found = _of_form(_STATE, checkpoint.open_part(path, "state")[0], path, "state")
    # Checkpoints from before it was saved: each optimizer step advanced a schedule by one.
    found.setdefault("scheduler_advances", [1] * len(found["schedulers"]))
    _of_form({"scheduler_advances": list}, found, path, "state")
    _check_counts(accelerator, found, path, manifest, strict)
    _check_kinds(accelerator, found, path, strict)
    _say_other_batches(accelerator, manifest)
    if strict:
        _say_other_formats(accelerator, path, manifest)
    return found


def _check_same(accelerator: Accelerator, path: Path, manifest: Manifest) -> None:
    """See that this is the save that the models were loaded from just before, if they were from this path."""
    for model in accelerator.models:
        place, of_models, steps = accelerator.loaded_from.get(model, (None, manifest, None))
        if (place, steps) == (os.path.abspath(path), accelerator.steps) and not _is(of_models, manifest):
            raise ValueError(f"{path} was replaced after the models were loaded from it. Load it again, both together.")


def _chosen_models(accelerator: Accelerator, path: Path) -> list[nn.Module]:
    """The models that hooks leave to be loaded."""
    chosen = list(accelerator.models)
    with accelerator.world.together():
        for hook in accelerator.load_hooks.values():
            hook(chosen, str(path))
    return chosen


def _layouts(accelerator: Accelerator, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The state of what is registered as it is now, where it may show how tensors lie on the processes."""
    if not accelerator.strategy.sharded:
        return {}
    return {
        name: getattr(value, "state_layout", value.state_dict)()
        for name, value in accelerator.registered.items()
        if _holds_tensors(saved.get(name))
    }


def _holds_tensors(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, Stored) or any(map(_holds_tensors, items))


def registered_in(path: Path) -> dict[str, Any]:
    """The states of what was registered, their tensors unread; none of a checkpoint of weights only.

    Raises:
        ValueError: if it is no checkpoint, or is damaged.
    """
    if not has_part(read_manifest(path).files, "state"):
        return {}
    return _of_form(_STATE, checkpoint.open_part(path, "state")[0], path, "state")["registered"]  # type: ignore[no-any-return]


def weight_differences(model: nn.Module, path: Path, complete: bool) -> list[str]:
    """Return the names and shapes in which a checkpoint's first model is not ``model``; see `architecture.differences`.

    Raises:
        ValueError: if it is no checkpoint, or is damaged.
    """
    files = read_manifest(path).files
    if not has_part(files, model_part(0)):
        return []
    saved = checkpoint.open_part(path, model_part(0))[0]
    if has_part(files, extra_part(0)):
        saved = saved | checkpoint.read_part(path, extra_part(0))
    return architecture.differences(model, saved, complete)


def in_memory(saved: Any, like: Any, once: dict[tuple[int, int], Tensor]) -> Any:
    """A state with its tensors read.

    Args:
        saved: the state.
        like: another one; where it has a sharded tensor at the same place, this process's part is read, laid out so.
        once: those that were read already, so that tied ones are one object again.
    """
    if isinstance(saved, Stored):
        alike = is_sharded(like) and like.shape == saved.shape
        key = id(saved), id(like) if alike else 0
        if key not in once:
            once[key] = cut_like(saved, like) if alike else saved.read()
        return once[key]
    if isinstance(saved, np.ndarray):
        return np.array(saved)  # it lies on the file
    if type(saved) is dict:
        there = like if isinstance(like, Mapping) else {}
        return {name: in_memory(value, there.get(name), once) for name, value in saved.items()}
    if type(saved) in (list, tuple):
        alike = isinstance(like, list | tuple) and len(like) == len(saved)
        pairs = zip(saved, like if alike else [None] * len(saved), strict=True)
        return type(saved)(in_memory(value, one, once) for value, one in pairs)
    return saved


def _own_part(accelerator: Accelerator, path: Path) -> dict[str, Any]:
    """What this process alone knew."""
    name = rank_part(accelerator.process_index)
    own = _of_form(_RANK, checkpoint.read_part(path, name), path, name)
    if not all(isinstance(values, dict) for values in own["buffers"]):
        raise ValueError(f"{path}: part {name!r} is damaged: buffers hold no dicts. Use another checkpoint.")
    return own


def _training(accelerator: Accelerator) -> list[Loader]:
    return [loader for loader in accelerator.loaders if not loader.evaluation]


def _load_buffers(accelerator: Accelerator, manifest: Manifest, saved: list[dict[str, Tensor]]) -> None:
    """Give the models that were loaded from this checkpoint, now or just before, the buffers that this process had."""
    loaded = [accelerator.loaded_from.pop(model, None) for model in accelerator.models]
    for model, values, source in zip(accelerator.own_models, saved, loaded, strict=False):
        if source is None or not _is(source[1], manifest):
            continue
        for name, buffer in model.named_buffers():
            value = values.get(own_name(name))
            if isinstance(value, Tensor) and value.shape == buffer.shape and not is_sharded(buffer):
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
    accelerator: Accelerator, path: Path, manifest: Manifest, chosen: list[nn.Module], strict: bool | None
) -> list[tuple[nn.Module, dict[str, Any], bool]]:
    """For each of the chosen models what it is to load, laid out over the processes as it is."""
    loads = []
    for number, model in enumerate(accelerator.models):
        if not any(model is kept for kept in chosen):
            continue
        own = accelerator.strategy.unwrap(model)
        exactly = getattr(own, "strict_loading", True) if strict is None else strict
        saved, notes = checkpoint.open_part(path, model_part(number))
        architecture.compare(own, notes, path)
        if has_part(manifest.files, extra_part(number)):
            saved = saved | checkpoint.read_part(path, extra_part(number))
        now = own.state_dict()
        saved = _as_named_in(now, saved)
        fits = architecture.check_weights(own, saved, path, exactly)
        values = {n: cut_like(v, now.get(n)) if isinstance(v, Stored) else v for n, v in fits.items()}
        loads.append((model, values, exactly))
    return loads


def _fitting_optimizers(
    accelerator: Accelerator, path: Path, manifest: Manifest, strict: bool
) -> list[LoadedOptimizer]:
    """For each optimizer the state that it is to load."""
    loads = []
    for number, prepared in enumerate(accelerator.optimizers):
        optimizer = prepared.optimizer
        saved: dict[str, Any] = {}
        first = optimizer_part(number)
        others = re.compile(rf"({first}-rank-\d{{5,}})\.json")  # of processes that each keep a part of it
        for name in (first, *(found[1] for found in map(others.fullmatch, sorted(manifest.files)) if found)):
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
        options = saved.get("built")
        state = optimizer_state.numbered(saved, optimizer, names)
        there = len(saved["groups"])
        loads.append(LoadedOptimizer(optimizer, state, options if isinstance(options, list) else None, there))
    return loads


def _choose_schedule(
    accelerator: Accelerator, path: Path, optimizers: list[LoadedOptimizer], state: dict[str, Any], schedule: str | None
) -> None:
    """Decide whose learning rates and schedules hold; see `Saving.load_state`."""
    if schedule == "script":
        as_built.follow_script(accelerator, optimizers, state)
        return
    # Where not all has to fit: a schedule keeps values for each group of parameters, so the saved one can't go on.
    regrouped = [one for one in optimizers if one.groups != len(one.optimizer.param_groups)]
    if regrouped := [one for one in regrouped if as_built.is_scheduled(accelerator, one.optimizer)]:
        warn(f"{path} has another number of groups of parameters: their learning rates and schedules are the script's.")
        as_built.follow_script(accelerator, regrouped, state)
    if schedule is None:
        as_built.compare(accelerator, path, [one for one in optimizers if one not in regrouped], state)


def _as_named_in(now: Iterable[str], weights: dict[str, Any]) -> dict[str, Any]:
    """Weights under the names in a model's own state, of which parts may be compiled."""
    renamed = {own_name(name): name for name in now if name != own_name(name)}
    return {renamed.get(name, name): value for name, value in weights.items()} if renamed else weights


def _check_counts(
    accelerator: Accelerator, state: dict[str, Any], path: Path, manifest: Manifest, strict: bool
) -> None:
    """See that as much is prepared as was saved. Evaluation may change: its loaders have no part in training.

    What there is another number of is left out of ``state`` where not all has to fit.
    """
    optimizers = sum(has_part(manifest.files, optimizer_part(n)) for n in range(len(accelerator.optimizers) + 1))
    pairs = {
        "models": (len(accelerator.models), len(state["reduction_orders"])),  # also those that hooks keep elsewhere
        "optimizers": (len(accelerator.optimizers), optimizers),
        "schedulers": (len(accelerator.schedulers), len(state["schedulers"])),
        "loaders": (sum(not loader.evaluation for loader in accelerator.loaders), len(state["loaders"])),
    }
    for kind, (here, there) in pairs.items():
        if here == there:
            continue
        text = f"{path} holds {there} {kind}, this run has {here}"
        if strict or kind in ("models", "optimizers"):
            raise ValueError(f"{text}: the same ones have to be there before it is loaded.")
        warn(f"{text}: they begin anew.")
        for name in _OF_SCHEDULERS if kind == "schedulers" else (kind,):
            state[name] = []
    if len({len(state[name]) for name in _OF_SCHEDULERS}) > 1:
        raise ValueError(f"{path}: part 'state' is damaged: its schedulers are not all there. Use another checkpoint.")


def _check_kinds(accelerator: Accelerator, state: dict[str, Any], path: Path, strict: bool) -> None:
    """See that schedulers are of the classes that were saved, and the same objects registered."""
    kinds = scheduler_kinds(accelerator.schedulers)
    pairs = zip(kinds, state["scheduler_kinds"], strict=False)
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


def _say_other_formats(accelerator: Accelerator, path: Path, manifest: Manifest) -> None:
    now, then = facts(accelerator), manifest.info
    if then.get("precision") != now["precision"]:
        return  # and that is said
    for number, model in enumerate(accelerator.own_models):
        known = then.get("models")
        same = isinstance(known, list) and known[number : number + 1] == [now["models"][number]]
        if not same and has_part(manifest.files, model_part(number)):
            stored = checkpoint.open_part(path, model_part(number))[0]
            architecture.say_other_formats(model, _as_named_in(model.state_dict(), stored), path)


def _load_schedulers(accelerator: Accelerator, state: dict[str, Any], manifest: Manifest) -> None:
    kinds = scheduler_kinds(accelerator.schedulers)
    samples = facts(accelerator)["global_batch_size"]
    same_batch = samples is not None and samples == manifest.info.get("global_batch_size")
    there = zip(*(state[name] for name in _OF_SCHEDULERS), strict=True)
    for scheduler, kind, (saved, saved_kind, *place) in zip(accelerator.schedulers, kinds, there, strict=False):
        if kind != saved_kind:
            continue
        if isinstance(scheduler, PreparedScheduler):
            scheduler.resume(saved, *place, same_batch=same_batch)
        else:
            scheduler.load_state_dict(saved)


def _load_shared_state(accelerator: Accelerator, state: dict[str, Any], manifest: Manifest) -> None:
    _load_schedulers(accelerator, state, manifest)
    evaluation = [loader for loader in accelerator.loaders if loader.evaluation]
    for loader, saved in zip(_training(accelerator), state["loaders"], strict=False):
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
