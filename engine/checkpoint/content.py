"""Content of a checkpoint: what may be saved, and the collection of the state of all prepared objects."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.messages import abbreviate, name_type, warn
from ...common.remote_path import AnyPath, RemotePath
from ...strategies import World
from ...strategies.distributed import is_sharded, local
from ...strategies.processes import identify_process
from ..metrics import metric_state
from ..optim import PreparedScheduler, optimizer_state
from ..parameter_names import make_view_key, strip_compile_prefix
from ..rng import random_state
from ..run_environment import describe_kernels
from . import model_check, store
from .json_codec import decode, encode
from .parts import STATE, Files, TensorFile, encode_part, extra_part, model_part, optimizer_part, rank_part
from .train_state import OptimizerState, RandomState, RankState, TrainState

if TYPE_CHECKING:
    from ..accelerator import Accelerator
    from ..data import Loader

_RESERVED = re.compile(r"(model|optimizer)(-.*)?|(extra|rank)-.*|state|manifest|unfinished", re.IGNORECASE)
"""Pattern of reserved part names: the engine's own parts (see `train_state`), ``manifest`` and ``unfinished``."""


class Counts:
    """Wrapper of a metric object that saves and restores the metric's state of every process."""

    def __init__(self, metric: nn.Module, world: World) -> None:
        self.metric = metric
        self._objects = metric_state.find(metric)
        self._world = world

    def state_dict(self) -> dict[str, Any]:
        """Return the metric's states on all processes. Call this method on all ranks."""
        return metric_state.collect_states(self._objects, set(), self._world)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the metric's state, even if the world size differs from that of the saved run.

        Raises:
            ValueError: If the world size differs and the state cannot be split over the processes.
        """
        metric_state.load(self._objects, state_dict, self._world)


def register(registered: dict[str, Any], objects: tuple[Any, ...], named: dict[str, Any], world: World) -> None:
    """Register objects, whose states become part of each checkpoint unless only weights are saved.

    The objects are added to ``registered``. A load matches ``objects`` by class name and position, and ``named``
    objects by name.

    Raises:
        TypeError: If an object has no ``state_dict`` or no ``load_state_dict``.
        ValueError: If another object is registered under one of the names.
    """
    for number, value in enumerate(objects, start=len(registered)):
        while (name := f"{type(value).__name__}_{number}") in registered or name in named:
            number += 1
        named[name] = value
    for name, value in named.items():
        holder = registered.get(name)
        if holder is not None and value is not (holder.metric if isinstance(holder, Counts) else holder):
            raise ValueError(
                f"register_for_checkpointing({name}=...): another object is registered under this name. Choose a "
                "different name."
            )
        if lacking := [method for method in ("state_dict", "load_state_dict") if not hasattr(value, method)]:
            raise TypeError(
                f"register_for_checkpointing: {name} is {name_type(value)} without {' and '.join(lacking)}, but a "
                "registered object must have the methods state_dict and load_state_dict. Define both methods."
            )
        is_metric = isinstance(value, nn.Module) and hasattr(value, "compute") and metric_state.find(value)
        registered[name] = Counts(value, world) if is_metric else value


def check_places(call: str, places: Mapping[str, Any], also: Any) -> None:
    """Check the types of the places to which a checkpoint is saved.

    Args:
        call: Name of the user's call, for errors.
        places: Path or URL of the checkpoint, by the name of its argument; empty if it is named automatically.
        also: The call's argument ``also``: a list of further paths and URLs.

    Raises:
        TypeError: If a place is neither a path nor a URL, or ``also`` is not a list of them.
    """
    if not isinstance(also, Sequence) or isinstance(also, str):
        wanted = f"[{str(also)!r}]" if isinstance(also, str | os.PathLike | RemotePath) else "such a list"
        raise TypeError(f"{call}(also={also!r:.100}) must be a list of paths or URLs. Pass {wanted}.")
    for argument, place in (*places.items(), *(("also", place) for place in also)):
        if not isinstance(place, str | os.PathLike | RemotePath):
            raise TypeError(
                f"{call}({argument}={place!r:.100}) must be a path or a URL, not {name_type(place)}. Pass a str or a "
                "Path."
            )


def check_part_names(parts: dict[str, Any]) -> None:
    """Check the names of the parts that a user adds to a checkpoint.

    Raises:
        ValueError: If a name is reserved.
        TypeError: If ``parts`` is not a dict of states by name.
    """
    if not isinstance(parts, Mapping) or not all(isinstance(name, str) for name in parts):
        raise TypeError(f"save_state(parts={parts!r:.100}) must be a dict of states by name.")
    for name in parts:
        if _RESERVED.fullmatch(name):
            raise ValueError(
                f"save_state(parts=...): the name {name!r} is reserved for a checkpoint's own files (model, model-*, "
                "optimizer, optimizer-*, extra-*, rank-*, state, manifest, unfinished). Choose another name, such as "
                f"'my_{name}'."
            )


class ErrorCollector:
    """Context manager for blocks that all run even if one fails, because other processes may be waiting for them."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception):
            self._error = self._error or error
        return error is None or isinstance(error, Exception)

    def raise_first(self) -> None:
        """Raise the first error, if a block failed."""
        if self._error is not None:
            raise self._error


