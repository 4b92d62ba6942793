"""Killed at every disk operation, by every way in which something is saved: what was committed stays whole.

Each test lists the disk operations of what one way of saving does next, and for each moment of them (before, half-way,
after) forks the process there and kills the fork at it. What the disk holds then is compared, byte for byte, to what a
fork that lived has committed, so it is no older than the last commit and no mixture. A resumed run has to end with the
weights of one that was never interrupted, and to leave nothing behind. By default some points are resumed from, with
``-m slow`` all of them.
"""

import errno
import gc
import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import tempfile
import time
import traceback
import warnings
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import stored
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import Callback, ModelCheckpoint
from treadle.cli.commands.export import export
from treadle.engine.big_models.offload_file import write_weights
from treadle.engine.checkpoint import lay_out, parts
from treadle.engine.checkpoint import store as checkpoint
from treadle.engine.checkpoint.atomic_swap import VERSION_NAME
from treadle.engine.checkpoint.store import CheckpointStore, DiskSave, FileSave
from treadle.engine.configuration import ProjectConfiguration
from treadle.engine.weights.sources import open_weights
from treadle.strategies import FSDP, World
from treadle.strategies.processes import IDENTITY, identify_process

import treadle
from treadle.testing.faults import Fault, FaultPlan, disk_points, forked

pytestmark = pytest.mark.guarantee

LIVE = Fault("disk:*", "delay:0")
"""For a fork that is not killed."""


# -- what stands on the disk -----------------------------------------------------------------------------------------


def content(path):
    """A checkpoint as it lies there, to the byte."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}


def tree(root):
    """All that stands in a directory of checkpoints. The order of their commits differs after a crash."""
    found = {}
    for name in sorted(os.listdir(root)):
        if (root / name).is_file():
            with zipfile.ZipFile(root / name) as archive:
                found[name] = {record: archive.read(record) for record in archive.namelist()}
            del found[name]["checkpoint/treadle/manifest.json"]
            # A pickle depends on which equal strings are one object; its tensors are other records.
            found[name]["checkpoint/data.pkl"] = str(torch.load(root / name, weights_only=True))
        else:
            found[name] = content(root / name)
        found[name]["manifest.json"] = checkpoint.read_manifest(root / name).info
    return found


def hidden(root):
    return [name for name in os.listdir(root) if name.startswith(".")]


def reset(source, target):
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def fork(work, fault=LIVE):
    """`forked`, with Python's random state, which Python seeds anew in a fork."""
    state = random.getstate()

    def go_on():
        random.setstate(state)
        work()

    return forked(go_on, fault)


def ending(work, root, aside):
    """The weights that a run has come to in a fork, and all its checkpoints."""
    final = aside / "final"
    assert fork(lambda: final.write_bytes(pickle.dumps(work()))) == 0
    assert hidden(root) == []
    return pickle.loads(final.read_bytes()), tree(root)


