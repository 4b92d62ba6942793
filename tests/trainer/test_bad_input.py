"""What a person gets wrong, and the words that say so: the value, the rule, the fix. Nothing is ignored in silence."""

import warnings

import pytest
import torch
from support.models import Line, LoggedLine, Scored, SGDTask, loader, with_step
from support.trainers import NO_OUTPUT, Dry, make_trainer, says
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from treadle.engine import move_data_to_device
from treadle.engine.checkpoint.parts import read_manifest

import treadle

NAN = float("nan")


FLAGS = [
    ({"strategy": "fdsp"}, ValueError, "strategy='fdsp'", "ddp", "Did you mean"),
    ({"strategy": 5}, TypeError, "strategy=5", "name or a Strategy"),
    ({"accelerator": "tpu"}, ValueError, "accelerator='tpu'", "auto, cpu"),
    ({"devices": 0}, ValueError, "devices=0", "at least 1"),
    ({"devices": "x"}, ValueError, "devices='x'", "'auto'"),
    ({"devices": [0, 0]}, ValueError, "devices=[0, 0]", "only once"),
    ({"devices": 1.5}, TypeError, "devices=1.5", "float"),
    ({"num_nodes": 2}, ValueError, "num_nodes=2", "treadle launch --nnodes 2"),
    ({"precision": "fp9"}, ValueError, "precision='fp9'", "float8", "Did you mean 'fp8'"),
    ({"fast_dev_run": 0.5}, ValueError, "fast_dev_run=0.5", "integer"),
    ({"max_epochs": -2}, ValueError, "max_epochs=-2", "at least -1"),
    ({"max_steps": None}, ValueError, "max_steps=None", "integer"),
    ({"min_epochs": -1}, ValueError, "min_epochs=-1", "at least 0"),
    ({"min_steps": 2.5}, ValueError, "min_steps=2.5", "integer"),
    ({"min_epochs": 5, "max_epochs": 2}, ValueError, "min_epochs=5", "max_epochs=2"),
    ({"min_steps": 5, "max_steps": 2}, ValueError, "min_steps=5", "max_steps=2"),
    *[
        ({f"limit_{kind}_batches": value}, error, f"limit_{kind}_batches={value!r}", "from 0.0 to 1.0")
        for kind in ("train", "val", "test", "predict")
        for value, error in ((-1, ValueError), (1.5, ValueError), (NAN, ValueError), ("all", TypeError))
    ],
    ({"limit_train_batches": True}, TypeError, "limit_train_batches=True", "whole number"),
    ({"val_check_interval": 0}, ValueError, "val_check_interval=0", "limit_val_batches=0"),
    ({"val_check_interval": 2.5}, ValueError, "val_check_interval=2.5", "from 0.0 to 1.0"),
    ({"check_val_every_n_epoch": 0}, ValueError, "check_val_every_n_epoch=0", "at least 1"),
    ({"check_val_every_n_epoch": None}, ValueError, "check_val_every_n_epoch=None", "whole number of batches"),
    ({"num_sanity_val_steps": -2}, ValueError, "num_sanity_val_steps=-2", "at least -1"),
    ({"log_every_n_steps": 1.0}, ValueError, "log_every_n_steps=1.0", "integer"),
    ({"accumulate_grad_batches": 0}, ValueError, "accumulate_grad_batches=0", "at least 1"),
    ({"accumulate_grad_batches": {0: 2}}, ValueError, "accumulate_grad_batches={0: 2}"),
    ({"gradient_clip_val": -1}, ValueError, "gradient_clip_val=-1", "above 0"),
    ({"gradient_clip_val": NAN}, ValueError, "gradient_clip_val=nan", "above 0"),
    ({"gradient_clip_algorithm": "l2"}, ValueError, "gradient_clip_algorithm='l2'", "norm, value"),
    ({"deterministic": "yes"}, ValueError, "deterministic='yes'", "'warn'"),
    *[
        ({flag: "False"}, TypeError, f"{flag}='False'", "True or False")
        for words in ("benchmark inference_mode use_distributed_sampler detect_anomaly", " ".join(NO_OUTPUT))
        for flag in words.split()
        if flag != "logger"
    ],
    ({"default_root_dir": 5}, TypeError, "default_root_dir=5", "path"),
    ({"on_nonfinite": "stop"}, ValueError, "on_nonfinite='stop'", "raise, skip, ignore"),
    ({"logger": "tensorboard"}, TypeError, "logger", "'tensorboard'"),
    ({"logger": [5]}, TypeError, "logger", "5"),
    ({"callbacks": "bar"}, TypeError, "callbacks", "'bar'"),
    ({"callbacks": EarlyStopping}, TypeError, "callbacks", "EarlyStopping"),
    ({"callbacks": [EarlyStopping]}, TypeError, "callbacks", "Pass EarlyStopping() instead of the class"),
    ({"callbacks": [treadle.Callback()] * 2}, ValueError, "same Callback object twice"),
    ({"enable_checkpointing": False, "callbacks": ModelCheckpoint()}, ValueError, "enable_checkpointing=False"),
    ({"enable_progress_bar": False, "callbacks": TQDMProgressBar()}, ValueError, "enable_progress_bar=False"),
    ({"max_epoch": 3}, TypeError, "no argument 'max_epoch'", "Did you mean 'max_epochs'"),
    ({"model_registry": "x"}, TypeError, "'model_registry'", "Pass a checkpoint's path to fit as ckpt_path"),
    ({"plugins": "deepspeed"}, TypeError, "plugins='deepspeed' must be"),
    ({"plugins": [treadle.strategies.Precision.parse("64-true")], "precision": 32}, ValueError, "Pass only one"),
    ({"plugins": [treadle.strategies.TorchSyncBatchNorm()], "sync_batchnorm": True}, ValueError, "set the same option"),
    ({"compile": "yes"}, TypeError, "compile='yes' must be True, False or a dict"),
    ({"reload_dataloaders_every_n_epochs": -1}, ValueError, "at least 0"),
    ({"gpus": 1, "max_epoch": 3}, TypeError, "no argument 'gpus'", "Use accelerator='gpu' and devices", "'max_epoch'"),
]


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [pytest.param(f, e, w, id=f"{n}-{'-'.join(f)}") for n, (f, e, *w) in enumerate(FLAGS)],
)
def test_flags(flags, error, words):
    with says(error, *words):
        treadle.Trainer(**{"accelerator": "cpu", **flags})


