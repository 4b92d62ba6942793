"""Which checkpoint is meant by ``ckpt_path``: a path, or a word for one that has to be found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...callbacks import ModelCheckpoint, folders
from ...common.messages import announce, warn
from ...engine import CheckpointStore
from ...engine.checkpoint import (
    STATE,
    Manifest,
    OpenCheckpoint,
    find_first_intact,
    has_part,
    open_callback_states,
    open_together,
)
from ...engine.checkpoint import store as checkpoint
from ...loggers import DirectoryLogger
from ..runs import CHECKPOINTS, RECORD
from ..runs import read as read_run
from .run_identity import configuration, differences
from .words import WORDS_FOR_CHECKPOINTS

if TYPE_CHECKING:
    from ..trainer import Trainer

_ELSEWHERE = {
    "hpc": "checkpoints made for a scheduler's signal are like all others here: say 'auto'",
    "registry": "there is no model registry: give a checkpoint's directory",
}


@dataclass
class Search:
    """What a search for a checkpoint came across, for what is said of it; only rank zero looks.

    Attributes:
        reached: the optimizer steps that the run had taken when it ended, where its folder says so.
        skipped: one sentence for each that could not be taken.
        others: checkpoints of other runs, the newest first, by what tells them from this one.
        places: where the search went.
    """

    reached: int = 0
    skipped: list[str] = field(default_factory=list)
    others: dict[str, list[Path]] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)

    @property
    def about_others(self) -> str:
        """What to say of the other runs' checkpoints."""
        texts = []
        for difference, paths in self.others.items():
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            texts.append(f"{paths[0]}{more} ({difference})")
        return "; ".join(texts)


def find_checkpoint(trainer: Trainer, stage: str, ckpt_path: Any) -> OpenCheckpoint | None:
    """Find, open and verify the checkpoint to resume from, the same on every process. All processes must ask.

    Rank zero looks, all verify what it comes across, and it is said once what was found and what had to be skipped.

    Args:
        trainer: whose ModelCheckpoints say where to look.
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        ckpt_path: None; a path, which never stands for another one; ``"last"``, the newest that is intact and belongs
            to this run; ``"best"``; or ``"auto"``, in ``fit`` alone: as ``"last"``, or a fresh start where there is
            nothing.

    Raises:
        ValueError: if there is none such, or one given by its path is damaged.
        TypeError: if it is no path.
    """
    assert trainer.task is not None
    configuration(trainer.task, trainer.datamodule)  # noted before any hook may change it
    if ckpt_path is None:
        return None
    _check(stage, ckpt_path)
    world = trainer.accelerator.world
    word = ckpt_path if isinstance(ckpt_path, str) and ckpt_path in WORDS_FOR_CHECKPOINTS else None
    if word is None:
        with world.together():
            if world.is_main:
                _check_given(Path(ckpt_path))
        opened = open_together(world, world.broadcast(Path(ckpt_path)))
        opened.verify(world)
        return opened
    search = Search()
    found = _best(trainer, stage, search) if word == "best" else _last(trainer, stage, word, search)
    search = world.broadcast(search)
    for sentence in search.skipped:
        warn(f"ckpt_path={ckpt_path!r} skips a checkpoint: {sentence}")
    if search.others:
        warn(
            f"ckpt_path={ckpt_path!r} skips checkpoints of other runs: {search.about_others}. To continue from one of "
            "them, give its path."
        )
    if found is None:
        announce(f"ckpt_path='auto': a fresh start, as there is nothing to go on from in {_join(search.places)}")
        return None
    what, step = "goes on from" if stage == "fit" else "takes the weights of", found.manifest.step
    behind = f"; the run had reached step {search.reached:,}" if search.reached > step else ""
    announce(f"ckpt_path={ckpt_path!r}: {stage} {what} {found.path} (optimizer step {step:,}{behind})")
    return found


def _check(stage: str, ckpt_path: Any) -> None:
    if not isinstance(ckpt_path, str | os.PathLike):
        raise TypeError(f"ckpt_path={ckpt_path!r} must be a checkpoint's directory, 'last', 'best' or 'auto'.")
    if ckpt_path == "auto" and stage != "fit":
        raise ValueError(
            f"ckpt_path='auto' may mean a fresh start, so it is for fit only; {stage} takes a path, 'last' or 'best'."
        )
    if isinstance(ckpt_path, str) and (why := _ELSEWHERE.get(ckpt_path.partition(":")[0])):
        raise ValueError(f"ckpt_path={ckpt_path!r}: {why}.")


def _check_given(path: Path) -> None:
    checkpoint.find_again(path)
    if path.is_file():
        raise ValueError(
            f"ckpt_path={str(path)!r} is a file, and a checkpoint of ours is a directory. Weights of Lightning's and "
            "others' files are read by TaskModule.load_from_checkpoint and treadle.load_weights."
        )
    if not path.is_dir():
        raise ValueError(
            f"ckpt_path={str(path)!r} does not exist. Give a checkpoint's directory, 'last', 'best' or 'auto'."
        )
    if not (path / checkpoint.MANIFEST).is_file():
        inside = CheckpointStore(path).find() or CheckpointStore(path / CHECKPOINTS).find()
        if inside:
            names = ", ".join(str(one.relative_to(path)) for one in inside[:5])
            raise ValueError(
                f"ckpt_path={str(path)!r} is no checkpoint, but a folder with checkpoints in it: give one of {names}."
            )