def collect(
    accelerator: Accelerator,
    target: AnyPath,
    parts: dict[str, Any],
    weights_only: bool,
    frozen: Sequence[Mapping[str, str]] = (),
) -> Files:
    """Return the content of the files that this process adds to a checkpoint. Call this function on all ranks.

    Tensors of models and optimizers are not copied. Sharded weights are gathered if there are save hooks, which may
    write files for ``target``. ``frozen`` contains, for each model, the digests of the weights to omit, by name.

    Raises:
        ValueError: If the function is called during gradient accumulation, unless ``weights_only`` is True, or a part
            is not valid.
        TypeError: If a state contains something that is not data.
    """
    if accelerator.accumulation.position and not weights_only:
        raise ValueError(
            "save_state was called during gradient accumulation, but a checkpoint does not contain accumulated "
            "gradients. Call save_state when accelerator.sync_gradients is True, after optimizer.step()."
        )
    rank, files, errors = accelerator.world.rank, dict[str, Any](), ErrorCollector()
    weights = _collect_weights(accelerator, target, errors)
    for number, (model, state) in enumerate(zip(accelerator.models, weights, strict=True)):
        with errors:
            left_out = frozen[number] if frozen else {}
            files |= (
                {}
                if state is None
                else _collect_model_files(rank, number, accelerator.strategy.unwrap(model), state, left_out)
            )
    for name, content in parts.items():
        with errors:
            files |= encode_part(name, content, rank)
    if not weights_only:
        with errors:
            files |= encode_optimizers(accelerator)
        # Called on every process, because registered objects may use collectives to determine their state.
        with errors:
            files |= encode_part(STATE, _collect_shared_state(accelerator), rank)
        with errors:
            has_rank_buffers = rank > 0 and accelerator.strategy.has_rank_buffers
            buffers = _collect_buffers(accelerator.unwrapped_models) if has_rank_buffers else []
            files |= encode_rank_state(rank, collect_rank_random_state(accelerator.loaders), buffers)
    errors.raise_first()
    if not weights_only and not accelerator.checkpointer.save_hooks:  # a hook may write them
        _warn_unsaved(accelerator.unwrapped_models, [p.optimizer for p in accelerator.optimizers], files)
    return files


def _collect_model_files(
    rank: int, number: int, model: nn.Module, weights: dict[str, Any], frozen: Mapping[str, str]
) -> Files:
    """Return the files of one unwrapped model that this process writes."""
    tensors, extra = _split_tensors({name: value for name, value in weights.items() if name not in frozen})
    notes = model_check.make_notes(model)
    if frozen:
        notes |= model_check.make_frozen_note(frozen)
    files = encode_part(model_part(number), tensors, rank, notes)
    return files | (encode_part(extra_part(number), extra, rank) if extra else {})


def encode_optimizers(accelerator: Accelerator) -> Files:
    """Return the files of the optimizers' states that this process writes. Call this function on all ranks."""
    rank, strategy, errors = accelerator.world.rank, accelerator.strategy, ErrorCollector()
    files: Files = {}
    for number, prepared in enumerate(accelerator.optimizers):
        with errors:
            optimizer = prepared.optimizer
            names = optimizer_state.name_parameters(optimizer, accelerator.unwrapped_models)
            state: OptimizerState = optimizer_state.encode_by_name(
                strategy.optimizer_state(optimizer), optimizer, names
            )
            state["built"] = prepared.effective_options
            if strategy.keeps_apart(optimizer):
                files |= encode_part(optimizer_part(number, rank), state)
            else:
                files |= encode_part(optimizer_part(number), state, rank)
    errors.raise_first()
    return files


