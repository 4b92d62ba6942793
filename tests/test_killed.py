"""Killed at every disk operation, by every way in which something is saved: what was committed stays whole.

Each test lists the disk operations of what one way of saving does next, and for each moment of them (before, half-way,
after) forks the process there and kills the fork at it. What the disk holds then is compared, byte for byte, to what a
fork that lived has committed, so it is no older than the last commit and no mixture. A resumed run has to end with the
weights of one that was never interrupted, and to leave nothing behind. By default some points are resumed from, with
``-m slow`` all of them.
"""

import errno
import itertools
import os
import pickle
import random
import shutil
import signal
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
from processes import run
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import Callback, ModelCheckpoint
from treadle.engine import checkpoint
from treadle.engine.big_models.weights import open_weights, write_weights
from treadle.engine.checkpoint import CheckpointStore
from treadle.engine.export_command import export
from treadle.engine.plugins import ProjectConfiguration
from treadle.strategies import FSDP
from treadle.testing.faults import Fault, FaultPlan, disk_points, forked

import treadle

pytestmark = pytest.mark.guarantee

LIVE = Fault("disk:*", "delay:0")
"""For a fork that is not killed."""


# -- what stands on the disk -----------------------------------------------------------------------------------------


def content(path):
    """A checkpoint as it lies there, to the byte."""
    return {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}


def tree(root):
    """All that stands in a directory of checkpoints. The order of their commits differs after a crash."""
    found = {}
    for name in sorted(os.listdir(root)):
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
        commit = checkpoint.commit

        def noted(target, files, info, *args, **kwargs):
            path = commit(target, files, info, *args, **kwargs)
            with self.log.open("a") as log:
                log.write(f"{info['step']}\n")
            if keep:
                shutil.copytree(path, self.aside / "known" / f"{path.name}@{info['step']}")
            return path

        checkpoint.commit = noted
        try:
            self.work()
        finally:
            checkpoint.commit = commit

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
            name = one.name.removeprefix(".").removesuffix(".old") if one.name.startswith(".") else one.name
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

    def kill_everywhere(self, reference, resumed):
        """Kill at every point, and resume from each ``resumed``-th of them; ``reference`` was never interrupted."""
        seen = set()
        for number, point in enumerate(self.points):
            seen.add(self.kill_at(point))
            if number % resumed:
                self.recover()
            else:
                weights, files = ending(self.resume, self.root, self.aside)
                assert all(torch.equal(weights[name], value) for name, value in reference[0].items()), point
                assert files == reference[1], point
        assert seen == set(self.steps)
        assert {(point.moment, point.operation) for point in self.points} >= {
            *itertools.product(["before", "half", "after"], ["write_bytes", "write_tensors"]),
            *itertools.product(["before", "after"], ["fsync", "rename", "unlink", "rmdir"]),
        }
        assert len(self.points) > 60

    def refuse_everywhere(self):
        """Let the disk refuse at every point: an error, or a warning where only what is replaced can't be deleted."""
        outcomes = set()
        for number, point in enumerate(self.points):
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


# -- own loops -------------------------------------------------------------------------------------------------------

LAST = 6


class Loop:
    """A training of ``LAST`` steps that draws random numbers, and saves after each step in one of three ways."""

    def __init__(self, how, root, seed=0):
        self.how, self.root = how, root
        project = {}
        if how == "numbered":
            project["project_config"] = ProjectConfiguration(
                project_dir=root.parent, automatic_checkpoint_naming=True, total_limit=2
            )
        torch.manual_seed(seed)
        self.accelerator = treadle.Accelerator(cpu=True, **project)
        net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))
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


EXTENTS = [pytest.param(1, 16, id="some"), pytest.param(2, 1, id="all", marks=pytest.mark.slow)]
"""How many saves are gone through, each at every point, and that each n-th point is resumed from."""


@pytest.mark.parametrize(("saves", "resumed"), EXTENTS)
@pytest.mark.parametrize("how", ["same", "numbered", "beside"])
def test_own_loop_killed(how, tmp_path, aside, saves, resumed):
    door, reference = Loop(how, tmp_path / "run" / "checkpoints").door(aside, saves)
    door.kill_everywhere(reference, resumed)


@pytest.mark.parametrize(("saves", "resumed"), EXTENTS)
@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="this machine has no /dev/shm")
def test_own_loop_killed_on_tmpfs(aside, saves, resumed):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        door, reference = Loop("same", Path(name) / "checkpoints").door(aside, saves)
        door.kill_everywhere(reference, resumed)


@pytest.mark.parametrize("saves", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["same", "numbered", "beside"])
def test_own_loop_refused_by_the_disk(how, tmp_path, aside, saves):
    door, _ = Loop(how, tmp_path / "run" / "checkpoints").door(aside, saves)
    door.refuse_everywhere()


# -- the Trainer -----------------------------------------------------------------------------------------------------


class Task(treadle.TaskModule):
    """Draws random numbers, and is better at each step."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))

    def training_step(self, batch, batch_idx):
        self.log("score", -float(self.global_step))
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Moment(Callback):
    """Calls ``explore`` before the saves of a step."""

    def __init__(self, step, explore):
        self.step, self.explore = step, explore

    def on_step_end(self, trainer, pl_module):
        if trainer.global_step == self.step:
            self.explore(trainer, pl_module)


def fit(root, *callbacks, seed=0, ckpt_path=None):
    """Two epochs of three steps, a save of the two best and of the last after each."""
    torch.manual_seed(seed)
    keeper = ModelCheckpoint(
        root, "{step}", monitor="score", save_top_k=2, save_last=True, every_n_train_steps=1, every_n_epochs=None
    )
    trainer = treadle.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, keeper],
    )  # fmt: skip
    task = Task()
    data = TensorDataset(torch.arange(36.0).reshape(9, 4).sin())
    trainer.fit(task, DataLoader(data, 3, shuffle=True), ckpt_path=ckpt_path)
    assert trainer.global_step == LAST
    return {name: value.clone() for name, value in task.state_dict().items()}


def explored(root, aside, explore):
    """Fit; before the saves of the fourth step, ``explore(door, reference)``."""
    reference = ending(lambda: fit(root), root, aside)
    shutil.rmtree(root)
    doors = []

    def at_moment(trainer, task):
        keeper = trainer.checkpoint_callback
        resume = lambda: fit(root, seed=7, ckpt_path="auto")  # noqa: E731
        doors.append(Door(root, aside, lambda: keeper.on_step_end(trainer, task), resume, again=resume))
        explore(doors[0], reference)
        doors[0].start_over()

    weights = fit(root, Moment(4, at_moment))
    assert all(torch.equal(weights[name], value) for name, value in reference[0].items())
    assert len(doors) == 1


@pytest.mark.parametrize("resumed", [pytest.param(32, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def test_trainer_killed(tmp_path, aside, resumed):
    explored(tmp_path / "run", aside, lambda door, reference: door.kill_everywhere(reference, resumed))


def test_trainer_refused_by_the_disk(tmp_path, aside):
    explored(tmp_path / "run", aside, lambda door, reference: door.refuse_everywhere())