def _last(trainer: Trainer, stage: str, word: str, search: Search) -> OpenCheckpoint | None:
    """The newest that is intact; None where ``"auto"`` finds nothing to go on from. All processes must ask."""
    if not trainer.checkpoint_callbacks and word == "auto" and trainer.fast_dev_run:
        search.places = ["a fast_dev_run, which has no checkpoints"]
        return None
    _check_callbacks(trainer, word)
    world = trainer.accelerator.world
    newest = _newest(trainer, search, recover=stage == "fit", resumable=stage == "fit")
    with world.together():
        # A folder that is this run's own: starting afresh in it would mix two runs.
        own = search.others and any(_run_record(Path(place)) for place in search.places)
        if world.is_main and newest is None and (word == "last" or own):
            raise _none_fits(word, stage, search)
        if world.is_main and newest is not None and stage == "fit":
            search.reached = _steps_reached(newest.path.parent)
    return newest


def _check_callbacks(trainer: Trainer, word: str) -> None:
    if not trainer.checkpoint_callbacks:
        raise ValueError(f"ckpt_path={word!r}, but there is no ModelCheckpoint to say where to look. Give a path.")


def _none_fits(word: str, stage: str, search: Search) -> ValueError:
    whose = " of this run" if search.others else ""
    places = _join(search.places)
    reasons = [f"ckpt_path={word!r}, but there is no intact checkpoint{whose} in {places}", *search.skipped]
    if search.others:
        reasons.append(f"those of other runs are {search.about_others}")
    fresh = ", or say 'auto' to start afresh where there is none" if stage == "fit" and word != "auto" else ""
    return ValueError("; ".join(reasons) + f". Give a path{fresh}.")


def _run_record(folder: Path) -> Path | None:
    """Return the record of the run whose folder ``folder`` lies in, or is."""
    return next((path for one in (folder, *folder.parents[:2]) if (path := one / RECORD).is_file()), None)


def _steps_reached(folder: Path) -> int:
    """Return the optimizer steps of the run whose folder this is in, as it noted them last; 0 if it notes none."""
    record = _run_record(folder)
    return 0 if record is None else int(read_run(record.parent).facts.get("steps", 0))


# -- the newest ----------------------------------------------------------------------------------------------------


def _newest(trainer: Trainer, search: Search, recover: bool, resumable: bool) -> OpenCheckpoint | None:
    """The newest that is intact, in the directories of this run's ModelCheckpoints. All processes must ask.

    Args:
        trainer: whose ModelCheckpoints are meant.
        search: notes what is skipped, and where it looked.
        recover: finish what a killed process left half done, where this run saves.
        resumable: leave out those that hold weights only.
    """
    candidates = _candidates(trainer, search, recover, resumable)
    return find_first_intact(trainer.accelerator.world, candidates, search.skipped)


def _candidates(trainer: Trainer, search: Search, recover: bool, resumable: bool) -> Iterator[OpenCheckpoint]:
    """This run's checkpoints, the newest first; see `_newest`.

    Directories of earlier versions are gone through one by one, the highest version first.
    """
    own, earlier = _places(trainer)
    if recover:
        for folder in own:
            for store in _stores(folder, trainer):
                for sentence in store.recover():
                    announce(sentence)
    for places in ([*own], *([folder] for folder in earlier)):
        search.places += map(str, places)
        stores = [store for folder in places for store in _stores(folder, trainer)]
        for manifest, path in _newest_first(stores, search):
            if resumable and not has_part(manifest.files, STATE):
                search.skipped.append(f"{path}: it holds weights only, so no run can go on from it")
                continue
            opened = OpenCheckpoint(path, manifest)
            try:
                lines = differences(trainer, opened)
            except ValueError as error:
                search.skipped.append(str(error))
                continue
            if lines:
                search.others.setdefault(_shortened(lines), []).append(path)
            else:
                yield opened


def _newest_first(stores: list[CheckpointStore], search: Search) -> Iterator[tuple[Manifest, Path]]:
    listed: list[list[tuple[Manifest, Path]]] = []
    for store in stores:
        inside, problems = store.scan()
        # In one folder by the order in which they were committed: a run that went back, or another run in the same
        # folder, has left later steps behind.
        listed.append(sorted(inside, key=lambda pair: (pair[0].sequence, pair[0].step)))
        # Those whose manifest can't be read are in no list, so nobody knows how new they are.
        search.skipped += problems
    while any(listed):  # between folders the step decides
        yield max(filter(None, listed), key=lambda one: (one[-1][0].step, str(one[-1][1]))).pop()


def _shortened(lines: list[str], most: int = 5) -> str:
    return "; ".join(lines[:most]) + (f"; and {len(lines) - most} more" if len(lines) > most else "")