class Nothing(torch.utils.data.Dataset):
    def __len__(self):
        return 0


def test_a_loader_that_yields_nothing():
    batch = [torch.ones(2, 2)]
    for source, flags, words in [
        (DataLoader(Nothing()), {}, ["Nothing", "empty"]),
        (loader(3, 8, drop_last=True), {}, ["3 samples", "drop_last=True", "Lower batch_size"]),
        (iter([]), {}, ["iterated more than once"]),
        (iter([batch, batch]), {"max_epochs": 2}, ["iterated more than once"]),  # exhausted in the first epoch
        (DataLoader(Dry()), {}, ["yielded no batch"]),
        ([], {}, ["yielded no batch"]),
        (loader(6), {"limit_train_batches": 0.01}, ["limit_train_batches=0.01", "3 batches", "integer 1"]),
        (iter([batch]), {"limit_train_batches": 0.5}, ["limit_train_batches=0.5", "no length"]),
        (None, {}, ["training dataloader", "train_dataloader"]),
    ]:
        with says(ValueError, *words):
            make_trainer(**flags).fit(Line(), source)
    with says(ValueError, "validation dataloader", "empty"):
        make_trainer().validate(Scored(), DataLoader(Nothing()))
    with says(ValueError, "validate has no dataloader"):
        make_trainer().validate(Scored())
    assert make_trainer(limit_val_batches=0).validate(Scored(), loader(6)) == []  # as it was asked for


def test_things_that_are_no_loader():
    for source, words in [
        (5, ["loader", "int", "5"]),
        ("data.csv", ["str", "DataLoader"]),
        (torch.ones(4, 2), ["Tensor", "DataLoader"]),
        (TensorDataset(torch.ones(4, 2)), ["TensorDataset", "single samples", "DataLoader"]),
    ]:
        with says(TypeError, *words):
            make_trainer().fit(Line(), source)
        with says(TypeError, *words):
            make_trainer().validate(Scored(), source)
        with says(TypeError, *words):
            make_trainer().fit(Line(), {"a": loader(6), "b": source})
    with says(ValueError, "contains no dataloader"):
        make_trainer().fit(Line(), {})