class Door:
    """A way of saving, at the moment before it saves.

    Args:
        root: the directory of its checkpoints.
        aside: for notes.
        work: goes on with the run: takes steps, saves. Called in forks only, so always from the same moment.
        resume: begins a new run, goes on from what stands in ``root`` to the end, and returns the final weights.
        again: what a run does after it was told that a save failed; by default, the work.
    """

    def __init__(self, root, aside, work, resume, again=None):
        self.root, self.aside, self.work, self.resume, self.again = root, aside, work, resume, again or work
        self.before, self.log = aside / "before", aside / "log"
        shutil.copytree(root, self.before)
        self.known = {path.name: [content(path)] for path in CheckpointStore(root).find()}
        self.begin = max(checkpoint.read_manifest(path).step for path in CheckpointStore(root).find())
        (aside / "known").mkdir()
        assert fork(self._live) == 0
        self.points = pickle.loads((aside / "points").read_bytes())
        for path in (aside / "known").iterdir():
            self.known.setdefault(path.name.partition("@")[0], []).append(content(path))
        self.steps = [self.begin, *self.committed()]
        assert self.steps == sorted(self.steps)
        assert len(set(self.steps)) > 1

    def _live(self):
        (self.aside / "points").write_bytes(pickle.dumps(disk_points(lambda: self.go_on(keep=True))))

    def go_on(self, keep=False):
        """Do the work, noting each commit that returned."""
        commits = {kind: kind.commit for kind in (DiskSave, FileSave)}

        def note(path, info):
            with self.log.open("a") as log:
                log.write(f"{info['step']}\n")
            if keep:
                copy = shutil.copytree if path.is_dir() else shutil.copy
                copy(path, self.aside / "known" / f"{path.name}@{info['step']}")

        def noted(save, files, info, others):
            commits[type(save)](save, files, info, others)
            note(save._target, info)

        DiskSave.commit = FileSave.commit = noted
        try:
            self.work()
        finally:
            for kind, commit in commits.items():
                kind.commit = commit

    def committed(self):
        return [int(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def start_over(self):
        reset(self.before, self.root)
        self.log.unlink(missing_ok=True)

    def newest(self):
        """The newest checkpoint's step. All that count are whole, and what they were when they were committed."""
        store = CheckpointStore(self.root)
        path, skipped = store.latest()
        assert path is not None
        assert skipped == []
        for one in store.find():
            checkpoint.verify(one)
            match = VERSION_NAME.fullmatch(one.name)
            name = match["name"] if match else one.name
            assert content(one) in self.known[name], one
        return checkpoint.read_manifest(path).step

    def kill_at(self, point):
        """Kill the work at one point and see what is left; returns the newest one's step."""
        self.start_over()
        assert fork(self.go_on, point.fault("kill")) == -signal.SIGKILL
        count = len(self.committed())
        following = self.steps[count : count + 2]  # the last that was committed, the one that was being saved
        assert self.newest() in following
        return self.newest()

    def recover(self):
        found = self.newest()
        CheckpointStore(self.root).recover()
        assert hidden(self.root) == []
        assert self.newest() >= found

    def kill_everywhere(self, reference, resumed, every=1, form="directory"):
        """Kill at every point, and resume from each ``resumed``-th of them; ``reference`` was never interrupted."""
        seen = set()
        for number, point in enumerate(self.points[::every]):
            seen.add(self.kill_at(point))
            if number % resumed:
                self.recover()
            else:
                weights, files = ending(self.resume, self.root, self.aside)
                assert all(torch.equal(weights[name], value) for name, value in reference[0].items()), point
                assert files == reference[1], point
        assert seen == set(self.steps)
        writes, others, count = OPERATIONS[form]
        assert {(point.moment, point.operation) for point in self.points} >= {
            *itertools.product(["before", "half", "after"], writes),
            *itertools.product(["before", "after"], others),
        }
        assert len(self.points) > count

    def refuse_everywhere(self, every=1):
        """Let the disk refuse at every point: an error, or a warning where only what is replaced can't be deleted."""
        outcomes = set()
        for number, point in enumerate(self.points[::every]):
            self.start_over()
            code = (errno.ENOSPC, errno.EIO)[number % 2]
            fault = point.fault(f"oserror:{errno.errorcode[code]}")
            assert fork(lambda point=point, code=code: self._refused(point, code), fault) == 0, point
            outcomes.add((self.aside / "outcome").read_text())
            assert hidden(self.root) == [], point
        assert outcomes == {"error", "warning"}

    def _refused(self, point, code):
        raised = None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                self.go_on()
            except OSError as error:
                raised = error
        if raised is not None:
            assert raised.errno == code
            count = len(self.committed())
            assert self.newest() == self.steps[count], "what the caller was told failed is not there"
            if point.operation not in ("unlink", "rmdir"):  # else it is the cleaning that failed
                assert [name for name in hidden(self.root) if not name.endswith(".gone")] == []
        else:
            assert any(os.strerror(code) in str(one.message) for one in said)
            assert self.committed() == self.steps[1:]
            assert self.newest() == self.steps[-1]
        (self.aside / "outcome").write_text("error" if raised else "warning")
        self.log.unlink(missing_ok=True)
        self.known = None
        self.again()  # the run goes on, and saves
        CheckpointStore(self.root).recover()
        for path in CheckpointStore(self.root).find():
            checkpoint.verify(path)


OPERATIONS = {
    "directory": (["write_bytes", "write_tensors"], ["fsync", "rename", "unlink", "rmdir"], 60),
    "file": (["write_bytes", "write_stream"], ["fsync", "replace", "rename", "unlink"], 24),
}
"""What a save writes with, what else it does, and how many points it has at least."""


# -- own loops -------------------------------------------------------------------------------------------------------

LAST = 6


def make_net():
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))


