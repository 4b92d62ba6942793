"""Which checkpoint is meant by ``ckpt_path``: a path, or a word for one that has to be found."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callbacks import ModelCheckpoint
from ..callbacks.file_names import folders
from ..engine import CheckpointStore, checkpoint
from ..engine.manifest import Manifest
from ..loggers.directory import DirectoryLogger
from ..strategies import announce, warn
from .candidates import configuration, differences
from .config_values import WORDS_FOR_CHECKPOINTS
from .runs.folder import CHECKPOINTS, RECORD
from .runs.listing import read as read_run

if TYPE_CHECKING:
    from .trainer import Trainer

_ELSEWHERE = {
    "hpc": "checkpoints made for a scheduler's signal are like all others here: say 'auto'",
    "registry": "there is no model registry: give a checkpoint's directory",
}


@dataclass
class Found:
    """What a search came to.

    Attributes:
        path: the checkpoint, or None.
        step: its optimizer steps.
        reached: the optimizer steps that the run had taken when it ended, where its folder says so.
        skipped: one sentence for each that could not be taken.
        others: checkpoints of other runs, the newest first, by what tells them from this one.
        places: where the search went.
    """

    path: Path | None = None
    step: int = 0
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


def find_checkpoint(trainer: Trainer, stage: str, ckpt_path: Any) -> Path | None:
    """The checkpoint to go on from, the same on every process. All processes must ask.

    Rank zero looks, and says once what it found and what it had to skip.

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
    found = Found()
    with world.together():
        if world.is_main:
            word = ckpt_path if isinstance(ckpt_path, str) and ckpt_path in WORDS_FOR_CHECKPOINTS else None
            found = Found(_given(Path(ckpt_path))) if word is None else _search(trainer, stage, word)
    found = world.broadcast(found)
    for sentence in found.skipped:
        warn(f"ckpt_path={ckpt_path!r} skips a checkpoint: {sentence}")
    if found.others:
        warn(
            f"ckpt_path={ckpt_path!r} skips checkpoints of other runs: {found.about_others}. To continue from one of "
            "them, give its path."
        )
    if ckpt_path == "auto" and found.path is None:
        announce(f"ckpt_path='auto': a fresh start, as there is nothing to go on from in {_join(found.places)}")
    elif ckpt_path in WORDS_FOR_CHECKPOINTS:
        what = "goes on from" if stage == "fit" else "takes the weights of"
        behind = f"; the run had reached step {found.reached:,}" if found.reached > found.step else ""
        announce(f"ckpt_path={ckpt_path!r}: {stage} {what} {found.path} (optimizer step {found.step:,}{behind})")
    return found.path


def _check(stage: str, ckpt_path: Any) -> None:
    if not isinstance(ckpt_path, str | os.PathLike):
        raise TypeError(f"ckpt_path={ckpt_path!r} must be a checkpoint's directory, 'last', 'best' or 'auto'.")
    if ckpt_path == "auto" and stage != "fit":
        raise ValueError(
            f"ckpt_path='auto' may mean a fresh start, so it is for fit only; {stage} takes a path, 'last' or 'best'."
        )
    if isinstance(ckpt_path, str) and (why := _ELSEWHERE.get(ckpt_path.partition(":")[0])):
        raise ValueError(f"ckpt_path={ckpt_path!r}: {why}.")


def _given(path: Path) -> Path:
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
    checkpoint.verify(path, digests=False)  # they are compared when it is read
    return path


def _search(trainer: Trainer, stage: str, word: str) -> Found:
    """Look for what a word means; rank zero alone does."""
    if not trainer.checkpoint_callbacks:
        if word == "auto" and trainer.fast_dev_run:
            return Found(places=["a fast_dev_run, which has no checkpoints"])
        raise ValueError(f"ckpt_path={word!r}, but there is no ModelCheckpoint to say where to look. Give a path.")
    if word == "best":
        return _best(trainer, stage)
    found = _newest(trainer, recover=stage == "fit", resumable=stage == "fit")
    if found.path is None and word == "last":
        raise _none_fits(word, stage, found)
    if found.path is None and found.others and any(_run_record(Path(place)) for place in found.places):
        # The folder is this run's own. Starting afresh in it would mix two runs.
        raise _none_fits(word, stage, found)
    if found.path is not None and stage == "fit":
        found.reached = _steps_reached(found.path.parent)
    return found


def _none_fits(word: str, stage: str, found: Found) -> ValueError:
    whose = " of this run" if found.others else ""
    reasons = [f"ckpt_path={word!r}, but there is no intact checkpoint{whose} in {_join(found.places)}", *found.skipped]
    if found.others:
        reasons.append(f"those of other runs are {found.about_others}")
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


