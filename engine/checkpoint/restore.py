"""Loading of a checkpoint into the objects of an Accelerator, and its comparison with a model.

`restore` changes no object until everything is checked and read, so a checkpoint that does not fit leaves the run as it
is: the digests of all files, the number and kinds of the objects, then the weights and states, which are read into
memory, and only then loaded. On an error in one process, all processes fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from torch import Tensor, nn

from ...common.messages import abbreviate, announce, format_count, warn
from ...common.remote_path import AnyPath, absolute
from ...strategies import World
from ...strategies.distributed import cut_like, is_sharded, strip_compile_prefix
from ..data import Loader
from ..optim import (
    LoadedOptimizer,
    PreparedOptimizer,
    PreparedScheduler,
    SavedSchedule,
    optimizer_state,
    resume_options,
)
from ..process import Prepared
from ..rng import isolated_random_state, set_random_state
from ..run_environment import warn_if_kernels_differ
from . import model_check
from .content import list_scheduler_kinds, run_metadata, sort_loaders
from .filesystem import RESTORE
from .open_checkpoint import OpenCheckpoint
from .parts import Manifest, extra_part, model_part, optimizer_part, rank_part
from .safetensors_file import Stored
from .train_state import OptimizerState, RankState, TrainState, check_form, open_train_state

LoadedFrom = MutableMapping[nn.Module, tuple[str, Manifest, int]]
"""For each loaded model, the path and manifest of its checkpoint, and the number of optimizer steps of the run."""

_OF_SCHEDULERS: tuple[Literal["schedulers", "scheduler_kinds", "steps_since", "scheduler_advances"], ...] = (
    "schedulers",
    "scheduler_kinds",
    "steps_since",
    "scheduler_advances",
)


def restore(
    accelerator: Prepared,
    opened: OpenCheckpoint,
    loaded_from: LoadedFrom,
    *,
    models: bool,
    state: bool,
    strict: bool | None = None,
    schedule: str | None = None,
    finish_epoch: bool = True,
) -> dict[str, Any]:
    """Restore a checkpoint or a part of it, and discard accumulated gradients.

    Args:
        accelerator: The Accelerator whose objects are restored.
        opened: The checkpoint, which is verified first.
        loaded_from: See `Checkpointer`.
        models: Restore the models' weights.
        state: Restore everything else, such as optimizers, schedulers, dataloaders and RNG states.
        strict: If False, load only what fits, with a warning. Default: the models' ``strict_loading``, else True.
        schedule: ``"saved"``, ``"script"`` or None; see `Accelerator.load_state`.
        finish_epoch: Start the next epoch if the state was saved after the last batch of an epoch. Default: True.

    Returns:
        The checkpoint's ``info``; see `Accelerator.load_state` for its ``epoch``.
    """
    world, manifest, unwrapped = accelerator.world, opened.manifest, accelerator.strategy.unwrapped_models
    exactly = all(getattr(model, "strict_loading", True) for model in unwrapped) if strict is None else strict
    opened.verify(world)
    with _read_together(world, opened):
        shared = _open_checked_state(accelerator, opened, exactly, asked=strict is not None) if state else None
        if state and not models:
            _check_not_replaced(accelerator, opened, loaded_from)
    chosen = _choose_models(accelerator, opened.path) if models else []
    layouts = {} if shared is None else _collect_layouts(accelerator, shared["registered"])
    with _read_together(world, opened):
        weights = _select_fitting_weights(accelerator, opened, chosen, strict)
        training = None if shared is None else _read_training(accelerator, opened, shared, layouts, exactly, schedule)
    for model, _, exact, frozen in weights:
        if frozen:  # all ranks compute the digests of these weights
            current = model_check.compute_digests(accelerator.strategy.unwrap(model), frozen, world)
            model_check.check_frozen(current, frozen, opened.path, exact)
    for model, values, exact, frozen in weights:
        accelerator.strategy.load_model_state(model, values, exact and not frozen)
        loaded_from[model] = str(absolute(opened.path)), manifest, accelerator.accumulation.steps
    if training is not None:
        _load_training(accelerator, manifest, training, loaded_from)
        resume_options.hold(training.optimizers, training.schedules, script=schedule == "script")
    accelerator.accumulation.drop_gradients()
    return _finish_epoch(_list_loaders(accelerator, False), manifest.info) if state and finish_epoch else manifest.info


@contextmanager
def _read_together(world: World, opened: OpenCheckpoint) -> Iterator[None]:
    """Return a context for reading a checkpoint; all processes fail if one fails or the checkpoint is replaced."""
    with world.failing_together():
        error: ValueError | None = None
        try:
            yield
        except ValueError as caught:
            error = caught
        try:
            opened.check_unchanged()  # first, because a replaced checkpoint may be the cause of the other error
        except ValueError as replaced:
            raise replaced from error
        if error is not None:
            raise error


# -- checks --------------------------------------------------------------------------------------------------------


def _open_checked_state(accelerator: Prepared, opened: OpenCheckpoint, strict: bool, asked: bool) -> TrainState:
    """Check the state that all ranks share against this run, and return it without reading its tensors."""
    shared = open_train_state(opened)
    _check_counts(accelerator, shared, opened, strict, asked)
    _check_kinds(accelerator.schedulers, set(accelerator.registered), shared, opened.path, strict)
    current = run_metadata(accelerator)
    _warn_batches_changed(current, opened.manifest.info)
    if current["kernels"] is not None and (saved := opened.manifest.info.get("kernels")) is not None:
        warn_if_kernels_differ(accelerator.world, saved)
    if strict and opened.manifest.info.get("precision") == current["precision"]:  # otherwise it has just warned
        _warn_dtypes_changed(accelerator.strategy.unwrapped_models, current["models"], opened)
    return shared


def _check_counts(accelerator: Prepared, state: TrainState, opened: OpenCheckpoint, strict: bool, asked: bool) -> None:
    """Check that as many objects are prepared as were saved; evaluation dataloaders are not counted.

    If a difference is permitted, warn, and remove the states that cannot be matched from ``state``.
    """
    path = opened.path
    optimizers = sum(opened.has(optimizer_part(n)) for n in range(len(accelerator.optimizers) + 1))
    pairs = {
        # Including those that hooks store elsewhere.
        "models": (len(accelerator.models), len(state["reduction_orders"])),
        "optimizers": (len(accelerator.optimizers), optimizers),
        "schedulers": (len(accelerator.schedulers), len(state["schedulers"])),
        "training dataloaders": (sum(not loader.evaluation for loader in accelerator.loaders), len(state["loaders"])),
    }
    for kind, (prepared, saved) in pairs.items():
        if prepared == saved:
            continue
        text = f"{path} contains {saved} {kind[:-1] if saved == 1 else kind}, but this run has {prepared}"
        # If no object of a kind is prepared, none silently starts over: the script evaluates, or prepares it later.
        # Loaders may also be created for each epoch. A Trainer, which requests strict loading, has prepared all its
        # objects.
        left_out = not asked and (kind == "training dataloaders" or (prepared == 0 and kind != "models"))
        if not left_out and (strict or kind in ("models", "optimizers")):
            raise ValueError(f"{text}. Prepare the same {kind} as the saved run before loading the checkpoint.")
        warn(
            f"{text}, so {kind} are not restored. To restore them, prepare the same {kind} before load_state. To "
            "load only weights, call load_state(..., state=False)."
        )
        if kind == "training dataloaders":
            state["loaders"] = []
        else:
            for name in _OF_SCHEDULERS:
                state[name] = []
    if len({len(state[name]) for name in _OF_SCHEDULERS}) > 1:
        raise ValueError(f"{path}: part 'state' is damaged: some schedulers are missing. {RESTORE}")


def _check_kinds(schedulers: list[Any], names: set[str], state: TrainState, path: AnyPath, strict: bool) -> None:
    """Check that schedulers have the saved classes, and that objects with the same ``names`` are registered."""
    kinds = list_scheduler_kinds(schedulers)
    pairs = zip(kinds, state["scheduler_kinds"], strict=False)
    lines = [f"scheduler: {old} in the checkpoint, {new} in this run" for new, old in pairs if new != old]
    registered = state["registered"]
    if missing := sorted(names - set(registered)):
        lines.append(
            f"registered objects: {', '.join(registered) or 'none'} in the checkpoint, which lacks {', '.join(missing)}"
        )
    if lines:
        text = (f"{path} was saved by a run with different objects:\n  ") + "\n  ".join(lines)
        if strict:
            raise ValueError(f"{text}\n{model_check.TO_LOAD_WHAT_FITS}")
        warn(f"{text}\nState that does not fit is not restored.")
    if left := sorted(set(registered) - names):
        warn(f"{path} contains state for {', '.join(left)}, which this run has not registered. This state is ignored.")


def _warn_batches_changed(current: dict[str, Any], saved: dict[str, Any]) -> None:
    """Warn if the precision or the batch size differ between the metadata of this run and of the saved one."""
    if saved.get("precision", current["precision"]) != current["precision"]:
        old, new = saved["precision"], current["precision"]
        warn(f"the checkpoint was saved with precision={old!r}, but this run uses {new!r}, so the results will differ.")
    if None in (current["global_batch_size"], saved.get("global_batch_size")):
        return
    if current["global_batch_size"] != saved["global_batch_size"]:
        new, old = (
            f"{f['global_batch_size']} (micro-batches of {f['batch_size']} over "
            f"{format_count(f['world_size'], 'process')}, accumulation {f['accumulate']})"
            for f in (current, saved)
        )
        warn(
            f"the checkpoint was saved with a global batch of {old}, but this run has {new}, so the results will "
            "differ."
        )


def _warn_dtypes_changed(models: list[nn.Module], current: list[str], opened: OpenCheckpoint) -> None:
    """Warn if weights were saved in other dtypes. ``current`` holds the fingerprints of the models."""
    for number, model in enumerate(models):
        fingerprints = opened.manifest.info.get("models")
        unchanged = isinstance(fingerprints, list) and fingerprints[number : number + 1] == [current[number]]
        if not unchanged and opened.has(model_part(number)):
            stored = opened.open_part(model_part(number))
            model_check.warn_dtypes_changed(model, _restore_compiled_names(model.state_dict(), stored), opened.path)


def _check_not_replaced(accelerator: Prepared, opened: OpenCheckpoint, loaded_from: LoadedFrom) -> None:
    """Check that models loaded from this path since the last optimizer step were loaded from the same save."""
    path, manifest = str(absolute(opened.path)), opened.manifest
    for model in accelerator.models:
        place, of_models, steps = loaded_from.get(model, (None, manifest, None))
        if (place, steps) == (path, accelerator.accumulation.steps) and not _is_identical_save(of_models, manifest):
            raise ValueError(
                f"{opened.path} was replaced after the models were loaded from it. Load the models and the state "
                "again in one load_state call."
            )


def _is_identical_save(first: Manifest, second: Manifest) -> bool:
    """Return whether two manifests belong to the same save. ``info`` may contain NaN, so it is not compared."""
    return (first.sequence, first.files) == (second.sequence, second.files)


# -- reading -------------------------------------------------------------------------------------------------------


def _choose_models(accelerator: Prepared, path: AnyPath) -> list[nn.Module]:
    """Call the load hooks, which may remove models from the list, and return the models to load."""
    chosen = list(accelerator.models)
    with accelerator.world.failing_together():
        for hook in accelerator.load_hooks.values():
            hook(chosen, str(path))
    return chosen


def _collect_layouts(accelerator: Prepared, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of registered objects that show how to shard their saved tensors; empty without sharding."""
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


