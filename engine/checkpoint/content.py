"""Content of a checkpoint: what may be saved, and the collection of the state of all prepared objects.

`Checkpointer.save_state` uses it in this order: the checks before a save, the metadata for the manifest, and `collect`,
which asks each object for its state and returns the files that this process writes. Nothing is written here.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from xxhash import xxh3_64

from ...common.messages import abbreviate, name_type, warn
from ...common.remote_path import AnyPath, RemotePath
from ...strategies import World
from ...strategies.distributed import get_original_class, is_sharded, local, make_view_key, strip_compile_prefix
from ...strategies.processes import identify_process
from ..data import Loader
from ..metrics import metric_state
from ..optim import PreparedScheduler, optimizer_state, storable_state
from ..process import Prepared
from ..rng import random_state
from ..run_environment import describe_kernels
from . import store
from .json_codec import decode, encode
from .parts import STATE, Files, TensorFile, encode_part, extra_part, model_part, optimizer_part, rank_part
from .train_state import OptimizerState, RandomState, RankState, TrainState

MODULES_NOTE, FROZEN_NOTE = "modules", "frozen"
"""Notes about a model in the header of its file: its submodules' classes, and the digests of the weights it omits."""

_RESERVED = re.compile(r"(model|optimizer)(-.*)?|(extra|rank)-.*|state|manifest|unfinished", re.IGNORECASE)
"""Pattern of reserved part names: the engine's own parts (see `train_state`), ``manifest`` and ``unfinished``."""

_nan_from_start = WeakKeyDictionary[nn.Module, list[str]]()
"""Names of the buffers of each prepared model that contained NaN before the run."""


# -- registered objects --------------------------------------------------------------------------------------------


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


# -- checks before a save ------------------------------------------------------------------------------------------


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


def refuse_not_finite(
    models: Iterable[nn.Module], optimizers: Iterable[Optimizer], step: int, path: AnyPath | str
) -> None:
    """Raise a ValueError if this process's weights or optimizer states contain values that must not be saved.

    ``step`` is the number of optimizer steps taken, and ``path`` that of the checkpoint, for the message.
    """
    models = list(models)
    bad = [name for model in models for name in find_not_finite(model)]
    names: dict[Tensor, str] = {
        p: strip_compile_prefix(name) for model in models for name, p in model.named_parameters()
    }
    bad += [name for optimizer in optimizers for name in find_not_finite_states(optimizer, names)]
    if bad:
        raise ValueError(
            f"{abbreviate(bad, 3)} {'contains' if len(bad) == 1 else 'contain'} NaN or infinity after optimizer step "
            f"{step}, so {path} is not saved. Earlier checkpoints are kept. Lower the learning rate or clip the "
            "gradients, and resume from an earlier checkpoint or start again."
        )


def note_nan_buffers(model: nn.Module) -> None:
    """Record the buffers that contain NaN before a run, such as a threshold that is not computed yet.

    Args:
        model: The user's module.
    """
    buffers = {strip_compile_prefix(name): b.detach() for name, b in model.named_buffers() if not is_lazy(b)}
    _nan_from_start[model] = _find_bad(buffers, ())


def find_not_finite(model: nn.Module) -> list[str]:
    """Return the names of tensors with values that must not be saved, in this process's shard of a model.

    A parameter with ``requires_grad=True`` must be finite. In other tensors, only NaN is refused, because masks and
    ranges may contain infinities. A buffer that contained NaN before the run may still do so.
    """
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    others = {
        name: t.detach() for name, t in model.state_dict().items() if isinstance(t, Tensor) and name not in trained
    }
    bad, from_start = _find_bad(trained | others, set(trained)), _nan_from_start.get(model, ())
    return [name for name in bad if strip_compile_prefix(name) not in from_start]


def find_not_finite_states(optimizer: Optimizer, names: Mapping[Tensor, str]) -> list[str]:
    """Return the names of tensors with values that must not be saved, in this process's optimizer state.

    A tensor with the shape of its parameter must be finite, unless it is a scalar: with an infinite second moment, the
    parameter would never change again. In other tensors, only NaN is refused. ``names`` holds the parameters' names,
    which become part of the result, as in ``"exp_avg of layer.weight"``.
    """
    states: dict[str, Tensor] = {}
    like_parameter = set()
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor):
                name = f"{key} of {names.get(parameter, 'a parameter')}"
                states[name] = value.detach()
                if isinstance(parameter, Tensor) and value.shape == parameter.shape and value.ndim:
                    like_parameter.add(name)
    return _find_bad(states, like_parameter)


def _find_bad(tensors: Mapping[str, Tensor], finite: Collection[str]) -> list[str]:
    tensors = {n: _to_summable(t) for n, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel() and not tensor.is_meta}
    suspects: list[str] = []
    for device in {tensor.device for tensor in tensors.values()}:
        names_on_device = [name for name, tensor in tensors.items() if tensor.device == device]
        # A sum is finite only if all its terms are. The reverse does not hold: tensors with another sum are checked one
        # by one.
        sums = torch.stack([_sum(tensors[name]) for name in names_on_device])
        fine = torch.isfinite(sums).tolist()
        suspects += [name for name, good in zip(names_on_device, fine, strict=True) if not good]
    return [name for name in tensors if name in suspects and _is_bad(tensors[name], name in finite)]