def test_val_check_interval_that_never_comes():
    with says(ValueError, "val_check_interval=10", "3 batches"):
        make_trainer(val_check_interval=10).fit(Scored(), loader(6), loader(6))
    with says(ValueError, "val_check_interval=0.5", "no length", "whole number"):
        make_trainer(val_check_interval=0.5).fit(Scored(), iter([[torch.ones(2, 2)]]), loader(6))


def sgd(task):
    return torch.optim.SGD(task.parameters(), lr=0.1)


def steps(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


plateau = torch.optim.lr_scheduler.ReduceLROnPlateau


def of(make):
    """configure_optimizers that makes what it returns from one optimizer of the task."""
    return lambda task: make(sgd(task))


def scheduled(**config):
    return of(lambda optimizer: {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps(optimizer), **config}})


@pytest.mark.parametrize(
    ("configure", "error", "words"),
    [
        (lambda t: "adam", TypeError, ["str", "an optimizer"]),
        (lambda t: (o for o in [sgd(t)]), TypeError, ["generator"]),
        (lambda t: [], ValueError, ["empty list"]),
        (lambda t: ([], []), ValueError, ["empty"]),
        (of(lambda o: ([], [steps(o)])), ValueError, ["optimizers, is empty"]),
        (of(lambda o: (o, steps(o))), TypeError, ["StepLR", "two lists (optimizers, schedulers)"]),
        (lambda t: [sgd(t), sgd(t)], ValueError, ["net.weight is in two optimizers", "one optimizer"]),
        (lambda t: {"lr_scheduler": 1}, ValueError, ["without 'optimizer'"]),
        (lambda t: {"optimizer": None}, TypeError, ["returned None where an optimizer is expected"]),
        (of(lambda o: {"optimizer": o, "lr_scheduler": "cosine"}), TypeError, ["step()", "'cosine'"]),
        (of(lambda o: {"optimizer": o, "lr_scheduler": {"interval": "step"}}), ValueError, ["without 'scheduler'"]),
        (scheduled(interval="batch"), ValueError, ["interval='batch'", "epoch, step"]),
        (scheduled(frequency=0), ValueError, ["frequency=0", "at least 1"]),
        (of(lambda o: {"optimizer": o, "lr_scheduler": plateau(o)}), ValueError, ["ReduceLROnPlateau", "'monitor'"]),
        (of(lambda o: {"optimizer": o, "lr_scheduler": plateau(o), "monitor": "vall"}), ValueError, ["'vall'", "loss"]),
        (lambda t: {"optimizer": sgd(t), "lr_scheduler": steps(sgd(t))}, ValueError, ["StepLR", "not the optimizer"]),
        (lambda t: sgd(nn.Linear(2, 2)), ValueError, ["none of Odd's parameters", "self.parameters()"]),
    ],
)
def test_what_configure_optimizers_returns(configure, error, words):
    task = type("Odd", (LoggedLine,), {"configure_optimizers": configure})()
    with says(error, *words):
        make_trainer().fit(task, loader(6))