class _ModelWeights(NamedTuple):
    """Weights to load into one model, sharded like it, and the digests of frozen ones that the checkpoint omits."""

    model: nn.Module
    values: dict[str, Any]
    strict: bool
    frozen: dict[str, str]


def _select_fitting_weights(
    accelerator: Prepared, opened: OpenCheckpoint, chosen: list[nn.Module], strict: bool | None
) -> list[_ModelWeights]:
    """Return the weights to load into each chosen model."""
    loads = []
    for number, model in enumerate(accelerator.models):
        if not any(model is candidate for candidate in chosen):
            continue
        module = accelerator.strategy.unwrap(model)
        exactly = getattr(module, "strict_loading", True) if strict is None else strict
        part = opened.part(model_part(number))
        model_check.compare(module, part.notes, opened.path)
        saved = part.unread()
        if opened.has(extra_part(number)):
            saved = saved | opened.read_part(extra_part(number))
        left_out = model_check.read_frozen_note(part.notes, opened.path)
        current = module.state_dict()
        saved = _restore_compiled_names(current, saved)
        fitting = model_check.check_weights(module, saved, opened.path, exactly, left_out)
        values = {n: cut_like(v, current.get(n)) if isinstance(v, Stored) else v for n, v in fitting.items()}
        loads.append(_ModelWeights(model, values, exactly, left_out))
    return loads


