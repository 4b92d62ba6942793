"""`ModelCheckpoint`: when it saves, what it keeps, how it names it, and that a run goes on from it."""

import ctypes
import errno
import inspect
import math
import os
import shutil
import sys
import typing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import yaml
from support import stored
from support.callback_runs import ByEpoch, Steps, Tiny, fit, loader, names, trainer
from support.models import Stream
from support.processes import run
from torch import nn
from torch.utils.data import DataLoader
from treadle.callbacks import LambdaCallback, ModelCheckpoint
from treadle.callbacks._checkpointing import finish_removing
from treadle.engine.checkpoint import store

NAN = float("nan")


# -- when ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "flags", "steps"),
    [
        ({}, {}, [5, 10]),
        ({"every_n_epochs": 2}, {"max_epochs": 5}, [10, 20]),
        ({"every_n_epochs": 0}, {}, []),
        ({"every_n_train_steps": 3}, {}, [3, 6, 9]),
        ({"every_n_train_steps": 5}, {}, [5, 10]),
        ({"every_n_train_steps": 2}, {"accumulate_grad_batches": 2}, [2, 4, 6]),
        ({"train_time_interval": timedelta(microseconds=1)}, {}, list(range(1, 11))),
        ({"train_time_interval": timedelta(0)}, {}, list(range(1, 11))),
        ({"train_time_interval": timedelta(hours=1)}, {}, []),
        ({}, {"max_epochs": -1, "max_steps": 7}, [5, 7]),
        ({}, {"val_check_interval": 2}, [2, 4, 7, 9]),
        ({}, {"val_check_interval": 1}, list(range(1, 11))),
        ({}, {"val_check_interval": timedelta(microseconds=1)}, list(range(1, 11))),
        ({}, {"val_check_interval": 2, "accumulate_grad_batches": 2}, [1, 2, 4, 5]),
        ({"save_on_train_epoch_end": True}, {"val_check_interval": 2}, [5, 10]),
        ({"save_on_train_epoch_end": False}, {}, [5, 10]),
        ({}, {"check_val_every_n_epoch": 2, "max_epochs": 4}, [10, 20]),
        ({}, {"check_val_every_n_epoch": 2, "max_epochs": 3, "limit_val_batches": 0}, [5, 10, 15]),
        ({"save_top_k": 0}, {}, []),
    ],
)
def test_when(tmp_path, arguments, flags, steps):
    kept = ModelCheckpoint(tmp_path / "c", filename="{step}", **{"save_top_k": -1, **arguments})
    fit(tmp_path, kept, **flags)
    assert (names(tmp_path / "c") if kept.saves else []) == sorted(f"step={s}.ckpt" for s in steps)


def test_a_save_at_the_last_step_of_an_epoch_follows_its_validation(tmp_path):
    order = []
    notes = LambdaCallback(
        on_validation_end=lambda trainer, task: order.append("validated"),
        on_train_epoch_end=lambda trainer, task: order.append("epoch ended"),
        on_save_checkpoint=lambda trainer, task, checkpoint: order.append(trainer.global_step),
    )
    kept = ModelCheckpoint(tmp_path / "c", every_n_train_steps=5, save_top_k=1)
    fit(tmp_path, kept, notes, values=[1.0], max_epochs=1)
    assert order == ["validated", "epoch ended", 5]
    order.clear()
    fit(tmp_path, notes, values=[1.0, 1.0], max_epochs=2, ckpt_path=kept.best_model_path, enable_checkpointing=False)
    assert order == ["validated", "epoch ended"]  # of the second epoch


def test_a_loader_without_a_length(tmp_path):
    kept = ModelCheckpoint(tmp_path / "c", monitor="val_loss", every_n_train_steps=5, save_top_k=-1, save_last=True)
    made = trainer(tmp_path, kept)
    made.fit(Tiny([3.0, 2.0]), DataLoader(Stream(torch.ones(10, 1, 2)), batch_size=2), loader(4))
    assert names(tmp_path / "c") == ["epoch=0-step=5.ckpt", "epoch=1-step=10.ckpt", "last.ckpt"]
    assert kept.best_model_score.item() == 2.0


