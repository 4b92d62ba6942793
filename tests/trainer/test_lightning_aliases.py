"""The names by which other people's code reads a Trainer."""

import pytest
import torch
from support.models import Line, LoggedLine, Stream, loader
from support.trainers import make_trainer
from treadle.callbacks import EarlyStopping, LambdaCallback
from treadle.engine import CombinedLoader
from treadle.trainer.states import TrainerFn

import treadle


class Task(Line):
    """Notes what its Trainer says in each stage."""

    def __init__(self):
        super().__init__()
        self.seen, self.counts, self.stages = [], [], []

    def setup(self, stage):
        self.stages.append(stage)

    teardown = setup

    def note(self, batch, batch_idx, dataloader_idx=0):
        t = self.trainer
        now = (t.training, t.validating, t.testing, t.predicting, t.evaluating, t.sanity_checking)
        self.seen.append(tuple(int(one) for one in now))
        self.counts.append((t.num_training_batches, t.num_val_batches, t.num_sanity_val_batches))

    def training_step(self, batch, batch_idx):
        self.note(batch, batch_idx)
        return self.net.weight.sum()

    validation_step = test_step = predict_step = note


def test_stages_and_lengths():
    task, trainer = Task(), make_trainer(limit_predict_batches=2)
    trainer.fit(task, loader(4, 1), loader(3, 1))
    assert task.seen == [(0, 0, 0, 0, 1, 1)] * 2 + [(1, 0, 0, 0, 0, 0)] * 4 + [(0, 1, 0, 0, 1, 0)] * 3
    assert (trainer.num_training_batches, trainer.num_val_batches, trainer.num_sanity_val_batches) == (4, [3], [2])
    assert trainer.enable_validation
    task.seen.clear()
    trainer.test(task, loader(2, 1))
    assert trainer.num_test_batches == [2]
    assert trainer.num_training_batches == float("inf")
    trainer.predict(task, loader(5, 1))
    assert trainer.num_predict_batches == [2]
    trainer.validate(task, loader(1, 1))
    assert task.seen == [(0, 0, 1, 0, 1, 0)] * 2 + [(0, 0, 0, 1, 0, 0)] * 2 + [(0, 1, 0, 0, 1, 0)]
    names = [name for name in ("fit", "test", "predict", "validate") for _ in range(2)]
    assert task.stages == [stage.value for stage in task.stages] == names
    assert task.stages[0] is TrainerFn.FITTING
    assert f"{task.stages[0]}-{task.stages[-1]!s}" == "fit-validate"


def test_places_and_parts():
    stopping = EarlyStopping("x")
    trainer = make_trainer(callbacks=stopping, precision="bf16-mixed")
    assert (trainer.num_nodes, trainer.node_rank, trainer.num_devices, trainer.device_ids) == (1, 0, 1, [0])
    assert trainer.distributed_sampler_kwargs is None
    assert trainer.scaler is None
    assert trainer.precision_plugin.name == trainer.precision == "bf16-mixed"
    assert trainer.early_stopping_callbacks == [stopping]
    assert trainer.early_stopping_callback is stopping
    assert (trainer.model, Task().on_gpu) == (None, False)
    assert (trainer.min_steps, trainer.gradient_clip_algorithm) == (None, None)  # which were not given
    assert make_trainer(gradient_clip_algorithm="VALUE").gradient_clip_algorithm == "value"
    assert treadle.TaskModule.CHECKPOINT_HYPER_PARAMS_KEY == "hyper_parameters"
    assert treadle.TaskModule.CHECKPOINT_HYPER_PARAMS_NAME == "hparams_name"
    assert treadle.DataModule.CHECKPOINT_HYPER_PARAMS_KEY == "datamodule_hyper_parameters"


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_no_stage_reads_code(stage):
    with pytest.warns(UserWarning, match="weights_only=False has no effect.*never run"):
        getattr(make_trainer(), stage)(Task(), loader(), weights_only=False)


def test_the_last_batch_stays_the_last_until_the_next_epoch():
    hooks = "on_train_epoch_start", "on_before_backward", "on_train_batch_end", "on_validation_end"
    hooks += "on_train_epoch_end", "on_fit_end"
    seen, note = [], lambda trainer, *_: seen.append(trainer.is_last_batch)
    trainer = make_trainer(callbacks=LambdaCallback(**dict.fromkeys(hooks, note)), num_sanity_val_steps=0)
    assert not trainer.is_last_batch
    trainer.fit(Task(), loader(), loader())
    assert seen == [False] * 3 + [True] * 5
    assert trainer.is_last_batch


