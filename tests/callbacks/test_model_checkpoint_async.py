"""``ModelCheckpoint(async_save=True)``: the same checkpoints, written while training goes on, and no failure lost."""

import os
import threading
from pathlib import Path

import pytest
import torch
from support.callback_runs import Tiny, fit
from support.failing_runs import Fails
from support.processes import run, script
from treadle.callbacks import LambdaCallback, ModelCheckpoint
from treadle.engine.checkpoint import filesystem
from treadle.engine.checkpoint.store import verify

import treadle


def files(folder):
    """Every file of every checkpoint, or its digest in one file, but for those that name folders and times."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.suffix == ".ckpt":
            found |= {f"{path.name}/{name}": entry for name, entry in verify(path).files.items()}
        else:
            found[str(path.relative_to(folder))] = path.read_bytes()
    changing = ("manifest", "state", "document")
    return {name: content for name, content in found.items() if os.path.basename(name).split(".")[0] not in changing}


FORMS = ["file", "directory"]


class Gated:
    """Tensors are written when the gate is open; the n-th write fails if that is asked for.

    A checkpoint that is a file needs one write, a directory three or four.
    """

    def __init__(self, monkeypatch, fail=None):
        self.gate = threading.Event()
        self.gate.set()
        self.writes = 0

        def gate(write):
            def gated(path, *args):
                assert self.gate.wait(60)
                self.writes += 1
                if self.writes == fail:
                    raise OSError(5, "the disk is gone")
                return write(path, *args)

            return gated

        for name in ("write_tensors", "write_stream"):
            monkeypatch.setattr(filesystem, name, gate(getattr(filesystem, name)))


@pytest.mark.parametrize("form", FORMS)
def test_the_same_checkpoints(tmp_path, form):
    kept = {}
    for name, beside in (("now", False), ("beside", True)):
        treadle.seed_everything(1)
        options = {"monitor": "val_loss", "save_top_k": 2, "save_last": True}
        saver = ModelCheckpoint(tmp_path / name, async_save=beside, format=form, **options)
        fit(tmp_path, saver, values=(3.0, 1.0, 2.0, 0.5, 4.0), max_epochs=5)
        kept[name] = {
            "files": files(tmp_path / name),
            "best": os.path.basename(saver.best_model_path),
            "score": float(saver.best_model_score),
            "all": {os.path.basename(path): float(value) for path, value in saver.best_k_models.items()},
        }
        for path in (saver.best_model_path, saver.last_model_path):
            verify(path)
        if form == "file":
            content = torch.load(saver.best_model_path, weights_only=True)  # as other programs read it
            kept[name]["for others"] = str([content[part] for part in ("state_dict", "optimizer_states")])
    assert kept["now"] == kept["beside"]
    assert kept["now"]["score"] == 0.5


@pytest.mark.parametrize("form", FORMS)
def test_training_goes_on_and_what_is_replaced_stays_until_then(tmp_path, monkeypatch, form):
    folder, gate, seen = tmp_path / "kept", Gated(monkeypatch).gate, []

    def close(trainer, *_):
        if trainer.global_step == 3:
            trainer.accelerator.finish_saving()  # of an earlier step
            gate.clear()

    def look(trainer, _):
        if trainer.global_step in (4, 5):
            seen.append(sorted(name for name in os.listdir(folder) if not name.startswith(".")))
        if trainer.global_step == 5:
            gate.set()

    watch = LambdaCallback(on_train_batch_start=close, on_step_end=look)
    watch.after_task = 9
    options = {"save_top_k": 1, "async_save": True, "filename": "{step}", "format": form}
    saver = ModelCheckpoint(folder, every_n_train_steps=2, **options)
    fit(tmp_path, saver, watch, max_epochs=1, samples=14, validate=False)
    assert seen == [["step=2.ckpt"], ["step=2.ckpt"]]  # after steps 4 and 5, while the save of step 4 is held
    assert sorted(os.listdir(folder)) == ["step=6.ckpt"]


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("form", "fail", "end"),
    [("file", 1, "within"), ("file", 3, "at the end"), ("directory", 3, "within"), ("directory", 9, "at the end")],
)
def test_a_failed_save_ends_the_run_and_is_forgotten(tmp_path, monkeypatch, form, fail, end):
    gated = Gated(monkeypatch, fail=fail)
    options = {"save_top_k": 1, "async_save": True, "filename": "{step}", "format": form}
    saver = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, **options)
    task = Tiny(pause=0.02)
    with pytest.raises(OSError, match="the disk is gone"):
        fit(tmp_path, saver, task=task, max_epochs=1, samples=12, validate=False)
    assert gated.writes >= fail
    left = {"within": "", "at the end": "step=4.ckpt"}[end]
    assert os.path.basename(saver.best_model_path) == left
    assert sorted(os.listdir(tmp_path / "kept")) == [left][: bool(left)]


def test_an_error_in_training_waits_for_the_save_and_survives(tmp_path, monkeypatch):
    saver = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=3, async_save=True, filename="{step}")
    with pytest.raises(RuntimeError, match="planned"):
        fit(tmp_path, saver, Fails("backward", 3), max_epochs=1, validate=False)
    verify(tmp_path / "kept" / "step=3.ckpt")
    Gated(monkeypatch, fail=1)
    saver = ModelCheckpoint(tmp_path / "bad", every_n_train_steps=3, async_save=True, save_on_exception=False)
    with pytest.raises(RuntimeError, match="planned") as error:
        fit(tmp_path, saver, Fails("backward", 3), max_epochs=1, validate=False)
    assert any("the disk is gone" in note for note in error.value.__notes__)
    assert os.listdir(tmp_path / "bad") == []


def test_an_error_after_a_failed_save_still_saves_the_last_step(tmp_path, monkeypatch):
    gated = Gated(monkeypatch, fail=1)

    class Breaks(Tiny):
        def training_step(self, batch, index):
            if index == 4:
                gated.gate.clear()  # the save of step 4 fails while the error is handled
                threading.Timer(0.2, gated.gate.set).start()
                raise RuntimeError("broken")
            return super().training_step(batch, index)

        def on_train_batch_start(self, batch, index):
            if index == 3:
                gated.gate.clear()

    options = {"save_on_exception": True, "async_save": True, "filename": "{step}"}
    saver = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=4, **options)
    with pytest.raises(RuntimeError, match="broken") as error:
        fit(tmp_path, saver, task=Breaks(), max_epochs=1, validate=False)
    assert any("the disk is gone" in note for note in error.value.__notes__)
    assert os.listdir(tmp_path / "kept") == ["step=4.ckpt"]
    verify(tmp_path / "kept" / "step=4.ckpt")


INTERRUPTED = """
import os, signal, sys, threading, time, warnings
sys.path[:0] = sys.argv[2:]
from support.callback_runs import Tiny, fit
from treadle.callbacks import ModelCheckpoint
from treadle.engine.checkpoint import filesystem as disk
warnings.simplefilter("ignore")
write = disk.write_stream

