"""The names by which other people's code reads a Trainer."""

import pytest
import torch
from support.models import SGDTask
from support.trainers import NO_OUTPUT, make_trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from treadle.callbacks import EarlyStopping, LambdaCallback
from treadle.engine import CombinedLoader
from treadle.loggers import CSVLogger
from treadle.trainer.states import TrainerFn

import treadle


class Task(SGDTask):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.seen = []
        self.states = []

    def note(self):
        t = self.trainer
        now = (t.training, t.validating, t.testing, t.predicting, t.evaluating, t.sanity_checking)
        self.seen.append(tuple(int(one) for one in now))
        self.states.append((t.state.fn, t.state.stage))

    def training_step(self, batch, batch_idx):
        self.note()
        assert self.trainer.is_last_batch == (batch_idx == 3)
        return self.net(batch[0]).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert self.trainer.is_last_batch == (batch_idx == 3)

    def validation_step(self, batch, batch_idx):
        self.note()

    def test_step(self, batch, batch_idx):
        self.note()

    def predict_step(self, batch, batch_idx):
        self.note()


def loader(count):
    return DataLoader(TensorDataset(torch.ones(count, 2)), batch_size=1)


def made(*callbacks, **flags):
    return treadle.Trainer(accelerator="cpu", max_epochs=1, callbacks=list(callbacks), **NO_OUTPUT, **flags)


def test_stages_and_lengths():
    task, trainer = Task(), made(limit_predict_batches=2)
    trainer.fit(task, loader(4), loader(3))
    assert task.seen == [(0, 0, 0, 0, 1, 1)] * 2 + [(1, 0, 0, 0, 0, 0)] * 4 + [(0, 1, 0, 0, 1, 0)] * 3
    assert task.states == [("fit", "sanity_check")] * 2 + [("fit", "train")] * 4 + [("fit", "validate")] * 3
    assert (trainer.num_training_batches, trainer.num_val_batches, trainer.num_sanity_val_batches) == (4, [3], [2])
    assert trainer.enable_validation
    task.seen.clear()
    test, predict = loader(2), loader(5)
    trainer.test(task, test)
    assert (trainer.num_test_batches, trainer.test_dataloaders) == ([2], test)
    assert trainer.num_training_batches == float("inf")
    assert task.states[-1] == ("test", "test")
    assert (trainer.state.fn, trainer.state.stage, trainer.state.finished) == ("test", None, True)
    trainer.predict(task, predict)
    assert (trainer.num_predict_batches, trainer.predict_dataloaders) == ([2], predict)
    trainer.validate(task, loader(1))
    assert task.seen == [(0, 0, 1, 0, 1, 0)] * 2 + [(0, 0, 0, 1, 0, 0)] * 2 + [(0, 1, 0, 0, 1, 0)]


def test_places_and_parts():
    stopping = EarlyStopping("x")
    trainer = made(stopping, precision="bf16-mixed")
    assert (trainer.num_nodes, trainer.node_rank, trainer.num_devices, trainer.device_ids) == (1, 0, 1, [0])
    assert trainer.distributed_sampler_kwargs is None
    assert trainer.scaler is None
    assert trainer.precision_plugin.name == trainer.precision == "bf16-mixed"
    assert trainer.early_stopping_callbacks == [stopping]
    assert trainer.early_stopping_callback is stopping
    task = Task()
    assert (trainer.model, task.on_gpu) == (None, False)


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_no_stage_reads_code(stage):
    with pytest.warns(UserWarning, match="weights_only=False has no effect.*never run"):
        getattr(made(), stage)(Task(), loader(4), weights_only=False)


def test_an_epoch_that_max_steps_cuts_short_does_not_count():
    run = treadle.Trainer(accelerator="cpu", max_steps=6, **NO_OUTPUT)
    run.fit(Task(), loader(4))
    assert (run.global_step, run.current_epoch) == (6, 1)