def test_missing_steps():
    class NoOptimizer(treadle.TaskModule):
        training_step = Line.training_step

    for task, words in [(SGDTask(), ["SGDTask", "training_step"]), (NoOptimizer(), ["configure_optimizers"])]:
        with says(ValueError, *words):
            make_trainer().fit(task, loader(6))
    steps = {"validate": "validation_step", "test": "test_step", "predict": "predict_step or forward"}
    for stage, words in steps.items():
        with says(ValueError, f"{stage} needs", words, "but Line"):
            getattr(make_trainer(), stage)(Line(), loader(6))
    with pytest.warns(UserWarning, match="Line has no validation_step"):
        make_trainer().fit(Line(), loader(6), loader(6))
    for absent in (None, []):
        with pytest.warns(UserWarning, match="no validation dataloader"):
            make_trainer().fit(Scored(), loader(6), absent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer(limit_val_batches=0).fit(Scored(), loader(6))
        make_trainer().fit(Scored(), loader(6), loader(6))
    with says(ValueError, "2 dataloaders", "dataloader_idx"):
        make_trainer().fit(Scored(), loader(6), [loader(6), loader(6)])


def test_the_wrong_kind_of_task():
    class Forgot(Line):
        def __init__(self):
            self.number = 1

    for task, error, words in [
        (nn.Linear(2, 1), TypeError, ["TaskModule", "Linear"]),
        (Line, TypeError, ["the class Line", "Pass Line() instead"]),
        (Forgot(), TypeError, ["Forgot.__init__", "super().__init__()"]),
    ]:
        with says(error, *words):
            make_trainer().fit(task, loader(6))
    with says(ValueError, "validate needs a model"):
        make_trainer().validate(dataloaders=loader(6))
    with says(ValueError, "save_checkpoint needs a task"):
        make_trainer().save_checkpoint("nowhere")


def test_where_a_checkpoint_is_saved(tmp_path):
    run = make_trainer(max_steps=1)
    run.fit(Line(), loader(6))
    for path in (None, 5):
        with says(TypeError, f"save_checkpoint(filepath={path}) must be a path or a URL", "Pass a str or a Path"):
            run.save_checkpoint(path)
        with says(TypeError, f"save_checkpoint(also={path}) must be a path or a URL", "Pass a str or a Path"):
            run.save_checkpoint(tmp_path / "a", also=[path])
    with says(TypeError, "also='xyz'", "Pass ['xyz']"):
        run.save_checkpoint(tmp_path / "a", also="xyz")
    assert not (tmp_path / "a").exists()
    with says(ValueError):
        run.validate(Line(), loader(6), ckpt_path=tmp_path / "missing")
    with says(ValueError, "no model to save"):
        run.save_checkpoint(tmp_path / "a")


def test_hooks_that_nobody_would_call():
    for stage, name in (("train", "training_epoch_end"), ("validation", "validation_epoch_end")):
        task = type("Odd", (Line,), {name: lambda self, outputs: None})()
        with says(ValueError, f"Odd.{name}", f"use on_{stage}_epoch_end"):
            make_trainer().fit(task, loader(6))


def test_loaders_and_data_modules():
    data = treadle.DataModule.from_datasets(TensorDataset(torch.ones(4, 2)), batch_size=2)
    both = {"datamodule": data, "train_dataloaders": loader(6)}
    for more in (both, {"train_dataloaders": data, "val_dataloaders": loader(6)}):
        with says(ValueError, "Pass only one of the two"):
            make_trainer().fit(Line(), **more)
    with says(TypeError, "datamodule", "DataModule", "DataLoader"):
        make_trainer().fit(Line(), datamodule=loader(6))
    with says(ValueError, "training dataloader"):
        make_trainer().fit(Line(), datamodule=treadle.DataModule())


@pytest.mark.parametrize("samples", [5, [1, 2]])
def test_samples_are_not_datasets(samples):
    with says(TypeError, "from_datasets got ", "a dataset must have __getitem__", "torch.utils.data.Dataset"):
        treadle.DataModule.from_datasets(samples).train_dataloader()


class Immovable:
    def to(self):
        return self


class Movable:
    def to(self, device):
        self.device = device


def test_a_batch_that_can_not_be_moved():
    with says(TypeError, "Immovable", "meta", "to(device)", "transfer_batch_to_device"):
        move_data_to_device({"a": [torch.ones(1), Immovable()]}, "meta")
    moved = move_data_to_device({"a": [torch.ones(1), Movable(), "text", 5]}, "meta")["a"]
    assert moved[0].device.type == moved[1].device == "meta"
    assert moved[2:] == ["text", 5]


def test_what_is_logged():
    for arguments, options, error, words in [
        (("x", None), {}, TypeError, ["self.log('x')", "got None"]),
        (("x", torch.ones(3)), {}, ValueError, ["self.log('x')", "shape (3,)", "mean"]),
        (("x", torch.tensor([1 + 2j])), {}, TypeError, ["self.log('x')", "a tensor of type torch.complex64", ".abs()"]),
        (("x", {"a": 1}), {}, TypeError, ["self.log('x')", "dict"]),
        (("x", nn.Linear(1, 1)), {}, TypeError, ["self.log('x')", "Linear"]),
        (("x", 1.0), {"reduce_fx": ["mean"]}, ValueError, ["reduce_fx=['mean']", "mean, sum, min, max"]),
        (("x", 1.0), {"prog_bra": True}, TypeError, ["prog_bra"]),
    ]:

        def step(task, arguments=arguments, options=options):
            task.log(*arguments, **options)
            return task.net(torch.ones(1, 2)).mean()

        with says(error, *words):
            make_trainer().fit(with_step(step), loader(6))


def test_what_is_logged_too_late_or_nowhere():
    for hook in ("on_fit_start", "on_validation_end", "on_train_end", "on_fit_end", "setup"):
        task = type("Late", (Scored,), {hook: lambda self, *stage: self.log("late", 1.0)})()
        run = make_trainer(num_sanity_val_steps=0)
        with pytest.warns(UserWarning, match=r"self.log\('late'\) has no effect here"):
            run.fit(task, loader(6), loader(6))
        assert "late" not in run.callback_metrics


def test_checkpoints_that_are_none(tmp_path):
    (tmp_path / "file.ckpt").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / "manifest.json").write_text('{"format": 1, "files": {"../x": {}}}')
    for path, words, at_load in [
        ("file.ckpt", ["file.ckpt has an unknown format. Pass a Treadle checkpoint"], "torch.save"),
        ("empty", ["manifest.json is missing"], "contains no files"),
        ("hostile", ["manifest.json is damaged"], "manifest.json"),
    ]:
        with says(ValueError, *words):
            make_trainer().fit(Line(), loader(6), ckpt_path=tmp_path / path)
        with says(ValueError, path, at_load):
            Line.load_from_checkpoint(tmp_path / path)


