"""Two `ModelCheckpoint`s in one folder: neither takes, replaces or removes what is the other's."""

import os
import time
from pathlib import Path

import pytest
from callback_runs import Tiny, fit, loader, trainer
from processes import run
from treadle.callbacks import ModelCheckpoint
from treadle.engine.checkpoint import filesystem, store

VALUES = [5.0, 4.0, 1.0, 3.0, 2.0]


class ByEpoch(Tiny):
    """What a validation logs depends on the epoch alone, so a resumed run sees what another one saw."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", VALUES[self.trainer.current_epoch])


def pair(folder, **options):
    return ModelCheckpoint(folder, monitor="val_loss", **options), ModelCheckpoint(folder, **options)


def step_of(path):
    return store.verify(path).step


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


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
        fit(tmp_path, *pair(tmp_path / "c", async_save=beside), task=ByEpoch(), max_epochs=cut)
    best, newest = pair(tmp_path / "c", async_save=beside)
    fit(tmp_path, best, newest, task=ByEpoch(), max_epochs=4, ckpt_path="last" if cut else None)
    assert (step_of(best.best_model_path), best.best_model_score.item()) == (15, 1.0)
    assert step_of(newest.best_model_path) == 20
    assert {"epoch=2-step=15.ckpt", "epoch=3-step=20.ckpt"} <= set(names(tmp_path / "c"))


def test_what_was_saved_before_a_resume_is_saved_anew_under_its_name(tmp_path):
    """The run was killed later than the checkpoint that it goes on from; each takes over its own of the two."""
    for path in (None, tmp_path / "all" / "step=5.ckpt"):
        every = ModelCheckpoint(tmp_path / "all", "{step}", every_n_train_steps=5, save_top_k=-1)
        best, newest = pair(tmp_path / "c")
        fit(tmp_path, best, newest, every, task=ByEpoch(), max_epochs=3, ckpt_path=path)
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
        fit(tmp_path, one, two, task=ByEpoch(), max_epochs=epochs, ckpt_path="auto")
        assert (one.last_model_path, two.last_model_path) == (
            str(tmp_path / "c" / "last.ckpt"),
            str(tmp_path / "c" / "last-v1.ckpt"),
        )
        assert step_of(one.last_model_path) == step_of(two.last_model_path) == 5 * epochs
    assert step_of(one.best_model_path) == 15


def test_the_last_of_both_in_a_state_of_before(tmp_path):
    """An earlier version gave both the same; one of them gets another, and nothing is removed."""
    one, two = pair(tmp_path / "c", save_last=True)
    made = fit(tmp_path, one, two, task=ByEpoch(), max_epochs=1)
    store.remove(two.last_model_path)
    two.last_model_path = one.last_model_path
    made.max_epochs = 2
    made.fit(ByEpoch(), loader(), loader(4))
    assert {os.path.basename(saver.last_model_path) for saver in (one, two)} == {"last.ckpt", "last-v1.ckpt"}
    assert step_of(one.last_model_path) == step_of(two.last_model_path) == 10


@pytest.mark.parametrize("counting", [True, False])
def test_a_template_that_is_called_last(tmp_path, counting):
    """The best is not overwritten by the newest."""
    options = {"monitor": "val_loss", "save_last": True, "enable_version_counter": counting}
    for epochs in (3, 4):
        kept = ModelCheckpoint(tmp_path / "c", "last", **options)
        fit(tmp_path, kept, task=ByEpoch(), max_epochs=epochs, ckpt_path="auto")
    assert (step_of(kept.best_model_path), kept.best_model_score.item()) == (15, 1.0)
    assert step_of(kept.last_model_path) == 20
    assert names(tmp_path / "c") == ["last-v1.ckpt", "last.ckpt"]


def two_processes(root):
    found = []
    for epochs in (2, 4):
        best, newest = pair(Path(root) / "c", save_last=True, async_save=True)
        made = trainer(root, best, newest, max_epochs=epochs)
        made.fit(ByEpoch(), loader(20), loader(4), ckpt_path="auto")
        found += [best.best_model_path, best.last_model_path, newest.best_model_path, newest.last_model_path]
    return found


def test_two_processes(tmp_path):
    first, second = run(two_processes, 2, str(tmp_path))
    assert first == second
    assert [step_of(path) for path in first[4:]] == [15, 20, 20, 20]
    assert len(set(first[4:])) == 4