def test_the_last_batch_stays_the_last_until_the_next_epoch():
    seen = []
    trainer = made(
        LambdaCallback(
            on_train_epoch_start=lambda t, _: seen.append(t.is_last_batch),
            on_validation_end=lambda t, _: t.sanity_checking or seen.append(t.is_last_batch),
            on_train_epoch_end=lambda t, _: seen.append(t.is_last_batch),
            on_fit_end=lambda t, _: seen.append(t.is_last_batch),
        )
    )
    assert not trainer.is_last_batch
    trainer.fit(Task(), loader(4), loader(1))
    assert seen == [False, True, True, True]
    assert trainer.is_last_batch


def test_a_stage_without_training_has_no_training_loader():
    seen = []
    trainer = made(LambdaCallback(on_test_start=lambda t, _: seen.append(t.train_dataloader)))
    trainer.test(Task(), loader(1))
    assert seen == [None]


def test_flags_that_were_not_given_are_none():
    trainer = made()
    assert (trainer.min_steps, trainer.gradient_clip_algorithm) == (None, None)
    assert made(min_steps=2, gradient_clip_algorithm="value").min_steps == 2


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(6, 1))


class Line(SGDTask):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.seen, self.stages = [], []

    def setup(self, stage):
        self.stages.append(stage)

    def teardown(self, stage):
        self.stages.append(stage)

    def training_step(self, batch, batch_idx):
        trainer = self.trainer
        self.seen.append((trainer.num_training_batches, trainer.num_val_batches, trainer.num_sanity_val_batches))
        first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        return self.net(first.view(-1, 1)).mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pass

    test_step = predict_step = validation_step


def test_numbers_of_batches_without_a_length():
    task, loader = Line(), DataLoader(Numbers(), batch_size=2)
    trainer = treadle.Trainer(accelerator="cpu", max_epochs=1, **{**NO_OUTPUT, "num_sanity_val_steps": 1})
    assert trainer.num_training_batches == float("inf")
    trainer.fit(task, loader, loader)
    assert task.seen == [(float("inf"), [float("inf")], [1])] * 3
    assert trainer.estimated_stepping_batches == float("inf")
    assert trainer.fit_loop.epoch_loop.val_loop.max_batches == [float("inf")]


def test_dataloaders_are_what_the_user_passed():
    def loader():
        return DataLoader(torch.ones(4, 1), batch_size=2)

    for train, validation in (
        ({"a": loader(), "b": loader()}, {"x": loader(), "y": loader()}),
        ([loader(), loader()], [loader(), loader()]),
        (loader(), loader()),
    ):
        trainer = treadle.Trainer(accelerator="cpu", max_epochs=1, **NO_OUTPUT)
        trainer.fit(Line(), train, validation)
        assert trainer.train_dataloader is train
        assert trainer.val_dataloaders is validation
        trainer.test(Line(), validation, verbose=False)
        assert trainer.test_dataloaders is validation
        trainer.predict(Line(), validation)
        assert trainer.predict_dataloaders is validation
        assert trainer.val_dataloaders is None


def test_the_stage_is_a_trainer_fn_and_its_text():
    task, loader = Line(), DataLoader(torch.ones(4, 1), batch_size=2)
    trainer = treadle.Trainer(accelerator="cpu", max_epochs=1, **NO_OUTPUT)
    trainer.fit(task, loader)
    trainer.validate(task, loader, verbose=False)
    trainer.test(task, loader, verbose=False)
    trainer.predict(task, loader)
    names = [name for name in ("fit", "validate", "test", "predict") for _ in range(2)]
    assert task.stages == names
    assert [stage.value for stage in task.stages] == names
    assert task.stages[0] is TrainerFn.FITTING
    assert f"{task.stages[0]}-{task.stages[-1]!s}" == "fit-predict"
    assert {"fit": 1}[task.stages[0]] == 1


