"""The Trainer's own state in a checkpoint.

A save (`TrainerCheckpointer.save`) happens in this order:

1. It is refused if no run could resume from the checkpoint.
2. `call_save_hooks` gives the dict in Lightning's layout to the ``on_save_checkpoint`` hooks (`lightning_layout`).
3. `applying` adds what the hooks changed, the hyperparameters and the configuration to the checkpoint.
4. `Accelerator.save_state` collects the states of the objects that `register` has registered, and of its own.
5. `choose_save` decides how these are written: to one file, by the user's `CheckpointIO`, or to a directory.

A resume is spread over the start of ``fit``:

1. `restoring_counters`, before the dataloaders exist: the counters and the data module's state.
2. `call_load_hook`, before the model is placed: the task's ``on_load_checkpoint``, which may replace layers.
3. `load_weights`, once the model is placed.
4. `restore_run`, before the first step: everything else. The callbacks' hooks run with their states.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from numpy import ndarray
from torch import Tensor

from ...callbacks import Callback
from ...common.messages import warn
from ...common.remote_path import absolute
from ...engine import isolated_random_state, random_state
from ...engine.checkpoint import (
    ADDED,
    CONFIG,
    DATAMODULE_HPARAMS,
    HPARAMS,
    CallbackStates,
    Files,
    FileSave,
    OpenCheckpoint,
    Save,
    TrainerStates,
    encode,
    lay_out,
    load_into_memory,
    model_part,
    open_registered,
    read_frozen_note,
)
from ..core import (
    DataModule,
    HookDict,
    HookedWeights,
    TaskModule,
    add_objects,
    overrides,
    read_datamodule_hparams,
    read_hook_entries,
    read_weights,
    remember,
    replace_lost,
)
from ..loop import Hooks
from . import run_identity
from .checkpoint_io import CheckpointIO, DictSave, TorchCheckpointIO
from .lightning_layout import finish_document, make_document

if TYPE_CHECKING:
    from ..loop import Progress
    from ..trainer import Trainer


@dataclass(frozen=True)
class HookedState:
    """Result of the ``on_save_checkpoint`` hooks.

    Attributes:
        added: Entries that the hooks added, and the hyperparameters that they changed.
        weights: The task's state as the hooks left it; None if they did not change it.
        document: Function that returns the dict in Lightning's layout, as the hooks left it.
    """

    added: dict[str, Any]
    weights: dict[str, Any] | None
    document: Callable[[], dict[str, Any]]


class TrainerCheckpointer:
    """Saver and loader of the Trainer's own parts of a checkpoint, such as counters and the states of callbacks.

    Args:
        trainer: Trainer whose state is saved and restored.

    Attributes:
        earlier_callback_states: Callback states by ``state_key``, which are saved instead of the current ones.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.earlier_callback_states: dict[str, Any] = {}
        self._origin = ""  # see `remember`
        self._owners: tuple[Any, Any] = (None, None)  # its task and data module
        self._identity: dict[str, Any] = {}  # their class and hyperparameters, by which a search knows the run
        self._left_out: dict[str, dict[str, str]] = {}  # what the last save left out: words by name, by part
        self._added: dict[str, Any] | None = None  # entries that hooks add to the checkpoint being saved

    # -- registered objects --------------------------------------------------------------------------------------------

    def register(self) -> None:
        """Register the Trainer's own state with the accelerator, which then saves it in every full checkpoint.

        Raises:
            ValueError: If two callbacks with a state have the same ``state_key``.
        """
        trainer, metrics, world = self._trainer, self._trainer.metrics, self._trainer.accelerator.data_world
        collect_callback_states(trainer.callbacks)  # so that a duplicate name is an error now, not at the first save
        states = TrainerStates(
            progress=trainer.progress,
            logged=trainer.logbook,
            history=trainer.history,
            metrics=SimpleNamespace(
                # At an epoch's end a checkpoint begins the next one, which has logged nothing yet.
                state_dict=lambda: metrics.state_dict(world, trainer.task, over=trainer.progress.epoch_is_over),
                load_state_dict=lambda state: metrics.load_state_dict(state, world, trainer.task),
                state_layout=dict,  # nothing in it is sharded
            ),
            callbacks=SimpleNamespace(
                state_dict=self._collect_callback_states,
                load_state_dict=self._load_callback_states,
                state_layout=self._collect_callback_layouts,
            ),
        )
        datamodule = trainer.datamodule
        if datamodule is not None and type(datamodule).state_dict is not DataModule.state_dict:
            # `restoring_counters` restores its state before the rest.
            states["datamodule"] = SimpleNamespace(
                state_dict=datamodule.state_dict, load_state_dict=lambda state: None, state_layout=dict
            )
        trainer.accelerator.register_for_checkpointing(**states)

    def _collect_callback_states(self) -> CallbackStates:
        callback_states = collect_callback_states(self._trainer.callbacks) | self.earlier_callback_states
        return CallbackStates(callbacks=callback_states, added=self._added or {})

    def _collect_callback_layouts(self) -> CallbackStates:
        """Return the callbacks' states and the entries of `Callback.added_layout`.

        Only the sharding of their tensors is used, as the layout of the tensors to load.

        The checkpoint hooks are not called, because they might change state.
        """
        callbacks = self._trainer.callbacks
        layouts = {name: value for callback in callbacks for name, value in callback.added_layout().items()}
        return CallbackStates(callbacks=collect_callback_states(callbacks), added=layouts)

    # -- save ----------------------------------------------------------------------------------------------------------

    def find_task(self) -> TaskModule | None:
        """Return the task of the run, or of a later ``trainer.strategy.connect(task)``; None before both."""
        models = self._trainer.strategy.unwrapped_models if self._trainer.stage is None else ()
        return next((model for model in models if isinstance(model, TaskModule)), self._trainer.task)

    def save(
        self,
        task: TaskModule,
        paths: Sequence[str | Path],
        weights_only: bool,
        trainable_only: bool = False,
        blocking: bool = True,
        form: str | None = None,
    ) -> None:
        """Save a checkpoint of the run. Call it on all processes, between two optimizer steps.

        Args:
            task: Task to save.
            paths: Paths under which the checkpoint is saved.
            weights_only: Omit everything that is needed only to resume.
            trainable_only: Omit frozen weights. Default: False.
            blocking: Wait until the checkpoint is written. Default: True.
            form: ``"file"``, ``"directory"``, or None for a file where one is possible. Default: None.

        Raises:
            ValueError: If the run cannot be saved now, or for a reason of `Accelerator.save_state`.
            TypeError, OSError: See `Accelerator.save_state`.
        """
        trainer, accelerator = self._trainer, self._trainer.accelerator
        path, *also = map(str, paths)
        if not accelerator.models:
            raise ValueError(
                "save_checkpoint has no model to save, because the last stage ended before it prepared the task. Run a "
                "stage, such as fit, first."
            )
        if trainer.progress.in_step and not weights_only:
            raise ValueError(
                f"{path} cannot be saved in the middle of optimizer step {trainer.progress.step + 1}, because no run "
                "can resume from the middle of a step. Save in on_train_batch_end or on_step_end, or save only the "
                "current weights with weights_only=True."
            )
        accelerator.world.meet("trainer.save_checkpoint")
        as_file = self.is_one_file(form, paths)
        if trainer.stage is None and not accelerator.registered and not weights_only:
            warn(
                f"{path} contains only weights, because the last stage was not fit. No run can resume from this "
                "checkpoint. Save directly after fit, or pass weights_only=True."
            )
            weights_only = True
        with accelerator.world.failing_together():
            hooked = self.call_save_hooks(task, trainer.progress, weights_only)
        with trainer.history.spending("checkpoints"), self.applying(hooked, task, weights_only) as parts:
            accelerator.checkpointer.save_state(
                path,
                info=self.info(trainer.progress),
                parts=parts,
                weights_only=weights_only,
                trainable_only=trainable_only,
                blocking=blocking or self.plugin is not None,  # it gets the run's own tensors
                also=also,
                choose_save=partial(self.choose_save, hooked) if as_file else None,
            )

    def is_one_file(self, form: str | None, paths: Sequence[str | Path]) -> bool:
        """Return whether a checkpoint is saved as one file (or by a plugin) and not as a directory.

        Args:
            form: ``"file"``, ``"directory"``, or None for a file where one is possible.
            paths: Paths or URLs of the checkpoint.

        Raises:
            ValueError: If a file is not possible, or ``form`` is invalid.
        """
        if form not in (None, "file", "directory"):
            raise ValueError(f"format={form!r} must be 'file', 'directory' or None, which chooses one.")
        reasons = [self._trainer.accelerator.checkpointer.explain_directory(absolute(path)) for path in paths]
        reason = next(filter(None, reasons), "")
        if (form == "file" or self.plugin is not None) and reason:
            asked = "format='file'" if self.plugin is None else f"the plugin {type(self.plugin).__name__}"
            raise ValueError(f"{asked} cannot save this checkpoint, because {reason}. Use format=None or 'directory'.")
        return (form != "directory" or self.plugin is not None) and not reason

    def call_save_hooks(self, task: TaskModule, progress: Progress, weights_only: bool) -> HookedState:
        """Call the ``on_save_checkpoint`` hooks, and return the entries they added and the weights they changed.

        They receive the dict in Lightning's layout. Treadle itself restores its own records, so of the entries that
        they change, only ``state_dict`` and ``hyper_parameters`` take effect in a run that resumes here.

        Args:
            task: Task whose weights the hooks receive.
            progress: Counters of the run at the step that is saved.
            weights_only: Omit what is needed only to resume.
        """
        known = self._left_out.pop(ADDED, {})
        make = partial(make_document, self._trainer, task, progress, weights_only)
        table = self._trainer.hooks
        if table is None or table.task is not task:  # it was connected without a stage
            table = Hooks(self._trainer, task, self._trainer.active_callbacks)
        hooks = table.on_save_checkpoint
        if not hooks:
            return HookedState({}, None, make)
        document = make()
        reserved, hparams = {*document} - {"hyper_parameters"}, self._get_hparams()
        weights = HookedWeights(task.state_dict())
        checkpoint = HookDict({**document, "state_dict": weights.offered})
        for hook in hooks:
            hook(checkpoint)
        entries = {name: value for name, value in checkpoint.items() if name not in reserved}
        if isinstance(entries.get("hyper_parameters"), Mapping):
            changed = {
                k: v for k, v in entries.pop("hyper_parameters").items() if k not in hparams or v is not hparams[k]
            }
            entries |= {"hyper_parameters": changed} if changed else {}
        self._take_objects(task, entries, known)
        return HookedState(entries, weights.get_edited(checkpoint), lambda: dict(checkpoint))

    def _take_objects(self, task: TaskModule, entries: dict[str, Any], known: Mapping[str, str]) -> None:
        """Move entries that checkpoints cannot store from those that hooks added to the task.

        A warning names those that are not in ``known``.
        """
        objects = {}
        for name, value in entries.items():
            if isinstance(value, Tensor | ndarray):
                continue  # data, which must not be lost
            try:
                encode(value)
            except TypeError:
                objects[name] = value
        task.__dict__["_added_objects"] = objects
        self._left_out[ADDED] = {name: f"{name} ({type(entries.pop(name)).__qualname__})" for name in objects}
        if new := [words for name, words in self._left_out[ADDED].items() if name not in known]:
            warn(
                f"on_save_checkpoint of {type(task).__name__} or a callback adds {', '.join(new)}, which checkpoints "
                "cannot store, because they are or contain objects. Only loads in this process get copies; a load in "
                "another process lacks the entries. Add a state_dict() or other data instead."
            )

    def dump_checkpoint(self, weights_only: bool = False) -> dict[str, Any]:
        """Return the run's checkpoint as a dict in Lightning's layout, after the ``on_save_checkpoint`` hooks.

        Args:
            weights_only: Omit what is needed only to resume. Default: False.
        """
        trainer = self._trainer
        if trainer.task is None:
            raise ValueError("dump_checkpoint needs a task. Call fit or another stage first.")
        return self.call_save_hooks(trainer.task, trainer.progress, weights_only).document()

    @contextmanager
    def applying(self, hooked: HookedState, task: TaskModule, weights_only: bool) -> Iterator[dict[str, Any]]:
        """Apply the hooks' entries and weights to the checkpoint that is saved inside this context manager.

        Its value are the parts that the Trainer adds to the checkpoint; see `parts`.

        Args:
            hooked: Result of `call_save_hooks`.
            task: Task to save.
            weights_only: Whether what is needed only to resume is omitted.
        """
        parts = self.parts(task)
        if weights_only and hooked.added:
            parts[ADDED] = hooked.added  # otherwise it is among the callbacks' states

        def replace(module: Any, current: dict[str, Any], prefix: str, local_metadata: Any) -> None:
            assert hooked.weights is not None
            current.clear()
            current.update(hooked.weights)

        handle = None if hooked.weights is None else task.register_state_dict_post_hook(replace)
        self._added = hooked.added
        try:
            yield parts
        finally:
            self._added = None
            if handle is not None:
                handle.remove()

    def parts(self, task: TaskModule) -> dict[str, Any]:
        """Return the hyperparameters and the YAML configuration of the run, by their names in a checkpoint.

        Args:
            task: Task whose hyperparameters are saved.
        """
        parts: dict[str, Any] = {}
        self.remember_owners(task, self._trainer.datamodule)  # one of `trainer.strategy.connect` has no stage
        for name, owner in ((HPARAMS, task), (DATAMODULE_HPARAMS, self._trainer.datamodule)):
            self._left_out[name] = {}
            if owner is not None and owner.hparams:
                stored = owner.stored_hparams()
                self._left_out[name] = owner.check_hparams(stored)
                parts[name] = {
                    "hyper_parameters": stored.values,
                    "hparams_name": owner.hparams_name,
                    "hparams_kind": owner.hparams_kind,
                    "left_out": stored.left_out,
                }
        if self._trainer.config is not None:
            parts[CONFIG] = {"yaml": self._trainer.config}
        return parts

    def remember_owners(self, task: TaskModule, datamodule: DataModule | None) -> None:
        """Record whose run it is, before hooks change its hyperparameters. Call it on all processes.

        Later loads in this process then find the objects that a task's checkpoints lack.

        Args:
            task: The task.
            datamodule: The data module.
        """
        if self._owners[0] is task and self._owners[1] is datamodule:
            return
        self._owners = task, datamodule
        self._identity = {
            "task": run_identity.class_name(type(task)),
            "configuration": run_identity.configuration(task, datamodule),
        }
        self._origin = self._trainer.accelerator.world.broadcast(uuid4().hex)
        for owner, part in ((task, HPARAMS), (datamodule, DATAMODULE_HPARAMS)):
            if owner is not None:
                remember(owner, part, self._origin)

    def info(self, progress: Progress) -> dict[str, Any]:
        """Return the counters, the task's class and the hyperparameters that a checkpoint's manifest records.

        Args:
            progress: Counters of the run.
        """
        counts = {"step": progress.step, "epoch": progress.epoch, "samples": progress.samples}
        objects = {"origin": self._origin, "left_out": self._left_out} if any(self._left_out.values()) else {}
        return {**counts, **self._identity, **objects}

    def choose_save(self, hooked: HookedState, files: Files, left_out: Container[str]) -> Callable[[Path, str], Save]:
        """Return the function that makes the `Save` of a checkpoint that is one file or a plugin's.

        Args:
            hooked: Result of `call_save_hooks`.
            files: This process's files.
            left_out: Names of the weights that the checkpoint does not contain.
        """
        is_main, plugin = self._trainer.accelerator.world.is_main, self.plugin
        document = finish_document(hooked.document(), left_out) if is_main else None
        if plugin is not None:
            return lambda target, writer: DictSave(target, plugin.save_checkpoint, document)
        layout = None if document is None else lay_out(files, document)
        return lambda target, writer: FileSave(target, writer, layout)

    @property
    def plugin(self) -> CheckpointIO | None:
        """The user's `CheckpointIO`, which then writes the checkpoints; None for Treadle's own writer."""
        plugin = self._trainer.strategy.checkpoint_io
        return None if type(plugin) is TorchCheckpointIO else plugin

    def finish_plugin(self, stage: str) -> None:
        """Let the user's `CheckpointIO` complete its writes, at the end of each stage.

        Args:
            stage: Name of the stage.
        """
        if self.plugin is not None:
            self.plugin.teardown()

    # -- restore -------------------------------------------------------------------------------------------------------

    @contextmanager
    def restoring_counters(self, opened: OpenCheckpoint | None) -> Iterator[None]:
        """Restore the data module and the counters, on which dataloaders may depend; on an error, revert the counters.

        Args:
            opened: The opened checkpoint; None restores nothing.
        """
        progress = self._trainer.progress
        saved_counters = progress.state_dict()
        try:
            if opened is not None:
                progress.load_state_dict(self.restore_datamodule(opened).get("progress", {}))
            yield
        except BaseException:
            if opened is not None:
                progress.load_state_dict(saved_counters)
            raise

    def restore_datamodule(self, opened: OpenCheckpoint) -> dict[str, Any]:
        """Restore the data module's state, if the checkpoint has one, and return all registered states.

        Call it on all processes.

        Args:
            opened: The opened checkpoint.
        """
        datamodule = self._trainer.datamodule
        with self._trainer.accelerator.world.failing_together():
            registered = open_registered(opened)
            if datamodule is not None and "datamodule" in registered:
                datamodule.load_state_dict(load_into_memory(registered["datamodule"], {}, {}))
        return registered

    def call_load_hook(self, task: TaskModule, opened: OpenCheckpoint) -> dict[str, Any] | None:
        """Call the task's ``on_load_checkpoint``. Call it on all processes, before the model is placed.

        The hook may replace layers, which must then be placed and trained like the others.

        Args:
            task: Task whose hook is called.
            opened: Opened checkpoint.

        Returns:
            The weights as the hook left them; None if there is no hook, or it did not change them.
        """
        if not overrides(task, "on_load_checkpoint"):
            return None
        world = self._trainer.accelerator.world
        opened.verify(world)
        with world.failing_together():
            checkpoint = read_hook_entries(opened)
            replace_lost(checkpoint, opened.path, task)
            if hparams := self._get_hparams():
                checkpoint["hyper_parameters"] = hparams | checkpoint.get("hyper_parameters", {})
            weights = HookedWeights(read_weights(opened))
            checkpoint["state_dict"] = weights.offered
            task.on_load_checkpoint(checkpoint)
            return weights.get_edited(checkpoint)

    def load_weights(self, task: TaskModule, opened: OpenCheckpoint, weights: dict[str, Any] | None) -> None:
        """Load the weights. Call it on all processes.

        Args:
            task: Task that gets the weights.
            opened: Opened checkpoint.
            weights: Weights to load instead of the saved ones; None for the saved ones. See `call_load_hook`.

        Raises:
            ValueError: If the checkpoint is damaged, or the weights do not fit the task.
        """
        accelerator = self._trainer.accelerator
        by_task = overrides(task, "load_state_dict")  # a custom load_state_dict may accept more
        if weights is None and not by_task:
            accelerator.load_state(opened, state=False)
            return
        opened.verify(accelerator.world)
        with accelerator.world.failing_together():
            weights = weights or read_weights(opened)
            if any(getattr(value, "is_meta", False) for value in weights.values()):
                own = task.state_dict()  # a hook inserted the task's own values before the strategy created them
                weights = {name: own[name] if getattr(v, "is_meta", False) else v for name, v in weights.items()}
            from ...engine.weights import Opened, load_opened

            frozen = read_frozen_note(opened.part(model_part(0)).notes, opened.path)
            load_opened(task, Opened(str(opened.path), weights, frozen=frozen), task.strict_loading)

    def restore_run(self, opened: OpenCheckpoint | None, schedule: str | None = None) -> Any:
        """Restore everything except the weights, and return the RNG state to set right before the first step.

        Args:
            opened: The opened checkpoint, or None, which restores nothing.
            schedule: ``"saved"``, ``"script"`` or None; see `Accelerator.load_state`. Default: None.
        """
        if opened is None:
            return None
        with isolated_random_state():
            info = self._trainer.accelerator.load_state(
                opened,
                models=False,
                strict=self._is_strict(),
                schedule=schedule,
                finish_epoch=False,  # the end of the epoch and its validation follow
            )
            if info.get("saved_by", 1) > 1:
                warn(
                    f"{opened.path} was saved by rank zero alone after an error. It lacks the other ranks' RNG state "
                    "and their share of the epoch's logged means, so both start from scratch on these ranks."
                )
            return random_state()

    def _is_strict(self) -> bool:
        return all(getattr(model, "strict_loading", True) for model in self._trainer.strategy.unwrapped_models)

    def _load_callback_states(self, state: CallbackStates) -> None:
        """Load the callbacks' states and call their ``on_load_checkpoint``; `call_load_hook` has called the task's."""
        callbacks = {callback.state_key: callback for callback in self._trainer.callbacks}
        for name, saved in state["callbacks"].items():
            if name in callbacks:
                callbacks[name].load_state_dict(saved)
            else:
                warn(
                    f"the state of the callback {name} in the checkpoint is ignored, because the Trainer has no "
                    "callback with this state_key. Add the callback to restore its state."
                )
        progress = self._trainer.progress
        added = HookDict({"epoch": progress.epoch, "global_step": progress.step, **state["added"]})
        if self._trainer.hooks.on_load_checkpoint and (opened := self._trainer.opened_checkpoint) is not None:
            added = add_objects({**read_datamodule_hparams(opened), **added}, opened.manifest.info)
            replace_lost(added, opened.path, self._trainer.task)
        if hparams := self._get_hparams():
            added["hyper_parameters"] = hparams | state["added"].get("hyper_parameters", {})
        if self._trainer.hooks.on_load_checkpoint and self._trainer.task is not None:
            added["state_dict"] = self._trainer.task.state_dict()  # just loaded
        for hook in self._trainer.hooks.on_load_checkpoint:
            hook(added)

    def _get_hparams(self) -> dict[str, Any]:
        task = self._trainer.task
        return {} if task is None or not task.hparams else dict(task.hparams)


def collect_callback_states(callbacks: list[Callback]) -> dict[str, Any]:
    """Return the states of all callbacks that have one, by ``state_key``.

    Raises:
        ValueError: If two of these callbacks have the same ``state_key``.
    """
    states: dict[str, Any] = {}
    for callback in callbacks:
        if state := callback.state_dict():
            if callback.state_key in states:
                raise ValueError(
                    f"two callbacks have the state_key {callback.state_key!r}, under which only one state can be "
                    "saved. Remove one of them, or override the property state_key in one of their classes."
                )
            states[callback.state_key] = state
    return states