def _restore_compiled_names(names: Iterable[str], weights: dict[str, Any]) -> dict[str, Any]:
    """Return weights under the names in a model's own state, which have a prefix if submodules are compiled."""
    renamed = {strip_compile_prefix(name): name for name in names if name != strip_compile_prefix(name)}
    return {renamed.get(name, name): value for name, value in weights.items()} if renamed else weights


class _Training(NamedTuple):
    """State of a run except for its weights, read from a checkpoint and checked. ``of_rank`` is None on new ranks."""

    shared: TrainState
    of_rank: RankState | None
    optimizers: list[LoadedOptimizer]
    schedules: list[SavedSchedule]


def _read_training(
    accelerator: Prepared,
    opened: OpenCheckpoint,
    shared: TrainState,
    layouts: dict[str, Any],
    strict: bool,
    schedule: str | None,
) -> _Training:
    optimizers = _select_fitting_optimizers(
        accelerator.optimizers, accelerator.strategy.unwrapped_models, opened, strict
    )
    shared = cast(TrainState, load_into_memory(shared, {"registered": layouts}, {}))
    schedules = resume_options.match_schedules(accelerator.schedulers, accelerator.schedules_built, shared)
    _choose_schedule(opened.path, optimizers, accelerator.schedulers, schedules, schedule)
    for loader, saved in zip(_list_loaders(accelerator, False), shared["loaders"], strict=False):
        loader.check(saved)
    rank = accelerator.world.rank
    # A rank that was not saved keeps its own state.
    of_rank = _read_rank_state(rank, opened) if rank < opened.manifest.world_size else None
    return _Training(shared, of_rank, optimizers, schedules)