# -- which ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "top", "values", "kept_epochs", "best", "worst", "current"),
    [  # NaN counts as infinity, as in Lightning
        ("min", 1, [3.0, 1.0, 2.0, 1.0], [1], 1, 1, 1.0),
        ("max", 1, [3.0, 1.0, 4.0, 2.0], [2], 2, 2, 4.0),
        ("min", 2, [3.0, 1.0, 2.0, NAN], [1, 2], 1, 2, 2.0),
        ("max", 2, [NAN, 1.0, 2.0, 3.0], [2, 3], 3, 2, 3.0),
        ("max", 2, [1.0, NAN, 0.5, NAN], [0, 2], 0, 2, 0.5),
        ("min", 2, [NAN, NAN, NAN, 9.0], [1, 3], 3, 1, 9.0),
        ("min", 1, [NAN, math.inf, NAN, NAN], [0], 0, 0, math.inf),
        ("max", 1, [NAN, NAN, NAN, NAN], [0], 0, 0, -math.inf),
        ("min", -1, [3.0, NAN, 2.0, 4.0], [0, 1, 2, 3], 2, 1, 4.0),
        ("min", 9, [3.0, 1.0, 2.0, 4.0], [0, 1, 2, 3], 1, None, 4.0),
        ("max", 1, [0.7, 0.7, 0.7, 0.7], [0], 0, 0, 0.7),  # rounded to float32, 0.7 is less than 0.7
    ],
)
def test_the_best_are_kept(tmp_path, mode, top, values, kept_epochs, best, worst, current):
    seen = []
    kept = ModelCheckpoint(tmp_path / "c", filename="{epoch}", monitor="val_loss", mode=mode, save_top_k=top)
    check = LambdaCallback(on_train_epoch_start=lambda *_: seen.append(os.path.exists(kept.best_model_path or "none")))
    fit(tmp_path, kept, check, values=values, max_epochs=4)
    assert names(tmp_path / "c") == [f"epoch={e}.ckpt" for e in kept_epochs]
    assert sorted(kept.best_k_models) == [str(tmp_path / "c" / f"epoch={e}.ckpt") for e in kept_epochs]
    assert kept.best_model_path == str(tmp_path / "c" / f"epoch={best}.ckpt")
    assert kept.kth_best_model_path == ("" if worst is None else str(tmp_path / "c" / f"epoch={worst}.ckpt"))
    infinite = math.inf if mode == "min" else -math.inf
    assert kept.best_model_score.item() == (infinite if math.isnan(values[best]) else values[best])
    assert kept.current_score.item() == current
    assert kept.best_model_score.ndim == kept.current_score.ndim == 0
    assert {v.ndim for v in kept.best_k_models.values()} == {0}
    assert seen == [False, True, True, True]


def test_without_a_monitor_the_newest_is_best(tmp_path):
    kept = ModelCheckpoint(tmp_path / "c")
    made = fit(tmp_path, kept)
    assert names(tmp_path / "c") == ["epoch=1-step=10.ckpt"]
    assert kept.best_model_path == str(tmp_path / "c" / "epoch=1-step=10.ckpt")
    assert (kept.best_model_score, kept.best_k_models) == (None, {})
    assert made.checkpoint_callback is kept
    assert kept.check_monitor_top_k(made, torch.tensor(1.0))
    assert not kept.check_monitor_top_k(made, None)
    assert kept.file_exists(kept.best_model_path, made)
    assert not kept.file_exists(tmp_path / "c" / "epoch=7.ckpt", made)


def test_the_default_directory_and_two_at_once(tmp_path):
    best = ModelCheckpoint(monitor="val_loss", filename="best-{epoch}")
    often = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1, filename="{step}", save_weights_only=True)
    fit(tmp_path, best, often, values=[1.0, 2.0])
    assert names(tmp_path / "checkpoints") == ["best-epoch=0.ckpt", "step=4.ckpt", "step=8.ckpt"]
    assert best.best_model_path == str(tmp_path / "checkpoints" / "best-epoch=0.ckpt")
    assert [*store.read_manifest(often.best_model_path).files] == ["model.safetensors"]
    with pytest.raises(ValueError, match="only weights"):
        fit(tmp_path, ckpt_path=often.best_model_path)


def test_a_validation_value_is_never_taken_for_later_weights(tmp_path):
    """Saves by steps between two validations wait for the next; ``last`` does not."""
    saved = []
    kept = ModelCheckpoint(tmp_path / "c", "{step}", "val_loss", save_top_k=-1, every_n_train_steps=2, save_last=True)
    note = LambdaCallback(on_train_batch_start=lambda *_: saved.append(names(tmp_path / "c")))
    fit(tmp_path, kept, note, values=[3.0, 2.0], check_val_every_n_epoch=2, max_epochs=4)
    assert [path[-12:] for path in kept.best_k_models] == ["step=10.ckpt", "step=20.ckpt"]
    assert [score.item() for score in kept.best_k_models.values()] == [3.0, 2.0]
    assert saved[3] == ["last.ckpt"]


def test_a_step_value_is_that_of_the_step(tmp_path):
    """Not the one the loggers got some steps ago."""
    losses = {}
    note = LambdaCallback(
        on_train_batch_end=lambda t, m, outputs, *_: losses.update({t.global_step: outputs["loss"].item()})
    )
    kept = ModelCheckpoint(tmp_path / "c", "{step}", "train_loss", save_top_k=-1, every_n_train_steps=3)
    fit(tmp_path, note, kept, log_every_n_steps=4, values=[1.0])
    assert [s.item() for s in kept.best_k_models.values()] == pytest.approx([losses[s] for s in (3, 6, 9)])


