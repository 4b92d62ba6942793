"""`EarlyStopping`: after which check it stops, and that all processes do."""

import math
from datetime import timedelta

import pytest
import torch
from support.callback_runs import ByEpoch, Tiny, fit, loader, trainer
from support.processes import run
from treadle.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from treadle.callbacks.early_stopping import EarlyStoppingReason

NAN = float("nan")
KINDS = {
    "not improved": EarlyStoppingReason.PATIENCE_EXHAUSTED,
    "better than": EarlyStoppingReason.STOPPING_THRESHOLD,
    "worse than": EarlyStoppingReason.DIVERGENCE_THRESHOLD,
    "not finite": EarlyStoppingReason.NON_FINITE_METRIC,
}
"""Reasons by the words of their messages."""


@pytest.mark.parametrize(
    ("arguments", "values", "epochs", "reason"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.5, 2.1, 0.0], 4, "not improved on 2 in the last 2 checks"),
        ({"patience": 0}, [3.0, 2.0, 2.0], 3, "not improved"),
        ({"patience": 2}, [0.1], 3, "not improved on 0.1"),  # a little more in float32, 0.7 a little less
        ({"patience": 2, "mode": "max"}, [0.7], 3, "not improved on 0.7"),
        ({"patience": 9}, [3.0, 2.0, 2.5], 6, None),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.0, 1.6], 3, "not improved"),
        ({"patience": 1, "min_delta": -0.5}, [3.0, 2.0, 1.4, 1.4], 4, "not improved on 1.4"),
        ({"patience": 1, "mode": "max"}, [1.0, 2.0, 1.5], 3, "not improved on 2"),
        ({"patience": 1, "mode": "max", "min_delta": 1.0}, [1.0, 2.0], 2, "not improved on 1"),
        ({}, [3.0, NAN], 2, "= nan is not finite"),
        ({}, [3.0, math.inf], 2, "= inf is not finite"),
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
    assert stop.best_score.item() == (-math.inf if stop.mode == "max" else math.inf)
    made = fit(tmp_path, stop, values=values, max_epochs=6)
    assert made.current_epoch == epochs
    assert stop.best_score.ndim == 0
    if reason is None:
        assert (stop.stopped_epoch, stop.stopping_reason_message) == (0, None)
    else:
        assert stop.stopped_epoch == epochs - 1
        assert reason in stop.stopping_reason_message
    again = EarlyStopping("x")
    again.load_state_dict(stop.state_dict())
    kinds = [KINDS[words] for words in KINDS if words in (reason or "")]
    assert [stop.stopping_reason] == [again.stopping_reason] == (kinds or [EarlyStoppingReason.NOT_STOPPED])


def test_patience_counts_checks(tmp_path):
    """Two validations an epoch: the third without improvement is in the middle of the second epoch."""
    made = fit(tmp_path, EarlyStopping("val_loss", patience=2), values=[1.0, 2.0, 3.0], val_check_interval=2)
    assert made.global_step == 7
    for interval in (1, timedelta(microseconds=1)):  # 1 is a batch, 1.0 an epoch
        made = fit(tmp_path, EarlyStopping("val_loss", patience=2), values=[1.0], val_check_interval=interval)
        assert made.global_step == 3
    made = fit(tmp_path, EarlyStopping("val_loss", patience=2), values=[1.0], max_epochs=9, check_val_every_n_epoch=2)
    assert made.current_epoch == 6
    end = EarlyStopping("val_loss", patience=2, check_on_train_epoch_end=True)  # no check where nothing was measured
    made = fit(tmp_path, end, values=[1.0], max_epochs=9, check_val_every_n_epoch=2)
    assert made.current_epoch == 6


def test_a_training_value_with_and_without_validation(tmp_path):
    for validate in (True, False):
        stop = EarlyStopping("train_loss", stopping_threshold=1e9)
        assert fit(tmp_path, stop, values=[1.0], validate=validate).current_epoch == 1


RECOVERS = [1.0, 2.0, 2.0, 2.0, 0.5, 0.4, 0.3, 0.2]


