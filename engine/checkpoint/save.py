"""What a checkpoint holds: the state of everything an Accelerator has prepared."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from ...common.messages import warn
from ...common.remote_path import AnyPath, RemotePath
from ...strategies import World
from ...strategies.distributed import is_sharded, local
from ..metrics import metric_state
from ..optim import PreparedScheduler, optimizer_state
from ..parameter_names import make_view_key, strip_compile_prefix
from ..rng import random_state
from . import model_check, store
from .json_codec import decode, encode
from .parts import Files, TensorFile, encode_part, estimate_size
from .remote import Upload
from .store import DiskSave
from .train_state import (
    STATE,
    OptimizerState,
    RandomState,
    RankState,
    TrainState,
    extra_part,
    model_part,
    optimizer_part,
    rank_part,
)

if TYPE_CHECKING:
    from ..accelerator import Accelerator
    from ..data import Loader

_RESERVED = re.compile(r"(model|optimizer)(-.*)?|(extra|rank)-.*|state|manifest|unfinished", re.IGNORECASE)
"""The names of parts that are the engine's own, see `train_state`, and of single files."""


class Counts:
    """What a metric object has counted on each process: its own ``state_dict`` has that only where it is told to."""

    def __init__(self, metric: nn.Module, world: World) -> None:
        self.metric = metric
        self._objects = metric_state.find(metric)
        self._world = world

    def state_dict(self) -> dict[str, Any]:
        """All processes must ask."""
        return metric_state.collect_states(self._objects, set(), self._world)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back, on any number of processes."""
        metric_state.load(self._objects, state_dict, self._world)


def register(registered: dict[str, Any], objects: tuple[Any, ...], named: dict[str, Any], world: World) -> None:
    """Add objects to those that are saved, by name or by order.

    Raises:
        TypeError: for an object without ``state_dict`` and ``load_state_dict``.
        ValueError: for a name that another object has.
    """
    for number, value in enumerate(objects, start=len(registered)):
        while (name := f"{type(value).__name__}_{number}") in registered or name in named:
            number += 1
        named[name] = value
    for name, value in named.items():
        holder = registered.get(name)
        if holder is not None and value is not (holder.metric if isinstance(holder, Counts) else holder):
            raise ValueError(
                f"register_for_checkpointing({name}=...): another object has this name, and would not be saved any "
                "more. Choose another one."
            )
        if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise TypeError(f"{name} ({type(value).__name__}) needs state_dict and load_state_dict to be saved.")
        is_metric = isinstance(value, nn.Module) and hasattr(value, "compute") and metric_state.find(value)
        registered[name] = Counts(value, world) if is_metric else value


def check(accelerator: Accelerator, targets: list[AnyPath], parts: dict[str, Any], weights_only: bool) -> None:
    """See before anything is written that it will find a place.

    Raises:
        ValueError: for a name of a part that is taken, a directory that is somebody else's, or what is not finite.
    """
    for name in parts:
        if _RESERVED.fullmatch(name):
            raise ValueError(
                f"save_state(parts=...): the name {name!r} is for a checkpoint's own files (model*, optimizer*, "
                f"extra-*, rank-*, state, manifest, unfinished). Choose another one, such as 'my_{name}'."
            )
    if accelerator.is_main_process:
        for target in targets:
            store.check_target(target)
    _refuse_not_finite(accelerator, targets[0], weights_only)


def _refuse_not_finite(accelerator: Accelerator, target: AnyPath, weights_only: bool) -> None:
    """Raise a ValueError if this process's share of weights or optimizer states could resume no run."""
    models = accelerator.unwrapped_models
    bad = [name for model in models for name in model_check.find_not_finite(model)]
    if not weights_only:
        names: dict[Tensor, str] = {
            p: strip_compile_prefix(name) for model in models for name, p in model.named_parameters()
        }
        for prepared in accelerator.optimizers:
            bad += model_check.find_not_finite_states(prepared.optimizer, names)
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise ValueError(
            f"{', '.join(bad[:3])}{more} hold NaN or infinity after optimizer step {accelerator.steps}, so {target} is "
            "not saved; what was saved before stays. Go on from that with a lower learning rate or with clipped "
            "gradients."
        )


