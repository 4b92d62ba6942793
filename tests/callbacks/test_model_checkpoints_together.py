"""Savers in one folder, of one run or of several: none takes, replaces or removes what is another's."""

import os
import subprocess
import time
from pathlib import Path

import pytest
from support import stored
from support.callback_runs import ByEpoch, fit, loader, names, trainer
from support.processes import clean_environment, python, run
from treadle.callbacks import ModelCheckpoint
from treadle.engine.checkpoint import filesystem, store

VALUES = [5.0, 4.0, 1.0, 3.0, 2.0]


def pair(folder, **options):
    return ModelCheckpoint(folder, monitor="val_loss", **options), ModelCheckpoint(folder, **options)


def step_of(path):
    return store.verify(path).step


@pytest.mark.parametrize("beside", [False, True], ids=["now", "beside"])
@pytest.mark.parametrize("cut", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_the_best_stays_the_bests(tmp_path, monkeypatch, beside, cut):
    """The second's retention would remove it, or the first's record would be of nothing yet on the disk."""
    write = filesystem.write_stream

    def slow(*args):
        time.sleep(0.01)
        return write(*args)

    if beside:
        monkeypatch.setattr(filesystem, "write_stream", slow)
    if cut:
        fit(tmp_path, *pair(tmp_path / "c", async_save=beside), task=ByEpoch(VALUES), max_epochs=cut)
    best, newest = pair(tmp_path / "c", async_save=beside)
    fit(tmp_path, best, newest, task=ByEpoch(VALUES), max_epochs=4, ckpt_path="last" if cut else None)
    assert (step_of(best.best_model_path), best.best_model_score.item()) == (15, 1.0)
    assert step_of(newest.best_model_path) == 20
    assert {"epoch=2-step=15.ckpt", "epoch=3-step=20.ckpt"} <= set(names(tmp_path / "c"))


def test_what_was_saved_before_a_resume_is_saved_anew_under_its_name(tmp_path):
    """The run was killed later than the checkpoint that it goes on from; each takes over its own of the two."""
    for path in (None, tmp_path / "all" / "step=5.ckpt"):
        every = ModelCheckpoint(tmp_path / "all", "{step}", every_n_train_steps=5, save_top_k=-1)
        best, newest = pair(tmp_path / "c")
        fit(tmp_path, best, newest, every, task=ByEpoch(VALUES), max_epochs=3, ckpt_path=path)
        assert [os.path.basename(saver.best_model_path) for saver in (best, newest)] == [
            "epoch=2-step=15.ckpt",
            "epoch=2-step=15-v1.ckpt",
        ]
        assert len(names(tmp_path / "c")) == 2
        assert len(names(tmp_path / "all")) == 3


@pytest.mark.parametrize("counting", [True, False])
def test_each_has_a_last_of_its_own(tmp_path, counting):
    for epochs in (2, 4):
        options = {"save_last": True, "enable_version_counter": counting}
        one, two = pair(tmp_path / "c", **options)
        fit(tmp_path, one, two, task=ByEpoch(VALUES), max_epochs=epochs, ckpt_path="auto")
        assert (one.last_model_path, two.last_model_path) == (
            str(tmp_path / "c" / "last.ckpt"),
            str(tmp_path / "c" / "last-v1.ckpt"),
        )
        assert step_of(one.last_model_path) == step_of(two.last_model_path) == 5 * epochs
    assert step_of(one.best_model_path) == 15


@pytest.mark.parametrize("counting", [True, False])
def test_a_template_that_is_called_last(tmp_path, counting):
    """The best is not overwritten by the newest."""
    options = {"monitor": "val_loss", "save_last": True, "enable_version_counter": counting}
    for epochs in (3, 4):
        kept = ModelCheckpoint(tmp_path / "c", "last", **options)
        fit(tmp_path, kept, task=ByEpoch(VALUES), max_epochs=epochs, ckpt_path="auto")
    assert (step_of(kept.best_model_path), kept.best_model_score.item()) == (15, 1.0)
    assert step_of(kept.last_model_path) == 20
    assert names(tmp_path / "c") == ["last-v1.ckpt", "last.ckpt"]


def two_processes(root):
    found = []
    for epochs in (2, 4):
        best, newest = pair(Path(root) / "c", save_last=True, async_save=True)
        made = trainer(root, best, newest, max_epochs=epochs)
        made.fit(ByEpoch(VALUES), loader(20), loader(4), ckpt_path="auto")
        found += [best.best_model_path, best.last_model_path, newest.best_model_path, newest.last_model_path]
    return found


@pytest.mark.long
def test_two_processes(tmp_path):
    first, second = run(two_processes, 2, str(tmp_path))
    assert first == second
    assert [step_of(path) for path in first[4:]] == [15, 20, 20, 20]
    assert len(set(first[4:])) == 4


RUN = """
import os, signal, sys, time, torch
sys.path[:0] = sys.argv[4:]
from support.callback_runs import Tiny, fit
from treadle.callbacks import ModelCheckpoint
from treadle.engine.checkpoint import filesystem as disk

name, async_save, held = sys.argv[1], sys.argv[2] == "async", sys.argv[3] == "held"
sync = disk.fsync

def wait_when_asked(path):
    sync(path)
    if held and "step=4" in str(path) and not os.path.exists(f"{name} saves"):
        open(f"{name} saves", "w").close()
        while not os.path.exists(f"{name} goes on"):
            time.sleep(0.01)
        if name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

class Named(Tiny):
    def __init__(self):
        super().__init__()
        self.register_buffer("run", torch.tensor(list(name.encode())))

disk.fsync = wait_when_asked
saver = ModelCheckpoint("kept", "{step}", every_n_train_steps=2, save_top_k=-1, save_last=True, async_save=async_save)
fit(".", saver, task=Named(), max_steps=6, max_epochs=-1, samples=12, validate=False)
"""


def begin(folder, name, how, held="held"):
    (folder / "run.py").write_text(RUN)
    tests = str(Path(__file__).parents[1])
    with (folder / f"{name} out").open("w") as out:
        command = [python(), "run.py", name, how, held, tests]
        return subprocess.Popen(command, cwd=folder, env=clean_environment(), stdout=out, stderr=out)


def wait_for(process, folder, name):
    """Wait until a run is in the middle of its save of step 4; its first checkpoint is complete then."""
    end = time.monotonic() + 90
    while not (folder / f"{name} saves").exists():
        assert process.poll() is None, (folder / f"{name} out").read_text()
        assert time.monotonic() < end, (folder / f"{name} out").read_text()
        time.sleep(0.02)


def hidden_names(folder):
    return sorted(path.name for path in folder.glob(".*"))


def collect_saved(folder):
    """The steps of each run's checkpoints, by the name that its weights carry."""
    saved = {}
    for path in (folder / "kept").iterdir():
        step = store.verify(path).step
        saved.setdefault(bytes(stored.read_part(path, "model")["run"].tolist()).decode(), []).append(step)
    return {name: sorted(steps) for name, steps in saved.items()}


@pytest.mark.long
@pytest.mark.guarantee
def test_several_runs_in_one_folder_one_of_which_is_killed_while_all_save(tmp_path):
    """A run that starts then removes what the killed one left, and nothing of those that live."""
    runs, unfinished = {}, []
    for name, how in (("killed", "async"), ("beside", "async"), ("now", "sync")):
        runs[name] = begin(tmp_path, name, how)
        wait_for(runs[name], tmp_path, name)
        unfinished += [file for file in hidden_names(tmp_path / "kept") if file not in unfinished]
    assert len(unfinished) == 3
    (tmp_path / "killed goes on").touch()
    assert runs.pop("killed").wait(60) != 0
    assert hidden_names(tmp_path / "kept") == sorted(unfinished)

    assert begin(tmp_path, "third", "sync", "free").wait(90) == 0, (tmp_path / "third out").read_text()
    assert "step=4.ckpt: removed a checkpoint that was never completed" in (tmp_path / "third out").read_text()
    assert hidden_names(tmp_path / "kept") == sorted(unfinished[1:])

    for name, process in runs.items():
        (tmp_path / f"{name} goes on").touch()
        assert process.wait(60) == 0, (tmp_path / f"{name} out").read_text()
    every = [2, 4, 6, 6]  # the last one is named so too
    assert collect_saved(tmp_path) == {"killed": [2, 2], "beside": every, "now": every, "third": every}
    assert not any("another run has replaced it" in (tmp_path / f"{name} out").read_text() for name in runs)
