"""Two ranks that were given different settings, or decide differently: an error on both, and never a wait without end.

Every run here has a time limit far below that of a collective.
"""

import pytest
import torch
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import Callback, EMAWeightAveraging, LambdaCallback

import treadle

LIMIT = 60  # seconds


class Task(treadle.TaskModule):
    """Seen samples are in `seen`; `leave` says where its hook returns -1: (rank, epoch, batch) each."""

    def __init__(self, leave=(), automatic=True, closure=False):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.automatic_optimization = automatic
        self.leave, self.closure = leave, closure
        self.seen, self.ends = [], []

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if (self.global_rank, self.current_epoch, batch_idx) in self.leave else None

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean() + torch.rand(())
        self.log("loss", loss, on_epoch=True)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += batch[0].flatten().tolist()

    def on_train_epoch_end(self):
        self.ends.append(self.global_step)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self):
        return (torch.optim.LBFGS if self.closure else torch.optim.AdamW)(self.parameters(), lr=0.01)


def loader(samples=24, size=2, generator=None):
    return DataLoader(TensorDataset(torch.arange(float(samples)).view(-1, 1)), batch_size=size, generator=generator)


def refused(function):
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing was raised"


# -- settings --------------------------------------------------------------------------------------------------------


DIFFERENT = {  # what rank zero has, and rank one
    "max_epochs": (1, 2),
    "max_steps": (3, 4),
    "min_steps": (None, 5),
    "limit_train_batches": (2, 3),
    "limit_val_batches": (0, 1),
    "overfit_batches": (0, 2),
    "val_check_interval": (2, 3),
    "check_val_every_n_epoch": (1, 2),
    "num_sanity_val_steps": (0, 2),
    "log_every_n_steps": (1, 2),
    "accumulate_grad_batches": (1, 2),
    "gradient_clip_val": (None, 0.5),
    "precision": ("32-true", "bf16-mixed"),
    "use_distributed_sampler": (True, False),
    "reload_dataloaders_every_n_epochs": (0, 1),
    "on_nonfinite": ("raise", "skip"),
    "fast_dev_run": (False, 2),
    "callbacks": ([EMAWeightAveraging()], []),
}


def every_setting():
    rank = treadle.Accelerator(cpu=True).process_index
    found = {}
    for name, values in DIFFERENT.items():
        trainer = make_trainer(**{"max_epochs": 2, name: values[rank]})
        found[name] = refused(lambda trainer=trainer: trainer.fit(Task(), loader(), loader(4)))
    trainer = make_trainer()
    stages = (lambda: trainer.fit(Task(), loader())), (lambda: trainer.validate(Task(), loader()))
    found["stage"] = refused(stages[rank])
    found["ckpt_path"] = refused(lambda: trainer.validate(Task(), loader(), ckpt_path="nowhere" if rank else None))
    trainer.fit(Task(), loader())  # nothing is left of all that
    return found


@pytest.mark.long
def test_settings_that_differ_are_an_error_that_names_them():
    first, second = run(every_setting, 2, timeout=LIMIT)
    assert first == second
    for name, (zero, one) in {**DIFFERENT, "callbacks": (["EMAWeightAveraging"], [])}.items():
        for words in ("the ranks are configured differently", f"{name}: {zero!r} on rank 0, {one!r} on rank 1", "same"):
            assert words in first[name], (name, first[name])
    assert "stage: 'fit' on rank 0, 'validate' on rank 1" in first["stage"]
    assert "ckpt_path: None on rank 0, 'a path' on rank 1" in first["ckpt_path"]


class Other(Task):
    """Differs on rank one in what `differs` says."""

    def __init__(self, differs, rank):
        super().__init__()
        self.differs = differs if rank else ""
        if self.differs == "shape":
            self.net = nn.Linear(1, 2)
        elif self.differs == "frozen":
            self.net[0].bias.requires_grad_(False)
        elif self.differs == "buffer":
            self.register_buffer("mine", torch.zeros(2))

    def training_step(self, batch, batch_idx):
        if self.differs == "name":
            self.log("mine", 1.0)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        kind = torch.optim.SGD if self.differs == "optimizer" else torch.optim.AdamW
        parameters = self.net[0].parameters() if self.differs == "parameters" else self.parameters()
        optimizer = kind(parameters, lr=0.02 if self.differs == "rate" else 0.01)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1)] if self.differs == "scheduler" else []
        return [optimizer], schedulers


OTHER = {
    "shape": "net.weight: missing on rank 0, 'float32 [2, 1], trained' on rank 1",
    "frozen": "net.0.bias: 'float32 [4], trained' on rank 0, 'float32 [4]' on rank 1",
    "buffer": "mine: missing on rank 0, 'float32 [2]' on rank 1",
    "optimizer": "optimizers: ['AdamW'] on rank 0, ['SGD'] on rank 1",
    "parameters": "optimizer 0, group 0, params: ['net.0.weight', 'net.0.bias', 'net.1.weight'",
    "rate": "optimizer 0, group 0, lr: 0.01 on rank 0, 0.02 on rank 1",
    "scheduler": "schedulers: [] on rank 0, [('StepLR', 'epoch', 1, None)] on rank 1",
    "name": "mine (mean): missing on rank 0, 'logged' on rank 1",
}