@contextmanager
def discard_on_failure(accelerator: Accelerator, target: AnyPath) -> Iterator[None]:
    """Delete what a hook has written beside ``target`` if anything fails in this block."""
    try:
        yield
    except BaseException:
        if accelerator.checkpointer.save_hooks and accelerator.is_main_process:
            with suppress(OSError):  # what is left is cleared away at the next start
                store.discard(target)
        raise


class Attempts:
    """Pieces of work, ``with attempts: ...``, of which all are done though one fails: others may wait for the rest."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, Exception):
            self._error = self._error or error
        return error is None or isinstance(error, Exception)

    def end(self) -> None:
        """Raise what came first, if anything failed."""
        if self._error is not None:
            raise self._error


def collect(
    accelerator: Accelerator,
    target: AnyPath,
    parts: dict[str, Any],
    weights_only: bool,
    frozen: Sequence[Mapping[str, str]] = (),
) -> Files:
    """Return the files of a checkpoint that this process writes; nothing is copied or written yet. Call it on all.

    Args:
        accelerator: whose state it is.
        target: where it will stand.
        parts: further states, by name.
        weights_only: leave out what only resuming needs.
        frozen: of each model, the weights to leave out; see `Checkpointer.find_frozen`.

    Raises:
        ValueError: inside a group of micro-batches.
        TypeError: for what is not data.
    """
    if accelerator.inside_group and not weights_only:
        raise ValueError(
            "save_state inside a group of micro-batches, whose gradients are in no checkpoint. Save when "
            "accelerator.sync_gradients is true, after the optimizer's step."
        )
    rank, files, attempts = accelerator.process_index, dict[str, Any](), Attempts()
    weights = _collect_weights(accelerator, target, attempts)
    for number, (model, state) in enumerate(zip(accelerator.models, weights, strict=True)):
        with attempts:
            left_out = frozen[number] if frozen else {}
            files |= {} if state is None else _collect_model_files(accelerator, number, model, state, left_out)
    for name, content in parts.items():
        with attempts:
            files |= encode_part(name, content, rank)
    if not weights_only:
        with attempts:
            files |= encode_optimizers(accelerator)
        with attempts:  # asked on every process: what is registered may exchange something to know its state
            files |= encode_part(STATE, _collect_shared_state(accelerator), rank)
        with attempts:
            has_rank_buffers = rank > 0 and accelerator.strategy.has_rank_buffers
            files |= encode_rank_state(
                rank, collect_rank_random_state(accelerator), _collect_buffers(accelerator) if has_rank_buffers else []
            )
    attempts.end()
    if not weights_only:
        _say_unsaved(accelerator, files)
    return files


def _collect_model_files(
    accelerator: Accelerator, number: int, model: nn.Module, weights: dict[str, Any], frozen: Mapping[str, str]
) -> Files:
    """Return the files of one model that this process writes."""
    rank = accelerator.process_index
    tensors, extra = _split_tensors({name: value for name, value in weights.items() if name not in frozen})
    notes = model_check.make_notes(accelerator.strategy.unwrap(model))
    if frozen:
        notes |= model_check.make_frozen_note(frozen)
    files = encode_part(model_part(number), tensors, rank, notes)
    return files | (encode_part(extra_part(number), extra, rank) if extra else {})


def encode_optimizers(accelerator: Accelerator) -> Files:
    """Return the files of the optimizers' states that this process writes. Call it on all processes."""
    rank, strategy, attempts = accelerator.process_index, accelerator.strategy, Attempts()
    files: Files = {}
    for number, prepared in enumerate(accelerator.optimizers):
        with attempts:
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
    attempts.end()
    return files