class Loop:
    """A training of ``LAST`` steps that draws random numbers, and saves after each step in one of three ways."""

    def __init__(self, how, root, seed=0):
        self.how, self.root = how, root
        numbered = ProjectConfiguration(project_dir=root.parent, automatic_checkpoint_naming=True, total_limit=2)
        torch.manual_seed(seed)
        self.accelerator = treadle.Accelerator(cpu=True, project_config=numbered if how == "numbered" else None)
        net = make_net()
        self.model, self.optimizer = self.accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))

    def go_to(self, last):
        while self.accelerator.steps < last:
            self.accelerator.backward(self.model(torch.randn(5, 4)).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.how == "numbered":
                self.accelerator.save_state()
            else:
                self.accelerator.save_state(self.root / "last", blocking=self.how != "beside")
        self.accelerator.finish_saving()
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def resume(self):
        torch.manual_seed(7)
        other = Loop(self.how, self.root, seed=7)
        if self.how == "numbered":
            other.accelerator.load_state()
        else:
            store = CheckpointStore(self.root)
            store.recover()
            other.accelerator.load_state(store.latest()[0])
        return other.go_to(LAST)

    def door(self, aside, saves):
        """Where so many more saves come, over or beside the first two; and how it ends if nothing happens."""
        self.go_to(2)
        shutil.copytree(self.root, aside / "start")
        reference = ending(lambda: self.go_to(LAST), self.root, aside)
        reset(aside / "start", self.root)
        return Door(self.root, aside, lambda: self.go_to(self.accelerator.steps + saves), self.resume), reference


@pytest.fixture
def aside(tmp_path):
    """A directory for notes."""
    (tmp_path / "aside").mkdir()
    return tmp_path / "aside"


EXTENTS = [pytest.param(1, 8, 2, id="some"), pytest.param(2, 1, 1, id="all", marks=pytest.mark.slow)]
"""How many saves are gone through, of which points each n-th is resumed from, and each n-th point that is struck."""
WAYS_TO_SAVE = [*(pytest.param(how, marks=pytest.mark.exhaustive) for how in ("same", "numbered")), "beside"]
NO_SHM = pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="this machine has no /dev/shm")
TMPFS = pytest.param("tmpfs", marks=[pytest.mark.exhaustive, NO_SHM])


