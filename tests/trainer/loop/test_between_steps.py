"""What lies between two steps, and between two runs of one Trainer: when validation is due, what ends, what is left."""

import pytest
import torch
from support.models import LoggedLine, SaveIn, Stream
from support.trainers import make_trainer
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint


class Task(LoggedLine):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.validated = []

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking and batch_idx == 0:
            self.validated.append(self.trainer.progress.batches)


def loader(batches, kind=list):
    samples = TensorDataset(torch.linspace(-1, 1, batches * 4).reshape(batches * 2, 2))
    return DataLoader(kind(samples), batch_size=2)


def stream(batches):
    return loader(batches, Stream)


class ShortStream(Stream):
    """Says that it is shorter than it is."""

    def __len__(self):
        return 4


# -- how a stream ends -----------------------------------------------------------------------------------------------


def test_max_steps_at_the_end_of_a_stream():
    task, one = Task(), make_trainer(max_epochs=-1, max_steps=6)
    one.fit(task, stream(6), loader(1))
    assert (one.global_step, one.current_epoch, task.validated) == (6, 0, [])
    one.max_steps = 7
    one.fit(task, stream(6), loader(1))
    assert (one.global_step, one.current_epoch) == (7, 0)


def test_a_stream_that_is_longer_than_it_says_is_cut_and_that_is_said():
    task, one = Task(), make_trainer(max_epochs=2)
    with pytest.warns(UserWarning, match=r"more batches than its length of 2"):
        one.fit(task, loader(6, ShortStream), loader(1))
    assert (one.global_step, one.current_epoch, task.validated) == (4, 2, [2, 4])


# -- what a checkpoint made in between goes on with ------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_end", "on_train_epoch_end"])
def test_saved_at_the_end_of_an_epoch_without_a_length(tmp_path, hook):
    whole, task = make_trainer(max_epochs=3, callbacks=[SaveIn(hook, 12, tmp_path / "x")]), Task()
    whole.fit(task, stream(6), loader(1))
    again, other = make_trainer(max_epochs=3), Task()
    again.fit(other, stream(6), loader(1), ckpt_path=tmp_path / "x")
    counts = ("step", "epoch", "batch", "batches", "samples", "validated")
    assert [getattr(again.progress, name) for name in counts] == [getattr(whole.progress, name) for name in counts]
    assert torch.equal(other.net.weight, task.net.weight)
    assert other.validated == task.validated[-len(other.validated) :]
    assert len(other.validated) == (2 if hook == "on_validation_start" else 1)


class SameName(Task):
    """Logs one name in training and in validation, and its schedule looks at it."""

    def validation_step(self, batch, batch_idx):
        self.log("loss", 100.0 + self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss"}}


@pytest.mark.parametrize("hook", ["on_validation_end", "on_step_end", "on_train_epoch_end"])
def test_what_validation_measured_is_known_after_a_resume(tmp_path, hook):
    def run(path=None, *callbacks):
        stopping = EarlyStopping("loss", patience=9, check_on_train_epoch_end=True)
        one, task = make_trainer(max_epochs=4, callbacks=[stopping, *callbacks]), SameName()
        one.fit(task, loader(3), loader(1), ckpt_path=path)
        return one.optimizers[0].param_groups[0]["lr"], stopping.best_score, task.net.weight.tolist()

    rate, best, weight = run(None, SaveIn(hook, 6, tmp_path / "x"))
    assert rate < 0.1
    assert best >= 100
    assert run(tmp_path / "x") == (rate, best, weight)


def test_the_history_of_a_run_that_was_saved_when_it_failed(tmp_path):
    saves = ModelCheckpoint(tmp_path, save_on_exception=True)
    flags = {"enable_checkpointing": True, "log_every_n_steps": 1}
    fails = LambdaCallback(on_before_backward=lambda trainer, *_: 1 // (5 - trainer.global_step))
    with pytest.raises(ZeroDivisionError):
        make_trainer(**flags, callbacks=[saves, fails]).fit(Task(), loader(8))
    again = make_trainer(**flags, callbacks=ModelCheckpoint(tmp_path))
    again.fit(Task(), loader(8), ckpt_path=tmp_path / "epoch=0-step=5.ckpt")
    assert again.history["loss"].steps == [1, 2, 3, 4, 5, 6, 7, 8]


# -- a group that was left -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_loss_that_was_not_finite_in_a_group_that_was_left_is_forgotten(policy):
    task, one = Task(), make_trainer(max_epochs=3, accumulate_grad_batches=3, on_nonfinite=policy)
    factor = {(0, 1): float("nan")}
    task.training_step = lambda batch, index: task.net(batch[0]).mean() * factor.get((task.current_epoch, index), 1.0)
    task.on_train_batch_start = lambda batch, index: -1 if (task.current_epoch, index) == (0, 2) else None
    one.fit(task, loader(3))
    assert (one.global_step, one.progress.skipped) == (2, 0)


# -- several runs of one Trainer or task -----------------------------------------------------------------------------


def test_a_second_fit_with_nothing_left_says_so():
    one = make_trainer()
    one.fit(Task(), loader(3))
    with pytest.warns(UserWarning, match=r"nothing is left to train: 3 optimizer steps and 1 epoch are done"):
        one.fit(Task(), loader(3))
    assert one.global_step == 3


def test_a_stage_within_a_stage_is_refused():
    class Nested(Task):
        def on_train_epoch_end(self):
            with pytest.raises(ValueError, match=r"trainer.validate was called within trainer.fit"):
                self.trainer.validate(self, loader(1))

    one = make_trainer(max_epochs=2)
    one.fit(Nested(), loader(3), loader(1))
    assert one.global_step == 6
    assert len(one.optimizers) == 1


def test_no_tests_where_the_limit_is_zero():
    task = Task()
    task.test_step = task.predict_step = task.validation_step
    assert make_trainer(limit_test_batches=0).test(task, loader(2)) == []
    assert make_trainer(limit_predict_batches=0).predict(task, loader(2)) == []
    assert task.validated == []