def _say_unsaved(accelerator: Accelerator, files: Files) -> None:
    """Warn of parameters that an optimizer steps, and whose values are in no file."""
    models = accelerator.unwrapped_models
    optimizers = [prepared.optimizer for prepared in accelerator.optimizers]
    unknown = {id(p): p for optimizer in optimizers for p in optimizer_state.find_unowned_parameters(optimizer, models)}
    if not unknown or accelerator.checkpointer.save_hooks:  # a hook may write them
        return
    written = [content for content in files.values() if isinstance(content, TensorFile)]
    saved = {make_view_key(tensor) for content in written for tensor in content.tensors.values()}
    shapes = [tuple(p.shape) for p in unknown.values() if make_view_key(local(p.detach())) not in saved]
    if shapes:
        more = f" and {len(shapes) - 5} more" if len(shapes) > 5 else ""
        warn(
            f"an optimizer steps {len(shapes)} parameters that are in no prepared model, of shapes "
            f"{', '.join(map(str, shapes[:5]))}{more}: what it knows of them is saved, their values are not, and a run "
            "that goes on would begin with others. Give their module to prepare(), or to register_for_checkpointing()."
        )


def select_optimizer_files(files: Files) -> set[str]:
    """Return the names of the ``files`` that hold an optimizer's state."""
    return {name for name in files if name.startswith(optimizer_part(0))}


def collect_rank_random_state(accelerator: Accelerator) -> RandomState:
    """Return the state of all that this process alone draws from: its generators, and its datasets' generators."""
    readers = [loader.reading_state() for loader in sort_loaders(accelerator.loaders)]
    return cast(RandomState, {**random_state(), "loaders": readers})


def sort_loaders(loaders: list[Loader]) -> list[Loader]:
    """Return the loaders of training first, as others may come and go."""
    return sorted(loaders, key=lambda loader: loader.evaluation)


def encode_rank_state(rank: int, random: RandomState, buffers: list[dict[str, Tensor]]) -> Files:
    """Return the files with the state that process ``rank`` does not share.

    Args:
        rank: this process's.
        random: its random state.
        buffers: of each model, those that this process continues from.
    """
    return encode_part(rank_part(rank), RankState(random=random, buffers=buffers))


def _collect_buffers(accelerator: Accelerator) -> list[dict[str, Tensor]]:
    """Return each model's buffers that are saved, as this process has them."""
    states = [model.state_dict() for model in accelerator.unwrapped_models]
    return [
        {strip_compile_prefix(name): b for name, b in model.named_buffers() if name in state and not is_sharded(b)}
        for model, state in zip(accelerator.unwrapped_models, states, strict=True)
    ]


def publish(world: World, target: AnyPath, files: Files, info: dict[str, Any], others: bool = False) -> None:
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
    save = DiskSave(target) if isinstance(target, Path) else Upload(target, world.broadcast(Upload.new_folder()))
    try:
        if others and (clashing := [name for name in files if os.path.lexists(save.staging / name)]):
            raise ValueError(f"a save_state pre-hook wrote {clashing[0]}, which is a file of the checkpoint itself.")
        entries = save.write(files)
    except Exception as caught:
        error = _explain_error(caught, target, files)
    of_ranks = world.gather_objects((entries, error is None))
    if world.is_main:
        try:
            if all(written for _, written in of_ranks):
                merged = {name: entry for written, _ in of_ranks for name, entry in written.items()}
                save.commit(merged, info, others)
        except Exception as caught:
            error = error or caught
    with suppress(OSError):  # what is left is cleared away at the next start
        save.discard(world.is_main)  # of a commit there is nothing
    world.raise_together(error)