class Falls(Tiny):
    """The mean over an epoch is 4, then 2; over the first two steps of the second it is 0.5."""

    def training_step(self, batch, batch_idx):
        self.log("mean", float(batch_idx if self.current_epoch else 2 * batch_idx), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("at_end", float(self.current_epoch))


@pytest.mark.parametrize("monitor", ["mean", "at_end"])
@pytest.mark.parametrize("trigger", [{}, {"every_n_train_steps": 2}])
def test_an_epochs_training_value(tmp_path, monitor, trigger):
    kept = ModelCheckpoint(tmp_path / "c", "{step}", monitor, save_top_k=-1, **trigger)
    fit(tmp_path, kept, task=Falls([1.0]))
    assert [path[-12:].lstrip("/") for path in kept.best_k_models] == ["step=5.ckpt", "step=10.ckpt"]


def test_a_part_of_an_epoch_is_not_ranked_as_a_whole_one(tmp_path):
    def go(root, ckpt_path=None, **limit):
        kept = ModelCheckpoint(tmp_path / root, "{step}", "mean", save_last=True)
        fit(tmp_path, kept, task=Falls(), ckpt_path=ckpt_path, **limit)
        return {Path(path).name: score.item() for path, score in kept.best_k_models.items()}

    assert go("whole") == {"step=10.ckpt": 2.0}
    assert go("parts", max_steps=7) == {"step=5.ckpt": 4.0}
    assert store.read_manifest(tmp_path / "parts" / "last.ckpt").step == 7
    assert go("parts", "last") == {"step=10.ckpt": 2.0}
    assert names(tmp_path / "parts") == ["last.ckpt", "step=10.ckpt"]


def test_what_a_fit_waited_for_the_next_one_does_not(tmp_path):
    kept = ModelCheckpoint(tmp_path / "c", "{step}", "val_loss", every_n_train_steps=3, save_last=True)
    with pytest.warns(UserWarning, match="saved no best checkpoint"):
        made = fit(tmp_path, kept, values=[1.0], max_steps=3)  # before the first validation
    made.max_steps = 4
    made.fit(Tiny([1.0]), loader(2), loader(4))
    assert (names(tmp_path / "c"), kept.best_model_path) == (["last.ckpt"], "")


@pytest.mark.parametrize("trigger", [{}, {"every_n_train_steps": 2}])
def test_a_value_that_was_never_logged(tmp_path, trigger):
    words = "ModelCheckpoint's monitor 'train_los' was never logged.*mean 'train_loss'"
    with pytest.raises(ValueError, match=words):
        fit(tmp_path, ModelCheckpoint(tmp_path / "c", monitor="train_los", **trigger), values=[1.0])


@pytest.mark.parametrize("flags", [{"validate": False}, {"limit_val_batches": 0}])
@pytest.mark.parametrize(("name", "why"), [("val_loss", ", because"), ("train_los", ".*'train_loss'.*")])
def test_a_run_without_validation_trains_on_where_the_monitor_is_missing(tmp_path, name, why, flags):
    kept = ModelCheckpoint(tmp_path / "c", monitor=name, save_last=True)
    words = rf"'{name}' was never logged{why}.*no validation.*Until it is logged, no best checkpoint is saved"
    with pytest.warns(UserWarning, match=words):
        assert fit(tmp_path, kept, values=[1.0], max_epochs=2, **flags).current_epoch == 2
    assert names(tmp_path / "c") == ["last.ckpt"]
    assert (kept.best_model_path, os.path.basename(kept.last_model_path)) == ("", "last.ckpt")


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "insert", "name"),
    [
        (None, True, "epoch=2-step=7"),
        ("{epoch}", True, "epoch=2"),
        ("{epoch:03d}", True, "epoch=002"),
        ("{epoch}-{val_loss:.2f}", True, "epoch=2-val_loss=0.12"),
        ("e{epoch}-v{val_loss:.2f}", False, "e2-v0.12"),
        ("epoch={epoch}-acc={val/acc:.1f}", False, "epoch=2-acc=0.5"),
        ("{val/acc:.1f}", True, "val_acc=0.5"),
        ("{top-5 acc}", True, "top-5 acc=1"),
        ("sub/{step}", True, "sub/step=7"),
        ("plain", True, "plain"),
    ],
)
def test_names(template, insert, name):
    values = {"epoch": 2, "step": 7, "val_loss": torch.tensor(0.123456), "val/acc": 0.5, "top-5 acc": 1}
    made = ModelCheckpoint(filename=template, auto_insert_metric_name=insert)
    assert made.format_checkpoint_name(values) == f"{name}.ckpt"
    assert made.format_checkpoint_name(values, ver=3) == f"{name}-v3.ckpt"
    assert ModelCheckpoint("/d", template, auto_insert_metric_name=insert).format_checkpoint_name(values) == (
        f"/d/{name}.ckpt"
    )


