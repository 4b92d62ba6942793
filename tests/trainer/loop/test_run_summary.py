"""What fit says: of the steps to come, of what it compiles, and at its end; what Ctrl-C leaves behind."""

import contextlib
import io
import logging
import sys
import types

import pytest
import torch
from support.models import Scored, Stream
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import ModelCheckpoint, ModelSummary
from treadle.loggers import CSVLogger

import treadle

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


class Task(Scored):
    def __init__(self, schedule=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.schedule = schedule

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        if self.schedule is None:
            return optimizer
        scheduler = self.schedule(optimizer, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class ByHand(Task):
    """Steps after every fourth batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        if batch_idx % 4 == 3:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def loader():
    return DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2)


def stream():
    return DataLoader(Stream(torch.ones(16, 1, 4)), batch_size=None)


# -- before ----------------------------------------------------------------------------------------------------------


def test_manual_optimization_announces_what_is_known(tmp_path):
    trainer = make_trainer(max_epochs=2)
    trainer.fit(ByHand(), loader())
    assert trainer.global_step == 4
    words = "manual optimization: training_step steps the optimizers; 8 batches per epoch, until 2 epochs"
    assert trainer.decided.splitlines()[1:3] == ["batch 2 = 2 per process x 1 process", words]
    trainer = make_trainer(max_epochs=None, max_steps=1)
    trainer.fit(ByHand(), stream())
    assert "the dataloader has no length, until 1 optimizer step" in trainer.decided


def test_compile_says_what_it_compiles():
    trainer = make_trainer(max_steps=1, compile={"backend": "eager"})
    trainer.fit(Task(), loader())
    assert "torch.compile: net, each compiled by its first calls, which take longer" in trainer.decided
    trainer = make_trainer(max_steps=1)
    trainer.fit(Task(), loader())
    assert "compile" not in trainer.decided


ENDLESS = {
    "OneCycleLR": lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps),
    "as a number": lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(steps)),
    "CosineAnnealingLR": lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, steps),
    "LambdaLR": lambda optimizer, steps: lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps),
    "SequentialLR": lambda optimizer, steps: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.LinearLR(optimizer, total_iters=steps)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("schedule", ENDLESS.values(), ids=ENDLESS)
def test_a_schedule_over_a_loader_without_length(schedule):
    with pytest.raises((ValueError, OverflowError)) as caught:
        make_trainer(max_epochs=2).fit(Task(schedule), stream())
    words = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "the training dataloader has no length and max_steps=-1. Set max_steps" in words
    with pytest.raises((ValueError, OverflowError)) as caught:
        make_trainer(max_epochs=-1, max_time="00:00:01:00").fit(Task(schedule), loader())
    words = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "because max_epochs=-1 and max_steps=-1. Set max_steps" in words
    make_trainer(max_epochs=None, max_steps=4).fit(Task(schedule), stream())


def test_a_plateau_scheduler_has_no_length():
    """Its best value so far is infinite."""
    task = Task()
    task.configure_optimizers = lambda: {
        "optimizer": (optimizer := torch.optim.SGD(task.parameters(), lr=0.01)),
        "lr_scheduler": {"scheduler": lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "loss"},
    }
    trainer = make_trainer(max_epochs=1)
    trainer.fit(task, stream())
    assert trainer.lr_scheduler_configs[0].scheduler.best < float("inf")


# -- after -----------------------------------------------------------------------------------------------------------


def test_after_fit_a_line_for_each_result(tmp_path, capsys):
    saver = ModelCheckpoint(tmp_path / "c", monitor="val_loss")
    trainer = treadle.Trainer(**QUIET, max_epochs=2, logger=CSVLogger(tmp_path), log_every_n_steps=4, callbacks=saver)
    trainer.fit(Task(), loader(), loader())
    folder, values = trainer.log_dir, trainer.callback_metrics
    assert capsys.readouterr().err.splitlines()[-4:] == [
        f"logs: {folder}",
        f"report: {folder}/report.html",
        f"best checkpoint: {saver.best_model_path} (val_loss {float(saver.best_model_score):.4g})",
        f"last metrics: loss {float(values['loss']):.4g}, val_loss {float(values['val_loss']):.4g}",
    ]
    trainer.validate(Task(), loader(), verbose=False)
    assert "best checkpoint" not in capsys.readouterr().err


def test_after_fit_nothing_is_said_of_what_is_not_there(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    treadle.Trainer(accelerator="cpu", max_epochs=1, barebones=True).fit(Task(), loader(), loader())
    assert capsys.readouterr().err.splitlines()[-1].startswith("25 trainable parameters")
    treadle.Trainer(**QUIET, max_epochs=1, enable_checkpointing=False, enable_report=False, log_every_n_steps=0).fit(
        ByHand(), loader()
    )
    assert capsys.readouterr().err.splitlines()[-1].startswith("25 trainable parameters")
    # Scripts read hparams.yaml, which is written also when it is empty, as in Lightning. It is not worth a line.
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["hparams.yaml"]


def test_the_logger_named_treadle_is_the_switch(tmp_path, capsys):
    logging.getLogger("treadle").setLevel("WARNING")
    try:
        treadle.Trainer(**QUIET, max_epochs=1, default_root_dir=tmp_path).fit(Task(), loader(), loader())
    finally:
        logging.getLogger("treadle").setLevel("INFO")
    assert capsys.readouterr().err == ""


def test_one_figure_in_a_notebook(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    from matplotlib import pyplot
    from matplotlib.backends import backend_agg

    inline = types.ModuleType("inline_backend")
    vars(inline).update({name: value for name, value in vars(backend_agg).items() if not name.startswith("__")})
    monkeypatch.setitem(sys.modules, "inline_backend", inline)
    trainer = make_trainer(max_epochs=1, log_every_n_steps=2)
    trainer.fit(Task(), loader())
    for backend, kept in (("agg", 1), ("module://inline_backend", 0)):
        pyplot.close("all")
        matplotlib.use(backend)
        assert trainer.history.plot("loss").axes
        assert len(pyplot.get_fignums()) == kept
    pyplot.close("all")
    matplotlib.use("agg")


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


class Interrupts(treadle.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 5:
            raise KeyboardInterrupt

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        raise KeyboardInterrupt


def interrupted(root, **flags):
    trainer = treadle.Trainer(
        **{**QUIET, "logger": False, "max_epochs": 2, "default_root_dir": root, "callbacks": [Interrupts()], **flags}
    )
    with pytest.raises(KeyboardInterrupt) as raised:
        trainer.fit(Task(), loader())
    assert not hasattr(raised.value, "__notes__")  # its place is in what is said
    return trainer


def test_an_interrupt_says_how_to_resume(tmp_path, capsys):
    trainer = interrupted(tmp_path, callbacks=[Interrupts(), ModelCheckpoint(tmp_path / "c", every_n_train_steps=2)])
    assert trainer.interrupted
    path = tmp_path / "c" / "epoch=0-step=4.ckpt"
    said = capsys.readouterr().err
    assert said.count("in fit, epoch 0") == 1
    assert said.splitlines()[-3:] == [
        "interrupted in fit, epoch 0, after optimizer step 5, in batch 5",
        f"latest checkpoint: {path} (optimizer step 4)",
        f"to resume: trainer.fit(..., ckpt_path={str(path)!r})",
    ]
    again = make_trainer(max_epochs=2)
    again.fit(Task(), loader(), ckpt_path=path)
    assert again.global_step == 16


def test_an_interrupt_without_a_checkpoint(tmp_path, capsys):
    interrupted(tmp_path)
    assert capsys.readouterr().err.splitlines()[-1] == "no checkpoint was saved"
    interrupted(
        tmp_path,
        callbacks=[Interrupts(), ModelCheckpoint(tmp_path / "w", every_n_train_steps=2, save_weights_only=True)],
    )
    assert capsys.readouterr().err.splitlines()[-1] == "no checkpoint was saved"
    trainer = treadle.Trainer(**QUIET, logger=False, callbacks=[Interrupts()], default_root_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trainer.test(Task(), loader())
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted in test, in batch 0"


def said_on_two(root):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        interrupted(root, max_epochs=4, callbacks=[Interrupts(), ModelCheckpoint(root / "c", every_n_train_steps=2)])
    return said.getvalue()


@pytest.mark.long
def test_rank_zero_says_it_for_all(tmp_path):
    first, second = run(said_on_two, 2, tmp_path)
    assert "interrupted in fit, epoch 1, after optimizer step 5, in batch 1\nlatest checkpoint: " in first
    assert "interrupted" not in second


@pytest.mark.parametrize("depth", [None, 0, 1])
def test_the_parameters_are_counted_once(depth, tmp_path, capsys):
    shown = {} if depth is None else {"callbacks": [ModelSummary(depth)], "enable_model_summary": True}
    trainer = treadle.Trainer(**(QUIET | {"default_root_dir": tmp_path, "max_epochs": 1, "logger": False} | shown))
    trainer.fit(Task(), loader())
    assert trainer.decided.endswith("25 trainable parameters, 0 frozen, 0.0 MiB")
    assert capsys.readouterr().err.count("25 trainable") == 1


# -- hooks that the user has written with another name or signature ----------------------------------------------------


class Watches(treadle.Callback):
    def on_train_start(self):
        pass


class Unprepared(treadle.DataModule):
    def setup(self):
        pass


class WithoutStage(Task):
    def setup(self):
        pass


class WithoutBatch(Task):
    def training_step(self):
        return 1


class Calls(Task):
    """Its own code makes the mistake, and no hook."""

    def training_step(self, batch, batch_idx):
        return self.loss()


@pytest.mark.parametrize(
    ("task", "data", "callback", "signature"),
    [
        (WithoutStage, loader, None, "TaskModule.setup(self, stage)"),
        (WithoutBatch, loader, None, "TaskModule.training_step(self, batch, batch_idx)"),
        (Task, Unprepared, None, "DataModule.setup(self, stage)"),
        (Task, loader, Watches(), "Callback.on_train_start(self, trainer, pl_module)"),
        (Calls, loader, None, None),
    ],
)
def test_a_hook_of_another_signature(task, data, callback, signature):
    with pytest.raises(TypeError, match="positional argument") as raised:
        make_trainer(callbacks=callback).fit(task(), data())
    notes = [note for note in getattr(raised.value, "__notes__", []) if "signature" in note]
    assert notes == ([f"the signature of this hook is {signature}"] if signature else [])