def _explain_error(error: Exception, target: AnyPath, files: Files) -> Exception:
    """Return the error, that of a full disk with the free and the needed bytes."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return error
    needed = f"It needs {sum(estimate_size(content) for content in files.values()):,} bytes"
    folder = store.beside(target)
    with suppress(OSError):
        existing = next(parent for parent in folder.parents if os.path.exists(parent))
        needed += f", {shutil.disk_usage(existing).free:,} are free"
    if isinstance(target, RemotePath):
        needed += f" in {folder.parent.parent}, where it is put together: set TMPDIR to a larger disk"
    return OSError(error.errno, f"can't save {target}: {error.strerror}. {needed}. What was saved stays.")


def _collect_weights(accelerator: Accelerator, target: AnyPath, attempts: Attempts) -> list[dict[str, Any] | None]:
    """Return each model's state as it lies on the processes; None for one that a hook saves."""
    models = accelerator.models
    if not accelerator.checkpointer.save_hooks:
        states = (accelerator.strategy.model_state(model) for model in models)
        return [{strip_compile_prefix(name): value for name, value in state.items()} for state in states]
    with accelerator.world.together():
        if accelerator.is_main_process:
            store.begin(target)
    whole = [accelerator.get_state_dict(model) for model in models]
    left = list(whole)
    for hook in accelerator.checkpointer.save_hooks.values():
        with attempts:
            hook(list(models), left, str(store.beside(target)))
    # Others than rank zero may have nothing of a sharded one, and have nothing to write.
    return [
        {name: value for name, value in state.items() if value is not None} if any(state is s for s in left) else None
        for state in whole
    ]


def _split_tensors(weights: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of a model's state, and what else modules keep there (``get_extra_state``)."""
    extra = {name: value for name, value in weights.items() if not isinstance(value, Tensor)}
    return {name: value for name, value in weights.items() if name not in extra}, extra


def _collect_shared_state(accelerator: Accelerator) -> TrainState:
    if (loss_scale := accelerator.accumulation.loss_scale) is not None:
        loss_scale.settle()
    attempts, registered = Attempts(), dict[str, Any]()
    for name, value in accelerator.checkpointer.registered.items():
        with attempts:
            registered[name] = value.state_dict()
    attempts.end()
    return TrainState(
        schedulers=[scheduler.state_dict() for scheduler in accelerator.schedulers],
        scheduler_kinds=list_scheduler_kinds(accelerator.schedulers),
        schedules_built=[built.effective_arguments for built in accelerator.schedules_built],
        steps_since=[s.since if isinstance(s, PreparedScheduler) else (0, 0) for s in accelerator.schedulers],
        scheduler_advances=[s.advances if isinstance(s, PreparedScheduler) else 1 for s in accelerator.schedulers],
        scaler=None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        loaders=[loader.state_dict() for loader in accelerator.loaders if not loader.evaluation],
        evaluation_loaders=[loader.state_dict() for loader in accelerator.loaders if loader.evaluation],
        stream=None if accelerator.rng.stream is None else accelerator.rng.stream.get_state(),
        reduction_orders=list_reduction_orders(accelerator),
        registered=registered,
    )


def list_scheduler_kinds(schedulers: list[Any]) -> list[str]:
    """Return the names of the schedulers' classes, without modules: a script's may have another one next time."""
    wrapped = (s.scheduler if isinstance(s, PreparedScheduler) else s for s in schedulers)
    return [type(scheduler).__qualname__ for scheduler in wrapped]


def list_reduction_orders(accelerator: Accelerator) -> list[list[int]]:
    """Return each model's reduction order; see `Strategy.reduction_order`."""
    return [accelerator.strategy.reduction_order(model) for model in accelerator.models]


def describe_save(accelerator: Accelerator, info: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the manifest's notes: metadata of the run, and what the user adds.

    Raises:
        ValueError: if ``info`` names what is known of the run already.
        TypeError: if it holds tensors, or what is not data.
    """
    metadata = run_metadata(accelerator)
    if clashing := sorted(metadata.keys() & info.keys()):
        raise ValueError(f"save_state(info=...) names {clashing[0]!r}, which is noted of every run: take another name.")
    document, tensors = encode(info, "info")
    if tensors:
        raise TypeError(f"save_state(info=...) holds a tensor, {next(iter(tensors))}: pass its .item(), or use parts=.")
    training = next((loader for loader in accelerator.loaders if not loader.evaluation), None)
    counts = {"step": accelerator.steps, "epoch": 0 if training is None else training.epoch}
    return {**metadata, **counts, **decode(document, {})}


def run_metadata(accelerator: Accelerator) -> dict[str, Any]:
    """Return the run's metadata for the manifest, which people and a resume read."""
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
        "models": [model_check.fingerprint(model) for model in accelerator.unwrapped_models],
    }