def test_names_that_do_not_fit():
    with pytest.warns(
        UserWarning, match=r"uses 'val_los', which is not logged, so it is written as 0. Did you mean 'val_loss'"
    ):
        assert ModelCheckpoint(filename="{val_los:d}").format_checkpoint_name({"val_loss": 1.0}) == "val_los=0.ckpt"
    with pytest.raises(ValueError, match="cannot be formatted"):
        ModelCheckpoint(filename="{val_loss:d}").format_checkpoint_name({"val_loss": 1.0})
    with pytest.raises(ValueError, match="Change the format of 'a'"):
        ModelCheckpoint(filename="{a:.2f}").format_checkpoint_name({"a": None})


def test_versions(tmp_path):
    """Another run's checkpoint stays; one's own is saved anew under its name."""
    for _ in range(3):
        kept = ModelCheckpoint(tmp_path / "c", filename="best", save_last=True)
        made = fit(tmp_path, kept, max_epochs=3)
    assert names(tmp_path / "c") == [f"{n}{v}.ckpt" for n in ("best", "last") for v in ("-v1", "-v2", "")]
    assert kept.best_model_path.endswith("best-v2.ckpt")
    made.max_epochs = 4
    made.fit(Tiny(), loader(), loader(4))
    assert len(names(tmp_path / "c")) == 6
    over = ModelCheckpoint(tmp_path / "c", filename="best", enable_version_counter=False)
    fit(tmp_path, over)
    assert over.best_model_path.endswith("best.ckpt")
    assert len(names(tmp_path / "c")) == 6


def test_a_second_name_for_last(tmp_path, monkeypatch):
    def save(folder, **options):
        kept = ModelCheckpoint(tmp_path / folder, "{epoch}", "step", mode="max", save_top_k=2, **options)
        fit(tmp_path, kept, max_epochs=3)
        assert names(tmp_path / folder) == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
        assert Path(kept.best_model_path).name == "epoch=2.ckpt"
        return Path(kept.last_model_path), tmp_path / folder / "epoch=2.ckpt"

    last, newest = save("file", save_last="link")
    assert last.samefile(newest)
    newest.unlink()
    assert torch.load(last)["global_step"] == 15
    last, newest = save("copy", save_last=True)
    assert not last.samefile(newest)
    last, newest = save("directory", save_last="link", format="directory")
    assert last.is_dir()
    last, newest = save("background", save_last="link", async_save=True)
    assert not last.samefile(newest)

    def refuse(*_):
        raise OSError(errno.EPERM, "one name per file")

    monkeypatch.setattr(os, "link", refuse)
    last, newest = save("no links", save_last="link")
    assert not last.samefile(newest)
    assert last.read_bytes() == newest.read_bytes()


# -- going on ------------------------------------------------------------------------------------------------------


VALUES = [5.0, 4.0, 6.0, 3.0, 3.5, 2.0]


@pytest.mark.long
@pytest.mark.parametrize("stop", [5, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (10, 7, 17))])
@pytest.mark.parametrize("trigger", [pytest.param({}, marks=pytest.mark.exhaustive), {"every_n_train_steps": 4}])
def test_resumed_it_keeps_what_it_would_have_kept(tmp_path, stop, trigger):
    def go(folder, ckpt_path=None):
        kept = ModelCheckpoint(tmp_path / folder, "{step}", "val_loss", save_top_k=2, save_last=True, **trigger)
        every = ModelCheckpoint(tmp_path / f"all {folder}", "{step}", every_n_train_steps=1, save_top_k=-1)
        fit(tmp_path, kept, every, task=ByEpoch(VALUES), max_epochs=6, ckpt_path=ckpt_path)
        scores = {Path(path).name: score.item() for path, score in kept.best_k_models.items()}
        return Path(kept.best_model_path).name, kept.best_model_score.item(), scores, Path(kept.last_model_path).name

    whole = go("parts")  # killed later than the checkpoint it goes on from
    assert go("parts", tmp_path / "all parts" / f"step={stop}.ckpt") == whole
    assert not [path for path in tmp_path.rglob("*.ckpt") if "-v" in path.name]