def _select_fitting_optimizers(
    optimizers: list[PreparedOptimizer], models: list[nn.Module], opened: OpenCheckpoint, strict: bool
) -> list[LoadedOptimizer]:
    """Return the state to load into each optimizer. Without ``strict``, an optimizer of another class is skipped."""
    loads, path = [], opened.path
    for number, prepared in enumerate(optimizers):
        optimizer = prepared.optimizer
        names = optimizer_state.name_parameters(optimizer, models)
        saved = optimizer_state.follow_replaced(_merge_optimizer_state(opened, number), optimizer, names)
        if lines := optimizer_state.list_differences(saved, optimizer, names):
            text = f"{path} was saved with a different optimizer:\n  " + abbreviate(lines, 30, "\n  ")
            if strict:
                raise ValueError(f"{text}\n{model_check.TO_LOAD_WHAT_FITS}")
            warn(f"{text}\nState that does not fit is not restored.")
            if saved["class"] != optimizer_state.name_class(optimizer):
                continue
        options = saved.get("built")
        state = optimizer_state.decode_by_name(saved, optimizer, names)
        groups = len(saved["groups"])
        loads.append(LoadedOptimizer(prepared, state, options if isinstance(options, list) else None, groups))
    return loads


def _merge_optimizer_state(opened: OpenCheckpoint, number: int) -> OptimizerState:
    first = optimizer_part(number)
    of_ranks = re.compile(rf"({first}-rank-\d{{5,}})\.json")
    names = [first, *(match[1] for match in map(of_ranks.fullmatch, sorted(opened.manifest.files)) if match)]
    parts = [check_form(OptimizerState, opened.open_part(name), opened.path, name) for name in names]
    merged = parts[-1]
    merged["slots"] = {name: slot for part in parts for name, slot in part["slots"].items()}
    return merged