def _warn_unsaved(models: list[nn.Module], optimizers: list[Optimizer], files: Files) -> None:
    """Warn about parameters that an optimizer updates but that are not saved in any file."""
    unknown = {id(p): p for optimizer in optimizers for p in optimizer_state.find_unowned_parameters(optimizer, models)}
    if not unknown:
        return
    written = [content for content in files.values() if isinstance(content, TensorFile)]
    saved = {make_view_key(tensor) for content in written for tensor in content.tensors.values()}
    shapes = [tuple(p.shape) for p in unknown.values() if make_view_key(local(p.detach())) not in saved]
    if shapes:
        warn(
            f"an optimizer updates parameters that are not in a prepared model (shapes: {abbreviate(shapes, 5)}). "
            "Their optimizer state is saved, but not their values, so a resumed run "
            "would start with different values. Pass their module to prepare() or register_for_checkpointing()."
        )


def select_optimizer_files(files: Files) -> set[str]:
    """Return the names of the ``files`` that contain an optimizer's state."""
    first = optimizer_part(0)
    return {name for name in files if name.partition(".")[0] == first or name.startswith(f"{first}-")}


def collect_rank_random_state(loaders: list[Loader]) -> RandomState:
    """Return this process's RNG state, and the state of each dataloader on this process; see `Loader.reading_state`."""
    readers = [loader.reading_state() for loader in sort_loaders(loaders)]
    return cast(RandomState, {**random_state(), "loaders": readers})


def sort_loaders(loaders: list[Loader]) -> list[Loader]:
    """Return training dataloaders before evaluation dataloaders, because the latter may be added or removed."""
    return sorted(loaders, key=lambda loader: loader.evaluation)


def encode_rank_state(rank: int, random: RandomState, buffers: list[dict[str, Tensor]]) -> Files:
    """Return the files with the state that belongs to process ``rank`` alone.

    ``buffers`` is empty on rank zero, and on all ranks if rank zero's buffers apply to them.
    """
    return encode_part(rank_part(rank), RankState(random=random, buffers=buffers))


def _collect_buffers(models: list[nn.Module]) -> list[dict[str, Tensor]]:
    """Return each model's persistent buffers on this process, except sharded ones."""
    states = [model.state_dict() for model in models]
    return [
        {strip_compile_prefix(name): b for name, b in model.named_buffers() if name in state and not is_sharded(b)}
        for model, state in zip(models, states, strict=True)
    ]


def _collect_weights(accelerator: Accelerator, target: AnyPath, errors: ErrorCollector) -> list[dict[str, Any] | None]:
    """Return each model's state dict: sharded, or whole if there are save hooks.

    A state that a hook removed is None.
    """
    models = accelerator.models
    if not accelerator.checkpointer.save_hooks:
        states = (accelerator.strategy.model_state(model) for model in models)
        return [{strip_compile_prefix(name): value for name, value in state.items()} for state in states]
    with accelerator.world.failing_together():
        if accelerator.world.is_main:
            store.begin(target)
    staging = str(store.get_staging_path(target, accelerator.world.broadcast(identify_process())))
    whole = [accelerator.get_state_dict(model) for model in models]
    left = list(whole)
    for hook in accelerator.checkpointer.save_hooks.values():
        with errors:
            hook(list(models), left, staging)
    # Ranks other than zero may have no part of a sharded object, and then write nothing.
    return [
        {name: value for name, value in state.items() if value is not None} if any(state is s for s in left) else None
        for state in whole
    ]


