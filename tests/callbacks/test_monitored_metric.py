"""The value that a callback watches: never logged, of before a resume, or before any validation."""

import os

import pytest
from support.callback_runs import ByEpoch, fit
from treadle.callbacks import EarlyStopping, ModelCheckpoint


@pytest.mark.parametrize("flags", [{}, {"validate": False}, {"limit_val_batches": 0}])
def test_a_value_that_was_never_logged(tmp_path, flags):
    # A RuntimeError in Lightning.
    words = r"^EarlyStopping's monitor 'train_los' was never logged.*mean 'train_loss'"
    with pytest.raises(RuntimeError, match=words) as raised:
        fit(tmp_path, EarlyStopping("train_los"), values=[1.0], **flags)
    assert isinstance(raised.value, ValueError)
    if flags:
        with pytest.raises(RuntimeError, match="'val_loss' was never logged, because this run has no validation"):
            fit(tmp_path, EarlyStopping("val_loss"), values=[1.0], **flags)
    with pytest.warns(UserWarning, match="skips a check"):
        fit(tmp_path, EarlyStopping("train_los", strict=False), values=[1.0], **flags)


def test_no_check_before_the_first_validation(tmp_path):
    assert fit(tmp_path, EarlyStopping("val_loss"), values=[1.0], max_steps=3).global_step == 3


@pytest.mark.parametrize("cut", [2, *(pytest.param(cut, marks=pytest.mark.exhaustive) for cut in (3, 4))])
def test_a_resumed_run_takes_no_old_validation_for_a_new_one(tmp_path, cut):
    def go(root, epochs, ckpt_path=None):
        stop = EarlyStopping("val_loss", patience=3, check_on_train_epoch_end=True)
        kept = ModelCheckpoint(root, "{epoch}", "val_loss", save_top_k=-1, save_last=True, save_on_train_epoch_end=True)
        flags = {"max_epochs": epochs, "check_val_every_n_epoch": 2, "ckpt_path": ckpt_path}
        fit(tmp_path, stop, kept, task=ByEpoch([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), **flags)
        return stop.wait_count, {os.path.basename(path): score.item() for path, score in kept.best_k_models.items()}

    whole = go(tmp_path / "whole", 7)
    assert whole == (2, {"epoch=1.ckpt": 1.0, "epoch=3.ckpt": 3.0, "epoch=5.ckpt": 5.0})
    go(tmp_path / "parts", cut)
    assert go(tmp_path / "parts", 7, "last") == whole
