"""A resumed run is the uninterrupted one, to the bit: from every kind of step, in every kind of set-up."""

import random
import time

import numpy as np
import pytest
import torch
from support.models import SGDTask
from support.processes import run
from support.resume_trials import Centre, Rows
from support.trainers import make_trainer
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Subset
from torchmetrics import MeanMetric, SumMetric

import treadle

SAMPLES, EPOCHS = 13, 3


class Samples(Dataset):
    """(number, features, target); the features differ each time they are read."""

    def __init__(self, count=SAMPLES, noise=0.1, own=False):
        self.count = count
        self.noise = noise
        self.own = [np.random.default_rng(1), np.random.RandomState(2), random.Random(3)] if own else []
        self.generator = torch.Generator().manual_seed(4) if own else None
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(count, 4, generator=generator)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = self.x[index]
        if self.noise:
            x = x + self.noise * torch.rand(4) + self.noise * random.random() + self.noise * np.random.rand()
        if self.own:
            drawn = [self.own[0].random(), self.own[1].rand(), self.own[2].random()]
            x = x + 0.1 * float(sum(drawn)) + 0.1 * torch.rand(4, generator=self.generator)
        return index, x.float(), x.sum().float()


class Stream(IterableDataset):
    def __iter__(self):
        data = Samples(noise=0.0)
        return (data[index] for index in range(len(data)))


class Task(treadle.TaskModule):
    def __init__(self, settings):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), Centre(), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 1))
        self.settings = settings
        self.ids = []
        self.losses = []

    def training_step(self, batch, batch_idx):
        number, x, y = batch
        loss = nn.functional.mse_loss(self.net(x).squeeze(1), y)
        self.ids.append(number.tolist())
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("highest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch, batch_idx):
        _, x, y = batch
        self.log("val", nn.functional.mse_loss(self.net(x).squeeze(1), y))

    def on_train_epoch_start(self):
        if self.settings.get("noise", 0.1):
            torch.rand(1)  # hooks draw too
        self.log("epoch_start", float(self.current_epoch))

    def configure_optimizers(self):
        if self.settings["optimizer"] == "sgd":
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        kind = self.settings["schedule"]
        if kind is None:
            return optimizer
        scheduler = {
            "step": lambda: StepLR(optimizer, 2, gamma=0.8),
            "cycle": lambda: OneCycleLR(optimizer, 0.1, total_steps=100),
            "epoch": lambda: CosineAnnealingLR(optimizer, 4),
            "plateau": lambda: ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.7),
        }[kind]()
        interval = "step" if kind in ("step", "cycle") else "epoch"
        config = {"scheduler": scheduler, "interval": interval, "monitor": "val"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class SaveEach(treadle.Callback):
    """Saves after every step; notes how much had been logged and trained on by then."""

    def __init__(self, root, rows):
        self.root = root
        self.rows = rows
        self.noted = {}

    def on_step_end(self, trainer, task):
        trainer.save_checkpoint(self.root / f"step{trainer.global_step}")
        self.noted[trainer.global_step] = (len(self.rows), len(task.ids))


def make_loader(settings):
    if settings.get("stream"):
        return DataLoader(Stream(), batch_size=2)
    options = {"batch_size": settings["batch"], "num_workers": settings.get("workers", 0)}
    data = Samples(noise=settings.get("noise", 0.1), own=settings.get("own", False))
    if settings.get("own"):
        data = Subset(data, range(SAMPLES))
    return DataLoader(data, shuffle=True, **options)


def train(settings, seed, root=None, ckpt_path=None, **flags):
    """Train; returns everything that a resumed run must have in common with the uninterrupted one."""
    treadle.seed_everything(seed)
    task = Task(settings)
    if settings.get("plain"):
        task.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    rows = Rows()
    saver = None if root is None else SaveEach(root, rows.rows)
    flags = {"max_epochs": EPOCHS, **settings.get("flags", {}), **flags}
    own = make_trainer(logger=rows, callbacks=saver, log_every_n_steps=1, **flags)
    validation = DataLoader(Samples(5, noise=0.0), batch_size=2)
    own.fit(task, make_loader(settings), None if settings.get("blind") else validation, ckpt_path=ckpt_path)
    state = own.accelerator.optimizers[0].state_dict()
    scaler = own.accelerator.scaler
    return {
        "weights": {name: value.tolist() for name, value in task.state_dict().items()},
        "optimizer": [
            (name, value.tolist() if isinstance(value, torch.Tensor) else value)
            for entry in state["state"].values()
            for name, value in entry.items()
        ],
        "groups": state["param_groups"],
        "scheduler": [scheduler.state_dict() for scheduler in own.accelerator.schedulers],
        "scale": None if scaler is None else scaler.get_scale(),
        "progress": {**own.progress.state_dict(), "seconds": 0.0},
        "metrics": {name: float(value) for name, value in own.callback_metrics.items()},
        "random": (torch.rand(2).tolist(), random.random(), np.random.rand()),
        "ids": task.ids,
        "losses": task.losses,
        "rows": rows.rows,
        "noted": None if saver is None else saver.noted,
    }


LISTS = ("ids", "losses", "rows", "noted")


def assert_same(resumed, whole, step):
    """`resumed` went on from `whole`'s checkpoint after `step`."""
    for name in whole:
        if name not in LISTS:
            assert resumed[name] == whole[name], (step, name)
    rows, batches = whole["noted"][step]
    assert resumed["ids"] == whole["ids"][batches:], step
    assert resumed["losses"] == whole["losses"][batches:], step
    assert resumed["rows"] == whole["rows"][rows:], step


SETTINGS = {
    "sgd": {"optimizer": "sgd", "schedule": "step", "batch": 2},
    "accumulated": {"optimizer": "adamw", "schedule": "epoch", "batch": 2, "flags": {"accumulate_grad_batches": 3}},
    "workers": {
        "optimizer": "adamw",
        "schedule": "cycle",
        "batch": 3,
        "workers": 2,
        "blind": True,
        "flags": {"max_epochs": 2, "accumulate_grad_batches": 2},
    },
    "plateau": {
        "optimizer": "sgd",
        "schedule": "plateau",
        "batch": 3,
        "own": True,
        "flags": {"precision": "bf16-mixed", "val_check_interval": 2},
    },
    "float16": {"optimizer": "adamw", "schedule": "step", "batch": 4, "flags": {"precision": "16-mixed"}},
    "stream": {"optimizer": "adamw", "schedule": "epoch", "batch": 2, "stream": True, "blind": True},
}


@pytest.mark.filterwarnings("ignore:the stream has no state", "ignore:.*nothing is validated", "ignore:.*lr_scheduler")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name in ("sgd", "accumulated") else ()) for name in SETTINGS],
)
def test_resume_from_any_step(tmp_path, name):
    settings = SETTINGS[name]
    whole = train(settings, seed=1, root=tmp_path)
    steps = sorted(whole["noted"])
    assert len(steps) >= 5
    per_epoch = len(steps) // settings.get("flags", {}).get("max_epochs", EPOCHS)
    few = {1, per_epoch, per_epoch + 2}
    if not settings.get("workers"):
        few |= {2, per_epoch - 1, per_epoch + 1, steps[-1]}
    for step in sorted(few):
        assert_same(train(settings, seed=step + 100, ckpt_path=tmp_path / f"step{step}"), whole, step)


