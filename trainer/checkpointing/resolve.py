"""Resolution of ``ckpt_path``: the path of a checkpoint, or a word, such as "last", that selects a checkpoint."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from ...callbacks import Checkpoint, ModelCheckpoint, folders
from ...common.messages import abbreviate, announce, warn
from ...common.remote_path import AnyPath, absolute, as_path
from ...engine import CheckpointStore
from ...engine.checkpoint import (
    STATE,
    CheckpointNotFoundError,
    Manifest,
    OpenCheckpoint,
    compare_names,
    filesystem,
    find_first_intact,
    has_part,
    is_checkpoint,
    open_callback_states,
    open_together,
    recover_interrupted,
)
from ...loggers import DirectoryLogger
from ..core import load_checkpoint, overrides
from ..runs import CHECKPOINTS, RECORD
from ..runs import read as read_run
from .checkpoint_io import ENTRY, open_dict
from .run_identity import differences, is_complete
from .words import WORDS_FOR_CHECKPOINTS

if TYPE_CHECKING:
    from ..trainer import Trainer

_ADVICE = " To use one anyway, pass its path."
_ELSEWHERE = {
    "hpc": "checkpoints saved after a scheduler's signal are ordinary checkpoints. Use 'last'",
    "registry": "Treadle has no model registry. Pass a checkpoint's path",
}


@dataclass
class SearchReport:
    """Findings of a search for a checkpoint, which rank zero sends to all ranks.

    Attributes:
        steps_reached: Number of optimizer steps of the run, as last recorded in its folder; 0 if unknown.
        skipped: Sentences about checkpoints that cannot be used.
        other_runs: Paths of checkpoints from other runs, keyed by a text that states how those runs differ.
        searched: Directories that were searched, or descriptions of other places that were searched.
    """

    steps_reached: int = 0
    skipped: list[str] = field(default_factory=list)
    other_runs: dict[str, list[AnyPath]] = field(default_factory=dict)
    searched: list[str] = field(default_factory=list)

    def list_skipped(self) -> list[str]:
        """Return a sentence about each checkpoint that cannot be used, and one about those of each other run."""
        sentences = [*self.skipped]
        for difference, paths in self.other_runs.items():
            subject = f"{paths[0]} and {len(paths) - 1} more belong" if len(paths) > 1 else f"{paths[0]} belongs"
            sentences.append(f"{subject} to another run ({difference}).{_ADVICE}")
        return sentences

    def describe_searched(self) -> str:
        """Return the directories or places that were searched, as text."""
        return ", ".join(self.searched) or "the loggers' directory"


class CheckpointResolver:
    """Search for the checkpoint of a stage; `resolve` opens and verifies it.

    ``ckpt_path`` is None; the path of a checkpoint; ``"last"``, the latest intact checkpoint of this run; ``"best"``,
    the best checkpoint according to the ModelCheckpoint; or, in ``fit`` only, ``"auto"``: like ``"last"``, but ``fit``
    starts from scratch not only where there is no checkpoint, but also where none can be used. ``got_task`` says that
    the caller passed the task: where ``"last"`` finds no checkpoint, an evaluation then takes its current weights.
    """

    def __init__(self, trainer: Trainer, stage: str, ckpt_path: Any, got_task: bool = False) -> None:
        self.trainer, self.stage, self.ckpt_path = trainer, stage, ckpt_path
        self._needs_one = stage != "fit" and not got_task
        self.world = trainer.accelerator.world
        self.report = SearchReport()

    def resolve(self) -> OpenCheckpoint | None:
        """Return the opened and verified checkpoint, the same on every rank; None if no checkpoint is loaded.

        Call it on all ranks. If ``ckpt_path`` is a word, a message announces the choice, and warnings name the skipped
        checkpoints.

        Raises:
            CheckpointNotFoundError: If ``ckpt_path`` is a path that does not exist.
            ValueError: If ``ckpt_path`` is invalid for the stage or selects no intact checkpoint.
            TypeError: If ``ckpt_path`` is neither a string nor a path.
        """
        ckpt_path = self.ckpt_path
        if ckpt_path is None:
            return None
        self._check_arguments()
        if not (isinstance(ckpt_path, str) and ckpt_path in WORDS_FOR_CHECKPOINTS):
            self._check_path(as_path(ckpt_path))
            return self._open(as_path(ckpt_path))
        opened = self._best() if ckpt_path == "best" else self._last()
        self.report = report = self.world.broadcast(self.report)
        for sentence in report.list_skipped():
            warn(f"ckpt_path={ckpt_path!r} skips a checkpoint: {sentence}")
        if opened is None:
            say = announce if ckpt_path == "auto" else warn
            intact = "intact " if report.skipped else ""
            start, use = "starts from scratch", " to resume from"
            if self.stage != "fit":
                start, use = "takes the model's current weights", ""
            say(
                f"ckpt_path={ckpt_path!r}: {self.stage} {start}, because there is no {intact}checkpoint{use} in "
                f"{report.describe_searched()}"
            )
            return None
        action, step = "resumes from" if self.stage == "fit" else "loads the weights from", opened.manifest.step
        behind = f"; the run had reached step {report.steps_reached:,}" if report.steps_reached > step else ""
        announce(f"ckpt_path={ckpt_path!r}: {self.stage} {action} {opened.path} (optimizer step {step:,}{behind})")
        return opened

    def _open(self, path: AnyPath) -> OpenCheckpoint:
        if isinstance(path, Path) and path.is_file() and not is_checkpoint(path):
            return self._open_dict(path)
        opened = open_together(self.world, self.world.broadcast(path))
        opened.verify(self.world)
        return opened

    def _open_dict(self, path: Path) -> OpenCheckpoint:
        """Open a file that a `CheckpointIO` plugin or another library has written, on each rank by itself."""
        plugin = self.trainer.checkpointer.plugin
        with self.world.failing_together():
            try:
                if plugin is None:
                    self._compare_names(path)
                content = load_checkpoint(path) if plugin is None else plugin.load_checkpoint(path)
            except UnpicklingError as error:
                raise ValueError(
                    f"ckpt_path={str(path)!r} contains more than data. Its weights can be loaded with "
                    "TaskModule.load_from_checkpoint or treadle.load_weights, which run no code."
                ) from error
            if self.stage == "fit" and ENTRY not in content:
                raise ValueError(
                    f"ckpt_path={str(path)!r} contains weights of another library and nothing that Treadle can resume "
                    "from. Load its weights with TaskModule.load_from_checkpoint, and call fit without ckpt_path."
                )
            return open_dict(content, str(path))

    def _compare_names(self, path: Path) -> None:
        """Raise a ValueError if a file has the weights of another model. Copying a million tensors first takes 30 s."""
        trainer, task = self.trainer, self.trainer.task
        hooked = overrides(task, "on_load_checkpoint") or overrides(task, "load_state_dict")
        if task.strict_loading and not hooked:
            from ...engine.weights import open_source

            with open_source(path) as source:
                compare_names(task, source.weights | source.extras, path, is_complete(trainer, task))

    def _check_arguments(self) -> None:
        stage, ckpt_path = self.stage, self.ckpt_path
        if not isinstance(ckpt_path, str | os.PathLike):
            raise TypeError(f"ckpt_path={ckpt_path!r} must be {self._describe_choices()}.")
        if ckpt_path == "auto" and stage != "fit":
            raise ValueError(
                f"ckpt_path='auto' is for fit only, because it may start from scratch. Pass a path, 'last' or 'best' "
                f"to {stage}."
            )
        if isinstance(ckpt_path, str) and (why := _ELSEWHERE.get(ckpt_path.partition(":")[0])):
            raise ValueError(f"ckpt_path={ckpt_path!r}: {why}.")

    def _describe_choices(self) -> str:
        words = "'last', 'best' or 'auto'" if self.stage == "fit" else "'last' or 'best'"
        return f"a checkpoint's path, {words}"

    def _check_path(self, path: AnyPath) -> None:
        """Raise an error on every rank if a path does not exist, or is a folder of checkpoints."""
        exists, inside = True, list[AnyPath]()
        with self.world.failing_together():
            if self.world.is_main:
                recover_interrupted(path)
                exists = path.is_dir() or path.is_file()
                if path.is_dir() and not is_checkpoint(path):
                    inside = CheckpointStore(path).find() or CheckpointStore(path / CHECKPOINTS).find()
        exists, inside = self.world.broadcast((exists, inside))
        if not exists:
            raise CheckpointNotFoundError(f"ckpt_path={str(path)!r} does not exist. Pass {self._describe_choices()}.")
        if inside:
            number = f" ({len(inside)} were found)" if len(inside) > 1 else ""
            raise ValueError(
                f"ckpt_path={str(path)!r} is a folder of checkpoints, not a checkpoint. Pass the path of one "
                f"checkpoint, such as {str(inside[-1])!r}{number}."
            )

    def _check_callbacks(self) -> None:
        if not self.trainer.checkpoint_callbacks:
            raise ValueError(
                f"ckpt_path={self.ckpt_path!r} searches the directory of the ModelCheckpoint, but the Trainer has no "
                "ModelCheckpoint. Pass a path instead."
            )

    # -- the last checkpoint -------------------------------------------------------------------------------------

    def _last(self) -> OpenCheckpoint | None:
        """Return the latest intact checkpoint; None if ``fit`` starts from scratch or the current weights are taken."""
        trainer, report = self.trainer, self.report
        if not trainer.checkpoint_callbacks and self.stage == "fit" and trainer.fast_dev_run:
            report.searched = ["a fast_dev_run, which has no checkpoints"]
            return None
        keepers = [callback for callback in trainer.callbacks if isinstance(callback, Checkpoint) and callback.keeper]
        for callback in keepers:
            if (path := callback.resume_path()) is not None:
                return self._open(as_path(path))
        if keepers and not trainer.checkpoint_callbacks:
            report.searched = [f"{callback.keeper}'s checkpoints" for callback in keepers]
            if self._needs_one:
                raise self._none_intact()
            return None
        self._check_callbacks()
        latest = self._latest(resumable=self.stage == "fit")
        with self.world.failing_together():
            if self.world.is_main and latest is None:
                self._refuse_plugin_files()
                # In the folder of a recorded run, a fresh start would mix two runs, and an evaluation of the current
                # weights would be taken for one of that run.
                recorded = any(_run_record(as_path(folder)) for folder in report.searched)
                wrong_run = recorded and (report.other_runs or self.stage != "fit")
                none_usable = self.ckpt_path == "last" and (report.skipped or report.other_runs)
                if self._needs_one or wrong_run or none_usable:
                    raise self._none_intact()
            if self.world.is_main and latest is not None and self.stage == "fit":
                report.steps_reached = _steps_reached(latest.path.parent)
        return latest

    def _refuse_plugin_files(self) -> None:
        """Raise a ValueError if a `CheckpointIO` plugin has written checkpoints, whose steps only the plugin knows."""
        plugin = self.trainer.checkpointer.plugin
        if plugin is None:
            return
        names = tuple(callback.FILE_EXTENSION for callback in self.trainer.checkpoint_callbacks)
        for store in self._stores(itertools.chain(*self._folders())):
            for name in filesystem.list_names(store.directory):
                if name.endswith(names):
                    raise ValueError(
                        f"ckpt_path={self.ckpt_path!r} cannot select among the checkpoints of "
                        f"{type(plugin).__name__}, because only this plugin can read them. Pass the path of one, such "
                        f"as {str(store.directory / name)!r}."
                    )

    def _none_intact(self) -> ValueError:
        report, ckpt_path = self.report, self.ckpt_path
        whose = " from this run" if report.other_runs else ""
        folders_searched = report.describe_searched()
        reasons = [f"ckpt_path={ckpt_path!r}, but there is no intact checkpoint{whose} in {folders_searched}"]
        reasons += [reason.removesuffix(_ADVICE) for reason in report.list_skipped()]
        fresh = ""
        if self.stage == "fit" and report.other_runs:  # "auto" would fail too if the folder belongs to a recorded run
            fresh = ", or save to another directory to start from scratch"
        elif self.stage == "fit" and ckpt_path != "auto":
            fresh = ", or 'auto' to start from scratch if there is no checkpoint"
        return ValueError("; ".join(reason.rstrip(".") for reason in reasons) + f". Pass a path{fresh}.")

    def _latest(self, resumable: bool) -> OpenCheckpoint | None:
        """Return the latest intact checkpoint of this run; with ``resumable``, skip those with weights only."""
        return find_first_intact(self.world, self._candidates(resumable), self.report.skipped)

    def _candidates(self, resumable: bool) -> Iterator[OpenCheckpoint]:
        """Yield this run's checkpoints, latest first, and then those of each earlier version, latest version first."""
        report = self.report
        run_folders, earlier_folders = self._folders()
        if self.stage == "fit":  # this run saves in them: complete what a killed process left unfinished
            for store in self._stores(run_folders):
                for sentence in store.recover():
                    announce(sentence)
        for batch in ([*run_folders], *([folder] for folder in earlier_folders)):
            report.searched += map(str, batch)
            for manifest, path in _latest_first(self._stores(batch), report):
                if resumable and not has_part(manifest.files, STATE):
                    report.skipped.append(f"{path} contains only weights, so no run can resume from it.")
                    continue
                opened = OpenCheckpoint(path, manifest)
                try:
                    lines = differences(self.trainer, opened)
                except ValueError as error:
                    report.skipped.append(str(error))
                    continue
                if lines:
                    report.other_runs.setdefault(abbreviate(lines, 5, "; "), []).append(path)
                else:
                    yield opened

    def _folders(self) -> tuple[list[AnyPath], list[AnyPath]]:
        """Return the directories of this run's ModelCheckpoints, and those of earlier runs, latest first."""
        trainer = self.trainer
        run_folders: dict[AnyPath, None] = {}
        earlier_folders: dict[AnyPath, None] = {}
        for callback in trainer.checkpoint_callbacks:
            if callback.dirpath is not None:
                run_folders[as_path(callback.dirpath)] = None
                continue
            logger = next((logger for logger in trainer.loggers if logger.root_dir), None)
            root = trainer.default_root_dir
            if not trainer.loggers:
                run_folders[absolute(root) / CHECKPOINTS] = None
                continue
            # Reading a version that is not set would claim the next free one.
            has_version = logger is not None and getattr(logger, "_version", None) is not None
            folder = (
                trainer.logbook.existing_folder(root) if logger is None else logger.log_dir if has_version else None
            )
            if folder:
                run_folders[absolute(folder) / CHECKPOINTS] = None
                continue
            parent = trainer.logbook.folder_of_runs(root) if logger is None else str(logger.root_dir)
            names = "version_*" if isinstance(logger, DirectoryLogger) else "*"
            earlier_folders |= dict.fromkeys(_find_earlier_runs(absolute(parent), names))
        return list(run_folders), list(earlier_folders)

    def _stores(self, directories: Iterable[AnyPath]) -> list[CheckpointStore]:
        """Return the checkpoint stores in directories, and in the folders that names like ``{epoch}/{step}`` create."""
        depth = max(callback.name_depth for callback in self.trainer.checkpoint_callbacks)
        return [CheckpointStore(path) for directory in directories for path in folders(directory, depth)]

    # -- the best checkpoint -------------------------------------------------------------------------------------

    def _best(self) -> OpenCheckpoint:
        self._check_callbacks()
        callback, stage, is_main = self.trainer.checkpoint_callback, self.stage, self.world.is_main
        assert callback is not None
        latest = None
        if not self.world.broadcast(callback.best_model_path):
            with self.world.failing_together():
                if is_main and stage != "fit" and not any(map(_run_record, self._folders()[0])):
                    raise ValueError(
                        f"ckpt_path='best': {stage} was called without a fit in this process, so the ModelCheckpoint "
                        "has saved no best checkpoint. Pass a path, call fit first, or select an earlier run with "
                        "RunFolder.open or --from-run."
                    )
            latest = self._latest(resumable=True)
        with self.world.failing_together():
            best: AnyPath = self._path_of_best(callback, latest) if is_main else Path()
            if is_main and stage == "fit":
                self.report.steps_reached = _steps_reached(best.parent)
        best = self.world.broadcast(best)
        return latest if latest is not None and absolute(latest.path) == absolute(best) else self._open(best)

    def _path_of_best(self, callback: ModelCheckpoint, latest: OpenCheckpoint | None) -> AnyPath:
        """Return the best checkpoint's path, from a ModelCheckpoint or from its state in the latest checkpoint."""
        best, source = callback.best_model_path, "the Trainer's ModelCheckpoint"
        if not best:
            if latest is None:
                text = (
                    f"ckpt_path='best', but the ModelCheckpoint has saved no best checkpoint, and no intact checkpoint "
                    f"from this run in {self.report.describe_searched()} records one. Pass a path."
                )
                raise ValueError("\n  ".join([text, *self.report.list_skipped()]))
            best, source = _recorded_best(callback, latest), str(latest.path)
        if not best:
            raise ValueError(f"ckpt_path='best', but {source} records no best checkpoint. Pass a path.")
        recover_interrupted(best)
        if not (is_checkpoint(best) or as_path(best).is_file()):
            raise ValueError(
                f"ckpt_path='best', but {best}, the best checkpoint according to {source}, does not exist. Pass a path."
            )
        return as_path(best)


