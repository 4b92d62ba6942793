"""What an Accelerator writes and reads back: whole checkpoints, and weights for others to load."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

from ...common.messages import warn
from ...strategies import Strategy, World
from ...strategies.distributed import is_sharded, whole
from ..configuration import ProjectConfiguration
from ..data import Loader
from ..optim import PreparedOptimizer, check_schedule
from ..parameter_names import own_name
from ..process_state import Process
from ..weights import save as export
from . import automatic_naming, load
from . import save as snapshot
from .async_save import Copying, HostCopies, Job
from .manifest import Manifest
from .open_checkpoint import OpenCheckpoint, open_together
from .parts import Files


class Saving(Process):
    """The part of an `Accelerator` that keeps states on disk."""

    strategy: Strategy
    data_world: World
    project_configuration: ProjectConfiguration
    models: list[nn.Module]
    optimizers: list[PreparedOptimizer]
    schedulers: list[Any]
    loaders: list[Loader]
    saving: Job | None  # the save that is under way beside the training

    def _begin_saving(self) -> None:
        self.registered: dict[str, Any] = {}
        self.save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        # By model: the path, manifest and step of the checkpoint it was loaded from, until the rest is loaded too.
        self.loaded_from: WeakKeyDictionary[nn.Module, tuple[str, Manifest, int]] = WeakKeyDictionary()
        self._steps_before = 0
        self.saving = None
        self._copies = HostCopies()

    @property
    def own_models(self) -> list[nn.Module]:
        """The user's own modules inside the prepared models."""
        return [self.strategy.unwrap(model) for model in self.models]

    @property
    def steps(self) -> int:
        """Optimizer steps that were taken, before and after a resume; of several optimizers, the most."""
        return self._steps_before + max((optimizer.taken for optimizer in self.optimizers), default=0)

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps_before = 0
        self._steps_before = value - self.steps

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Add objects with ``state_dict``/``load_state_dict`` to every checkpoint, by name or by order."""
        snapshot.register(self.registered, objects, named, self.data_world)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` before `save_state` writes; returns a handle with ``remove()``.

        What it takes out of ``weights`` is not saved; what it writes to ``output_dir`` becomes part of the checkpoint.
        """
        return _add(self.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` before `load_state` reads; what it takes out of ``models`` is not loaded."""
        return _add(self.load_hooks, hook)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        info: dict[str, Any] | None = None,
        parts: dict[str, Any] | None = None,
        weights_only: bool = False,
        blocking: bool = True,
        also: Sequence[str | os.PathLike[str]] = (),
    ) -> Path:
        """Save everything prepared or registered, and every process's random state. Call it on all processes.

        Args:
            output_dir: the checkpoint, a directory that is put in place in one move once it is complete. With
                ``ProjectConfiguration(automatic_checkpoint_naming=True)`` it may be left out.
            safe_serialization: only True; there is no other format.
            info: numbers and names for its manifest (``step``, ``epoch``, ...).
            parts: further states to keep in files of their own, by name.
            weights_only: the models and ``parts`` only.
            blocking: False returns when the state is copied to host memory; the rest happens beside the training. One
                save is under way at a time: the next waits for it. `poll_saving` and `finish_saving` tell of its end.
            also: further directories for the same state, each a checkpoint of its own.

        Raises:
            ValueError: without a directory, or inside a group of micro-batches.
            TypeError: for a state that is not data.
            OSError: the disk refused. Nothing of the attempt is left then, and what stood there before still does.
        """
        if not safe_serialization:
            raise ValueError(
                "save_state(safe_serialization=False): checkpoints are safetensors and JSON, never pickle. For weights "
                "in torch's format use accelerator.save(accelerator.get_state_dict(model), 'weights.pt')."
            )
        if isinstance(also, str | os.PathLike):
            raise TypeError(f"save_state(also={also!r}) must be a list of directories: write [{also!r}].")
        self.world.meet("accelerator.save_state")
        self.finish_saving()
        info = snapshot.described(self, info or {})  # type: ignore[arg-type]
        numbering = self.project_configuration if output_dir is None else None
        with self.world.together():
            path = (
                Path(output_dir) if output_dir is not None else automatic_naming.next_target(self.project_configuration)
            )
            targets = [Path(os.path.abspath(one)) for one in (path, *also)]
            snapshot.check(self, targets, parts or {})  # type: ignore[arg-type]
        if self.save_hooks and len(targets) > 1:
            raise ValueError("save_state(also=...): what a save_state pre-hook writes would be in one of them only.")
        copying = None
        with snapshot.staged(self, targets[0]), self.world.together():  # type: ignore[arg-type]
            files = snapshot.collect(self, targets[0], parts or {}, weights_only)  # type: ignore[arg-type]
            if not blocking:
                later = snapshot.of_optimizers(files)
                files, copying = self._copies.of(files, later, [one.optimizer for one in self.optimizers])
        if numbering is not None:
            numbering.iteration += 1
        self._publish(targets, files, info, numbering, copying)
        return targets[0]

    def _publish(
        self,
        targets: list[Path],
        files: Files,
        info: dict[str, Any],
        numbering: ProjectConfiguration | None,
        copying: Copying | None,
    ) -> None:
        """Write and commit, then drop what is too old: here and now, or beside the training."""
        hooked = bool(self.save_hooks)

        def publish(world: World) -> None:
            for target in targets:
                snapshot.publish(world, target, files, info, hooked)
            if numbering is not None and numbering.total_limit is not None:
                with world.together():
                    if world.is_main:
                        automatic_naming.drop_oldest(targets[0].parent, numbering.total_limit)

        if copying is None:
            publish(self.world)
            return
        world = self.world.beside()

        def work() -> None:
            with world.together():
                copying.finish()
            publish(world)

        self.saving = Job(work)

    def poll_saving(self) -> bool:
        """Whether no ``save_state(blocking=False)`` is under way; costs nothing.

        Raises:
            Exception: whatever the last one failed with, once.
        """
        if self.saving is not None and self.saving.done:
            self.finish_saving()
        return self.saving is None

    def finish_saving(self) -> None:
        """Wait for a ``save_state(blocking=False)`` that is under way; raises what it failed with, once."""
        job = self.saving
        if job is not None:
            try:
                job.finish()
            finally:
                if job.done:  # else Ctrl-C ended the wait, and the copies that it writes are still in use
                    self.saving = None

    def end_training(self) -> None:
        """Wait for a save that is under way, then for everyone; finish the trackers."""
        self.finish_saving()
        super().end_training()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | OpenCheckpoint | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        models: bool = True,
        state: bool = True,
        strict: bool | None = None,
        schedule: str | None = None,
    ) -> dict[str, Any]:
        """Restore what `save_state` saved; returns its ``info``. Call it on all processes.

        A group of micro-batches that has begun begins anew. What a registered object gets is laid out over the
        processes as what its own ``state_dict`` has at the same place.

        Args:
            input_dir: a checkpoint's directory, or the checkpoint if it is open already. With
                ``automatic_checkpoint_naming`` it may be left out: the newest that is intact is loaded, and a warning
                names each that had to be skipped.
            load_kwargs: accepted empty; loading has no options.
            models: restore the models.
            state: restore everything else.
            strict: False takes what fits of another model's or optimizer's state, and says what does not. Default: what
                the model's ``strict_loading`` says, else True.
            schedule: whose learning rates and schedules hold: ``"saved"``, those of the checkpoint, or ``"script"``,
                those of the prepared optimizers and schedulers, as they are after as many steps. Default: the saved
                ones, with a warning if the script's are others.

        Raises:
            ValueError: if it is no checkpoint, is damaged, another model's or optimizer's, or was replaced while it was
                read; nothing is changed then on any process. What the ``load_state_dict`` of a scheduler or a
                registered object itself raises comes later, when models and optimizers are loaded.
        """
        self.finish_saving()
        check_schedule(schedule)
        if load_kwargs:
            raise ValueError(f"load_state(load_kwargs={dict(load_kwargs)!r}): checkpoints are read in one way only.")
        project = self.project_configuration
        if input_dir is None:
            opened, skipped = automatic_naming.newest(self.world, project, state)
            for text in skipped:
                warn(f"load_state skipped a checkpoint: {text}")
        else:
            opened = input_dir if isinstance(input_dir, OpenCheckpoint) else open_together(self.world, input_dir)
        info = load.load(self, opened, models=models, state=state, strict=strict, schedule=schedule)  # type: ignore[arg-type]
        if state:
            self.steps = info["step"]
            project.iteration = self.world.broadcast(automatic_naming.iteration_after(project, opened.path))
        return info

    # -- weights for others --------------------------------------------------------------------------------------

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own module.

        Args:
            model: a prepared one.
            keep_fp32_wrapper: accepted; no ``forward`` is ever replaced.
            keep_torch_compile: return what ``torch.compile`` made of it, if that was what was prepared.
        """
        own = self.strategy.unwrap(model)
        if not keep_torch_compile:
            return own
        return next((m for m in model.modules() if m._modules.get("_orig_mod") is own), own)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state of the user's own module, whole and under its own names. Call it on all processes.

        Returns:
            On rank zero the tensors: those that were sharded whole, in host memory; others are the model's own, which
            training changes, so clone what is to be kept. Other processes get None for each that was sharded.
        """
        if not unwrap:
            raise ValueError(
                "get_state_dict(unwrap=False): names with wrappers in them fit no other model. Leave it out, or call "
                "model.state_dict() yourself."
            )
        state = whole(self.strategy.model_state(model), self.is_main_process)
        return {own_name(name): value for name, value in state.items()}

    @property
    def should_save_model(self) -> bool:
        """True: `save_model` knows which process writes."""
        return True

    def _writes_here(self) -> bool:
        return self.is_local_main_process if self.project_configuration.save_on_each_node else self.is_main_process

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write data to a file on the main process, for others to load: a state dict, numbers, nested as you like.

        It may be called on the main process alone.

        The file appears in one move. It holds data only, and ``torch.load(f, weights_only=True)`` reads it: tensors,
        numbers, text, bytes, None, dtypes, devices, in dicts, lists, tuples and sets. numpy's numbers are written as
        Python's, a defaultdict as a dict.

        Args:
            obj: what to write; for a module give its ``state_dict()``, for a sharded one what `get_state_dict` returns.
            f: a path, or an open file.
            safe_serialization: as safetensors; ``obj`` is a dict of tensors then. Tied ones are written once, and the
                header says so.

        Raises:
            TypeError: for anything else (numpy arrays, paths, objects), with its place and what to do.
        """
        if self._writes_here():
            export.save_object(obj, f, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights for others to load: ``model.safetensors``, or shards and their index.

        Call it on all processes. Where nothing of the model is sharded, the main process may call it alone.

        Args:
            model: the model, prepared or not.
            save_directory: made if it is not there; no checkpoint's. Files of an earlier save, of either kind, go once
                the new ones are complete.
            max_shard_size: the most bytes of a file, a number or ``"500MB"``, ``"2GiB"``.
            safe_serialization: False writes ``pytorch_model.bin`` in torch's format.
        """
        limit = export.byte_size(max_shard_size)
        if any(map(is_sharded, model.parameters())):
            self.world.meet("accelerator.save_model")
        weights = self.get_state_dict(model)
        if self._writes_here():
            export.save_weights(weights, Path(save_directory), limit, safe_serialization)


def _add(hooks: OrderedDict[int, Callable[..., Any]], hook: Callable[..., Any]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