def _places(trainer: Trainer) -> tuple[list[Path], list[Path]]:
    """The directories this run's ModelCheckpoints save in, and those of earlier runs, the newest first."""
    own: dict[Path, None] = {}
    earlier: dict[Path, None] = {}
    for callback in trainer.checkpoint_callbacks:
        if callback.dirpath is not None:
            own[Path(callback.dirpath)] = None
            continue
        logger = next((logger for logger in trainer.loggers if logger.root_dir), None)
        root = trainer.default_root_dir
        if not trainer.loggers:
            own[Path(os.path.abspath(root)) / CHECKPOINTS] = None
            continue
        # To ask for a version that nobody has given would claim the next free one.
        known = logger is not None and getattr(logger, "_version", None) is not None
        folder = trainer.logbook.known_folder(root) if logger is None else logger.log_dir if known else None
        if folder:
            own[Path(os.path.abspath(folder)) / CHECKPOINTS] = None
            continue
        above = trainer.logbook.folder_of_runs(root) if logger is None else str(logger.root_dir)
        names = "version_*" if isinstance(logger, DirectoryLogger) else "*"
        earlier |= dict.fromkeys(_earlier(Path(os.path.abspath(above)), names))
    return list(own), list(earlier)


def _earlier(root: Path, names: str) -> list[Path]:
    """The checkpoints of runs in a folder, the newest first: by number, or by time where names are a service's ids."""

    def age(folder: Path) -> tuple[int, float]:
        number = folder.parent.name.removeprefix("version_")
        return (int(number) if number.isdecimal() else -1, folder.stat().st_mtime)

    return sorted(root.glob(f"{names}/{CHECKPOINTS}"), key=age, reverse=True)


def _stores(folder: Path, trainer: Trainer) -> list[CheckpointStore]:
    """The stores in a directory: itself, and where names such as ``{epoch}/{step}`` lead into folders, those too."""
    depth = max(callback.name_depth for callback in trainer.checkpoint_callbacks)
    return [CheckpointStore(path) for path in folders(folder, depth)]


# -- the best ------------------------------------------------------------------------------------------------------


def _best(trainer: Trainer, stage: str, search: Search) -> OpenCheckpoint:
    """The best of this process's ModelCheckpoint; in a process that has none, the one that the newest knows of.

    All processes must ask.
    """
    _check_callbacks(trainer, "best")
    first, world = trainer.checkpoint_callback, trainer.accelerator.world
    assert first is not None
    with world.together():
        places = _places(trainer)[0] if world.is_main and not first.best_model_path else []
        if world.is_main and not first.best_model_path and stage != "fit" and not any(map(_run_record, places)):
            raise ValueError(
                f"ckpt_path='best': {stage} was called without a fit in this process, so its ModelCheckpoint has saved "
                "no best checkpoint. Give a path, call fit before, or use the folder of a run (RunFolder, --from-run), "
                "whose checkpoints are that run's own."
            )
    newest = None
    if not world.broadcast(first.best_model_path):
        newest = _newest(trainer, search, recover=stage == "fit", resumable=True)
    with world.together():
        best = _path_of_best(first, newest, search) if world.is_main else Path()
        if world.is_main and stage == "fit":
            search.reached = _steps_reached(best.parent)
    best = world.broadcast(best)
    if newest is not None and os.path.abspath(newest.path) == os.path.abspath(best):
        return newest
    opened = open_together(world, best)
    opened.verify(world)
    return opened


def _path_of_best(callback: ModelCheckpoint, newest: OpenCheckpoint | None, search: Search) -> Path:
    """Where the best checkpoint is, by a ModelCheckpoint or by the newest checkpoint, which has its state."""
    best, source = callback.best_model_path, "its ModelCheckpoint"
    if not best:
        if newest is None:
            others = f" Those of other runs: {search.about_others}." if search.others else ""
            raise ValueError(
                f"ckpt_path='best', but its ModelCheckpoint has saved no best one, nor is there an intact checkpoint "
                f"of this run in {_join(search.places)} that says which it is.{others} Give a path."
            )
        best, source = _recorded_best(callback, newest), str(newest.path)
    if not best:
        raise ValueError(f"ckpt_path='best', but {source} knows of no best checkpoint. Give a path.")
    if not os.path.isdir(best):
        raise ValueError(f"ckpt_path='best', but {best}, the best that {source} knows of, does not exist. Give a path.")
    return Path(best)


def _recorded_best(callback: ModelCheckpoint, newest: OpenCheckpoint) -> str:
    """The best according to the ModelCheckpoint's state in a checkpoint; "" if that has none."""
    own = open_callback_states(newest)["callbacks"].get(callback.state_key, {})
    best, home = own.get("best_model_path", ""), own.get("dirpath")
    if best and home and not os.path.isdir(best) and Path(home) in Path(best).parents:
        for folder in newest.path.parents:  # the run's directory was moved
            if os.path.isdir(moved := folder / Path(best).relative_to(home)):
                return str(moved)
    return str(best)


def _join(places: list[str]) -> str:
    return ", ".join(places) or "the loggers' directory"