def _newest(trainer: Trainer, recover: bool, resumable: bool) -> Found:
    """The newest that is intact, in the directories of this run's ModelCheckpoints.

    Directories of earlier versions are gone through one by one, the highest version first.

    Args:
        trainer: whose ModelCheckpoints are meant.
        recover: finish what a killed process left half done, where this run saves.
        resumable: leave out those that hold weights only.
    """
    found = Found()
    own, earlier = _places(trainer)
    if recover:
        for folder in own:
            for store in _stores(folder, trainer):
                for sentence in store.recover():
                    announce(sentence)
    for places in ([*own], *([folder] for folder in earlier)):
        found.places += map(str, places)
        stores = [store for folder in places for store in _stores(folder, trainer)]
        if _newest_in(trainer, stores, found, resumable):
            break
    return found


def _newest_in(trainer: Trainer, stores: list[CheckpointStore], found: Found, resumable: bool) -> bool:
    listed: list[list[tuple[Manifest, Path]]] = []
    for store in stores:
        paths = store.find()
        inside: list[tuple[Manifest, Path]] = []
        for path in paths:
            try:
                inside.append((checkpoint.read_manifest(path), path))
            except ValueError as error:
                found.skipped.append(str(error))
        # In one folder by the order in which they were committed: a run that went back, or another run in the same
        # folder, has left later steps behind.
        listed.append(sorted(inside, key=lambda pair: (pair[0].sequence, pair[0].step)))
        # Those whose manifest can't be read are in no list, so nobody knows how new they are.
        _, problems = store.latest(verify=False)
        found.skipped += [text for text in problems if not any(text.startswith(f"{path}: ") for path in paths)]
    while any(listed):  # between folders the step decides
        manifest, path = max(filter(None, listed), key=lambda one: (one[-1][0].step, str(one[-1][1]))).pop()
        if resumable and "state.json" not in manifest.files:
            found.skipped.append(f"{path}: it holds weights only, so no run can go on from it")
            continue
        try:
            if lines := differences(trainer, path, manifest):
                found.others.setdefault(_shortened(lines), []).append(path)
                continue
            checkpoint.verify(path)
        except ValueError as error:
            found.skipped.append(str(error))
            continue
        found.path, found.step = path, manifest.step
        return True
    return False


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


def _best(trainer: Trainer, stage: str) -> Found:
    """The best of this process's ModelCheckpoint; in a process that has none, the one that the newest knows of."""
    first = trainer.checkpoint_callback
    assert first is not None
    found = Found()
    best, source = first.best_model_path, "its ModelCheckpoint"
    if not best and stage != "fit" and not any(_run_record(place) for place in _places(trainer)[0]):
        raise ValueError(
            f"ckpt_path='best': {stage} was called without a fit in this process, so its ModelCheckpoint has saved no "
            "best checkpoint. Give a path, call fit before, or use the folder of a run (RunFolder, --from-run), whose "
            "checkpoints are that run's own."
        )
    if not best:
        found = _newest(trainer, recover=stage == "fit", resumable=True)
        if found.path is None:
            others = f" Those of other runs: {found.about_others}." if found.others else ""
            raise ValueError(
                f"ckpt_path='best', but its ModelCheckpoint has saved no best one, nor is there an intact checkpoint "
                f"of this run in {_join(found.places)} that says which it is.{others} Give a path."
            )
        best, source = _recorded_best(first, found.path), str(found.path)
    if not best:
        raise ValueError(f"ckpt_path='best', but {source} knows of no best checkpoint. Give a path.")
    if not os.path.isdir(best):
        raise ValueError(f"ckpt_path='best', but {best}, the best that {source} knows of, does not exist. Give a path.")
    found.path, found.step = Path(best), checkpoint.verify(best, digests=False).step
    if stage == "fit":
        found.reached = _steps_reached(found.path.parent)
    return found


def _recorded_best(callback: ModelCheckpoint, newest: Path) -> str:
    """The best according to the ModelCheckpoint's state in a checkpoint; "" if that has none."""
    state = checkpoint.read_part(newest, "state")["registered"].get("callbacks", {}).get("callbacks", {})
    own = state.get(callback.state_key, {})
    best, home = own.get("best_model_path", ""), own.get("dirpath")
    if best and home and not os.path.isdir(best) and Path(home) in Path(best).parents:
        for folder in newest.parents:  # the run's directory was moved
            if os.path.isdir(moved := folder / Path(best).relative_to(home)):
                return str(moved)
    return str(best)


def _join(places: list[str]) -> str:
    return ", ".join(places) or "the loggers' directory"