def test_paths_and_the_last_batch(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    task, loader = Line(), DataLoader(torch.ones(8, 1), batch_size=2)
    trainer = make_trainer(max_epochs=2, default_root_dir="~/x", enable_checkpointing=None)
    assert trainer.default_root_dir == trainer.log_dir == str(tmp_path / "x")
    trainer.fit(task, loader)
    assert (trainer.fit_loop.batch_idx, trainer.fit_loop.epoch_loop.batch_idx) == (3, 3)
    trainer.validate(task, loader, ckpt_path="best", verbose=False)
    assert trainer.ckpt_path == trainer.checkpoint_callback.best_model_path
    assert type(trainer.ckpt_path) is str


def test_loggers_may_be_replaced(tmp_path):
    trainer = treadle.Trainer(accelerator="cpu", max_steps=2, log_every_n_steps=1, **NO_OUTPUT)
    trainer.logger = logger = CSVLogger(tmp_path)
    assert trainer.logger is logger
    assert trainer.log_dir == logger.log_dir

    class Logs(Line):
        def training_step(self, batch, batch_idx):
            self.log("loss", 2.0)
            return super().training_step(batch, batch_idx)

    trainer.fit(Logs(), DataLoader(torch.ones(4, 1), batch_size=2))
    assert [row["loss"] for row in logger.experiment.metrics] == [2.0, 2.0]
    assert (tmp_path / "treadle_logs" / "version_0" / CSVLogger.NAME_HPARAMS_FILE).read_text() == "{}\n"
    trainer.loggers = []
    assert trainer.logger is None
    with pytest.raises(TypeError, match="logger must be"):
        trainer.logger = 3


def test_keys_of_hyperparameters():
    assert treadle.TaskModule.CHECKPOINT_HYPER_PARAMS_KEY == "hyper_parameters"
    assert treadle.TaskModule.CHECKPOINT_HYPER_PARAMS_NAME == "hparams_name"
    assert treadle.DataModule.CHECKPOINT_HYPER_PARAMS_KEY == "datamodule_hyper_parameters"


def test_limits_before_fit():
    def limits(**flags):
        trainer = treadle.Trainer(accelerator="cpu", **NO_OUTPUT, **flags)
        return trainer.max_epochs, trainer.min_epochs, trainer.max_steps

    assert make_trainer(gradient_clip_algorithm="VALUE").gradient_clip_algorithm == "value"
    assert limits() == (None, None, -1)
    assert limits(max_steps=5) == (None, None, 5)
    assert limits(max_time="00:00:01:00") == (None, None, -1)
    trainer = treadle.Trainer(accelerator="cpu", max_time="00:00:01:00")
    assert [type(callback).__name__ for callback in trainer.callbacks] == [
        *("ModelSummary", "TQDMProgressBar", "ModelCheckpoint", "RunReport")
    ]


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
    class Reads(Line):
        def setup(self, stage):
            self.limits = self.trainer.max_epochs, self.trainer.min_epochs

        def on_train_start(self):
            self.trainer.should_stop = True

    task, trainer = Reads(), treadle.Trainer(accelerator="cpu", **NO_OUTPUT, **flags)
    trainer.validate(task, DataLoader(torch.ones(4, 1)), verbose=False)
    assert task.limits == before
    trainer.fit(task, DataLoader(torch.ones(4, 1)))
    assert task.limits == (trainer.max_epochs, trainer.min_epochs) == within


def test_numbers_of_batches_that_are_evaluated():
    data = DataLoader(TensorDataset(torch.ones(4, 1)))
    both = CombinedLoader({"a": data, "b": DataLoader(TensorDataset(torch.ones(3, 1)))}, "max_size")
    for stage, name in (("validate", "num_val_batches"), ("test", "num_test_batches")):
        trainer = treadle.Trainer(accelerator="cpu", **NO_OUTPUT)
        getattr(trainer, stage)(Line(), both)
        assert (getattr(trainer, name), trainer.num_sanity_val_batches) == ([4, 3], [])
    trainer = treadle.Trainer(accelerator="cpu", max_epochs=1, limit_val_batches=0, **NO_OUTPUT)
    trainer.fit(Line(), data, data)
    assert (trainer.num_val_batches, trainer.num_sanity_val_batches) == ([], [])


def test_fast_dev_run_of_one_batch_is_true():
    runs = [treadle.Trainer(accelerator="cpu", fast_dev_run=number) for number in (1, True, 3, False)]
    assert [run.fast_dev_run for run in runs] == [True, True, 3, False]
    assert runs[0].fast_dev_run is True