def find_resumable(trainer: Trainer) -> tuple[int, AnyPath] | None:
    """Return the optimizer step and path of the last checkpoint from which this run can be resumed, if any.

    It is not verified.
    """
    if not any(callback.dirpath for callback in trainer.checkpoint_callbacks):  # also if the stage was not set up
        return None
    resolver = CheckpointResolver(trainer, "fit", "last")
    committed = _latest_first(resolver._stores(resolver._folders()[0]), resolver.report)
    return next(((manifest.step, path) for manifest, path in committed if has_part(manifest.files, STATE)), None)


def _run_record(folder: AnyPath) -> AnyPath | None:
    """Return the path of ``run.json`` in ``folder`` or one of the two folders above it, or None."""
    return next((path for parent in (folder, *folder.parents[:2]) if (path := parent / RECORD).is_file()), None)


def _steps_reached(folder: AnyPath) -> int:
    """Return the number of optimizer steps recorded for the run that a folder belongs to; 0 without a record."""
    record = _run_record(folder)
    return 0 if record is None else int(read_run(record.parent).facts.get("steps", 0))


def _latest_first(stores: list[CheckpointStore], report: SearchReport) -> Iterator[tuple[Manifest, AnyPath]]:
    """Yield the committed checkpoints of several stores, latest first, and add damaged manifests to the report."""
    by_store: list[list[tuple[Manifest, AnyPath]]] = []
    for store in stores:
        committed, problems = store.scan()
        # Ordered by commit within a folder: a run that resumed from an earlier step, or another run in the same folder,
        # may have left later steps.
        by_store.append(sorted(committed, key=lambda pair: (pair[0].sequence, pair[0].step)))
        # The age of a checkpoint with an unreadable manifest is unknown.
        report.skipped += problems
    while any(by_store):  # between folders the step decides
        yield max(filter(None, by_store), key=lambda pairs: (pairs[-1][0].step, str(pairs[-1][1]))).pop()