def every_other(strategy):
    rank = treadle.Accelerator(cpu=True).process_index

    def fit(*given):
        return refused(lambda: make_trainer(log_every_n_steps=1, strategy=strategy).fit(*given))

    found = {name: fit(Other(name, rank), loader()) for name in OTHER}
    found["loaders"] = fit(Task(), loader(), [loader(4)] * (1 + rank))
    found["batches"] = fit(Task(), loader(size=2 + rank))
    return found


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_models_optimizers_and_loaders_that_differ(strategy):
    first, second = run(every_other, 2, strategy, timeout=LIMIT)
    assert first == second
    for name, words in OTHER.items():
        assert words in first[name], (name, first[name])
    assert "val dataloaders: 1 on rank 0, 2 on rank 1" in first["loaders"]
    assert "batch_size: 2 on rank 0, 3 on rank 1" in first["batches"]


class Stop(Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        trainer.should_stop = "val" in trainer.callback_metrics and trainer.current_epoch == 1

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pass


def what_may_differ(folder, **kind):
    """Callbacks without exchange, loggers, time and printing: on one rank only."""
    rank = treadle.Accelerator(cpu=True).process_index
    options = {"max_epochs": 3, "num_sanity_val_steps": 0}
    if rank == 0:
        options |= {"logger": treadle.loggers.CSVLogger(folder), "callbacks": [Stop()], "max_time": "00:01:00:00"}
    trainer = make_trainer(**options, log_every_n_steps=1, default_root_dir=folder)
    trainer.fit(Task(**kind), loader(), loader(4))
    return trainer.global_step


def every_kind(folder):
    return [what_may_differ(folder, **kind) for kind in ({}, {"automatic": False}, {"closure": True})]


@pytest.mark.long
def test_what_is_rank_zeros_alone_may_be_on_rank_zero_alone(tmp_path):
    assert run(every_kind, 2, str(tmp_path), timeout=LIMIT) == [[12, 12, 12]] * 2
    assert list(tmp_path.rglob("metrics.csv"))


# -- leaving an epoch ------------------------------------------------------------------------------------------------


def leaving(ranks, late=False, automatic=True, closure=False, **options):
    """A task that leaves the first epoch at its fourth micro-batch on some ranks, and its Trainer."""
    task = Task([(rank, 0, 3) for rank in ranks], automatic, closure)
    trainer = make_trainer(**options)
    if late:  # votes are read one step late, as on accelerators
        task.on_train_start = lambda: setattr(trainer.accelerator.accumulation.agreement, "immediate", False)
    return task, trainer


def left(world_size, **options):
    """A run in which every rank leaves the first epoch at its fourth micro-batch, the others at the sixth."""
    once = LambdaCallback(on_train_batch_start=lambda trainer, task, batch, batch_idx: -1 if batch_idx == 5 else None)
    task, trainer = leaving(range(2), max_epochs=2, log_every_n_steps=1, callbacks=once, **options)
    assert trainer.world_size == world_size
    # A generator of its own: else one process draws the loader's numbers from those that the task draws from.
    trainer.fit(task, loader(24, 4 // world_size, torch.Generator()))
    buffers = [buffer.tolist() for buffer in task.buffers()]
    return trainer.global_step, task.ends, task.seen, buffers, float(torch.rand(()))


def every_way(world_size):
    return {
        "plain": left(world_size),
        "late": left(world_size, late=True),
        "accumulated": left(world_size, accumulate_grad_batches=2),
        "fsdp": left(world_size, strategy="fsdp"),
        "manual": left(world_size, automatic=False),
        "closure": left(world_size, closure=True),
    }


@pytest.mark.exhaustive
def test_every_rank_leaves_the_epoch_as_one_process_does():
    shares = run(every_way, 2, 2, timeout=2 * LIMIT)
    alone = every_way(1)
    for name, (steps, ends, seen, _, drawn) in alone.items():
        assert steps == (3 if name == "accumulated" else 8)
        for share in shares:
            assert share[name][0] == steps, name
            assert share[name][1] == ends
        assert sorted(shares[0][name][2] + shares[1][name][2]) == sorted(seen), name
        # What the refused batch would have drawn, rank zero has not drawn either.
        assert shares[0][name][4] == drawn or name == "closure", name
    for name in ("plain", "late", "accumulated"):  # the refused batch counts in no statistics
        batches = [buffers[2] for share in shares if (buffers := share[name][3])]
        assert batches == [alone[name][3][2]] * 2


def alone_in_leaving(rank, **options):
    task, trainer = leaving([rank], **options)
    return refused(lambda: trainer.fit(task, loader()))


def every_way_alone():
    """The other ways are those of `loop/test_agreement.py`."""
    return {
        "rank zero": alone_in_leaving(0),
        "accumulated": alone_in_leaving(1, accumulate_grad_batches=3),
        "closure": alone_in_leaving(1, closure=True),
    }


@pytest.mark.exhaustive
def test_one_rank_that_leaves_alone_is_an_error_on_all():
    first, second = run(every_way_alone, 2, timeout=LIMIT)
    assert first == second
    for name, text in first.items():
        rank = 0 if name == "rank zero" else 1
        for words in (f"returned -1 on rank {rank} (micro-batch 3) in epoch 0", "not on every rank", "batch_idx"):
            assert words in text, (name, text)


def late_and_alone():
    return alone_in_leaving(1, late=True)


def test_one_rank_that_leaves_alone_where_votes_are_read_late():
    """Rank zero is in its next step when rank one knows."""
    first, second = run(late_and_alone, 2, timeout=LIMIT)
    assert "returned -1 on rank 1 (micro-batch 3) in epoch 0" in second
    assert first != "nothing was raised"