def _choose_schedule(
    path: AnyPath,
    optimizers: list[LoadedOptimizer],
    schedulers: list[Any],
    saved_schedules: list[SavedSchedule],
    schedule: str | None,
) -> None:
    if schedule == "script":
        resume_options.follow_script(optimizers, saved_schedules)
        return
    # If a mismatch is allowed: a schedule keeps values for each group of parameters, so the saved one cannot continue
    # with other groups.
    regrouped = [loaded for loaded in optimizers if loaded.groups != len(loaded.prepared.param_groups)]
    if regrouped := [loaded for loaded in regrouped if resume_options.is_scheduled(loaded.prepared, schedulers)]:
        saved, current = regrouped[0].groups, len(regrouped[0].prepared.param_groups)
        warn(
            f"an optimizer has {format_count(saved, 'parameter group')} in {path}, but {current} in the script, so "
            "its learning rates and schedule come from the script."
        )
        resume_options.follow_script(regrouped, saved_schedules)
    if schedule is None:
        resume_options.compare(path, [loaded for loaded in optimizers if loaded not in regrouped], saved_schedules)


def _read_rank_state(rank: int, opened: OpenCheckpoint) -> RankState:
    path, name = opened.path, rank_part(rank)
    state = check_form(RankState, opened.read_part(name), path, name)
    if not all(isinstance(values, dict) for values in state["buffers"]):
        raise ValueError(f"{path}: part {name!r} is damaged: the items of 'buffers' are not dicts. {RESTORE}")
    return state


def load_into_memory(saved: Any, like: Any, once: dict[tuple[int, int], Tensor]) -> Any:
    """Return a state with its tensors loaded into memory.

    Where ``like`` has a sharded tensor of the same shape at the same place, only this process's shard is read. ``once``
    caches the tensors that were read, so tied tensors become one object again; pass an empty dict.
    """
    if isinstance(saved, Stored):
        alike = is_sharded(like) and like.shape == saved.shape
        key = id(saved), id(like) if alike else 0
        if key not in once:
            once[key] = cut_like(saved, like) if alike else saved.read()
        return once[key]
    if isinstance(saved, np.ndarray):
        return np.array(saved)  # the array shares memory with the file
    if type(saved) is dict:
        layouts = like if isinstance(like, Mapping) else {}
        return {name: load_into_memory(value, layouts.get(name), once) for name, value in saved.items()}
    if type(saved) in (list, tuple):
        alike = isinstance(like, list | tuple) and len(like) == len(saved)
        pairs = zip(saved, like if alike else [None] * len(saved), strict=True)
        return type(saved)(load_into_memory(value, layout, once) for value, layout in pairs)
    return saved


def compare_weights(model: nn.Module, opened: OpenCheckpoint, complete: bool) -> list[str]:
    """Return the differences between the names and shapes of a checkpoint's first model and those of ``model``.

    The list is empty if the checkpoint has no model. Pass ``complete=False`` if the model is not completely built;
    missing and unexpected names are then not reported.

    Raises:
        ValueError: If the checkpoint is damaged, or was changed after it was opened.
    """
    if not opened.has(model_part(0)):
        return []
    part = opened.part(model_part(0))
    saved = part.unread()
    if opened.has(extra_part(0)):
        saved = saved | opened.read_part(extra_part(0))
    return model_check.list_differences(model, saved, complete, model_check.read_frozen_note(part.notes, opened.path))


# -- loading -------------------------------------------------------------------------------------------------------


