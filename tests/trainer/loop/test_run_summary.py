"""What fit says: of the steps to come, of what it compiles, and at its end; what Ctrl-C leaves behind."""

import logging

import pytest
import torch
from support.models import Scored, Stream, loader, optimize
from support.trainers import make_trainer
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from treadle.callbacks import ModelCheckpoint, ModelSummary
from treadle.loggers import CSVLogger

import treadle

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


class Task(Scored):
    def __init__(self, schedule=None):
        super().__init__()
        self.schedule = schedule

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self.schedule is None:
            return optimizer
        scheduler = self.schedule(optimizer, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class ByHand(Task):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimize(self, self.loss(batch))


def stream():
    return DataLoader(Stream(loader(16).dataset), batch_size=2)


# -- before ----------------------------------------------------------------------------------------------------------


def test_manual_optimization_announces_what_is_known(tmp_path):
    trainer = make_trainer(max_epochs=2)
    trainer.fit(ByHand(), loader(16))
    words = "manual optimization: training_step steps the optimizers; 8 batches per epoch, until 2 epochs"
    assert trainer.decided.splitlines()[1:3] == ["batch 2 = 2 per process x 1 process", words]
    trainer = make_trainer(max_epochs=None, max_steps=1)
    trainer.fit(ByHand(), stream())
    assert "the dataloader has no length, until 1 optimizer step" in trainer.decided


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
        make_trainer(max_epochs=-1, max_time="00:00:01:00").fit(Task(schedule), loader(16))
    words = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "because max_epochs=-1 and max_steps=-1. Set max_steps" in words
    make_trainer(max_epochs=None, max_steps=4).fit(Task(schedule), stream())


def test_a_plateau_scheduler_has_no_length():
    """Its best value so far is infinite."""
    task, plateau = Scored(), lr_scheduler.ReduceLROnPlateau
    optimizer = torch.optim.SGD(task.parameters(), lr=0.01)
    task.configure_optimizers = lambda: ([optimizer], [{"scheduler": plateau(optimizer), "monitor": "loss"}])
    trainer = make_trainer(max_epochs=1)
    trainer.fit(task, stream())
    assert trainer.lr_scheduler_configs[0].scheduler.best < float("inf")


# -- after -----------------------------------------------------------------------------------------------------------


def test_after_fit_a_line_for_each_result(tmp_path, capsys):
    saver = ModelCheckpoint(tmp_path / "c", monitor="val_loss")
    trainer = treadle.Trainer(**QUIET, max_epochs=2, logger=CSVLogger(tmp_path), log_every_n_steps=4, callbacks=saver)
    trainer.fit(Task(), loader(16), loader(16))
    folder, values = trainer.log_dir, trainer.callback_metrics
    assert capsys.readouterr().err.splitlines()[-4:] == [
        f"logs: {folder}",
        f"report: {folder}/report.html",
        f"best checkpoint: {saver.best_model_path} (val_loss {float(saver.best_model_score):.4g})",
        f"last metrics: loss {float(values['loss']):.4g}, val_loss {float(values['val_loss']):.4g}",
    ]
    trainer.validate(Task(), loader(16), verbose=False)
    assert "best checkpoint" not in capsys.readouterr().err


def test_after_fit_nothing_is_said_of_what_is_not_there(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    treadle.Trainer(accelerator="cpu", max_epochs=1, barebones=True).fit(Task(), loader(16), loader(16))
    assert capsys.readouterr().err.splitlines()[-1].startswith("3 trainable parameters")
    quiet = {**QUIET, "enable_checkpointing": False, "enable_report": False}
    treadle.Trainer(**quiet, max_epochs=1, log_every_n_steps=0).fit(ByHand(), loader(16))
    assert capsys.readouterr().err.splitlines()[-1].startswith("3 trainable parameters")
    # Scripts read hparams.yaml, which is written also when it is empty, as in Lightning. It is not worth a line.
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["hparams.yaml"]


def test_the_logger_named_treadle_is_the_switch(tmp_path, capsys):
    logging.getLogger("treadle").setLevel("WARNING")
    try:
        treadle.Trainer(**QUIET, max_epochs=1, default_root_dir=tmp_path).fit(Task(), loader(16), loader(16))
    finally:
        logging.getLogger("treadle").setLevel("INFO")
    assert capsys.readouterr().err == ""


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


class Interrupts(treadle.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 5:
            raise KeyboardInterrupt

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        raise KeyboardInterrupt


def interrupted(root, **flags):
    flags = {"default_root_dir": root, "callbacks": [Interrupts()], **flags}
    trainer = treadle.Trainer(**QUIET, logger=False, max_epochs=2, **flags)
    with pytest.raises(KeyboardInterrupt) as raised:
        trainer.fit(Task(), loader(16))
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
    again.fit(Task(), loader(16), ckpt_path=path)
    assert again.global_step == 16


def test_an_interrupt_without_a_checkpoint(tmp_path, capsys):
    interrupted(tmp_path)
    assert capsys.readouterr().err.splitlines()[-1] == "no checkpoint was saved"
    weights = ModelCheckpoint(tmp_path / "w", every_n_train_steps=2, save_weights_only=True)
    interrupted(tmp_path, callbacks=[Interrupts(), weights])
    assert capsys.readouterr().err.splitlines()[-1] == "no checkpoint was saved"
    trainer = treadle.Trainer(**QUIET, logger=False, callbacks=[Interrupts()], default_root_dir=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trainer.test(Task(), loader(16))
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted in test, in batch 0"


@pytest.mark.parametrize("depth", [None, 0, 1])
def test_the_parameters_are_counted_once(depth, tmp_path, capsys):
    shown = {} if depth is None else {"callbacks": [ModelSummary(depth)], "enable_model_summary": True}
    trainer = treadle.Trainer(**(QUIET | {"default_root_dir": tmp_path, "max_epochs": 1, "logger": False} | shown))
    trainer.fit(Task(), loader(16))
    assert trainer.decided.endswith("3 trainable parameters, 0 frozen, 0.0 MiB")
    assert capsys.readouterr().err.count("3 trainable") == 1


# -- hooks that the user has written with another name or signature ----------------------------------------------------


class WithoutArguments:
    def setup(self): ...

    def training_step(self): ...

    def on_train_start(self): ...


@pytest.mark.parametrize(
    ("base", "method", "signature"),
    [
        (treadle.TaskModule, "setup", "(self, stage)"),
        (treadle.TaskModule, "training_step", "(self, batch, batch_idx)"),
        (treadle.DataModule, "setup", "(self, stage)"),
        (treadle.Callback, "on_train_start", "(self, trainer, pl_module)"),
        (treadle.TaskModule, None, None),  # its own code makes the mistake, and no hook
    ],
)
def test_a_hook_of_another_signature(base, method, signature):
    task, data, callback = Task(), treadle.DataModule(), treadle.Callback()
    data.train_dataloader = lambda: loader(16)
    if method is None:
        task.training_step = lambda batch, batch_idx: task.loss()
    else:
        (odd,) = (one for one in (task, data, callback) if isinstance(one, base))
        odd.__class__ = type("Odd", (type(odd),), {method: getattr(WithoutArguments, method)})
    with pytest.raises(TypeError, match="positional argument") as raised:
        make_trainer(callbacks=callback).fit(task, data)
    notes = [note for note in getattr(raised.value, "__notes__", []) if "signature" in note]
    assert notes == ([f"the signature of this hook is {base.__name__}.{method}{signature}"] if method else [])