@pytest.mark.parametrize("minimum", [{"min_epochs": 5}, {"min_steps": 25}])
def test_a_stop_that_is_held_back_is_decided_anew(tmp_path, minimum):
    stop = EarlyStopping("val_loss", patience=2)
    made = fit(tmp_path, stop, values=RECOVERS, max_epochs=8, **minimum)
    assert (made.current_epoch, stop.wait_count, stop.stopped_epoch) == (8, 0, 0)
    assert (stop.stopping_reason_message, stop.stopping_reason.name) == (None, "NOT_STOPPED")
    stop = EarlyStopping("val_loss", patience=2)  # without a recovery, it stops at once when it may
    assert fit(tmp_path, stop, values=[1.0, 2.0], max_epochs=8, **minimum).global_step == 25
    assert stop.stopped_epoch == 4


def test_a_withdrawn_stop_leaves_the_requests_of_others(tmp_path):
    """Of two that request a stop, one withdraws; and a request of the user's own is not withdrawn at all."""
    diverged = EarlyStopping("val_loss", mode="max", divergence_threshold=9.0)

    def wish(trainer, _):
        if trainer.current_epoch == 3:
            trainer.should_stop = True

    for other in (diverged, LambdaCallback(on_train_epoch_end=wish)):
        stop = EarlyStopping("val_loss", patience=2)
        made = fit(tmp_path, stop, other, values=RECOVERS, max_epochs=8, min_epochs=6)
        assert (made.current_epoch, stop.stopping_reason_message) == (6, None)


def test_the_state_of_an_older_release():
    stop = EarlyStopping("x")
    stop.load_state_dict({"wait_count": 1, "stopped_epoch": 0, "best_score": torch.tensor(1.0), "patience": 3})
    assert (stop.wait_count, stop.best_score.item(), stop.stopping_reason_message) == (1, 1.0, None)


def test_resumed_it_goes_on_counting(tmp_path):
    def go(folder, ckpt_path=None, **limit):
        stop, kept = EarlyStopping("val_loss", patience=4), ModelCheckpoint(tmp_path / folder, save_last=True)
        task, flags = ByEpoch([2.0, 2.5, 2.4, 2.3, 2.2]), {"max_epochs": 9, "ckpt_path": ckpt_path, **limit}
        return stop, fit(tmp_path, stop, kept, task=task, **flags).current_epoch, kept.last_model_path

    for limit in ({"max_epochs": 3}, {"max_steps": 7}, {"max_steps": 12}):  # an epoch that is cut short is no check
        _, _, path = go(f"cut by {limit}", **limit)
        stop, epochs, _ = go("again", path)
        assert (stop.wait_count, stop.best_score.item(), epochs) == (4, 2.0, 5)
        assert isinstance(stop.best_score, torch.Tensor)


def goes_on(root, values, ckpt_path="auto", epochs=12, min_epochs=None, **options):
    """Start the same script again; returns the epochs done, and the callback."""
    stop = EarlyStopping("val_loss", **options)
    flags = {"max_epochs": epochs, "min_epochs": min_epochs}
    made = fit(root, stop, ModelCheckpoint(root / "c"), task=ByEpoch(values), ckpt_path=ckpt_path, **flags)
    return made.current_epoch, stop


def test_a_stopped_run_stays_stopped_when_it_is_started_again(tmp_path):
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    for _ in range(3):
        epochs, stop = goes_on(tmp_path, values, patience=2)
        assert (epochs, stop.stopped_epoch, stop.wait_count) == (3, 2, 2)
        assert "last 2 checks" in stop.stopping_reason_message
    epochs, stop = goes_on(tmp_path, values, patience=5)  # as if it had been 5 from the first
    assert (epochs, stop.stopped_epoch) == (6, 5)
    epochs, stop = goes_on(tmp_path, values, patience=9, epochs=7)
    assert (epochs, stop.stopped_epoch, stop.stopping_reason_message) == (7, 0, None)


@pytest.mark.parametrize(
    ("limit", "values", "others", "epochs"),
    [
        ({"stopping_threshold": 2.0}, [3.0, 1.5, 1.4, 0.5], {"stopping_threshold": 1.0}, 4),
        ({"divergence_threshold": 2.0}, [1.0, 2.5, 2.6, 9.0], {"divergence_threshold": 5.0}, 4),
        ({}, [1.0, NAN, 0.5, NAN], {"check_finite": False, "stopping_threshold": 0.6}, 3),
    ],
    ids=["good enough", "diverged", "not finite"],
)
def test_stopped_by_another_limit_it_stays_so_while_that_holds(tmp_path, limit, values, others, epochs):
    assert [goes_on(tmp_path, values, **limit)[0] for _ in range(2)] == [2, 2]
    assert goes_on(tmp_path, values, **others)[0] == epochs