def _load_training(accelerator: Prepared, manifest: Manifest, training: _Training, loaded_from: LoadedFrom) -> None:
    shared, of_rank, optimizers, _ = training
    for prepared, saved, *_ in optimizers:
        accelerator.strategy.load_optimizer_state(prepared.optimizer, saved)
        optimizer_state.keep_formats(prepared.optimizer, saved)
    _load_shared_state(accelerator, shared, manifest)
    world_unchanged = accelerator.world.size == manifest.world_size
    buffers = of_rank["buffers"] if of_rank is not None and world_unchanged else []
    _load_buffers(accelerator, manifest, buffers, loaded_from)
    accelerator.rng.draw_apart()  # a rank that is not in the checkpoint draws its own numbers
    if of_rank is not None:
        random = of_rank["random"]
        set_random_state(random)
        for loader, states in zip(sort_loaders(accelerator.loaders), random["loaders"], strict=False):
            loader.load_reading_state(states)
    if accelerator.rng.stream is not None and (stream := shared["stream"]) is not None:
        # Last, because with one process the stream is the state of that process, and the state saved by several is rank
        # zero's.
        accelerator.rng.stream.go_to(stream)


def _load_shared_state(accelerator: Prepared, state: TrainState, manifest: Manifest) -> None:
    _load_schedulers(accelerator, state, manifest)
    accelerator.accumulation.counts_calls = state["counts_calls"]  # before the loaders form groups
    for loader, saved in zip(_list_loaders(accelerator, False), state["loaders"], strict=False):
        loader.load_state_dict(saved)
    for loader, saved in zip(_list_loaders(accelerator, True), state["evaluation_loaders"], strict=False):
        loader.load_state_dict(saved)
    for model, order in zip(accelerator.models, state["reduction_orders"], strict=True):
        accelerator.strategy.take_reduction_order(model, order)
    if (loss_scale := accelerator.accumulation.loss_scale) is not None and (scaler := state["scaler"]) is not None:
        loss_scale.load_state_dict(scaler)
    for name, value in accelerator.registered.items():
        if name in state["registered"]:
            value.load_state_dict(state["registered"][name])


def _load_schedulers(accelerator: Prepared, state: TrainState, manifest: Manifest) -> None:
    kinds = list_scheduler_kinds(accelerator.schedulers)
    samples = run_metadata(accelerator)["global_batch_size"]
    batch_size_unchanged = samples is not None and samples == manifest.info.get("global_batch_size")
    states = zip(*(state[name] for name in _OF_SCHEDULERS), strict=True)
    for scheduler, kind, (saved, saved_kind, *place) in zip(accelerator.schedulers, kinds, states, strict=False):
        if kind != saved_kind:
            continue
        if isinstance(scheduler, PreparedScheduler):
            scheduler.resume(saved, *place, batch_size_unchanged=batch_size_unchanged)
        else:
            scheduler.load_state_dict(saved)


def _load_buffers(
    accelerator: Prepared, manifest: Manifest, saved: list[dict[str, Tensor]], loaded_from: LoadedFrom
) -> None:
    """Restore this process's buffers in the models that were loaded from this checkpoint."""
    loaded = [loaded_from.pop(model, None) for model in accelerator.models]
    for model, values, source in zip(accelerator.strategy.unwrapped_models, saved, loaded, strict=False):
        if source is None or not _is_identical_save(source[1], manifest):
            continue
        for name, buffer in model.named_buffers():
            value = values.get(strip_compile_prefix(name))
            if isinstance(value, Tensor) and value.shape == buffer.shape and not is_sharded(buffer):
                buffer.copy_(value)


def _finish_epoch(loaders: list[Loader], info: dict[str, Any]) -> dict[str, Any]:
    """Start the next epoch if the state was saved after the last batch of one; return the updated info."""
    epochs = [loader.epoch for loader in loaders]
    with isolated_random_state():  # so that an empty pass does not change what the process draws next
        finished = [loader.finish_epoch() for loader in loaders]
    if not any(finished):
        return info
    announce(
        f"the checkpoint was saved after the last batch of epoch {epochs[finished.index(True)]}, so the dataloader "
        "starts the next epoch. If your loop resumes in the saved epoch, call load_state(finish_epoch=False). The "
        "first pass over the dataloader then yields no batches."
    )
    # A number that differs from the loader's is the script's own count.
    return info | {"epoch": epochs[0] + 1} if finished[0] and info.get("epoch") == epochs[0] else info


def _list_loaders(accelerator: Prepared, evaluation: bool) -> list[Loader]:
    return [loader for loader in accelerator.loaders if loader.evaluation == evaluation]