def test_numbers_of_batches_without_a_length():
    task, stream = Task(), torch.utils.data.DataLoader(Stream(torch.ones(6, 2)), batch_size=2)
    trainer = make_trainer(num_sanity_val_steps=1)
    assert trainer.num_training_batches == float("inf")
    trainer.fit(task, stream, stream)
    assert task.counts[1:4] == [(float("inf"), [float("inf")], [1])] * 3  # of training
    assert trainer.estimated_stepping_batches == float("inf")
    assert trainer.fit_loop.epoch_loop.val_loop.max_batches == [float("inf")]


def test_dataloaders_are_what_the_user_passed():
    for train, validation in (
        ({"a": loader(), "b": loader()}, {"x": loader(), "y": loader()}),
        ([loader(), loader()], [loader(), loader()]),
        (loader(), loader()),
    ):
        trainer = make_trainer()
        trainer.fit(Task(), train, validation)
        assert trainer.train_dataloader is train
        assert trainer.val_dataloaders is validation
        trainer.test(Task(), validation, verbose=False)
        assert trainer.test_dataloaders is validation
        trainer.predict(Task(), validation)
        assert trainer.predict_dataloaders is validation
        assert trainer.train_dataloader is trainer.val_dataloaders is None


def test_paths_and_the_last_batch(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    task = Task()
    trainer = make_trainer(max_epochs=2, default_root_dir="~/x", enable_checkpointing=None)
    assert trainer.default_root_dir == trainer.log_dir == str(tmp_path / "x")
    trainer.fit(task, loader(8))
    assert (trainer.fit_loop.batch_idx, trainer.fit_loop.epoch_loop.batch_idx) == (3, 3)
    trainer.validate(task, loader(), ckpt_path="best", verbose=False)
    assert trainer.ckpt_path == trainer.checkpoint_callback.best_model_path
    assert type(trainer.ckpt_path) is str


def test_loggers_may_be_replaced(tmp_path):
    trainer = make_trainer(log_every_n_steps=1)
    trainer.logger = logger = treadle.loggers.CSVLogger(tmp_path)
    assert trainer.logger is logger
    assert trainer.log_dir == logger.log_dir

    trainer.fit(LoggedLine(), loader())
    assert ["loss" in row for row in logger.experiment.metrics] == [True, True]
    assert (tmp_path / "treadle_logs" / "version_0" / treadle.loggers.CSVLogger.NAME_HPARAMS_FILE).read_text() == "{}\n"
    trainer.loggers = []
    assert trainer.logger is None
    with pytest.raises(TypeError, match="logger must be"):
        trainer.logger = 3


def test_limits_before_fit():
    def limits(**flags):
        trainer = make_trainer(**{"max_epochs": None, **flags})
        return trainer.max_epochs, trainer.min_epochs, trainer.max_steps

    assert limits() == (None, None, -1)
    assert limits(max_steps=5) == (None, None, 5)
    assert limits(max_time="00:00:01:00") == (None, None, -1)
    trainer = treadle.Trainer(accelerator="cpu", max_time="00:00:01:00")
    kinds = [type(callback).__name__ for callback in trainer.callbacks]
    assert kinds == ["ModelSummary", "TQDMProgressBar", "ModelCheckpoint", "RunReport"]


@pytest.mark.parametrize(
    ("flags", "before", "within"),
    [
        ({}, (None, None), (1000, 0)),
        ({"max_steps": 5}, (None, None), (-1, 0)),
        ({"max_time": "00:00:01:00"}, (None, None), (-1, 0)),
        ({"min_epochs": 1, "max_epochs": 2}, (2, 1), (2, 1)),
        ({"fast_dev_run": True}, (1, None), (1, 0)),
    ],
)
def test_limits_within_fit(flags, before, within):
    task, trainer, seen = Task(), make_trainer(**{"max_epochs": None, **flags}), []
    task.setup = lambda stage: seen.append((trainer.max_epochs, trainer.min_epochs))
    task.on_train_start = lambda: setattr(trainer, "should_stop", True)
    trainer.validate(task, loader(), verbose=False)
    trainer.fit(task, loader())
    assert [*seen, (trainer.max_epochs, trainer.min_epochs)] == [before, within, within]


def test_numbers_of_batches_that_are_evaluated():
    both = CombinedLoader({"a": loader(4, 1), "b": loader(3, 1)}, "max_size")
    for stage, name in (("validate", "num_val_batches"), ("test", "num_test_batches")):
        trainer = make_trainer()
        getattr(trainer, stage)(Task(), both)
        assert (getattr(trainer, name), trainer.num_sanity_val_batches) == ([4, 3], [])
    trainer = make_trainer(limit_val_batches=0)
    trainer.fit(Task(), loader(), loader())
    assert (trainer.num_val_batches, trainer.num_sanity_val_batches) == ([], [])


def test_fast_dev_run_of_one_batch_is_true():
    runs = [treadle.Trainer(accelerator="cpu", fast_dev_run=number) for number in (1, True, 3, False)]
    assert [run.fast_dev_run for run in runs] == [True, True, 3, False]
    assert runs[0].fast_dev_run is True
