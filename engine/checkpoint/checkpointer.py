"""Saving and loading of an Accelerator's state: whole checkpoints, and weights for other programs."""

from __future__ import annotations

import os
import re
import socket
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...common.messages import named_ranks, warn
from ...common.remote_path import AnyPath, RemotePath, absolute, as_path
from ...strategies import World
from ...strategies.distributed import (
    PassedMeeting,
    is_sharded,
    mark_exchange,
    name_phase,
    strip_compile_prefix,
    whole,
)
from ..configuration import ProjectConfiguration
from ..optim import check_schedule
from ..process import Prepared
from ..weights import save as export
from . import content, filesystem, restore, store
from .async_save import Copying, HostCopies, Job
from .model_check import FrozenWeights, digest_parameters
from .open_checkpoint import OpenCheckpoint, find_first_intact, open_together
from .parts import MANIFEST, STATE, Files
from .safetensors_file import UnreadTensor
from .store import Save

_NAME = re.compile(r"checkpoint_(\d+)")
_REPLACED = re.compile(r"\.checkpoint_(\d+)\..+\.old")


def _check_equal_targets(targets: list[AnyPath], world: World) -> None:
    """Check that the ranks of each machine use the same directories; machines may mount a file system differently."""
    if world.size == 1:
        return
    places = [str(target) if isinstance(target, RemotePath) else os.path.realpath(target) for target in targets]
    by_rank = world.gather_objects((socket.gethostname(), places))
    by_host: dict[str, list[str]] = {}
    if any(by_host.setdefault(host, paths) != paths for host, paths in by_rank):
        ranks: dict[str, list[int]] = {}
        for rank, (_, paths) in enumerate(by_rank):
            ranks.setdefault(", ".join(paths), []).append(rank)
        listed = "; ".join(f"{named_ranks(numbers)}: {paths}" for paths, numbers in ranks.items())
        raise ValueError(
            f"save_state got directories that differ by rank ({listed}), but all ranks write one checkpoint. Pass the "
            "same path on every rank. If the path contains a timestamp, broadcast it from rank zero."
        )


def _check_targets(targets: list[AnyPath], world: World, hooked: bool) -> None:
    """Check that one checkpoint can be saved to the targets; ``hooked`` means that save hooks write files, too."""
    _check_equal_targets(targets, world)
    if hooked and (len(targets) > 1 or isinstance(targets[0], RemotePath)):
        raise ValueError(
            "a save_state pre-hook writes files into one directory on a disk, so a checkpoint can't be saved to a "
            "URL or with also=... Save to one directory, and upload it afterwards."
        )