def test_the_best_of_before_stays_the_best_in_another_directory(tmp_path):
    def callback(folder):
        return ModelCheckpoint(tmp_path / folder, "{epoch}", "val_loss", save_last=True)

    first, second, third = map(callback, ("one", "two", "three"))
    fit(tmp_path, first, values=[1.0, 2.0])
    fit(tmp_path, second, values=[3.0, 4.0], max_epochs=4, ckpt_path=first.last_model_path)
    assert (second.best_model_path, second.best_model_score) == (str(tmp_path / "one" / "epoch=0.ckpt"), 1.0)
    assert names(tmp_path / "two") == ["epoch=2.ckpt", "last.ckpt"]
    assert names(tmp_path / "one") == ["epoch=0.ckpt", "last.ckpt"]
    fit(tmp_path, third, values=[0.5], max_epochs=5, ckpt_path=second.last_model_path)
    assert (third.best_model_path, third.best_model_score) == (str(tmp_path / "three" / "epoch=4.ckpt"), 0.5)
    # And one that is not there any more is not the best.
    store.remove(first.best_model_path)
    fourth = callback("four")
    fit(tmp_path, fourth, values=[9.0], max_epochs=5, ckpt_path=second.last_model_path)
    assert (fourth.best_model_path, fourth.best_model_score) == (str(tmp_path / "four" / "epoch=4.ckpt"), 9.0)


@pytest.mark.parametrize(("template", "folder"), [("{epoch}/{step}", "epoch=0"), ("a/b/{step}", "a/b"), ("x", ".")])
def test_what_a_killed_run_left_is_cleared_away_in_folders_too(tmp_path, template, folder):
    left = tmp_path / "c" / folder / f".step=3.ckpt.{stored.DEAD}.part"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_text("half of it")
    other = tmp_path / "c" / "notes" / f".step=3.ckpt.{stored.DEAD}.part"
    other.mkdir(parents=True)
    (other / "mine.txt").write_text("")
    fit(tmp_path, ModelCheckpoint(tmp_path / "c", template), max_epochs=1, max_steps=1)
    assert other.exists()
    assert not left.exists()


def test_what_was_saved_anew_under_a_replaced_name_is_not_removed(tmp_path):
    """A run that goes on from an earlier checkpoint, whose list of what it replaced is old."""
    kept = ModelCheckpoint(tmp_path / "c", "fixed", save_last=True)
    fit(tmp_path, kept, max_epochs=1)
    assert "'replaced': []" in str(stored.read_part(tmp_path / "c" / "last.ckpt", "state"))
    found = finish_removing([kept.best_model_path], str(tmp_path / "c"), 5, None)
    assert found == []  # of this very step
    assert finish_removing([kept.best_model_path], str(tmp_path / "c"), 4, None) == []  # saved later
    assert finish_removing([kept.best_model_path], str(tmp_path / "c"), 6, None) == [kept.best_model_path]
    assert names(tmp_path / "c") == ["last.ckpt"]


# -- for subclasses and scripts of Lightning -----------------------------------------------------------------------


def test_a_subclass_decides_what_is_among_the_best(tmp_path):
    class NoneBelowHalf(ModelCheckpoint):
        def check_monitor_top_k(self, trainer, current=None):
            return float(current) >= 0.5 and super().check_monitor_top_k(trainer, current)

    kept = NoneBelowHalf(tmp_path / "c", "{epoch}", "val_loss", save_top_k=2)
    fit(tmp_path, kept, values=[0.9, 0.1, 0.7, 0.8], max_epochs=4)
    assert names(tmp_path / "c") == ["epoch=2.ckpt", "epoch=3.ckpt"]
    assert kept.best_model_path == str(tmp_path / "c" / "epoch=2.ckpt")


def test_a_subclass_names_its_checkpoints(tmp_path):
    class Numbered(ModelCheckpoint):
        CHECKPOINT_NAME_LAST = "newest of {epoch}"

        def format_checkpoint_name(self, metrics, filename=None, ver=None):
            path = super().format_checkpoint_name(metrics, filename, ver)
            return path.replace("epoch=", "number ")

    kept = Numbered(tmp_path / "c", "{epoch}", save_last=True)
    kept.FILE_EXTENSION = ".run"
    fit(tmp_path, kept)
    assert names(tmp_path / "c") == ["newest of number 1.run", "number 1.run"]
    assert kept.last_model_path == str(tmp_path / "c" / "newest of number 1.run")


def test_public_attributes_can_be_set(tmp_path):
    kept = ModelCheckpoint(tmp_path / "c", "{epoch}")
    kept.monitor, kept.mode, kept.save_top_k = "val_loss", "max", 2
    fit(tmp_path, kept, values=[3.0, 1.0, 2.0], max_epochs=3)
    assert names(tmp_path / "c") == ["epoch=0.ckpt", "epoch=2.ckpt"]
    assert (float(kept.best_model_score), float(kept.current_score)) == (3.0, 2.0)
    assert kept.kth_best_model_path == str(tmp_path / "c" / "epoch=2.ckpt")
    assert float(kept.kth_value) == 2.0
    with pytest.raises(AttributeError):
        kept.kth_best_model_path = "elsewhere.ckpt"
    assert not {"kth_best_model_path", "kth_value"} & kept.state_dict().keys()
    assert kept.state_key.startswith("ModelCheckpoint(monitor='val_loss', mode='max', every_n_train_steps=0,")
    kept.best_model_path = kept.last_model_path = "elsewhere.ckpt"
    assert (kept.state_dict()["best_model_path"], kept.state_dict()["last_model_path"]) == ("elsewhere.ckpt",) * 2


