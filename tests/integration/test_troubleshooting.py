"""docs/troubleshooting.md shows the errors that really come: each is provoked here and compared with the page.

An error of the page is a block of text below `<!-- error: name -->`, in which `...` stands for anything. The function
of that name provokes it.
"""

import functools
import itertools
import os
import re
import socket
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from support.models import SGDTask, Stream
from support.processes import clean_environment, python, run, script
from support.trainers import make_trainer
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset, random_split
from treadle.callbacks import Callback, EarlyStopping, ModelCheckpoint
from treadle.common import optional

import treadle as tl
from treadle.runs import RunFolder

PAGE = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text()
SGD = functools.partial(torch.optim.SGD, lr=0.1)
SHOWN = re.findall(r"<!-- error: (\w+) -->\n```text\n(.*?)\n```", PAGE, re.DOTALL)


def loader(samples=8, batch_size=4, **options):
    return DataLoader(TensorDataset(torch.randn(samples, 4), torch.randint(2, (samples,))), batch_size, **options)


class Net(SGDTask):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class Validated(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


def net(**methods):
    return type("Net", (Net,), methods)()


def stepping(loss):
    """A task whose step returns `loss`, a function of the task and the samples."""
    return net(training_step=lambda self, batch, batch_idx: loss(self, batch[0]))


def optimized(optimizers):
    return net(configure_optimizers=optimizers)


def scheduled(schedule):
    """A task whose schedule is `schedule`, a function of the task and its optimizer."""

    def configure_optimizers(self):
        optimizer = SGD(self.parameters())
        return [optimizer], [schedule(self, optimizer)]

    return optimized(configure_optimizers)


def fit(task, train=None, val=None, ckpt_path=None, **flags):
    trainer = make_trainer(**flags)
    trainer.fit(task, loader() if train is None else train, val, ckpt_path=ckpt_path)
    return trainer


def said(fn):
    """Every error and warning of a call, as Python prints them."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            texts.append(str(fn()))
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    texts += [f"{warning.category.__name__}: {warning.message}" for warning in caught]
    return [re.sub(r"\s+", " ", text) for text in texts]


# Errors that one expression provokes; those below need more.
PROVOKERS = {
    # the task
    "no_training_step": lambda: fit(net(training_step=tl.TaskModule.training_step)),
    "no_configure_optimizers": lambda: fit(net(configure_optimizers=tl.TaskModule.configure_optimizers)),
    "no_optimizer_returned": lambda: fit(optimized(lambda self: None)),
    "not_a_task": lambda: fit(nn.Linear(4, 2)),
    "loss_without_gradient": lambda: fit(stepping(lambda task, x: task.net(x).mean().detach())),
    "loss_is_a_number": lambda: fit(stepping(lambda task, x: task.net(x).mean().item())),
    "loss_of_many_values": lambda: fit(stepping(lambda task, x: task.net(x))),
    "loss_under_another_key": lambda: fit(stepping(lambda task, x: {"lss": task.net(x).mean()})),
    "no_loss": lambda: fit(stepping(lambda task, x: None)),
    "not_in_the_optimizer": lambda: fit(optimized(lambda self: SGD([self.net.weight]))),
    "another_models_parameters": lambda: fit(optimized(lambda self: SGD(nn.Linear(1, 1).parameters()))),
    "two_optimizers": lambda: fit(optimized(lambda self: [SGD(self.parameters()), SGD(self.parameters())])),
    "optimizer_idx": lambda: fit(net(training_step=lambda self, batch, batch_idx, optimizer_idx: self.net(batch[0]))),
    "plateau_without_monitor": lambda: fit(scheduled(lambda _, optimizer: lr_scheduler.ReduceLROnPlateau(optimizer))),
    "manual_backward_in_automatic": lambda: fit(stepping(lambda task, x: task.manual_backward(task.net(x).mean()))),
    "log_a_vector": lambda: fit(stepping(lambda task, x: task.log("logits", task.net(x)))),
    "log_outside": lambda: Net().log("loss", 1.0),
    "no_trainer_yet": lambda: Net().trainer,
    # the Trainer's arguments
    "unknown_flag": lambda: tl.Trainer(max_epoch=3),
    "value_of_another_type": lambda: tl.Trainer(max_epochs="3"),
    "unknown_precision": lambda: tl.Trainer(accelerator="cpu", precision="bf16-mix"),
    "no_cuda": lambda: tl.Trainer(accelerator="cuda"),
    "not_a_callback": lambda: tl.Trainer(accelerator="cpu", callbacks=[print]),
    "logger_by_name": lambda: tl.Trainer(accelerator="cpu", logger="wandb"),
    # data and shapes
    "no_loader": lambda: make_trainer().fit(Net()),
    "no_batch": lambda: fit(Net(), loader(3, 4, drop_last=True)),
    "shapes": lambda: fit(stepping(lambda task, x: task.net(x[:, :3]).mean())),
    "no_validation_step": lambda: fit(Net(), val=loader()),
    "no_validation_loader": lambda: fit(Validated()),
    "interval_longer_than_an_epoch": lambda: fit(Validated(), val=loader(), val_check_interval=10),
    # during the run
    "not_finite": lambda: fit(stepping(lambda task, x: task.net(x).mean() * float("nan"))),
    "flag_of_automatic_optimization": lambda: fit(net(automatic_optimization=False), gradient_clip_val=1.0),
    "monitor_never_logged": lambda: fit(Validated(), val=loader(), callbacks=[EarlyStopping("valid_loss")]),
    "stage_within_a_stage": lambda: fit(net(on_train_start=lambda self: self.trainer.validate(Validated(), loader()))),
    "no_test_step": lambda: make_trainer().test(Net(), loader()),
    # checkpoints
    "no_such_checkpoint": lambda: fit(Net(), ckpt_path="runs/lst.ckpt"),
    "best_without_checkpoints": lambda: make_trainer().validate(Validated(), loader(), ckpt_path="best"),
    "top_k_without_monitor": lambda: ModelCheckpoint(save_top_k=3),
    # several processes
    "other_number_of_processes": lambda: run(asks_for_four, 2),
    "unused_parameters": lambda: run(train_with_unused, 2),
    "split_that_differs": lambda: run(train_on_another_split, 2),
}


def provokes(fn):
    PROVOKERS[fn.__name__] = fn
    return fn


def test_each_error_of_the_page_is_provoked_here():
    assert sorted(name for name, _ in SHOWN) == sorted(PROVOKERS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(name, text, id=name, marks=pytest.mark.exhaustive if name == "save_on_one_rank" else ())
        for name, text in SHOWN
    ],
)
def test_the_page_has_the_text_that_comes(name, text, tmp_path, monkeypatch):
    if name == "float_labels" and torch.__version__ < "2.13":
        pytest.skip("torch says it in other words")
    monkeypatch.chdir(tmp_path)
    wanted = re.escape(re.sub(r"\s+", " ", text)).replace(r"\.\.\.", ".*")
    texts = said(PROVOKERS[name])
    assert any(re.search(wanted, one) for one in texts), f"the page says:\n{text}\nwhat came:\n" + "\n".join(texts)


# -- the task --------------------------------------------------------------------------------------------------------


@provokes
def no_super_init():
    class Net(tl.TaskModule):
        def __init__(self):
            self.net = nn.Linear(4, 2)

    Net()


@provokes
def modules_in_a_list():
    task = net()
    task.layers = [nn.Linear(2, 2)]
    fit(task)


# -- the Trainer's arguments -----------------------------------------------------------------------------------------


@provokes
def missing_package():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optional, "find_spec", lambda name: None)
        tl.loggers.WandbLogger()


# -- data and shapes -------------------------------------------------------------------------------------------------


@provokes
def float_labels():
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1].float())

    fit(net(training_step=training_step))


@provokes
def endless_schedule():
    def decay(task, optimizer):
        return lr_scheduler.CosineAnnealingLR(optimizer, task.trainer.estimated_stepping_batches)

    endless = Stream(itertools.repeat((torch.randn(4), torch.tensor(0))))
    fit(scheduled(decay), DataLoader(endless, 4), max_epochs=-1)


@provokes
def worker_can_not_pickle():
    fit(Net(), loader(num_workers=1, collate_fn=lambda samples: samples, multiprocessing_context="spawn"))


@provokes
def no_main_guard():
    done = script(
        """
import torch
from torch.utils.data import DataLoader

loader = DataLoader(torch.randn(8, 4), 4, num_workers=1, multiprocessing_context="spawn")
for batch in loader:
    print(batch.shape)
"""
    )
    return done.stderr


# -- during the run --------------------------------------------------------------------------------------------------


@provokes
def evaluation_mode():
    task = Net()
    task.net.eval()
    fit(task)


# -- checkpoints -----------------------------------------------------------------------------------------------------


@provokes
def another_library():
    torch.save({"state_dict": Net().state_dict(), "epoch": 1, "global_step": 2}, "lightning.ckpt")
    fit(Net(), ckpt_path="lightning.ckpt")


@provokes
def no_file_possible():
    trainer = fit(Net())
    trainer.accelerator.register_save_state_pre_hook(lambda *_: None)
    trainer.save_checkpoint("a.ckpt", format="file")


@provokes
def another_model():
    fit(Net()).save_checkpoint("a.ckpt")
    wider = Net()
    wider.net = nn.Linear(4, 3)
    fit(wider, ckpt_path="a.ckpt")


@provokes
def no_last_checkpoint():
    trainer = make_trainer(enable_checkpointing=True, callbacks=[ModelCheckpoint("checkpoints")])
    trainer.validate(Validated(), loader())
    trainer.validate(dataloaders=loader(), ckpt_path="last")


@provokes
def damaged_checkpoint():
    task = Net()
    fit(task).save_checkpoint("a.ckpt")
    data = Path("a.ckpt").read_bytes()
    bias = task.net.bias.detach().numpy().tobytes()
    Path("a.ckpt").write_bytes(data.replace(bias, bytes(len(bias)), 1))
    fit(Net(), ckpt_path="a.ckpt")


@provokes
def weights_with_other_names():
    fit(Net()).save_checkpoint("a.ckpt")
    tl.load_weights(nn.Linear(4, 2), "a.ckpt")


@provokes
def argument_not_stored():
    class Net(globals()["Net"]):
        def __init__(self, width):
            super().__init__()

    fit(Net(3)).save_checkpoint("a.ckpt")
    Net.load_from_checkpoint("a.ckpt")


@provokes
def state_is_not_data():
    class Rule(Callback):
        def state_dict(self):
            return {"rule": lambda loss: loss < 1}

    fit(Net(), callbacks=[Rule(), ModelCheckpoint("checkpoints")], enable_checkpointing=True)


@provokes
def nothing_left_to_train():
    fit(Net()).save_checkpoint("a.ckpt")
    fit(Net(), ckpt_path="a.ckpt")


@provokes
def folder_in_use():
    folder = RunFolder.create("runs", "baseline")
    try:
        RunFolder.open("runs/baseline/1")
    finally:
        folder.release()


# -- several processes -----------------------------------------------------------------------------------------------


@provokes
def half_an_environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        tl.Trainer(accelerator="cpu")


@provokes
def no_script_to_start():
    command = [python(), "-c", "import treadle as tl; tl.Trainer(devices=2, accelerator='cpu')"]
    return subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=60).stderr


def asks_for_four():
    make_trainer(devices=4)


def train_with_unused():
    task = Net()
    task.other = nn.Linear(2, 2)
    fit(task, strategy="ddp")


def train_on_another_split():
    torch.manual_seed(0)
    data = loader(40).dataset
    torch.manual_seed(int(os.environ["RANK"]))
    train, _ = random_split(data, [20, 20])
    fit(Net(), DataLoader(train, 4), strategy="ddp")


@provokes
def save_on_one_rank():
    source = """
import torch, treadle as tl
trainer = tl.Trainer(accelerator="cpu", devices=2, logger=False, enable_progress_bar=False)
class Net(tl.TaskModule):
    def validation_step(self, batch, batch_idx):
        pass
trainer.validate(Net(), torch.utils.data.DataLoader(torch.ones(4, 1)))
if trainer.is_global_zero:
    trainer.save_checkpoint("a.ckpt", weights_only=True)
"""
    return script(source).stderr


@provokes
def port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        return script("import treadle as tl\ntl.Accelerator(cpu=True)", env=env).stderr


@provokes
def manual_optimization_with_fsdp():
    def training_step(self, batch, batch_idx):
        self.manual_backward((batch[0] @ self.net.weight.T).mean())

    fit(net(automatic_optimization=False, training_step=training_step), strategy="fsdp")