def test_resumed_twice_and_saved_again(tmp_path):
    settings = SETTINGS["accumulated"]
    whole = train(settings, seed=1, root=tmp_path)
    for start, then in ((1, 2), (2, 5)):
        again = tmp_path / f"again{start}"
        train(settings, seed=7, root=again, ckpt_path=tmp_path / f"step{start}", max_steps=then)
        assert_same(train(settings, seed=8, ckpt_path=again / f"step{then}"), whole, then)


def test_a_limit_within_an_epoch_then_more(tmp_path):
    settings = SETTINGS["sgd"]
    whole = train(settings, seed=1, root=tmp_path / "whole")
    for limit in (3, 7, 10):  # 7 batches are an epoch
        treadle.seed_everything(1)
        task = Task(settings)
        own = make_trainer(logger=Rows(), max_epochs=EPOCHS, max_steps=limit, log_every_n_steps=1)
        own.fit(task, make_loader(settings), DataLoader(Samples(5, noise=0.0), batch_size=2))
        assert own.global_step == limit
        own.save_checkpoint(tmp_path / f"limit{limit}")  # after fit, where scripts do it
        resumed = train(settings, seed=5, ckpt_path=tmp_path / f"limit{limit}")
        assert resumed["weights"] == whole["weights"]
        assert resumed["random"] == whole["random"]
        assert task.ids + resumed["ids"] == whole["ids"]
        means = [row for row in resumed["rows"] if "loss_epoch" in row[1]]
        assert means == [row for row in whole["rows"] if "loss_epoch" in row[1]][-len(means) :]
        assert len(means) == EPOCHS - limit // 7


def test_more_epochs_for_a_finished_run(tmp_path):
    settings = SETTINGS["plateau"]
    whole = train(settings, seed=1)
    short = train(settings, seed=1, root=tmp_path, max_epochs=2)
    last = max(short["noted"])
    resumed = train(settings, seed=3, ckpt_path=tmp_path / f"step{last}")
    assert resumed["weights"] == whole["weights"]
    assert resumed["ids"] == whole["ids"][len(short["ids"]) :]
    # And one that is over already trains nothing more.
    over = train(settings, seed=3, ckpt_path=tmp_path / f"step{last}", max_epochs=2)
    assert over["ids"] == []
    assert over["weights"] == short["weights"]
    assert over["metrics"] == short["metrics"]