def test_a_subclass_beside_its_base_class_has_a_state_of_its_own(tmp_path):
    class Mine(ModelCheckpoint):
        pass

    def make():
        flags = {"monitor": "val_loss", "save_top_k": -1}
        return ModelCheckpoint(tmp_path / "c", **flags), Mine(tmp_path / "m", **flags)

    fit(tmp_path, *(first := make()), values=[1.0, 2.0], max_epochs=2)
    fit(tmp_path, *(again := make()), values=[5.0] * 3, max_epochs=3, ckpt_path=tmp_path / "m" / "epoch=1-step=10.ckpt")
    assert [float(one.best_model_score) for one in again] == [1.0, 1.0]
    assert [one.best_model_path for one in again] == [one.best_model_path for one in first]


# -- what can go wrong ---------------------------------------------------------------------------------------------


def test_a_directory_that_can_not_be_written_to_is_found_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    steps = Steps()
    with pytest.raises(OSError, match="can't save checkpoints"):
        fit(tmp_path, steps, ModelCheckpoint(tmp_path / "file" / "c"))
    assert list(steps.weights) == [0]


def test_a_save_that_fails_changes_nothing_that_is_known(tmp_path):
    kept = ModelCheckpoint(tmp_path / "c", "{epoch}", "val_loss")

    def block(trainer, pl_module):
        if trainer.current_epoch == 1:
            (tmp_path / "c" / "epoch=1.ckpt").mkdir()
            (tmp_path / "c" / "epoch=1.ckpt" / "notes").write_text("somebody else's")
            kept.enable_version_counter = False

    with pytest.raises(ValueError, match="not a checkpoint"):
        fit(tmp_path, LambdaCallback(on_train_epoch_start=block), kept, values=[2.0, 1.0])
    assert kept.best_model_path == str(tmp_path / "c" / "epoch=0.ckpt")
    assert kept.best_model_score.item() == 2.0


def without_capabilities(root):
    """In a process that may write no more than its user may, even where that is root."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0
    fit(root, ModelCheckpoint(root / "locked" / "c"))


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
def test_no_permission_is_found_before_the_first_step(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    words = rf"\[Errno 13\] can't save checkpoints in {tmp_path / 'locked' / 'c'}: "
    with pytest.raises(PermissionError, match=words):
        run(without_capabilities, 1, tmp_path)


@pytest.mark.parametrize(("value", "name"), [(NAN, "spare.weight"), (math.inf, "spare.weight"), (NAN, "mean")])
def test_weights_that_are_not_finite_are_never_saved(tmp_path, value, name):
    """They are lost in the second epoch; the loss does not show it."""

    def lose(trainer, task):
        if trainer.current_epoch == 1:
            task.state_dict()[name].flatten()[1] = value

    task, kept = Tiny(), ModelCheckpoint(tmp_path / "c", save_last=True)
    task.spare = nn.Linear(3, 3)
    task.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    task.register_buffer("mean", torch.zeros(2))
    words = rf"{name} contains NaN or infinity after optimizer step 10, so .* is not saved"
    with pytest.raises(ValueError, match=words):
        fit(tmp_path, LambdaCallback(on_train_epoch_start=lose), kept, task=task)
    assert names(tmp_path / "c") == ["epoch=0-step=5.ckpt", "last.ckpt"]
    assert kept.best_model_path == str(tmp_path / "c" / "epoch=0-step=5.ckpt")
    weights = stored.read_part(kept.last_model_path, "model")
    assert all(torch.isfinite(weights[key]).all() for key in weights if key != "mask")


# -- several processes ---------------------------------------------------------------------------------------------


class Unequal(Tiny):
    """Every rank logs another value in training."""

    def training_step(self, batch, batch_idx):
        self.log("own", float(self.global_rank + self.global_step))
        return super().training_step(batch, batch_idx)


def two(root):
    root = Path(root)
    best = ModelCheckpoint(root / "best", "{epoch}-{val_loss:.1f}", "val_loss", save_last=True)
    steps = ModelCheckpoint(root / "steps", "{step}-{own:.1f}", "own", every_n_train_steps=2, save_top_k=2)
    clock = ModelCheckpoint(root / "clock" / str(os.getpid()), train_time_interval=timedelta(microseconds=1))
    made = trainer(root, best, steps, clock, max_epochs=3)
    made.fit(Unequal([3.0, 1.0, 2.0]), loader(20), loader(4))
    again = ModelCheckpoint(root / "best", "{epoch}-{val_loss:.1f}", "val_loss", save_last=True)
    trainer(root, again, max_epochs=4).fit(Unequal([0.5]), loader(20), loader(4), ckpt_path=best.last_model_path)
    return {
        "best": (best.best_model_path, best.best_model_score.item(), again.best_model_path),
        "steps": {path: score.item() for path, score in steps.best_k_models.items()},
        "clock": clock.best_model_path,
    }


def test_two_processes(tmp_path):
    first, second = run(two, 2, str(tmp_path))
    assert first == second
    best = [str(tmp_path / "best" / f"epoch={name}.ckpt") for name in ("1-val_loss=1.0", "3-val_loss=0.5")]
    assert first["best"] == (best[0], 1.0, best[1])
    assert list(first["steps"].values()) == [1.5, 3.5]
    assert [os.path.basename(path) for path in first["steps"]] == names(tmp_path / "steps")
    assert names(tmp_path / "steps") == ["step=2-own=1.5.ckpt", "step=4-own=3.5.ckpt"]
    # The ranks asked for two directories; rank zero's is taken.
    assert [str(path) for path in (tmp_path / "clock").glob("*/*")] == [first["clock"]]


class WeightsOnly(ModelCheckpoint):
    def _save_checkpoint(self, trainer, filepath):
        os.makedirs(os.path.dirname(filepath), exist_ok=True)
        torch.save(trainer.lightning_module.state_dict(), filepath.replace(".ckpt", ".pt"))
        self._last_global_step_saved = trainer.global_step


def test_a_subclass_saves_something_else(tmp_path):
    saving = WeightsOnly(dirpath=tmp_path, monitor="val_loss", save_last=True, filename="{epoch}")
    fit(tmp_path, saving, values=[3.0, 2.0], max_epochs=2)
    assert sorted(path.name for path in tmp_path.glob("*.*t")) == ["epoch=0.pt", "epoch=1.pt", "last.pt"]
    assert saving.best_model_path.endswith("epoch=1.ckpt")


class AtEpochsEnd(ModelCheckpoint):
    """Lightning's own method, written out as public subclasses do."""

    def on_train_epoch_end(self, trainer, pl_module):
        if not self._should_skip_saving_checkpoint(trainer) and self._should_save_on_train_epoch_end(trainer):
            candidates = self._monitor_candidates(trainer)
            assert {"val_loss", "epoch", "step"} <= candidates.keys()
            if self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0:
                self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)