def _split_tensors(weights: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of a model's state, and other values in it (``get_extra_state``)."""
    extra = {name: value for name, value in weights.items() if not isinstance(value, Tensor)}
    return {name: value for name, value in weights.items() if name not in extra}, extra


def _collect_shared_state(accelerator: Accelerator) -> TrainState:
    errors, registered = ErrorCollector(), dict[str, Any]()
    for name, value in accelerator.checkpointer.registered.items():
        with errors:
            registered[name] = value.state_dict()
    errors.raise_first()
    return collect_train_state(accelerator, registered)


def collect_train_state(accelerator: Accelerator, registered: dict[str, Any], copied: bool = False) -> TrainState:
    """Return the state that all ranks share, with the states of registered objects. A new entry is added here alone.

    Args:
        accelerator: The Accelerator whose objects have the state.
        registered: The states of registered objects, by name.
        copied: Copy what user code may change in place, and leave out the loss scale, because reading it waits for the
            device. Default: False.
    """
    schedulers, accumulation = accelerator.schedulers, accelerator.accumulation
    states = [scheduler.state_dict() for scheduler in schedulers]
    scale = None if copied or accumulation.loss_scale is None else accumulation.loss_scale.state_dict()
    loaders: dict[bool, list[dict[str, Any]]] = {False: [], True: []}  # training, evaluation
    for loader in accelerator.loaders:
        state = loader.state_dict()
        loaders[loader.evaluation].append(_copy_source(state) if copied else state)
    return TrainState(
        schedulers=copy.deepcopy(states) if copied else states,
        scheduler_kinds=list_scheduler_kinds(schedulers),
        schedules_built=[built.effective_arguments for built in accelerator.schedules_built],
        steps_since=[s.since if isinstance(s, PreparedScheduler) else (0, 0) for s in schedulers],
        scheduler_advances=[s.advances if isinstance(s, PreparedScheduler) else 1 for s in schedulers],
        scaler=scale,
        loaders=loaders[False],
        evaluation_loaders=loaders[True],
        stream=None if accelerator.rng.stream is None else accelerator.rng.stream.get_state(),
        reduction_orders=[accelerator.strategy.reduction_order(model) for model in accelerator.models],
        counts_calls=accumulation.counts_calls,
        registered=registered,
    )


def _copy_source(state: dict[str, Any]) -> dict[str, Any]:
    """Return a dataloader's state with a copy of the state of the user's objects in it."""
    if "loaders" in state:
        return {**state, "loaders": list(map(_copy_source, state["loaders"]))}
    return {**state, "source": copy.deepcopy(state["source"])}


def list_scheduler_kinds(schedulers: list[Any]) -> list[str]:
    """Return the schedulers' class names, without the module names, which may change for classes of a script."""
    wrapped = (s.scheduler if isinstance(s, PreparedScheduler) else s for s in schedulers)
    return [type(scheduler).__qualname__ for scheduler in wrapped]


def describe_save(accelerator: Accelerator, info: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata for the manifest: the run's own metadata, and the values in ``info``.

    Raises:
        ValueError: If ``info`` uses a name of the run's own metadata, or cannot be encoded.
        TypeError: If ``info`` is not a dict, or contains tensors, arrays, or something that is not data.
    """
    if not isinstance(info, Mapping):
        raise TypeError(f"save_state(info={info!r:.100}) must be a dict of values by name.")
    metadata = run_metadata(accelerator)
    if clashing := sorted(metadata.keys() & info.keys()):
        raise ValueError(
            f"save_state(info=...) has the key {clashing[0]!r}, which is reserved for the run's own metadata. Choose "
            "another key."
        )
    document, tensors = encode(info, "info")
    if tensors:
        raise TypeError(
            f"{next(iter(tensors))} is a tensor or an array, but save_state(info=...) must not contain any. Pass its "
            ".item() or .tolist(), or save it with save_state(parts=...)."
        )
    training = next((loader for loader in accelerator.loaders if not loader.evaluation), None)
    counts = {"step": accelerator.accumulation.steps, "epoch": 0 if training is None else training.epoch}
    return {**metadata, **counts, **decode(document, {})}


def run_metadata(accelerator: Accelerator) -> dict[str, Any]:
    """Return the run's metadata for the manifest, such as world size, precision, batch sizes and fingerprints."""
    training = next((loader for loader in accelerator.loaders if not loader.evaluation), None)
    accumulate = accelerator.accumulation.micro_batches
    batch = None if training is None else training.total_batch_size
    return {
        "world_size": accelerator.world.size,
        "strategy": accelerator.strategy.name,
        "precision": accelerator.precision.name,
        "accumulate": accumulate,
        "batch_size": batch,  # of a micro-batch, summed over all processes
        "global_batch_size": None if training is None else training.step_size(accumulate),
        "models": [model_check.fingerprint(model) for model in accelerator.unwrapped_models],
        "kernels": None if accelerator.step_micro_batches is None else describe_kernels(accelerator.device),
    }