@pytest.mark.long
@pytest.mark.parametrize(("cut", "least"), [(4, 5), (5, 6)])
def test_a_stop_that_the_minimum_holds_back_survives_a_resume(tmp_path, cut, least):
    """Decided in the third epoch, and held back until the metric recovers in the fifth or until it may stop."""
    for fifth, until in ((0.0, 7), (5.0, least)):
        values, root = [1.0, 2.0, 3.0, 4.0, fifth, 5.5, 6.0, 7.0, 8.0], tmp_path / str(fifth)
        assert goes_on(root / "whole", values, min_epochs=least, patience=2)[0] == until
        assert goes_on(root / "parts", values, min_epochs=cut, epochs=cut, patience=2)[0] == cut
        assert goes_on(root / "parts", values, min_epochs=least, patience=2)[0] == until


def test_a_second_fit_goes_on_and_its_checkpoints_too(tmp_path):
    """The stop of the fit before is neither kept nor written down."""
    stop = EarlyStopping("val_loss", patience=1)
    kept = ModelCheckpoint(tmp_path / "c", save_top_k=-1)
    made = fit(tmp_path, stop, kept, values=[1.0, 2.0])
    assert made.current_epoch == 2
    made.max_epochs = 3
    made.fit(Tiny([0.5]), loader(), loader(4))
    assert (made.current_epoch, stop.stopping_reason_message) == (3, None)
    again = EarlyStopping("val_loss", patience=1)
    assert fit(tmp_path, again, values=[0.4], max_epochs=4, ckpt_path=kept.best_model_path).current_epoch == 4


def test_states_of_an_earlier_version(tmp_path):
    """They know neither the newest validation nor what the decision was taken on."""
    stop, kept = EarlyStopping("val_loss", patience=2), ModelCheckpoint(tmp_path / "c", monitor="val_loss")
    fit(tmp_path, stop, kept, values=[1.0, 2.0, 3.0], max_epochs=9)
    old = {name: value for name, value in stop.state_dict().items() if name not in OF_LATE}
    again = EarlyStopping("val_loss", patience=2)
    again.load_state_dict(old | {"best_score": torch.tensor(1.0)})
    again.on_train_start(run_of := trainer(tmp_path), None)
    assert run_of.should_stop
    old = {name: value for name, value in kept.state_dict().items() if name not in OF_LATE}
    ModelCheckpoint(tmp_path / "c", monitor="val_loss").load_state_dict(old)


OF_LATE = ("watch", "decided_at", "decided_after")


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


class After(EarlyStopping):
    """What public subclasses override and read."""

    def __init__(self, *args, begin=0, **kwargs):
        super().__init__(*args, **kwargs)
        self.begin, self.improved = begin, []

    def _should_skip_check(self, trainer):
        return trainer.current_epoch < self.begin or super()._should_skip_check(trainer)

    def _improvement_message(self, current):
        self.improved.append(current.item())
        return "better"


def test_a_subclass_decides_when_to_check_and_what_is_said(tmp_path):
    stop = After("val_loss", patience=1, begin=2, verbose=True)
    assert fit(tmp_path, stop, values=[1.0, 2.0, 3.0, 2.0, 4.0], max_epochs=6).current_epoch == 5
    assert stop.improved == [3.0, 2.0]


class ByHand(EarlyStopping):
    """A criterion that is written out, with Lightning's names."""

    def _evaluate_stopping_criteria(self, current):
        if self.monitor_op(current - self.min_delta, self.best_score):
            self.best_score, self.wait_count = current, 0
            return False, "improved"
        self.wait_count += 1
        return self.wait_count >= self.patience, "no better"


@pytest.mark.parametrize(("mode", "values"), [("min", [3.0, 2.0, 1.6, 1.6]), ("max", [1.0, 2.0, 2.4, 2.4])])
def test_a_criterion_that_is_written_out_is_ours(tmp_path, mode, values):
    for kind in (EarlyStopping, ByHand):
        stop = kind("val_loss", patience=1, min_delta=0.5, mode=mode)
        assert fit(tmp_path, stop, values=values, max_epochs=6).current_epoch == 3