def test_lightnings_names_of_the_internals(tmp_path):
    saving = AtEpochsEnd(dirpath=tmp_path / "c", monitor="val_loss", save_last=True, save_top_k=2, filename="{epoch}")
    assert math.isinf(saving.kth_value)
    made = fit(tmp_path, saving, values=[3.0, 1.0, 2.0], max_epochs=3)
    assert names(tmp_path / "c") == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert saving.kth_value.item() == 2.0
    assert (saving._last_global_step_saved, saving._every_n_train_steps, saving._train_time_interval) == (
        made.global_step, 0, None,
    )  # fmt: skip
    assert [ModelCheckpoint(save_on_train_epoch_end=at)._save_on_train_epoch_end for at in (None, True)] == [None, True]


class Exports(ModelCheckpoint):
    """Has a folder in place of each checkpoint, and the best one's path without a suffix, as scvi-tools does."""

    def on_save_checkpoint(self, trainer, *args):
        folder = Path(self.format_checkpoint_name(self._monitor_candidates(trainer)).removesuffix(".ckpt"))
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(trainer.lightning_module.state_dict(), folder / "model.pt")

    def _update_best_and_save(self, current, trainer, monitor_candidates):
        assert float(current) == float(monitor_candidates["val_loss"])  # with all its digits
        super()._update_best_and_save(current, trainer, monitor_candidates)
        if os.path.exists(self.best_model_path):
            os.remove(self.best_model_path)
        self.best_model_path = self.best_model_path.removesuffix(".ckpt")

    def _remove_checkpoint(self, trainer, filepath):
        super()._remove_checkpoint(trainer, filepath)
        shutil.rmtree(filepath.removesuffix(".ckpt"))


@pytest.mark.parametrize(  # as with lightning 2.6.6
    ("count", "values", "kept", "best"),
    [
        (1, [2.0, 3.0, 1.0, 4.0], ["epoch=2"], "epoch=2"),
        (2, [2.0, 3.0, 1.0, 4.0], ["epoch=0", "epoch=2"], "epoch=2"),
        # a checkpoint that is not the best stays, and the best is not taken for one of an earlier run
        (2, [1.0, 2.0, 3.0, 4.0], ["epoch=0", "epoch=1", "epoch=1.ckpt"], "epoch=0"),
    ],
)
def test_a_subclass_replaces_the_best_by_something_else(tmp_path, count, values, kept, best):
    saving = Exports(dirpath=tmp_path, monitor="val_loss", filename="{epoch}", save_top_k=count)
    task = Tiny(values)
    task.validation_step = lambda _, index: task.log("val_loss", torch.tensor(values[task.current_epoch] + index / 3))
    fit(tmp_path, saving, task=task, max_epochs=4)
    assert sorted(path.name for path in tmp_path.glob("epoch*")) == kept
    assert Path(saving.best_model_path) == tmp_path / best
    assert float(saving.best_model_score) == pytest.approx(min(values) + 1 / 6)