def _to_summable(tensor: Tensor) -> Tensor:
    tensor = local(tensor)
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.element_size() == 1 else tensor  # 8-bit formats cannot be summed


def _sum(tensor: Tensor) -> Tensor:
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.sum(dtype=wide).to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _is_bad(tensor: Tensor, finite: bool) -> bool:
    return not bool(torch.isfinite(tensor).all()) if finite else bool(torch.isnan(tensor).any())


# -- metadata ------------------------------------------------------------------------------------------------------


def describe_save(accelerator: Prepared, info: dict[str, Any]) -> dict[str, Any]:
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


def run_metadata(accelerator: Prepared) -> dict[str, Any]:
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
        "models": [fingerprint(model) for model in accelerator.strategy.unwrapped_models],
        "kernels": None if accelerator.step_micro_batches is None else describe_kernels(accelerator.device),
    }


def fingerprint(model: nn.Module) -> str:
    """Return a short digest of the submodules' names and classes, and the parameters' names, shapes and dtypes."""
    forms = [(strip_compile_prefix(name), tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    return xxh3_64(repr((sorted(list_part_kinds(model).items()), forms)).encode()).hexdigest()


def list_part_kinds(model: nn.Module) -> dict[str, str]:
    """Return each submodule's class name, by submodule name.

    The model's own class is omitted, because scripts may rename it.
    """
    # Of a compiled part, the class inside is used, which comes second.
    names = ((strip_compile_prefix(f"{name}.").removesuffix("."), part) for name, part in model.named_modules())
    return {name: get_original_class(part).__qualname__ for name, part in names if name}


# -- state ---------------------------------------------------------------------------------------------------------


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
    accelerator: Prepared,
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
            buffers = _collect_buffers(accelerator.strategy.unwrapped_models) if has_rank_buffers else []
            files |= encode_rank_state(rank, collect_rank_random_state(accelerator.loaders), buffers)
    errors.raise_first()
    if not weights_only and not accelerator.save_hooks:  # a hook may write them
        _warn_unsaved(accelerator.strategy.unwrapped_models, [p.optimizer for p in accelerator.optimizers], files)
    return files


def _collect_weights(accelerator: Prepared, target: AnyPath, errors: ErrorCollector) -> list[dict[str, Any] | None]:
    """Return each model's state dict: sharded, or whole if there are save hooks.

    A state that a hook removed is None.
    """
    models = accelerator.models
    if not accelerator.save_hooks:
        states = (accelerator.strategy.model_state(model) for model in models)
        return [{strip_compile_prefix(name): value for name, value in state.items()} for state in states]
    assert isinstance(target, Path)
    with accelerator.world.failing_together():
        if accelerator.world.is_main:
            store.begin(target)
    staging = str(store.get_staging_path(target, accelerator.world.broadcast(identify_process())))
    full = [accelerator.get_state_dict(model) for model in models]
    left = list(full)
    for hook in accelerator.save_hooks.values():
        with errors:
            hook(list(models), left, staging)
    # Ranks other than zero may have no part of a sharded object, and then write nothing.
    return [
        {name: value for name, value in state.items() if value is not None} if any(state is s for s in left) else None
        for state in full
    ]


def _collect_model_files(
    rank: int, number: int, model: nn.Module, weights: dict[str, Any], frozen: Mapping[str, str]
) -> Files:
    """Return the files of one unwrapped model that this process writes."""
    saved = {name: value for name, value in weights.items() if name not in frozen}
    tensors = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
    extra = {name: value for name, value in saved.items() if name not in tensors}  # of `get_extra_state`
    noted = {MODULES_NOTE: list_part_kinds(model)} | ({FROZEN_NOTE: frozen} if frozen else {})
    notes = {name: json.dumps(note, separators=(",", ":")) for name, note in noted.items()}
    files = encode_part(model_part(number), tensors, rank, notes)
    return files | (encode_part(extra_part(number), extra, rank) if extra else {})


def encode_optimizers(accelerator: Prepared) -> Files:
    """Return the files of the optimizers' states that this process writes. Call this function on all ranks."""
    rank, strategy, errors = accelerator.world.rank, accelerator.strategy, ErrorCollector()
    files: Files = {}
    for number, prepared in enumerate(accelerator.optimizers):
        with errors:
            optimizer = prepared.optimizer
            names = optimizer_state.name_parameters(optimizer, accelerator.strategy.unwrapped_models)
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


def _collect_shared_state(accelerator: Prepared) -> TrainState:
    errors, registered = ErrorCollector(), dict[str, Any]()
    for name, value in accelerator.registered.items():
        with errors:
            registered[name] = value.state_dict()
    errors.raise_first()
    return collect_train_state(accelerator, registered)


def collect_train_state(accelerator: Prepared, registered: dict[str, Any], copied: bool = False) -> TrainState:
    """Return the state that all ranks share, with the states of registered objects. A new entry is added here alone.

    Args:
        accelerator: The Accelerator whose objects have the state.
        registered: The states of registered objects, by name.
        copied: Copy what user code may change in place, and leave out the loss scale, because reading it waits for the
            device. Default: False.
    """
    schedulers, accumulation = accelerator.schedulers, accelerator.accumulation
    states = [storable_state(scheduler) for scheduler in schedulers]
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
