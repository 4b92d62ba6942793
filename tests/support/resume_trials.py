"""Random trainings for the resume trials: a seed draws the set-up, `train` runs it and says everything it came to.

What is compared is compared to the bit; nothing here knows how a checkpoint is made or what is in it.
"""

import copy
import itertools
import random
import shutil

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, Subset, WeightedRandomSampler
from treadle.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint

import treadle
from support.callback_runs import Rows
from support.differences import differences, whole
from support.models import Count
from support.trainers import make_trainer


class Interrupted(Exception):
    """The run ends here, as by a crash."""


# -- the set-up ------------------------------------------------------------------------------------------------------


def draw(seed, door=None, processes=1):
    """The set-up of one trial, by name. Plain numbers and names, so that a failure can show it."""
    rng = random.Random(seed)
    pick = rng.choice

    def chance(share):
        return rng.random() < share

    data = pick(("map",) * 6 + ("stateful", "stream", "list"))
    own = {
        "seed": seed,
        "door": door or pick(("trainer",) * 3 + ("loop",)),
        "processes": processes,
        "data": data,
        "size": rng.randint(5, 17) * processes,
        "batch": rng.randint(1, 4),
        "drop_last": chance(0.2),
        "noise": [kind for kind in ("torch", "numpy", "python") if chance(0.5)],
        "order": pick(("shuffle",) * 3 + ("plain", "weighted", "lazy", "lazy-own", "batches", "generator")),
        "workers": 2 if data != "list" and data != "stateful" and chance(0.07) else 0,
        "persistent": chance(0.5),
        "subclass": chance(0.2),
        "layers": [kind for kind in ("dropout", "batchnorm", "centre") if chance(0.6)],
        "optimizer": pick(("sgd", "nesterov", "adamw", "amsgrad", "adagrad", "rmsprop", "nadam", "adamax")),
        "two_groups": chance(0.4),
        "schedule": pick((None, "step", "multi", "epoch", "cycle", "restarts", "warmup", "cyclic", "plateau")),
        "frequency": pick((1, 1, 2)),
        "precision": pick(("32-true",) * 3 + ("64-true", "bf16-mixed", "16-mixed", "16-mixed", "bf16-true")),
        "accumulate": pick((1, 1, 2, 3, 4)),
        "clip": pick((None, None, ("norm", 0.5), ("value", 0.1))),
        "validation": pick((0, 1, 1, 2)),
        "val_every": pick((None, None, 2, 3, 0.5)),
        "val_epochs": pick((1, 1, 2)),
        "val_shuffle": chance(0.3),
        "limit": pick((None, None, 0.6, 3)),
        "draws": chance(0.5),
        "metrics": chance(0.6),
        "epochs": rng.randint(2, 3),
        "every": pick((1, 1, 2, 3)),
        "early": chance(0.3),
        "keeper": pick((None, None, "best", "steps", "last")),
        "rates": chance(0.3),
        "deterministic": chance(0.2),
        "strategy": pick(("ddp", "fsdp")) if processes > 1 else "auto",
        "start": rng.randrange(1000),
    }
    own["resumes"] = [sorted(rng.random() for _ in range(pick((1, 1, 2, 3)))) for _ in range(2)]
    own["sampler"] = pick((None, "around", "counts"))
    own["own"] = chance(0.3)
    return _possible(own)


def _possible(own):
    """Without what torch or the flags rule out together."""
    if own["data"] != "map":
        own["order"] = "plain"
        own["drop_last"] = own["drop_last"] and own["data"] == "stream"  # one that knows where it is may be at its end
        if own["limit"] == 0.6:
            own["limit"] = 3
        if own["val_every"] == 0.5:
            own["val_every"] = 2
        if own["data"] == "stateful" and own["limit"] and own["size"] % (own["limit"] * own["batch"]) == 0:
            own["limit"] = None  # it would be left just before its end, and the next epoch have nothing
    if own["door"] == "loop" and own["precision"] == "bf16-true":
        own["precision"] = "bf16-mixed"
    if not own["validation"]:
        own["val_every"] = None
        if own["door"] == "trainer" and own["schedule"] == "plateau":
            own["schedule"] = "epoch"
    if isinstance(own["val_every"], int):
        own["val_epochs"] = None  # counted across epochs, so it may be more than an epoch has
    if own["processes"] > 1 and own["strategy"] == "fsdp":
        own["precision"] = "32-true"
    if own["processes"] > 1:
        own["keeper"] = None
        own["layers"] = [kind for kind in own["layers"] if kind != "batchnorm"]  # a share of one would not train it
    own["noise"] = own["noise"] if own["data"] != "list" else []
    own["own"] = own["own"] and own["data"] != "list" and not own["workers"]
    return own