class Checkpointer:
    """Saver and loader of the state of an `Accelerator`, whose methods document arguments and errors in full.

    Attributes:
        loaded_from: The checkpoint of each loaded model, until the rest of the state is loaded too.
        saving: The latest asynchronous save; None before the first one and after `finish_saving`.
        frozen: The digests of frozen weights, for each model that was saved with ``trainable_only=True``.
    """

    def __init__(self, accelerator: Prepared) -> None:
        self.loaded_from: restore.LoadedFrom = WeakKeyDictionary()
        self.saving: Job | None = None
        self.host_copies = HostCopies()
        self._alone = set[str]()  # lines at which only rank zero calls `save_state`
        self.frozen: WeakKeyDictionary[nn.Module, FrozenWeights] = WeakKeyDictionary()
        # A proxy, so that an Accelerator and its models are freed by reference counting once their last user releases
        # them.
        self._accelerator: Prepared = weakref.proxy(accelerator)

    def register(self, objects: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Include the states of objects in later checkpoints, except in those that contain weights only.

        A load matches ``objects`` by class name and position, and ``named`` objects by name.
        """
        content.register(self._accelerator.registered, objects, named, self._accelerator.data_world)

    def add_save_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Register a hook that is called before each save; see `Accelerator.register_save_state_pre_hook`."""
        return _add(self._accelerator.save_hooks, hook)

    def add_load_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Register a hook that is called before models are loaded; see `Accelerator.register_load_state_pre_hook`."""
        return _add(self._accelerator.load_hooks, hook)

    def forget_prepared(self) -> None:
        """Discard the registered objects and digests of frozen weights, and release the buffers in host memory."""
        self._accelerator.registered.clear()
        self.frozen.clear()
        self.host_copies.clear()

    def find_frozen(self, world: World) -> list[dict[str, str]]:
        """Return for each model the digests of its frozen weights, by name. Call it on all ranks."""
        models = self._accelerator.strategy.unwrapped_models
        return [self.frozen.setdefault(model, FrozenWeights()).update(model, world) for model in models]

    # -- saving --------------------------------------------------------------------------------------------------

    @name_phase("save")
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        info: dict[str, Any] | None = None,
        parts: dict[str, Any] | None = None,
        weights_only: bool = False,
        trainable_only: bool = False,
        blocking: bool = True,
        also: Sequence[str | os.PathLike[str]] = (),
        choose_save: Callable[[Files, Container[str]], Callable[[Path, str], Save]] | None = None,
    ) -> AnyPath:
        """Save all prepared and registered objects; see `Accelerator.save_state`.

        If ``choose_save`` is given, it returns, for this process's files and the names of the weights that are left
        out, a function that makes the `Save`. The caller has asked `explain_directory`.
        """
        if not safe_serialization:
            warn(
                "save_state(safe_serialization=False) has no effect: checkpoints are safetensors and JSON, never "
                "pickle. Remove the argument. For weights in torch's format, use "
                "accelerator.save(accelerator.get_state_dict(model), 'weights.pt')."
            )
        content.check_places("save_state", {} if output_dir is None else {"output_dir": output_dir}, also)
        accelerator, world = self._accelerator, self._accelerator.world
        if not self._meet(choose_save is None):
            kept = {"parts": parts, "weights_only": weights_only, "trainable_only": trainable_only, "also": also}
            return self._save_alone(output_dir, info or {}, kept)
        self.finish_saving()
        project = accelerator.project_configuration
        numbering = project if output_dir is None else None
        with world.failing_together():
            info = content.describe_save(accelerator, info or {})
            path = output_dir if output_dir is not None else _choose_next_target(project)
            targets = [absolute(target) for target in (path, *also)]
            content.check_part_names(parts or {})
            optimizers = [prepared.optimizer for prepared in accelerator.optimizers]
            content.refuse_not_finite(
                accelerator.strategy.unwrapped_models, () if weights_only else optimizers, info["step"], targets[0]
            )
            if choose_save is None and world.is_main:  # otherwise the `Save` decides
                for target in targets:
                    store.check_target(target)
        _check_targets(targets, world, bool(accelerator.save_hooks))
        copying, staged = None, targets[0] if world.is_main and accelerator.save_hooks else None
        with store.discarding_on_failure(staged), world.failing_together():
            frozen = self.find_frozen(world) if trainable_only else ()
            files = content.collect(accelerator, targets[0], parts or {}, weights_only, frozen)
            make_save = None if choose_save is None else choose_save(files, frozen[0] if frozen else ())
            if not blocking:
                optimizer_files = content.select_optimizer_files(files)
                files, copying = self.host_copies.copy_tensors(files, optimizer_files, optimizers)
        if numbering is not None:
            numbering.iteration += 1
        self._start_save(targets, files, info | self._describe_weights(), numbering, copying, make_save)
        return targets[0]

    def _meet(self, may_be_alone: bool) -> bool:
        """Wait for all ranks, and return whether they save together. Otherwise, rank zero saves alone.

        Public loops call ``save_state`` on rank zero only, which works without sharding, as for Accelerate. The line of
        such a call is known from then on, so that later saves there do not wait.
        """
        world = self._accelerator.world
        if not (may_be_alone and world.is_main and world.size > 1) or self._needs_all_ranks():
            return world.meet("accelerator.save_state")
        place = mark_exchange()[1]
        if place not in self._alone and not world.meet("accelerator.save_state", PassedMeeting(world)):
            self._alone.add(place)
            warn(
                f"only rank zero called {place}, so this checkpoint lacks the other ranks' random states, and the call "
                "took some seconds. Call save_state on all ranks; each file is still written only once."
            )
        return place not in self._alone

    def _needs_all_ranks(self) -> bool:
        strategy = self._accelerator.strategy
        return strategy.sharded or any(strategy.keeps_apart(p.optimizer) for p in self._accelerator.optimizers)

    def _save_alone(self, output_dir: Any, info: dict[str, Any], options: dict[str, Any]) -> AnyPath:
        world = self._accelerator.world
        self._accelerator.world = World(device=world.device)
        try:
            return self.save_state(output_dir, info={**info, "saved_by": world.size}, **options)
        finally:
            self._accelerator.world = world

    def _describe_weights(self) -> dict[str, str]:
        return {} if self._accelerator.step_micro_batches is None else {"weights_digest": self.record_weights()}

    def record_weights(self) -> str:
        """Record a digest of the parameters; see `Accelerator.record_weights`."""
        accelerator = self._accelerator
        digest = digest_parameters(accelerator.strategy.unwrapped_models, accelerator.world)
        accelerator.weight_digests[accelerator.accumulation.steps] = digest
        return digest

    def _start_save(
        self,
        targets: list[AnyPath],
        files: Files,
        info: dict[str, Any],
        numbering: ProjectConfiguration | None,
        copying: Copying | None,
        make_save: Callable[[Path, str], Save] | None,
    ) -> None:
        """Write and commit the checkpoint at each target, then delete old checkpoints.

        If ``copying`` is not None, a thread waits for these copies and does this work.
        """
        hooked = bool(self._accelerator.save_hooks)

        def save_to_all(world: World) -> None:
            for target in targets:
                store.write_and_commit(world, target, files, info, hooked, make_save)
            if numbering is not None and numbering.total_limit is not None:
                with world.failing_together():
                    if world.is_main:
                        _drop_oldest(targets[0].parent, numbering.total_limit)

        if copying is None:
            save_to_all(self._accelerator.world)
            return
        world = self._accelerator.world.background_world()

        def work() -> None:
            with world.failing_together():
                copying.finish()
            save_to_all(world)

        self.saving = Job(work)

    def explain_directory(self, target: AnyPath) -> str:
        """Return the reason why a checkpoint must be a directory; "" if it can be one file."""
        accelerator = self._accelerator
        if isinstance(target, RemotePath):
            return f"{target} is a URL, where a checkpoint consists of several objects"
        if accelerator.strategy.sharded and accelerator.world.size > 1:
            return f"strategy={accelerator.strategy.name!r} writes the shards of each process to a file of its own"
        if any(accelerator.strategy.keeps_apart(prepared.optimizer) for prepared in accelerator.optimizers):
            return "each process writes its shard of the optimizer's state to a file of its own"
        if accelerator.save_hooks:
            return "a hook of register_save_state_pre_hook may add files"
        return ""

    def poll_saving(self) -> bool:
        """Return True if no asynchronous save is in progress. Raise the error of a save that failed."""
        if self.saving is not None and self.saving.done:
            self.finish_saving()
        return self.saving is None

    def finish_saving(self) -> None:
        """Wait for an asynchronous save in progress. Raise its error if it failed."""
        job = self.saving
        if job is not None:
            try:
                job.finish()
            finally:
                if job.done:  # otherwise Ctrl-C ended the wait, and the copies that the job writes are still in use
                    self.saving = None

    # -- loading -------------------------------------------------------------------------------------------------

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | OpenCheckpoint | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        models: bool = True,
        state: bool = True,
        strict: bool | None = None,
        schedule: str | None = None,
        finish_epoch: bool = True,
    ) -> dict[str, Any]:
        """Restore a checkpoint and return its ``info``; see `Accelerator.load_state`."""
        accelerator, world = self._accelerator, self._accelerator.world
        project = accelerator.project_configuration
        self.finish_saving()
        check_schedule(schedule)
        if not isinstance(input_dir, str | os.PathLike | RemotePath | OpenCheckpoint | None):
            raise TypeError(f"load_state(input_dir={input_dir!r:.100}) must be a path or a URL.")
        if load_kwargs:
            warn(f"load_state(load_kwargs={dict(load_kwargs)!r}) has no effect: loading has no options. Remove it.")
        if input_dir is None:
            opened, skipped = _find_newest(world, project, state)
            for text in skipped:
                warn(f"load_state skipped a checkpoint: {text}")
        else:
            opened = input_dir if isinstance(input_dir, OpenCheckpoint) else open_together(world, input_dir)
        info = restore.restore(
            accelerator,
            opened,
            self.loaded_from,
            models=models,
            state=state,
            strict=strict,
            schedule=schedule,
            finish_epoch=finish_epoch,
        )
        if state:
            accelerator.accumulation.steps = info["step"]
            project.iteration = world.broadcast(_compute_next_iteration(project, opened.path))
        return info

    # -- weights for other programs ------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a model; see `Accelerator.get_state_dict`."""
        state = self._collect_state(model)
        read = {id(value): value[...] for value in state.values() if isinstance(value, UnreadTensor)}
        state = {name: read.get(id(value), value) for name, value in state.items()}
        if not unwrap:
            return dict(zip(model.state_dict(), state.values(), strict=True))
        return {strip_compile_prefix(name): value for name, value in state.items()}

    def _collect_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the full state dict of a model, with references to tensors that a device map has offloaded."""
        accelerator = self._accelerator
        state: dict[str, Any] = whole(accelerator.strategy.model_state(model), accelerator.is_main_process)
        if any(isinstance(value, Tensor) and value.is_meta for value in state.values()):
            from ..big_models import list_offloaded  # takes 25 ms, and imports this package

            offloaded = list_offloaded(accelerator.strategy.unwrap(model))
            state = {name: offloaded.get(name, value) for name, value in state.items()}
        return state

    def _writes_on_this_rank(self) -> bool:
        accelerator = self._accelerator
        every_node = accelerator.project_configuration.save_on_each_node
        return accelerator.is_local_main_process if every_node else accelerator.is_main_process

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write data to a file, on rank zero or on each node's main process; see `Accelerator.save`."""
        if self._writes_on_this_rank():
            export.save_object(obj, f, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights for other programs; see `Accelerator.save_model`."""
        limit = export.parse_shard_size(max_shard_size)
        if any(map(is_sharded, model.parameters())):
            self._accelerator.world.meet("accelerator.save_model")
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):  # offloaded, read one by one
            weights = {strip_compile_prefix(name): value for name, value in self._collect_state(model).items()}
        else:
            weights = self._accelerator.get_state_dict(model)
        if self._writes_on_this_rank():
            export.save_weights(weights, absolute(save_directory), limit, safe_serialization)


def _add(hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


# -- automatically named checkpoints: project_dir/checkpoints/checkpoint_N ----------------------------------------


def _require_folder(project: ProjectConfiguration, method: str, argument: str) -> AnyPath:
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        raise ValueError(
            f"{method} was called without {argument}, but automatic checkpoint naming is not configured. Pass "
            f"{argument}, or create Accelerator(project_config=ProjectConfiguration(project_dir=..., "
            "automatic_checkpoint_naming=True))."
        )
    return as_path(project.project_dir) / "checkpoints"


def _list_numbers(folder: AnyPath, pattern: re.Pattern[str] = _NAME) -> list[int]:
    return sorted(int(match[1]) for name in filesystem.list_names(folder) if (match := pattern.fullmatch(name)))


def _choose_next_target(project: ProjectConfiguration) -> AnyPath:
    """Return the path of the next automatically named checkpoint.

    Raises:
        ValueError: If automatic naming is not configured, or the folder already contains a checkpoint with the same or
            a higher number, for example because the run was not resumed.
    """
    folder = _require_folder(project, "save_state", "output_dir")
    numbers = _list_numbers(folder)
    if numbers and numbers[-1] >= project.iteration:
        raise ValueError(
            f"{folder} already has checkpoint_{numbers[-1]}, but this run would save checkpoint_{project.iteration}. "
            "Resume with load_state(), choose another project_dir, or set ProjectConfiguration(iteration="
            f"{numbers[-1] + 1})."
        )
    return folder / f"checkpoint_{project.iteration}"


def _find_newest(
    world: World, project: ProjectConfiguration, resumable: bool = True
) -> tuple[OpenCheckpoint, list[str]]:
    """Return the intact checkpoint with the highest number, and a message for each one that was skipped.

    Call it on all ranks. With ``resumable``, checkpoints that contain weights only are skipped. Damaged checkpoints are
    not deleted, because another process may be saving to the folder.
    """
    skipped: list[str] = []
    opened = find_first_intact(world, _open_from_highest(project, resumable, skipped), skipped)
    with world.failing_together():
        if opened is None and world.is_main:
            folder = _require_folder(project, "load_state", "input_dir")
            text = f"{folder} has no checkpoint that can be loaded. Pass input_dir, the path of a checkpoint."
            raise ValueError("\n  ".join([text, *skipped]))
    assert opened is not None
    return opened, world.broadcast(skipped)


def _open_from_highest(project: ProjectConfiguration, resumable: bool, skipped: list[str]) -> Iterator[OpenCheckpoint]:
    """Yield the usable checkpoints, highest number first, and add a message about each other one to ``skipped``."""
    folder = _require_folder(project, "load_state", "input_dir")
    for number in sorted({*_list_numbers(folder), *_list_numbers(folder, _REPLACED)}, reverse=True):
        path = folder / f"checkpoint_{number}"
        try:
            opened = OpenCheckpoint(path)
        except (OSError, ValueError) as error:
            skipped.append(str(error))
            continue
        if opened.has(STATE) or not resumable:
            yield opened
        else:
            skipped.append(f"{path} contains only weights, so no run can resume from it.")


def _compute_next_iteration(project: ProjectConfiguration, loaded: AnyPath) -> int:
    """Return the number of the next checkpoint after a resume from ``loaded``.

    If ``loaded`` is in the project's folder of automatically named checkpoints, the result exceeds all numbers in this
    folder.
    """
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        return project.iteration
    folder = as_path(project.project_dir) / "checkpoints"
    if absolute(loaded.parent) != absolute(folder):
        return project.iteration
    return max([project.iteration, *(number + 1 for number in _list_numbers(folder))])


def _drop_oldest(folder: AnyPath, limit: int) -> None:
    """Delete the checkpoints with the lowest numbers until ``limit`` of them are left.

    If one cannot be deleted, this only causes a warning, because the new checkpoint is already saved.
    """
    numbers = [n for n in _list_numbers(folder) if (folder / f"checkpoint_{n}" / MANIFEST).is_file()]
    try:
        store.CheckpointStore(folder).recover()  # complete deletions that were interrupted by a kill
    except (OSError, ValueError) as error:
        reason = str(error).rstrip(".")
        warn(f"remains of older checkpoints in {folder} can't be deleted: {reason}. The next save tries again.")
    for number in numbers[:-limit]:
        try:
            store.remove(folder / f"checkpoint_{number}")
        except (OSError, ValueError) as error:
            reason = str(error).rstrip(".")
            warn(f"checkpoint_{number} in {folder} exceeds total_limit={limit}, but can't be deleted: {reason}.")