class InVain(ModelCheckpoint):
    def _save_topk_checkpoint(self, trainer, monitor_candidates):
        """Save nothing."""


def test_what_is_overridden_in_vain_is_said(tmp_path):
    with pytest.warns(UserWarning, match="InVain overrides _save_topk_checkpoint, which Treadle never calls"):
        fit(tmp_path, InVain(dirpath=tmp_path), values=[1.0], max_epochs=1)


@pytest.mark.long
@pytest.mark.guarantee
def test_a_last_checkpoint_without_manifest_does_not_end_each_resumed_run(tmp_path):
    """A directory without one may be the user's. A file that begins like a checkpoint is replaced."""

    def fitted(epochs, **options):
        saving = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, save_last=True, **options)
        return fit(tmp_path, saving, validate=False, max_epochs=epochs, ckpt_path="auto"), saving

    fitted(1)
    os.truncate(tmp_path / "last.ckpt", 1000)
    with pytest.warns(UserWarning, match=r"last\.ckpt is truncated"):
        trainer, saving = fitted(2)
    assert trainer.current_epoch == 2
    assert saving.last_model_path == str(tmp_path / "last.ckpt")
    store.verify(saving.last_model_path)
    fitted(3, format="directory")
    os.remove(tmp_path / "last.ckpt" / "manifest.json")
    with pytest.warns(UserWarning, match=r"last\.ckpt"):
        trainer, saving = fitted(4)
    assert trainer.current_epoch == 4
    assert saving.last_model_path == str(tmp_path / "last-v1.ckpt")
    assert fitted(5)[0].current_epoch == 5
    with pytest.raises(ValueError, match=r"last\.ckpt exists and is not a checkpoint"):  # before the first step
        fitted(6, enable_version_counter=False)
    shutil.rmtree(tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "nowhere")
    assert fitted(6)[0].current_epoch == 6


def test_scores_as_yaml(tmp_path):
    kept = ModelCheckpoint(tmp_path / "best", "{epoch}", "val_loss")
    fit(tmp_path, kept, values=[2.0, 3.0])
    kept.to_yaml()
    assert yaml.safe_load((tmp_path / "best" / "best_k_models.yaml").read_text()) == {kept.best_model_path: 2.0}


@pytest.mark.parametrize(
    ("arguments", "validate"), [({"every_n_epochs": 10}, True), ({"save_on_train_epoch_end": False}, False)]
)
def test_last_is_saved_at_the_end_if_no_trigger_has_fired(tmp_path, arguments, validate):
    kept = ModelCheckpoint(tmp_path / "c", save_last=True, **arguments)
    fit(tmp_path, kept, validate=validate, max_epochs=2)
    assert names(tmp_path / "c") == ["last.ckpt"]
    again = ModelCheckpoint(tmp_path / "c", save_last=True, **arguments)
    resumed = fit(tmp_path, again, validate=validate, max_epochs=4, ckpt_path=kept.last_model_path)
    whole = fit(tmp_path / "whole", validate=validate, max_epochs=4, enable_checkpointing=False)
    assert resumed.global_step == whole.global_step == 20
    assert torch.equal(resumed.task.net.weight, whole.task.net.weight)
    nothing = ModelCheckpoint(tmp_path / "none", **arguments)
    fit(tmp_path, nothing, validate=validate, max_epochs=2)
    assert not (tmp_path / "none").exists() or names(tmp_path / "none") == []


def test_annotations_are_resolved_by_type_hints():
    assert inspect.signature(ModelCheckpoint).parameters["save_last"].annotation == "bool | str | None"
    assert typing.get_type_hints(ModelCheckpoint.__init__)["save_last"] == bool | str | None


def test_names_from_lightnings_helper(tmp_path):
    class Own(ModelCheckpoint):
        def format_checkpoint_name(self, metrics, filename=None, ver=None):
            name = self._format_checkpoint_name(filename or self.filename, metrics, auto_insert_metric_name=False)
            return str(tmp_path / f"{name}.own")

    values = {"epoch": 1, "step": 2, "loss": 0.25}
    assert Own(filename="{epoch}-{loss:.1f}").format_checkpoint_name(values) == str(tmp_path / "1-0.2.own")
    assert Own()._format_checkpoint_name(None, values, prefix="best") == "best-epoch=1-step=2"

    class Upper(ModelCheckpoint):
        def _format_checkpoint_name(self, *args, **kwargs):
            return super()._format_checkpoint_name(*args, **kwargs).upper()

    assert Upper(filename="{epoch}").format_checkpoint_name(values) == "EPOCH=1.ckpt"