class Samples(Dataset):
    """(number, features, target); the features differ each time they are read."""

    def __init__(self, size, noise, own=False):
        self.noise = noise
        self.rngs = [np.random.default_rng(7), random.Random(3), np.random.RandomState(2)] if own else []
        self.generator = torch.Generator().manual_seed(4) if own else None
        self.x = torch.randn(size, 4, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        own = sum(0.1 * float(rng.random()) for rng in self.rngs)
        if self.generator is not None:
            own += 0.1 * torch.rand(4, generator=self.generator)
        return index, self.x[index] + 0.1 * sum(NOISE[kind]() for kind in self.noise) + own, self.x[index].sum()


NOISE = {"torch": lambda: torch.rand(4), "numpy": np.random.rand, "python": random.random}


class Stream(IterableDataset):
    """Only goes forward; its workers take turns."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return (self.samples[index] for index in range(first, len(self.samples), step))


class Stateful(IterableDataset):
    """Knows where it is, and has another order in each epoch."""

    def __init__(self, samples):
        self.samples, self.epoch, self.position = samples, 0, 0

    def __iter__(self):
        order = list(range(len(self.samples)))
        random.Random(self.epoch).shuffle(order)
        while self.position < len(order):
            self.position += 1
            yield self.samples[order[self.position - 1]]
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


class Lazy(Sampler):
    """Draws each index when it is asked for: from the process, or from a generator of its own."""

    def __init__(self, size, generator=None):
        self.size, self.generator = size, generator

    def __len__(self):
        return self.size

    def __iter__(self):
        left = list(range(self.size))
        while left:
            high = len(left)
            drawn = self.generator.integers(high) if self.generator is not None else random.randrange(high)
            yield left.pop(int(drawn))


class Around(Sampler):
    """Hands on what a sampler with a generator of its own yields."""

    def __init__(self, size):
        self.inner = RandomSampler(range(size), generator=torch.Generator().manual_seed(6))

    def __len__(self):
        return len(self.inner)

    def __iter__(self):
        return iter(self.inner)


class Counts(Sampler):
    """Another order in each epoch, which it counts."""

    def __init__(self, size):
        self.size, self.begun = size, 0

    def __len__(self):
        return self.size

    def __iter__(self):
        self.begun += 1
        return iter(random.Random(self.begun).sample(range(self.size), self.size))

    def state_dict(self):
        return {"begun": self.begun}

    def load_state_dict(self, state):
        self.begun = state["begun"]


class Uneven(Sampler):
    """Batches of one, two and three samples in turn."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        order = iter(torch.randperm(self.size).tolist())
        for width in itertools.cycle((1, 2, 3)):
            if not (batch := list(itertools.islice(order, width))):
                return
            yield batch

    def __len__(self):
        return next(n for n in itertools.count() if sum(itertools.islice(itertools.cycle((1, 2, 3)), n)) >= self.size)


class Halved(DataLoader):
    """A loader of one's own, which works on each batch."""

    def __iter__(self):
        for number, x, y in super().__iter__():
            yield number, 0.5 * x, y


def make_loader(own):
    samples = Samples(own["size"], own["noise"], own["own"])
    if own["own"]:
        samples = Subset(samples, range(own["size"]))
    if own["data"] == "list":
        return list(DataLoader(samples, own["batch"]))
    options = {"num_workers": own["workers"], "persistent_workers": bool(own["workers"]) and own["persistent"]}
    kind = Halved if own["subclass"] else DataLoader
    if own["data"] != "map":
        data = (Stream if own["data"] == "stream" else Stateful)(samples)
        return kind(data, batch_size=own["batch"], drop_last=own["drop_last"], **options)
    if own["order"] == "batches":
        return kind(samples, batch_sampler=Uneven(own["size"]), **options)
    options |= {"batch_size": own["batch"], "drop_last": own["drop_last"] and own["size"] >= 2 * own["batch"]}
    if own["order"] == "weighted":
        weights = torch.arange(1.0, own["size"] + 1)
        generator = torch.Generator().manual_seed(9) if own["seed"] % 2 else None
        return kind(samples, sampler=WeightedRandomSampler(weights, own["size"], generator=generator), **options)
    if own["order"].startswith("lazy"):
        if own["sampler"] is not None:
            return kind(samples, sampler={"around": Around, "counts": Counts}[own["sampler"]](own["size"]), **options)
        generator = np.random.default_rng(3) if own["order"] == "lazy-own" else None
        return kind(samples, sampler=Lazy(own["size"], generator), **options)
    generator = torch.Generator().manual_seed(5) if own["order"] == "generator" else None
    return kind(samples, shuffle=own["order"] != "plain", generator=generator, **options)


def make_validation(own):
    sizes = (5 * own["processes"], 4 * own["processes"])[: own["validation"]]
    return [DataLoader(Samples(size, []), batch_size=2, shuffle=own["val_shuffle"]) for size in sizes]


class Centre(nn.Module):
    """A buffer that follows the data."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
        return x - self.mean


class Norm(nn.BatchNorm1d):
    """Batch norm that lets a batch of one pass."""

    def forward(self, x):
        return super().forward(x) if len(x) > 1 or not self.training else x


class Counter(Count):
    """A metric object of the user's own, without torchmetrics."""

    def update(self, number):
        self.value += number

    def compute(self):
        return self.value

    def reset(self):
        self.value = 0


def make_net(own):
    layers = {"dropout": nn.Dropout(0.3), "batchnorm": Norm(6), "centre": Centre()}
    return nn.Sequential(nn.Linear(4, 6), *(layers[name] for name in own["layers"]), nn.Tanh(), nn.Linear(6, 1))


def make_optimizer(own, net):
    parameters = list(net.parameters())
    groups = [{"params": parameters}]
    if own["two_groups"]:
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.01, "weight_decay": 0.1}]
    return {
        "sgd": lambda: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
        "nesterov": lambda: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        "adamw": lambda: torch.optim.AdamW(groups, lr=0.02),
        "amsgrad": lambda: torch.optim.Adam(groups, lr=0.02, amsgrad=True),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=0.05),
        "rmsprop": lambda: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
        "nadam": lambda: torch.optim.NAdam(groups, lr=0.02),
        "adamax": lambda: torch.optim.Adamax(groups, lr=0.02),
    }[own["optimizer"]]()