@pytest.mark.long
@pytest.mark.parametrize(("saves", "resumed", "every"), EXTENTS)
@pytest.mark.parametrize("how", [*WAYS_TO_SAVE, TMPFS])
def test_own_loop_killed(how, tmp_path, aside, saves, resumed, every):
    with tempfile.TemporaryDirectory(dir="/dev/shm" if how == "tmpfs" else tmp_path) as name:
        door, reference = Loop(how, Path(name) / "run" / "checkpoints").door(aside, saves)
        door.kill_everywhere(reference, resumed, every)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("saves", "every"), [pytest.param(1, 2, id="some"), pytest.param(2, 1, id="all", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("how", WAYS_TO_SAVE)
def test_own_loop_refused_by_the_disk(how, tmp_path, aside, saves, every):
    door, _ = Loop(how, tmp_path / "run" / "checkpoints").door(aside, saves)
    door.refuse_everywhere(every)


# -- the Trainer -----------------------------------------------------------------------------------------------------


class Task(treadle.TaskModule):
    """Draws random numbers, and is better at each step."""

    def __init__(self):
        super().__init__()
        self.net = make_net()

    def training_step(self, batch, batch_idx):
        self.log("score", -float(self.global_step), logger=False)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(root, form, *callbacks, seed=0, ckpt_path=None):
    """Two epochs of three steps, a save of the two best and of the last after each."""
    torch.manual_seed(seed)
    options = {"monitor": "score", "save_top_k": 2, "save_last": True, "every_n_train_steps": 1, "format": form}
    keeper = ModelCheckpoint(root, "{step}", every_n_epochs=None, **options)
    trainer = make_trainer(max_epochs=2, callbacks=[*callbacks, keeper], enable_checkpointing=True)
    task = Task()
    data = TensorDataset(torch.arange(36.0).reshape(9, 4).sin())
    trainer.fit(task, DataLoader(data, 3, shuffle=True), ckpt_path=ckpt_path)
    assert trainer.global_step == LAST
    return {name: value.clone() for name, value in task.state_dict().items()}


def explored(root, form, aside, explore):
    """Fit; before the saves of the fifth step, ``explore(door, reference)``."""
    reference = ending(lambda: fit(root, form), root, aside)
    shutil.rmtree(root)
    doors = []

    class Moment(Callback):
        def on_step_end(self, trainer, task):
            if trainer.global_step == 5:
                work = partial(trainer.checkpoint_callback.on_step_end, trainer, task)
                resume = partial(fit, root, form, seed=7, ckpt_path="auto")
                doors.append(Door(root, aside, work, resume, again=resume))
                explore(doors[0], reference)
                doors[0].start_over()

    weights = fit(root, form, Moment())
    assert all(torch.equal(weights[name], value) for name, value in reference[0].items())
    assert len(doors) == 1


TRAINER_FORMS = ["file", pytest.param("directory", marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("form", TRAINER_FORMS)
@pytest.mark.parametrize(
    ("resumed", "every"), [pytest.param(16, 3, id="some"), pytest.param(1, 1, id="all", marks=pytest.mark.slow)]
)
def test_trainer_killed(tmp_path, aside, resumed, every, form):
    def explore(door, reference):
        door.kill_everywhere(reference, resumed, every if form == "directory" else min(every, 2), form)

    explored(tmp_path / "run", form, aside, explore)


@pytest.mark.long
@pytest.mark.parametrize("form", TRAINER_FORMS)
@pytest.mark.parametrize("every", [pytest.param(7, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_trainer_refused_by_the_disk(tmp_path, aside, every, form):
    every = every if form == "directory" else min(every, 3)  # a file takes fewer operations
    explored(tmp_path / "run", form, aside, lambda door, reference: door.refuse_everywhere(every))


# -- one form for the other ------------------------------------------------------------------------------------------


def save_as(form, target, step, size=2**7):
    """Save the step's number, in each element of six tensors."""
    weights = {name: torch.full((size,), float(step)) for name in "abcdef"}
    if form == "torch":
        torch.save(weights, target)
    elif form == "empty":
        target.touch()
    else:
        files = parts.encode_part("model", weights) | parts.encode_part("state", {"step": step})
        make_save = None
        if form == "file":
            layout = lay_out(files, {"state_dict": weights})
            make_save = lambda target, writer: FileSave(target, writer, layout)  # noqa: E731
        checkpoint.write_and_commit(World(), target, files, {"step": step}, make_save=make_save)


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("file", "directory"),
        ("directory", "file"),
        pytest.param("file", "file", marks=pytest.mark.exhaustive),
        *(
            pytest.param(before, after, marks=pytest.mark.exhaustive)
            for before, after in itertools.product(("torch", "empty"), ("file", "directory"))
        ),
    ],
)
@pytest.mark.parametrize("action", ["kill", pytest.param("oserror:ENOSPC", marks=pytest.mark.exhaustive)])
@pytest.mark.filterwarnings("ignore:.*another run has replaced it")
def test_one_form_replaces_another(tmp_path, action, before, after):
    target, start = tmp_path / "run" / "last", tmp_path / "start"
    start.mkdir()
    save_as(before, start / "last", 1)
    old, store = content(start / "last"), CheckpointStore(target.parent)
    reset(start, target.parent)
    points = disk_points(lambda: save_as(after, target, 2))
    new, seen = content(target), []
    for point in points:
        reset(start, target.parent)
        status = forked(lambda: save_as(after, target, 2), point.fault(action))
        assert (status == -signal.SIGKILL) if action == "kill" else (status in (0, 1)), point
        if before in ("file", "directory"):
            path, skipped = store.latest()
            assert skipped == []
            assert content(path) in (old, new), point
        store.recover()
        assert os.listdir(target.parent) == ["last"], point
        assert content(target) in (old, new), point
        seen.append(content(target) == new)
        assert status != 0 or seen[-1], point
        save_as(after, target, 2)  # a new run saves
        checkpoint.verify(target)
        assert os.listdir(target.parent) == ["last"], point
    assert not seen[0]
    assert seen[-1]
    if action == "kill":
        assert seen == sorted(seen)
    else:  # only the cleaning fails when the new one is in place; or what follows a rename that replaced a file
        late = {"unlink", "rmdir"} | ({"replace", "fsync"} if after == "file" != "directory" != before else set())
        done = [point for point, is_new in zip(points, seen, strict=True) if is_new]
        assert {point.operation for point in done if not point.path.endswith(".old/manifest.json")} <= late


# -- two processes ---------------------------------------------------------------------------------------------------


def save_sharded(root, steps, around):
    """Train a sharded model, and save it by ``around(save)``."""
    torch.manual_seed(0)
    random.seed(0)
    accelerator = treadle.Accelerator(cpu=True, strategy=FSDP())
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    for _ in range(steps):
        accelerator.backward(model(torch.ones(3, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    around(lambda: accelerator.save_state(root / "last"))


class Pair:
    """What a process of `processes.run` does: for each trial it forks a rank, and waits for it."""

    def __init__(self, root, aside):
        self.root, self.aside = root, aside
        self.rank = int(os.environ["RANK"])
        self.trials = 0

    def meet(self, name):
        """Wait until the other process has come to the same place."""
        (self.aside / f"{name}-{self.rank}").touch()
        while not (self.aside / f"{name}-{1 - self.rank}").exists():
            time.sleep(0.001)

    def trial(self, steps, around):
        """A rank's status: -9, 0, or 1 if it raised, which is printed; and when it ended."""
        self.trials += 1
        if (child := os.fork()) == 0:
            status = 1
            gc.freeze()
            torch.set_num_threads(1)
            try:
                os.environ["TORCHELASTIC_RESTART_COUNT"] = str(self.trials)  # a group of its own in torch's store
                save_sharded(self.root, steps, around)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        end, status = time.time() + 30, None
        while status is None and time.time() < end:
            pid, code = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if pid else time.sleep(0.002)
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = "hangs"
        ended = time.time()
        self.meet(f"trial{self.trials}")
        return status, ended


def named(point, points, rank):
    """The fault at a point by the file's name: which process makes the directory is not the same each time."""
    same = [(p.operation, p.moment, p.path) for p in points[: points.index(point) + 1]].count(
        (point.operation, point.moment, point.path)
    )
    name = re.sub(IDENTITY, "*", os.path.basename(point.path))  # each trial is another process
    where = {"rank": rank, "occurrence": same, "match": f"*/{name}"}
    return Fault(f"disk:{point.operation}:{point.moment}", "kill", **where)


def under(fault, save):
    with FaultPlan([fault]):
        save()


def kill_one_of_two(root, aside, share):
    """Kill each rank at each of its points in turn, or at some of them; what was seen of each, by rank zero."""
    pair, known, points = Pair(root, aside), [], aside / "points"
    for steps in (1, 2):
        assert pair.trial(steps, lambda save, f=f"{points}{os.environ['RANK']}": Path(f).write_bytes(
            pickle.dumps(disk_points(save))))[0] == 0  # fmt: skip
        known.append(content(root / "last"))
        if pair.rank == 0 and steps == 1:
            shutil.copytree(root, aside / "before")
        pair.meet(f"known{steps}")
    seen = []
    for victim in (0, 1):
        chosen = pickle.loads(Path(f"{points}{victim}").read_bytes())
        for point in chosen if share is None else random.Random(victim).sample(chosen, share):
            if pair.rank == 0:
                reset(aside / "before", root)
            pair.meet(f"ready{len(seen)}")

            status, ended = pair.trial(2, partial(under, named(point, chosen, victim)))
            if pair.rank == 0:
                path, skipped = CheckpointStore(root).latest()
                assert skipped == []
                step = 1 + known.index(content(path))
                CheckpointStore(root).recover()
                assert os.listdir(root) == ["last"]
                assert known.index(content(root / "last")) + 1 >= step
            pair.meet(f"seen{len(seen)}")
            seen.append((victim, point, status, ended, step if pair.rank == 0 else None))
    return seen


@pytest.mark.long
@pytest.mark.parametrize("share", [pytest.param(4, id="some"), pytest.param(None, id="all", marks=pytest.mark.slow)])
def test_one_of_two_processes_killed(tmp_path, aside, share):
    ranks = run(kill_one_of_two, 2, tmp_path / "run", aside, share, timeout=1200 if share is None else 100)
    steps, struck = set(), [0, 0]
    for (victim, point, *first), (_, _, *second) in zip(*ranks, strict=True):
        ends = [first, second]
        if ends[victim][0] == 1 and (point.operation == "mkdir" or point.path.endswith("/run")):
            continue  # the other one made the directory
        struck[victim] += 1
        assert ends[victim][0] == -signal.SIGKILL, point
        assert ends[1 - victim][0] == 1, f"the other process did not end with an error, {point}"
        assert ends[1 - victim][1] - ends[victim][1] < 5, point
        steps.add(first[2])
        if victim == 1:
            assert first[2] == 1
    assert min(struck) > 0
    if share is None:
        assert steps == {1, 2}
        assert struck[0] > 60
        assert struck[1] > 15


# -- weights for others ----------------------------------------------------------------------------------------------


class Constant(nn.Module):
    """Weights that are all one number."""

    def __init__(self, value):
        super().__init__()
        for name in "abc":
            setattr(self, name, nn.Parameter(torch.full((16,), value)))


def exported(folder, value, name, **options):
    path = folder.parent / f"checkpoint-{value}"
    if not path.exists():
        stored.commit(path, stored.write_part(path, "model", Constant(value).state_dict()), {})
    export(path, folder / name, **options)


def save_model(folder, value, **options):
    treadle.Accelerator(cpu=True).save_model(Constant(value), folder, **options)


def save(folder, value, name, safe):
    treadle.Accelerator(cpu=True).save(Constant(value).state_dict(), folder / name, safe_serialization=safe)


def values(weights):
    assert weights.keys() == {"a", "b", "c"}
    tensors = [one if isinstance(one, torch.Tensor) else one.get() for one in weights.values()]
    return {value for tensor in tensors for value in tensor.tolist()}


def as_others_find(folder, stem, ending):
    """What tools take that look for one file first, then for an index."""
    load = load_file if ending == "safetensors" else partial(torch.load, weights_only=True)
    if (only := folder / f"{stem}.{ending}").exists():
        return load(only)
    index = json.loads((folder / f"{stem}.{ending}.index.json").read_text())
    return {name: load(folder / file)[name] for name, file in index["weight_map"].items()}


def in_folder(stem="model", ending="safetensors"):
    return [open_weights, lambda folder: as_others_find(folder, stem, ending)]


def in_file(name):
    return [lambda folder: open_weights(folder / name)]


SHARDED = {"max_shard_size": 64}
WAYS = {
    "export a file": (partial(exported, name="w.safetensors"), {}, {}, in_file("w.safetensors")),
    "export shards": (partial(exported, name="."), SHARDED, SHARDED, in_folder()),
    "save_model, one file": (save_model, {}, {}, in_folder()),
    "save_model, shards": (save_model, SHARDED, SHARDED, in_folder()),
    "save_model, one for shards": (save_model, SHARDED, {}, in_folder()),
    "save_model, shards for one": (save_model, {}, SHARDED, in_folder()),
    "save_model, other shards": (save_model, SHARDED, {"max_shard_size": 128}, in_folder()),
    "save_model, torch's format": (
        partial(save_model, safe_serialization=False), SHARDED, SHARDED, in_folder("pytorch_model", "bin")
    ),
    "save, safetensors": (partial(save, name="w.safetensors", safe=True), {}, {}, in_file("w.safetensors")),
    "save, torch's format": (partial(save, name="w.pt", safe=False), {}, {}, in_file("w.pt")),
    "offload": (lambda folder, value: write_weights(folder, Constant(value).state_dict()), {}, {}, [open_weights]),
}  # fmt: skip
"""How weights are written: by what, how the old and how the new ones, and how they are read."""
MORE = ["save_model, shards", "save_model, shards for one", "save_model, other shards", "save_model, torch's format"]


@pytest.mark.long
@pytest.mark.parametrize("every", [pytest.param(3, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("action", ["kill", pytest.param("oserror:ENOSPC", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.exhaustive if way in MORE else ()) for way in WAYS]
)
def test_weights_for_others_are_the_old_or_the_new_ones(tmp_path, way, action, every):
    write, before, after, readers = WAYS[way]
    folder, seen = tmp_path / "out", set()
    folder.mkdir()
    exported(tmp_path / "other", 2.0, "x")  # its checkpoint is there before the export
    write(folder, 1.0, **before)
    shutil.copytree(folder, tmp_path / "start")
    points = disk_points(lambda: write(folder, 2.0, **after))
    count = len(os.listdir(folder))
    for point in dict.fromkeys([*points[::every], points[-1]]):
        reset(tmp_path / "start", folder)
        status = forked(lambda: write(folder, 2.0, **after), point.fault(action))
        assert status == -signal.SIGKILL if action == "kill" else status in (0, 1)
        found = [values(read(folder)) for read in readers]
        assert all(one in ({1.0}, {2.0}) for one in found), point
        assert status != 0 or found == [{2.0}] * len(found), point
        seen |= set.union(*found)
        write(folder, 2.0, **after)
        assert [values(read(folder)) for read in readers] == [{2.0}] * len(readers)
        assert hidden(folder) == [], point
        assert len(os.listdir(folder)) == count, point
    assert seen == {1.0, 2.0}
    assert len(points) >= 4


def test_weights_for_others_are_on_the_disk_before_the_index_and_the_index_before_the_old_ones_go(tmp_path):
    save_model(tmp_path, 1.0, max_shard_size=128)
    points = disk_points(lambda: save_model(tmp_path, 2.0, max_shard_size=128))
    done = [(p.operation, os.path.relpath(p.path, tmp_path)) for p in points if p.moment == "after"]
    new, index = [f"model-v1-0000{n}-of-00002.safetensors" for n in (1, 2)], "model.safetensors.index.json"
    expected = []
    for write, name in [("write_tensors", new[0]), ("write_tensors", new[1]), ("write_bytes", index)]:
        part = f".{name}.{identify_process()}.part"
        expected += [(write, part), ("fsync", part), ("replace", part), ("fsync", ".")]
    assert done == [*expected, *(("unlink", name.replace("-v1", "")) for name in new)]


# -- killed from outside ---------------------------------------------------------------------------------------------


def keep_saving(form, target, begin):
    """Save 3 MB for ever."""
    for step in itertools.count(begin):
        save_as(form, target, step, size=2**17)


def is_half_written(target, sizes):
    """Whether a file of a checkpoint is there that is not as long as it will be."""
    with suppress(OSError):
        folders = target.parent.glob(f".{target.name}.*.part")
        return any(os.path.getsize(folder / name) < size for folder in folders for name, size in sizes.items())
    return False


@pytest.mark.long
@pytest.mark.parametrize("form", ["file", "directory"])
def test_killed_from_outside(tmp_path, form):
    """Half of the signals come at any moment, half when a half-written file is seen, which is mostly not too late."""
    chance, halves, target, step = random.Random(1), 0, tmp_path / "run" / "last", 0
    store = CheckpointStore(target.parent)
    sizes = {"model.safetensors" if form == "directory" else "": 6 * 2**19}
    for number in range(15):
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)  # OpenMP's other threads are not in the copy
                keep_saving(form, target, step + 1)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 30
        while not target.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        if number % 2:
            while not is_half_written(target, sizes) and time.monotonic() < deadline:
                pass
        else:
            time.sleep(chance.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        halves += is_half_written(target, sizes)
        assert store.latest()[1] == []
        store.recover()
        assert os.listdir(target.parent) == ["last"]
        found = checkpoint.verify(target).step
        assert found >= max(step, 1), "older than one that was seen before"
        step = found
        assert stored.read_part(target, "state") == {"step": step}
        assert {value for t in stored.read_part(target, "model").values() for value in t.tolist()} == {float(step)}
    assert halves > 1