def _find_earlier_runs(root: AnyPath, names: str) -> list[AnyPath]:
    """Return the checkpoint directories of the runs in a folder, latest first.

    Versions are ordered by number, other names by time. An object store records no time for a folder.
    """

    def age(folder: AnyPath) -> tuple[int, float]:
        number = folder.parent.name.removeprefix("version_")
        return (int(number) if number.isdecimal() else -1, folder.stat().st_mtime if isinstance(folder, Path) else 0.0)

    found = (root / name / CHECKPOINTS for name in filesystem.list_names(root) if fnmatchcase(name, names))
    return sorted((folder for folder in found if folder.is_dir()), key=age, reverse=True)


def _recorded_best(callback: ModelCheckpoint, latest: OpenCheckpoint) -> str:
    """Return the path of the best checkpoint that the ModelCheckpoint recorded in a checkpoint; "" if none."""
    state = open_callback_states(latest)["callbacks"].get(callback.state_key, {})
    best, dirpath = state.get("best_model_path", ""), state.get("dirpath")
    if best and dirpath and as_path(dirpath) in as_path(best).parents and not is_checkpoint(best):
        inside = best[len(dirpath) :].lstrip("/\\")
        for folder in latest.path.parents:  # the run's directory was moved
            if is_checkpoint(moved := folder / inside):
                return str(moved)
    return str(best)