def make_warmup(optimizer):
    parts = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)
    return lr_scheduler.SequentialLR(optimizer, list(parts), [3])


def make_scheduler(own, optimizer):
    """A scheduler and its interval, or (None, "")."""
    momentum = "momentum" in optimizer.param_groups[0] or "betas" in optimizer.param_groups[0]
    return {
        None: lambda: (None, ""),
        "step": lambda: (lr_scheduler.StepLR(optimizer, 2, gamma=0.8), "step"),
        "multi": lambda: (lr_scheduler.MultiStepLR(optimizer, [2, 3, 3, 7], gamma=0.7), "step"),
        "epoch": lambda: (lr_scheduler.CosineAnnealingLR(optimizer, 4), "epoch"),
        "cycle": lambda: (lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=200, cycle_momentum=momentum), "step"),
        "restarts": lambda: (lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2), "step"),
        "warmup": lambda: (make_warmup(optimizer), "step"),
        "cyclic": lambda: (lr_scheduler.CyclicLR(optimizer, 0.001, 0.1, 3, cycle_momentum=False), "step"),
        "plateau": lambda: (lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7), "epoch"),
    }[own["schedule"]]()


# -- the Trainer's door ----------------------------------------------------------------------------------------------


class Task(treadle.TaskModule):
    def __init__(self, own):
        super().__init__()
        self.own = own
        self.net = make_net(own)
        self.ids, self.losses = [], []
        if own["metrics"]:
            self.add_metrics()

    def add_metrics(self):
        self.counted = Counter()
        self.means = nn.ModuleDict({"mean": torchmetrics.MeanMetric(), "most": torchmetrics.MaxMetric()})
        self.ranks = torchmetrics.SpearmanCorrCoef()
        squared = torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError(squared=False)  # one counts for both
        errors = {"squared": squared[0], "root": squared[1], "absolute": torchmetrics.MeanAbsoluteError()}
        self.by_hand = torchmetrics.MetricCollection(errors)
        self.lasting = torchmetrics.SumMetric()
        self.on_val = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        number, x, y = batch
        x = x.to(self.net[0].weight.dtype)
        if self.own["draws"]:
            x = x + 0.01 * (torch.rand(()) + random.random() + np.random.rand()).to(x.dtype)
        found = self.net(x).squeeze(1)
        loss = nn.functional.mse_loss(found.float(), y.float())
        if self.own["precision"] == "16-mixed":
            loss = loss * 500.0  # some of the first steps overflow
        self.ids.append(number.tolist())
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("highest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        if self.own["metrics"]:
            self._measure(found.detach().float(), y.float(), len(number))
        return loss

    def _measure(self, found, y, count):
        if self.own["processes"] == 1:
            self.means["mean"](found.mean())
            self.log("mean", self.means["mean"], on_step=True, on_epoch=True)
        self.means["most"].update(found)
        self.log("most", self.means["most"], on_step=False, on_epoch=True)
        self.ranks.update(found, y)
        self.log("ranks", self.ranks, on_step=False, on_epoch=True)
        self.by_hand.update(found, y)
        self.lasting.update(found)
        self.counted.update(count)
        self.log("counted", self.counted, on_step=False, on_epoch=True)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        _, x, y = batch
        loss = nn.functional.mse_loss(self.net(x.to(self.net[0].weight.dtype)).squeeze(1).float(), y.float())
        self.log("val", loss, add_dataloader_idx=self.own["validation"] > 1)
        if self.own["metrics"] and not dataloader_idx:
            self.on_val.update(loss)
            self.log("on_val", self.on_val, add_dataloader_idx=False)

    def on_train_epoch_start(self):
        if self.own.get("hooks_draw", True):
            torch.rand(1)
        self.log("epoch_start", float(self.current_epoch))

    def on_train_epoch_end(self):
        if self.own["metrics"]:
            self.log_dict({name: value.float() for name, value in self.by_hand.compute().items()})
            self.by_hand.reset()
            self.log("lasting", self.lasting.compute())

    def configure_optimizers(self):
        optimizer = make_optimizer(self.own, self.net)
        scheduler, interval = make_scheduler(self.own, optimizer)
        if scheduler is None:
            return optimizer
        monitor = "val" if self.own["validation"] == 1 else "val/dataloader_idx_0"
        config = {"scheduler": scheduler, "interval": interval, "monitor": monitor, "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config | {"frequency": self.own["frequency"]}}


class SaveEach(treadle.Callback):
    """Saves after every step, and notes what there was by then; may end the run after one of them."""

    after_task = 9  # after the ModelCheckpoint, whose turn at this step is over then

    def __init__(self, root, first=0, until=None, folder=None):
        self.root, self.count, self.until, self.folder = root, first, until, folder
        self.noted = {}

    def on_step_end(self, trainer, task):
        self.count += 1
        self.save(trainer, task, self.count)
        if self.count == self.until:
            raise Interrupted

    def save(self, trainer, task, count):
        if self.until in (None, count):
            trainer.save_checkpoint(self.root / str(count))
            if self.folder is not None and self.folder.exists() and trainer.is_global_zero:
                shutil.copytree(self.folder, self.root / f"folder{count}")
        self.noted[count] = (len(task.ids), len(trainer.logger.rows))


def with_trainer(own, seed, folder, saver=None, ckpt_path=None, after=None, **flags):
    """The outcome of a run; `after` is called with the Trainer once it has ended."""
    treadle.seed_everything(seed)
    task, rows, loader = Task(own), Rows(), make_loader(own)
    callbacks = [LearningRateMonitor()] if own["rates"] else []
    if own["early"]:
        callbacks.append(EarlyStopping("highest", patience=1, check_on_train_epoch_end=True))
    if own["keeper"]:
        options = {
            "best": {"monitor": "highest", "save_top_k": 2},
            "steps": {"every_n_train_steps": 2, "save_top_k": -1},
            "last": {"save_last": True},
        }[own["keeper"]]
        callbacks.append(ModelCheckpoint(dirpath=folder, **options))
    own_trainer = make_trainer(
        strategy=own["strategy"],
        precision=own["precision"],
        logger=rows,
        callbacks=[*callbacks, *([saver] if saver else [])],
        enable_checkpointing=bool(own["keeper"]),
        max_epochs=own["epochs"],
        accumulate_grad_batches=own["accumulate"],
        gradient_clip_val=own["clip"] and own["clip"][1],
        gradient_clip_algorithm=own["clip"] and own["clip"][0],
        limit_train_batches=own["limit"],
        val_check_interval=own["val_every"],
        check_val_every_n_epoch=own["val_epochs"],
        log_every_n_steps=own["every"],
        deterministic=own["deterministic"] or None,
        **flags,
    )
    try:
        own_trainer.fit(task, loader, make_validation(own) or None, ckpt_path=ckpt_path)
        if after is not None:
            after(own_trainer)
    except Interrupted:
        return {"ids": task.ids, "losses": task.losses, "rows": rows.rows}
    finally:
        close(own_trainer.accelerator)
    progress = own_trainer.progress.state_dict()
    return {
        **_common(own_trainer.accelerator, task, loader),
        "progress": {name: value for name, value in progress.items() if name != "seconds"},
        "metrics": {name: float(value) for name, value in own_trainer.callback_metrics.items()},
        "bar": dict(own_trainer.progress_bar_metrics),
        "callbacks": [c.state_dict() for c in callbacks if not isinstance(c, LearningRateMonitor)],
        "files": sorted(str(path.relative_to(folder)) for path in folder.glob("*")),
        "lasting": task.lasting.metric_state if own["metrics"] else None,
        "ids": task.ids,
        "losses": task.losses,
        "rows": rows.rows,
    }


def close(accelerator):
    for loader in accelerator.loaders:
        loader.close()


def _common(accelerator, model, loader):
    if (loss_scale := accelerator.accumulation.loss_scale) is not None:
        loss_scale.update_scale()  # the last step's verdict, which the next step or a save would read
    state = accelerator.optimizers[0].state_dict()
    order = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    generators = filter(None, (getattr(loader, "generator", None), getattr(order[0], "generator", None)))
    return {
        "weights": {name: copy.deepcopy(whole(value)) for name, value in model.state_dict().items()},
        "optimizer": {
            key: {n: copy.deepcopy(whole(v)) for n, v in entry.items()} for key, entry in state["state"].items()
        },
        "groups": state["param_groups"],
        "schedulers": [_plain(scheduler.state_dict()) for scheduler in accelerator.schedulers],
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "stream": accelerator.stream.get_state(),
        "generators": [g.get_state() if isinstance(g, torch.Generator) else g.bit_generator.state for g in generators],
    }


def _plain(state):
    """A scheduler's state without what is no data (functions, other schedulers' objects)."""
    return {name: value for name, value in state.items() if not callable(value) and name != "_schedulers"}


# -- a loop of one's own ---------------------------------------------------------------------------------------------


def with_loop(own, seed, folder, saver=None, ckpt_path=None):
    treadle.seed_everything(seed)
    precision = {"bf16-mixed": "bf16", "16-mixed": "fp16"}.get(own["precision"], "no")
    options = {"gradient_accumulation_steps": own["accumulate"], "mixed_precision": precision}
    accelerator = treadle.Accelerator(cpu=True, **options)
    net = make_net(own).to(torch.float64 if own["precision"] == "64-true" else torch.float32)
    plain, optimizer = make_loader(own), make_optimizer(own, net)
    scheduler, interval = make_scheduler(own, optimizer)
    model, optimizer = accelerator.prepare(net, optimizer)
    loader = accelerator.prepare_data_loader(plain)
    validation = [accelerator.prepare_data_loader(each, evaluation=True) for each in make_validation(own)]
    if scheduler is not None:
        scheduler = accelerator.prepare(scheduler)
    worst = Count(0.0)  # what a loop of one's own keeps beside the rest
    accelerator.register_for_checkpointing(worst=worst)
    if ckpt_path is not None:
        accelerator.load_state(ckpt_path, finish_epoch=False)  # what follows the last batch is still to do
    ids, losses, rows = [], [], []

    def save(count):
        if saver.until in (None, count):
            accelerator.save_state(saver.root / str(count))
        saver.noted[count] = (len(ids), len(rows))

    while loader.epoch < own["epochs"]:
        model.train()
        epoch = loader.epoch
        for number, x, y in loader:
            with accelerator.accumulate(model):
                x = x.to(net[0].weight.dtype)
                if own["draws"]:
                    x = x + 0.01 * (torch.rand(()) + random.random() + np.random.rand()).to(x.dtype)
                loss = nn.functional.mse_loss(model(x).squeeze(1).float(), y.float())
                loss = loss * 500.0 if precision == "fp16" else loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and own["clip"]:
                    kind, limit = own["clip"]
                    getattr(accelerator, f"clip_grad_{kind}_")(model.parameters(), limit)
                optimizer.step()
                if scheduler is not None and interval == "step":
                    scheduler.step()
                optimizer.zero_grad()
            ids.append(number.tolist())
            losses.append(loss.item())
            # What is registered is rank zero's, so it has to be the same on all.
            worst.value = max(worst.value, float(accelerator.gather(loss.detach().reshape(1)).max()))
            if accelerator.sync_gradients and saver is not None:
                saver.count += 1
                save(saver.count)
                if saver.count == saver.until:
                    close(accelerator)
                    return {"ids": ids, "losses": losses, "rows": rows}
        model.eval()
        for each in validation:
            with torch.no_grad():
                rows.append((epoch, [float(model(x.to(net[0].weight.dtype)).sum()) for _, x, _ in each]))
        if scheduler is not None and interval == "epoch":
            scheduler.step(*([worst.value] if own["schedule"] == "plateau" else []))
    found = _common(accelerator, net, plain)
    close(accelerator)
    return {**found, "worst": worst.value, "ids": ids, "losses": losses, "rows": rows}


# -- comparing -------------------------------------------------------------------------------------------------------


def trial(seed, root, door=None, processes=1):
    """One set-up: trained whole, then resumed in two chains from random steps. Returns what differs."""
    own = draw(seed, door, processes)
    train = with_trainer if own["door"] == "trainer" else with_loop

    folder = root / "kept"
    saver = SaveEach(root / "whole", folder=folder if own["keeper"] else None)
    whole = train(own, own["start"], folder, saver)
    found = [f"the epoch's samples: {text}" for text in _not_once(own, whole["ids"])] if processes == 1 else []
    for number, shares in enumerate(own["resumes"]):
        steps = sorted({min(saver.count - 1, 1 + int(share * saver.count)) or 1 for share in shares})
        path, begun = saver.root / str(steps[0]), saver.noted[steps[0]]
        _put_back(folder, saver.root / f"folder{steps[0]}")
        for at, step in enumerate(steps):
            then = steps[at + 1] if at + 1 < len(steps) else None
            again = None if then is None else SaveEach(root / f"again{number}", step, then, saver.folder)
            part = train(own, own["start"] + 7 * step + number, folder, again, path)
            upto = (len(whole["ids"]), len(whole["rows"])) if then is None else saver.noted[then]
            wanted = {} if then is not None else dict(whole)
            wanted |= {name: whole[name][begun[0] : upto[0]] for name in ("ids", "losses")}
            wanted |= {"rows": whole["rows"][begun[1] : upto[1]]}
            part = {name: part[name] for name in wanted}
            place = f"steps {steps} of {saver.count}, resumed at {step}"
            found += [f"{place}: {difference}"[:300] for difference in differences(part, wanted)]
            if then is not None:
                path, begun = again.root / str(then), upto
                _put_back(folder, again.root / f"folder{then}")
    return own, found, len(own["resumes"])


def _put_back(folder, kept):
    shutil.rmtree(folder, ignore_errors=True)
    if kept.exists():
        shutil.copytree(kept, folder)


def _not_once(own, ids):
    """Where an epoch does not hold every sample once, though it should."""
    if own["order"] == "weighted" or own["limit"] is not None or own["drop_last"]:
        return []
    flat = [number for batch in ids for number in batch]
    epochs = [flat[start : start + own["size"]] for start in range(0, len(flat), own["size"])]
    return [str(epoch) for epoch in epochs if sorted(epoch) != list(range(own["size"]))]
