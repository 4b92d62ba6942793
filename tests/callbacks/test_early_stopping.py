"""`EarlyStopping`: after which check it stops, and that all processes do."""

import math

import pytest
import torch
from callback_runs import Tiny, fit, loader, trainer
from processes import run
from treadle.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint

NAN = float("nan")


@pytest.mark.parametrize(
    ("arguments", "values", "epochs", "reason"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.5, 2.1, 0.0], 4, "not improved on 2 in the last 2 checks"),
        ({"patience": 0}, [3.0, 2.0, 2.0], 3, "not improved"),
        ({"patience": 9}, [3.0, 2.0, 2.5], 6, None),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.0, 1.6], 3, "not improved"),
        ({"patience": 1, "min_delta": -0.5}, [3.0, 2.0, 1.4, 1.4], 4, "not improved on 1.4"),
        ({"patience": 1, "mode": "max"}, [1.0, 2.0, 1.5], 3, "not improved on 2"),
        ({"patience": 1, "mode": "max", "min_delta": 1.0}, [1.0, 2.0], 2, "not improved on 1"),
        ({}, [3.0, NAN], 2, "is nan"),
        ({}, [3.0, math.inf], 2, "is inf"),
        ({"check_finite": False, "patience": 2}, [NAN, NAN, 1.0], 2, "not improved"),
        ({"stopping_threshold": 1.0}, [3.0, 1.0, 0.9], 3, "better than stopping_threshold = 1.0"),
        ({"divergence_threshold": 4.0}, [3.0, 4.0, 4.1], 3, "worse than divergence_threshold = 4.0"),
        ({"mode": "max", "stopping_threshold": 2.0}, [3.0], 1, "better than stopping_threshold"),
        ({"mode": "max", "divergence_threshold": 4.0}, [3.0], 1, "worse than divergence_threshold"),
        ({"check_on_train_epoch_end": True, "patience": 1}, [1.0, 2.0], 2, "not improved"),
        ({"check_on_train_epoch_end": False, "patience": 1}, [1.0, 2.0], 2, "not improved"),
    ],
)
def test_when(tmp_path, arguments, values, epochs, reason):
    stop = EarlyStopping("val_loss", **arguments)
    made = fit(tmp_path, stop, values=values, max_epochs=6)
    assert made.current_epoch == epochs
    assert stop.best_score.ndim == 0
    if reason is None:
        assert (stop.stopped_epoch, stop.stopping_reason_message) == (0, None)
    else:
        assert stop.stopped_epoch == epochs - 1
        assert reason in stop.stopping_reason_message


def test_patience_counts_checks(tmp_path):
    """Two validations an epoch: the third without improvement is in the middle of the second epoch."""
    made = fit(tmp_path, EarlyStopping("val_loss", patience=2), values=[1.0, 2.0, 3.0], val_check_interval=2)
    assert made.global_step == 7
    made = fit(tmp_path, EarlyStopping("val_loss", patience=2), values=[1.0], max_epochs=9, check_val_every_n_epoch=2)
    assert made.current_epoch == 6
    end = EarlyStopping("val_loss", patience=2, check_on_train_epoch_end=True)  # no check where nothing was measured
    made = fit(tmp_path, end, values=[1.0], max_epochs=9, check_val_every_n_epoch=2)
    assert made.current_epoch == 6


def test_a_training_value_with_and_without_validation(tmp_path):
    for validate in (True, False):
        stop = EarlyStopping("train_loss", stopping_threshold=1e9)
        assert fit(tmp_path, stop, values=[1.0], validate=validate).current_epoch == 1


def test_the_minimum_is_kept(tmp_path):
    stop = EarlyStopping("val_loss", patience=1)
    assert fit(tmp_path, stop, values=[1.0], max_epochs=9, min_epochs=4).current_epoch == 4
    stop = EarlyStopping("val_loss", patience=1)
    assert fit(tmp_path, stop, values=[1.0], max_epochs=9, min_steps=13).global_step >= 13


@pytest.mark.parametrize("flags", [{}, {"validate": False}, {"limit_val_batches": 0}])
def test_a_value_that_was_never_logged(tmp_path, flags):
    with pytest.raises(ValueError, match=r"^EarlyStopping's monitor 'train_los' was never logged.*mean 'train_loss'"):
        fit(tmp_path, EarlyStopping("train_los"), values=[1.0], **flags)
    with pytest.warns(UserWarning, match="leaves out a check"):
        fit(tmp_path, EarlyStopping("train_los", strict=False), values=[1.0], **flags)


def test_no_check_before_the_first_validation(tmp_path):
    assert fit(tmp_path, EarlyStopping("val_loss"), values=[1.0], max_steps=3).global_step == 3


def test_resumed_it_goes_on_counting(tmp_path):
    def go(epochs, ckpt_path=None, values=(2.0, 2.5, 2.4, 2.3, 2.2)):
        stop = EarlyStopping("val_loss", patience=4)
        kept = ModelCheckpoint(tmp_path / "c", save_last=True)
        made = fit(tmp_path, stop, kept, values=values, max_epochs=epochs, ckpt_path=ckpt_path)
        return stop, made.current_epoch, kept.last_model_path

    _, _, path = go(3)
    stop, epochs, _ = go(9, path, values=(2.3, 2.2))
    assert (stop.wait_count, stop.best_score.item(), epochs) == (4, 2.0, 5)
    assert isinstance(stop.best_score, torch.Tensor)
    for cut in (7, 12):  # an epoch that is cut short is no check
        _, _, path = go(9), *go_steps(tmp_path, cut)
        stop, epochs, _ = go(9, path)
        assert (epochs, stop.wait_count) == (5, 4)


def go_steps(root, steps):
    class ByEpoch(Tiny):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", [2.0, 2.5, 2.4, 2.3, 2.2][self.current_epoch])

    kept = ModelCheckpoint(root / f"cut{steps}", save_last=True)
    fit(root, EarlyStopping("val_loss", patience=4), kept, task=ByEpoch(), max_epochs=9, max_steps=steps)
    return None, kept.last_model_path


def test_arguments_that_can_not_be_honoured():
    with pytest.raises(ValueError, match="Did you mean 'max'"):
        EarlyStopping("x", mode="maxi")
    with pytest.raises(ValueError, match="patience"):
        EarlyStopping("x", patience=-1)
    assert EarlyStopping("x").best_score.item() == math.inf
    assert EarlyStopping("x", mode="max").best_score.item() == -math.inf


class Unequal(Tiny):
    """Rank 0 improves, rank 1 gets worse faster."""

    def training_step(self, batch, batch_idx):
        self.log("own", -1.0 * self.global_step if self.global_rank == 0 else 2.0 * self.global_step)
        return super().training_step(batch, batch_idx)


def two(root):
    stop = EarlyStopping("own", patience=2)
    made = trainer(root, stop, max_epochs=9)
    made.fit(Unequal([1.0]), loader(20), loader(4))
    often = EarlyStopping("own", patience=3, check_on_train_epoch_end=False)
    late = trainer(root, often, LambdaCallback(), max_epochs=9, val_check_interval=2)
    late.fit(Unequal([1.0]), loader(20), loader(4))
    return made.global_step, stop.best_score.item(), stop.stopping_reason_message, late.global_step, often.wait_count


def test_two_processes_stop_after_the_same_step(tmp_path):
    first, second = run(two, 2, str(tmp_path))
    assert first == second
    assert first[:2] == (15, 2.0)
    assert first[3:] == (9, 3)
