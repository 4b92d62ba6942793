"""Callbacks and loggers in the forms in which scripts pass them, and those that a `fast_dev_run` leaves idle."""

import pytest
import torch
from support.models import LoggedLine, loader
from support.trainers import make_trainer
from treadle.callbacks import EarlyStopping, ModelCheckpoint, ModelSummary, TQDMProgressBar

import treadle


def test_a_fast_dev_run_has_a_checkpoint_callback_without_a_path(tmp_path):
    saving, stopping = ModelCheckpoint(tmp_path, monitor="loss"), EarlyStopping("loss")
    run = make_trainer(fast_dev_run=True, enable_checkpointing=None, callbacks=[saving, stopping])
    run.fit(LoggedLine(), loader())
    assert run.checkpoint_callback is saving
    assert run.checkpoint_callback.best_model_path == ""
    assert run.early_stopping_callback is stopping
    assert run.callbacks[:2] == [saving, stopping]
    assert run.checkpoint_callbacks == run.early_stopping_callbacks == []
    assert not any(tmp_path.iterdir())
    default = make_trainer(fast_dev_run=True, enable_checkpointing=None)
    default.fit(LoggedLine(), loader())
    assert default.checkpoint_callback.best_model_path == ""
    assert make_trainer(fast_dev_run=True).checkpoint_callback is None


def test_a_fast_dev_run_calls_no_idle_callback_that_the_task_adds_either(tmp_path):
    """Scripts find all of them in `trainer.callbacks`, as a task does that looks for one by its class."""

    task, run, seen = LoggedLine(), make_trainer(fast_dev_run=True, enable_checkpointing=None), []
    task.configure_callbacks = lambda: [ModelCheckpoint(tmp_path, monitor="loss"), EarlyStopping("misspelled")]
    task.on_fit_start = lambda: seen.extend(type(callback).__name__ for callback in run.callbacks)
    run.fit(task, loader())
    assert seen[-2:] == ["ModelCheckpoint", "EarlyStopping"]
    assert run.global_step == 1
    assert not any(tmp_path.iterdir())


def test_a_test_after_a_fast_dev_run_does_not_load_what_an_earlier_run_saved(tmp_path):
    saving, task = ModelCheckpoint(tmp_path), LoggedLine()
    make_trainer(enable_checkpointing=None, callbacks=saving).fit(task, loader())
    assert saving.best_model_path
    task.predict_step = lambda batch, batch_idx: task.net.weight.detach().clone()
    run = make_trainer(fast_dev_run=True, enable_checkpointing=None, callbacks=saving)
    run.fit(task, loader())
    assert torch.equal(run.predict(dataloaders=loader())[0], task.net.weight)


def test_a_summary_that_was_passed_is_kept_though_none_is_added(capsys):
    summary = ModelSummary()
    run = make_trainer(enable_model_summary=False, max_steps=1, callbacks=[summary])
    run.fit(LoggedLine(), loader())
    assert [callback for callback in run.callbacks if isinstance(callback, ModelSummary)] == [summary]
    assert "net" in "".join(capsys.readouterr())
    for flag, other in (("enable_progress_bar", TQDMProgressBar()), ("enable_checkpointing", ModelCheckpoint())):
        with pytest.raises(ValueError, match=f"{flag}=False contradicts"):
            make_trainer(callbacks=[other], **{flag: False})


def omega_list(items):
    omegaconf = pytest.importorskip("omegaconf")
    return omegaconf.OmegaConf.create(items, flags={"allow_objects": True})


@pytest.mark.parametrize("kind", [iter, tuple, omega_list, lambda items: dict(enumerate(items)).values()])
def test_callbacks_and_loggers_of_any_iterable(tmp_path, kind):
    callback, logger = treadle.Callback(), treadle.loggers.CSVLogger(tmp_path)
    run = make_trainer(logger=kind([logger]), callbacks=kind([callback]))
    assert run.loggers == [logger]
    assert run.callbacks[0] is callback
    with pytest.raises(ValueError, match="same CSVLogger object twice"):
        make_trainer(logger=kind([logger, logger]))