@pytest.mark.filterwarnings("ignore:.*nothing is validated")
def test_time_goes_on(tmp_path):
    settings = {**SETTINGS["sgd"], "blind": True}
    limit = {"milliseconds": 400}

    class Slow(treadle.Callback):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            time.sleep(0.03)

    def own(callbacks):
        return make_trainer(max_epochs=-1, max_time=limit, callbacks=callbacks)

    first = own([Slow(), SaveEach(tmp_path, [])])
    first.fit(Task(settings), make_loader(settings))
    last = first.global_step
    assert last >= 3
    second = own(Slow())
    second.fit(Task(settings), make_loader(settings), ckpt_path=tmp_path / f"step{last}")
    assert second.global_step <= last + 2  # its time was up


# Without anything random but the order, so that the number of processes makes no difference.
EXACT = {"optimizer": "sgd", "schedule": "step", "noise": 0.0, "plain": True, "blind": True}


def train_exactly(root, world, samples, steps=()):
    """A run of `samples` a step, or, for each of `steps`, the one that resumes behind it."""
    settings = {**EXACT, "batch": samples // world}
    if not steps:
        return train(settings, seed=1, root=root)
    return [train(settings, seed=9, ckpt_path=root / f"step{step}") for step in steps]


def save_and_resume(root, steps):
    """A run of two processes, and resumptions in them of a run of one."""
    return train_exactly(root / "two", 2, 4), train_exactly(root / "one", 2, 4, steps)


def whole_batches(ranks):
    """The ids of each global batch, and its mean loss, from what each process saw."""
    batches = []
    for parts in zip(*[zip(rank["ids"], rank["losses"], strict=True) for rank in ranks], strict=True):
        ids = [number for part, _ in parts for number in part]
        if len(ids) > len(set(ids)):  # a process without a share repeats a sample, with no weight
            ids, parts = parts[0][0], parts[:1]
        loss = sum(len(part) * value for part, value in parts) / sum(len(part) for part, _ in parts)
        batches.append((ids, loss))
    return batches


def check_resumed(ranks, reference, steps, per_epoch):
    """The batches are those of the uninterrupted run, and each sample of the epoch comes once."""
    for number, step in enumerate(steps):
        found = whole_batches([rank[number] for rank in ranks])
        assert [ids for ids, _ in found] == [ids for ids, _ in reference[step:]]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in reference[step:]], abs=1e-5)
        begun = [i for ids, _ in reference[per_epoch * (step // per_epoch) : step] for i in ids]
        rest = [i for ids, _ in found[: per_epoch - step % per_epoch] for i in ids]
        assert sorted(begun + rest) == list(range(SAMPLES))


@pytest.mark.filterwarnings("ignore:.*nothing is validated")
def test_another_number_of_processes(tmp_path):
    steps = (1, 2, 4, 6)  # 4 steps are an epoch
    reference = whole_batches([train_exactly(tmp_path / "one", 1, 4)])
    two, one_on_two = zip(*run(save_and_resume, 2, tmp_path, steps), strict=True)
    assert [ids for ids, _ in whole_batches(two)] == [ids for ids, _ in reference]
    check_resumed(one_on_two, reference, steps, 4)
    check_resumed([train_exactly(tmp_path / "two", 1, 4, steps)], reference, steps, 4)


@pytest.mark.exhaustive
@pytest.mark.guarantee
@pytest.mark.filterwarnings("ignore:.*nothing is validated")
def test_three_processes_then_two(tmp_path):
    steps = (1, 2, 3, 5)  # 3 steps are an epoch, whose last one has a single sample
    reference = whole_batches([train_exactly(tmp_path / "one", 1, 6)])
    three = whole_batches(run(train_exactly, 3, tmp_path / "three", 3, 6))
    assert [ids for ids, _ in three] == [ids for ids, _ in reference]
    check_resumed(run(train_exactly, 2, tmp_path / "three", 2, 6, steps), reference, steps, 3)


class OwnBatches(BatchSampler):
    """Of a user's own."""


class Follows(SGDTask):
    """Notes its batches and validations."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.tolist())
        return self.net(torch.ones(1, 1)).mean()

    def validation_step(self, batch, batch_idx):
        self.seen.append("validated")


def batches_of_ones_own(root, first):
    """Ten batches of two, saved after three; then the rest of them."""
    found = []
    for kind in ("list", "batches"):
        numbers = torch.arange(20)
        sampler = OwnBatches(torch.utils.data.SequentialSampler(numbers), 2, False)
        loader = list(numbers.split(2)) if kind == "list" else DataLoader(numbers, batch_sampler=sampler)
        own = make_trainer(max_epochs=1, max_steps=3 if first else -1)
        task = Follows()
        own.fit(task, loader, [torch.zeros(1)] * 2, ckpt_path=None if first else root / kind)
        if first:
            own.save_checkpoint(root / kind)
        found.append(task.seen)
    return found


def test_batches_of_ones_own_on_another_number_of_processes(tmp_path):
    batches_of_ones_own(tmp_path, True)
    for kinds in zip(*run(batches_of_ones_own, 2, tmp_path, False), strict=True):
        for rank, seen in enumerate(kinds):
            assert seen[4:] == ["validated"]
            firsts = [3 + rank, 5 + rank, 7 + rank]  # of the ten batches
            assert seen[:3] == [[2 * number, 2 * number + 1] for number in firsts]


def test_a_generator_for_the_validation_loader_comes_later(tmp_path):
    def fit(seed, **flags):
        treadle.seed_everything(1)
        own, task = make_trainer(**flags), Task(SETTINGS["sgd"])
        generator = torch.Generator().manual_seed(seed) if seed else None
        validation = DataLoader(Samples(6), batch_size=2, shuffle=True, generator=generator)
        own.fit(task, make_loader(SETTINGS["sgd"]), validation, ckpt_path=flags.get("max_epochs") and tmp_path / "ckpt")
        return own, task.losses

    own, _ = fit(None, max_steps=4)
    own.save_checkpoint(tmp_path / "ckpt")
    assert fit(5, max_epochs=1)[1] == fit(None, max_epochs=1)[1]


def test_a_generator_for_the_training_loader_is_refused_before_anything_is_loaded(tmp_path):
    def prepare(generator):
        accelerator, net = treadle.Accelerator(cpu=True), nn.Linear(2, 2)
        loader = DataLoader(range(6), shuffle=True, generator=generator)
        accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
        return accelerator, net

    prepare(None)[0].save_state(tmp_path / "ckpt")
    accelerator, net = prepare(torch.Generator())
    before = net.weight.detach().clone()
    with pytest.raises(ValueError, match="has 1 generator, but the checkpoint has 0"):
        accelerator.load_state(tmp_path / "ckpt")
    assert torch.equal(net.weight, before)


def saves_in(hook, path, epoch):
    """A callback that saves the first time that a hook runs in an epoch of training."""

    def save(trainer, task, *arguments):
        if trainer.current_epoch == epoch and not trainer.sanity_checking and not path.exists():
            trainer.save_checkpoint(path)

    saver = treadle.Callback()
    saver.after_task = 2  # as a ModelCheckpoint
    setattr(saver, hook, save)
    return saver


class Measured(SGDTask):
    """Metric objects of every habit: logged, logged in validation, and computed and reset by hand."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.trained, self.validated = MeanMetric(), SumMetric()
        self.by_hand = SumMetric()
        self.lasting = SumMetric()

    def training_step(self, batch, batch_idx):
        self.trained.update(batch)
        self.by_hand.update(batch)
        self.lasting.update(batch)
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        return self.net(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.validated.update(batch)
        self.log("validated", self.validated)

    def on_train_epoch_end(self):
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()
        self.log("lasting", self.lasting.compute())


@pytest.mark.parametrize("hook", ["on_step_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end"])
def test_metric_objects_begin_the_next_epoch_as_they_would_have(tmp_path, hook):
    data = [torch.tensor([[float(number)]]) for number in range(5)]
    rows = []
    for path in (None, tmp_path / "ckpt"):
        kept = Rows()
        saver = None if path else saves_in(hook, tmp_path / "ckpt", 1)
        own = make_trainer(max_epochs=4, callbacks=saver, logger=kept)
        own.fit(Measured(), data, data, ckpt_path=path)
        rows.append(kept.rows)
    whole, resumed = ([row for row in each if row[1]["epoch"] > 1] for each in rows)
    assert resumed == whole
    assert [row["lasting"] for _, row in rows[0] if "lasting" in row] == [10.0, 20.0, 30.0, 40.0]
    assert [row["validated"] for _, row in whole if "validated" in row] == [10.0, 10.0]


def test_a_metric_object_that_nobody_holds(tmp_path):
    metric = MeanMetric()

    class Hidden(Measured):
        def training_step(self, batch, batch_idx):
            metric.update(batch)
            self.log("hidden", metric, on_step=False, on_epoch=True)
            return self.net(batch).mean()

        def on_train_epoch_end(self):
            pass

    saver = saves_in("on_step_end", tmp_path / "ckpt", 0)
    own = make_trainer(max_epochs=1, callbacks=saver, limit_val_batches=0)
    with pytest.warns(
        UserWarning, match="'hidden' was logged as a MeanMetric whose state is not saved .* attribute of Hidden"
    ):
        own.fit(Hidden(), [torch.ones(1, 1)] * 2)