def slow(path, *args):
    if "step=4" in str(path):
        time.sleep(1.5)
        raise OSError(5, "the disk is gone")
    return write(path, *args)

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

class Interrupted(Tiny):
    def training_step(self, batch, index):
        if self.trainer.global_step == 4:
            threading.Timer(0.5, interrupt).start()  # the second one, while the save is waited for
            interrupt()
        return super().training_step(batch, index)

disk.write_stream = slow
saver = ModelCheckpoint(sys.argv[1] + "/k", every_n_train_steps=2, async_save=True, filename="{step}")
try:
    fit(sys.argv[1], saver, task=Interrupted(), max_epochs=1, validate=False)
except KeyboardInterrupt:
    print("step=2.ckpt" in os.listdir(saver.dirpath))
"""


@pytest.mark.guarantee
def test_ctrl_c_twice_keeps_what_is_not_replaced_yet(tmp_path):
    done = script(INTERRUPTED, str(tmp_path), str(Path(__file__).parents[1]))
    assert done.stdout == "True\n", done.stderr
    assert done.returncode == 1  # the save failed, and nobody has heard of that
    assert os.listdir(tmp_path / "k") == ["step=2.ckpt"]
    verify(tmp_path / "k" / "step=2.ckpt")


def test_two_callbacks_each_hear_of_their_own(tmp_path, monkeypatch):
    Gated(monkeypatch, fail=1)
    first = ModelCheckpoint(tmp_path / "a", every_n_train_steps=2, async_save=True, filename="{step}")
    second = ModelCheckpoint(tmp_path / "b", every_n_train_steps=1, save_top_k=-1, async_save=True, filename="{step}")
    with pytest.raises(OSError, match="the disk is gone"):
        fit(tmp_path, first, second, max_epochs=1, validate=False)
    assert first.best_model_path == second.best_model_path == ""


def on_two(root, strategy):
    for folder in ("now", "beside"):
        options = {"async_save": folder == "beside", "save_last": True, "every_n_train_steps": 2}
        saver = ModelCheckpoint(root / folder, "{step}", **options)
        treadle.seed_everything(1)
        fit(root, saver, max_epochs=2, strategy=strategy, samples=16, validate=False)
    return saver.best_model_path, saver.last_model_path


@pytest.mark.long
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_processes(tmp_path, strategy):
    results = run(on_two, 2, tmp_path, strategy)
    assert results[0] == results[1]
    for path in results[0]:
        verify(path)
    assert files(tmp_path / "beside") == files(tmp_path / "now")