class Sized(Line):
    def __init__(self, width):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(2, width)


def test_checkpoints_of_something_else(tmp_path):
    run = make_trainer()
    run.fit(Sized(3), loader(6))
    run.save_checkpoint(tmp_path / "run")
    run.save_checkpoint(tmp_path / "weights", weights_only=True)
    with says(ValueError, "a different model", "net.weight", "(3, 2)", "(1, 2)"):
        make_trainer().fit(Line(), loader(6), ckpt_path=tmp_path / "run")
    assert Sized.load_from_checkpoint(tmp_path / "weights").hparams == {"width": 3}
    with says(ValueError, "a different model"):
        Sized.load_from_checkpoint(tmp_path / "run", width=4)
    run.validate(Scored(), loader(6), verbose=False)
    with pytest.warns(UserWarning, match="No run can resume from this checkpoint"):
        run.save_checkpoint(tmp_path / "late")
    # A damaged file is found before it is loaded.
    place = read_manifest(tmp_path / "run").records.entries["data/0"]["at"]
    content = (tmp_path / "run").read_bytes()
    (tmp_path / "run").write_bytes(content[:place] + b"x" + content[place + 1 :])
    with says(ValueError, "data/0 is not what was written"):
        Sized.load_from_checkpoint(tmp_path / "run")


def test_callbacks_that_would_not_be_saved(tmp_path):
    class Counting(treadle.Callback):
        def state_dict(self):
            return {"n": 1}

    run = make_trainer(callbacks=[Counting(), Counting()])
    with says(ValueError, "two callbacks", "Counting", "state_key"):
        run.fit(Line(), loader(6))
    assert run.global_step == 0  # said before the first step, not at the first save

    wrong = Line()
    wrong.configure_callbacks = lambda: ["bar"]
    with says(TypeError, "configure_callbacks", "'bar'"):
        make_trainer().fit(wrong, loader(6))


def test_what_save_hyperparameters_takes():
    class Named(Line):
        def __init__(self, width=1):
            super().__init__()
            self.save_hyperparameters("widht")

    with says(ValueError, "'widht'", "width"):
        Named()
    with says(TypeError, "save_hyperparameters", "5"):
        Sized(1).save_hyperparameters(5)
    with says(TypeError, "save_hyperparameters", "one object with all hyperparameters"):
        Sized(1).save_hyperparameters({"a": 1}, {"b": 2})


def test_a_wrong_type_is_caught_as_either_kind():
    """A script that catches Lightning's MisconfigurationException catches a ValueError."""

    configures = Line()
    configures.configure_optimizers = lambda: 1

    for call in (
        lambda: make_trainer().fit(with_step(lambda task: task.log("x", None)), loader(6)),
        lambda: make_trainer().fit(with_step(lambda task: 1.0), loader(6)),
        lambda: make_trainer().fit(configures, loader(6)),
        lambda: make_trainer().fit(Line()),
        lambda: make_trainer().predict(Line()),
        lambda: Sized(1).save_hyperparameters(3),
    ):
        for kind in (TypeError, ValueError):
            with pytest.raises(kind):
                call()
