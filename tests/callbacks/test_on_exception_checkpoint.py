"""`ModelCheckpoint(save_on_exception=True)`: what a failing run leaves behind goes on as if it had never failed."""

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from support.callback_runs import Tiny, fit
from support.processes import run
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from treadle.callbacks import (
    Callback,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from treadle.engine.checkpoint import store

import treadle

PLACES = ("forward", "backward", "batch_end", "step_end", "validation", "epoch_end", "epoch_start")


class Samples(Dataset):
    """The features differ each time they are read."""

    def __len__(self):
        return 13

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.rand(4)
        return (x + 0.1 * random.random() + 0.1 * np.random.rand()).float(), torch.tensor([float(index)])


class Task(treadle.TaskModule):
    """Has everything that moves between two steps."""

    def __init__(self, schedule="epoch", norm=True):
        super().__init__()
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.net = nn.Sequential(nn.Linear(4, 6), middle, nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 1))
        self.schedule = schedule
        self.register_buffer("seen", torch.zeros(()))
        self.order = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen += len(x)
        self.order.append(y.flatten().tolist())
        loss = nn.functional.mse_loss(self.net(x), y / 10)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1] / 10))

    def on_train_epoch_start(self):
        torch.rand(1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule}}


class Fails(Callback):
    """Raises once, at a place, when so many steps are done."""

    def __init__(self, place, step, error=RuntimeError):
        self.place = place
        self.step = step
        self.error = error

    def _at(self, place, trainer):
        if self.place == place and trainer.global_step == self.step and not trainer.sanity_checking:
            raise self.error(f"planned: {place} {self.step}")

    def on_train_batch_start(self, trainer, task, batch, index):
        if index % 2:  # the group's second: the first has drawn, and moved the buffers
            self._at("forward", trainer)

    def on_after_backward(self, trainer, task):
        self._at("backward", trainer)

    def on_train_batch_end(self, trainer, *_):
        self._at("batch_end", trainer)

    def on_step_end(self, trainer, task):
        self._at("step_end", trainer)

    def on_validation_batch_start(self, trainer, task, batch, index, number=0):
        self._at("validation", trainer)

    def on_train_epoch_end(self, trainer, task):
        self._at("epoch_end", trainer)

    def on_train_epoch_start(self, trainer, task):
        self._at("epoch_start", trainer)


def saver(root, **more):
    return ModelCheckpoint(root / "c", every_n_epochs=0, save_on_exception=True, **more)


def made(root, *callbacks, **flags):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    defaults = {"max_epochs": 3, "accelerator": "cpu", "accumulate_grad_batches": 2, "default_root_dir": root}
    callbacks = [EarlyStopping("val", patience=9), *callbacks]
    return treadle.Trainer(**{**defaults, **quiet, **flags}, callbacks=callbacks)


def loaders():
    validation = TensorDataset(torch.randn(5, 4, generator=torch.Generator().manual_seed(5)), torch.zeros(5, 1))
    return DataLoader(Samples(), batch_size=3, shuffle=True, drop_last=True), DataLoader(validation, batch_size=2)


def facts(trainer, task):
    state = trainer.accelerator.optimizers[0].state_dict()
    return {
        "weights": {name: value.tolist() for name, value in task.state_dict().items()},
        "optimizer": [v.tolist() for slot in state["state"].values() for v in slot.values()],
        "rate": state["param_groups"][0]["lr"],
        "progress": {**trainer.progress.state_dict(), "seconds": 0.0},
        "values": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "random": (torch.rand(2).tolist(), random.random(), np.random.rand()),
        "stopping": trainer.early_stopping_callback.state_dict(),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the run that never failed comes to, and its samples."""
    treadle.seed_everything(1)
    root = tmp_path_factory.mktemp("whole")
    task, own = Task(), made(root, saver(root))
    own.fit(task, *loaders())
    assert not (root / "c").exists() or not list((root / "c").iterdir())
    return facts(own, task), task.order


# 4 batches of an epoch make 2 steps; 6 steps in all.
@pytest.mark.parametrize("step", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_goes_on_as_if_it_had_never_failed(tmp_path, whole, place, step):
    within = step == 3
    if within and place in ("validation", "epoch_end", "epoch_start"):
        step = 4
    expected, order = whole
    treadle.seed_everything(1)
    task, fails = Task(), Fails(place, step)
    with pytest.raises(RuntimeError, match="planned") as caught:
        made(tmp_path, fails, saver(tmp_path)).fit(task, *loaders())
    batch = ["the batch: [Te"] if place in ("forward", "backward", "batch_end", "validation") else []
    assert [note[:14] for note in caught.value.__notes__] == ["in fit, epoch ", *batch]
    path = next((tmp_path / "c").iterdir(), None)
    if place == "step_end" and within:  # what other callbacks have done in it is not known
        assert path is None
        return
    assert store.read_manifest(path).step == step
    treadle.seed_everything(99)
    again = Task()
    own = made(tmp_path, saver(tmp_path))
    own.fit(again, *loaders(), ckpt_path="last")
    assert facts(own, again) == expected
    assert again.order == order[2 * step :]


@pytest.mark.parametrize("step", [2, *(pytest.param(step, marks=pytest.mark.exhaustive) for step in (4, 6))])
def test_a_validation_that_failed_is_made_up_for_before_the_next_step(tmp_path, step):
    flags = {"accumulate_grad_batches": 1, "val_check_interval": 2, "max_epochs": 2}
    validated = []

    class Notes(Callback):
        def on_validation_end(self, trainer, task):
            if not trainer.sanity_checking:
                validated.append(trainer.global_step)

    def train(root, *callbacks, ckpt_path=None):
        treadle.seed_everything(1 if ckpt_path is None else 7)
        task, own = Task(), made(root, *callbacks, Notes(), saver(tmp_path), **flags)
        own.fit(task, *loaders(), ckpt_path=ckpt_path)
        return facts(own, task)

    expected = train(tmp_path)
    assert validated == [2, 4, 6, 8]
    with pytest.raises(RuntimeError):
        train(tmp_path, Fails("validation", step))
    validated.clear()
    found = train(tmp_path, ckpt_path="last")
    assert validated == [2, 4, 6, 8][step // 2 - 1 :]
    assert found == expected


@pytest.mark.parametrize(
    "flags",
    [
        {},
        pytest.param({"precision": "16-mixed"}, marks=pytest.mark.exhaustive),
        pytest.param({"accumulate_grad_batches": 1}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_ctrl_c(tmp_path, flags):
    """The optimizer, the loss scale and the learning rates as well."""

    def train(root, *callbacks, ckpt_path=None):
        treadle.seed_everything(1 if ckpt_path is None else 7)
        task, own = Task("step"), made(root, *callbacks, saver(tmp_path), **flags)
        own.fit(task, *loaders(), ckpt_path=ckpt_path)
        return facts(own, task)

    expected = train(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Fails("backward", 3, KeyboardInterrupt))
    assert len(list((tmp_path / "c").iterdir())) == 1
    assert train(tmp_path, ckpt_path="last") == expected


class Half(torch.optim.SGD):
    """Fails half-way through its third step."""

    taken = 0

    def step(self, closure=None):
        self.taken += 1
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        if self.taken == 3:
            raise RuntimeError("planned")
        return super().step(closure)


class HalfWay(Task):
    def configure_optimizers(self):
        return Half(self.parameters(), lr=0.01)


def test_nothing_is_saved_of_half_a_step(tmp_path):
    with (
        pytest.warns(UserWarning, match="the run is not saved, because the error occurred after the next optim"),
        pytest.raises(RuntimeError),
    ):
        made(tmp_path, saver(tmp_path)).fit(HalfWay(), *loaders())
    assert list((tmp_path / "c").iterdir()) == []


class Averages(Callback):
    """Validates with other weights, as those do that average them."""

    def on_validation_start(self, trainer, task):
        self.kept = [p.detach().clone() for p in task.parameters()]
        for p in task.parameters():
            p.data.mul_(0.5)

    def on_validation_end(self, trainer, task):
        for p, kept in zip(task.parameters(), self.kept, strict=True):
            p.data.copy_(kept)


def test_weights_that_are_only_for_a_validation_are_not_saved(tmp_path):
    with (
        pytest.warns(UserWarning, match="the run is not saved, because .* the model held other weights"),
        pytest.raises(RuntimeError),
    ):
        made(tmp_path, Averages(), Fails("validation", 2), saver(tmp_path)).fit(Task(), *loaders())
    assert list((tmp_path / "c").iterdir()) == []
    with pytest.raises(RuntimeError):
        made(tmp_path, Averages(), Fails("forward", 3), saver(tmp_path)).fit(Task(), *loaders())
    assert len(list((tmp_path / "c").iterdir())) == 1


class Breaks(Task):
    """Its weights are lost without an error; that comes later."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == 2:
            with torch.no_grad():
                self.net[0].weight[0, 0] = float("nan")
            raise RuntimeError("planned")


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    with pytest.raises(RuntimeError, match="planned") as caught:
        made(tmp_path, saver(tmp_path)).fit(Breaks(), *loaders())
    assert "net.0.weight contains NaN or infinity after optimizer step 2" in caught.value.__notes__[-1]
    assert list((tmp_path / "c").iterdir()) == []


def test_a_disk_that_refuses_does_not_hide_the_error(tmp_path):
    def lose(*_):
        (tmp_path / "c").rmdir()
        (tmp_path / "c").write_text("")

    class Loses(Fails):
        def on_after_backward(self, trainer, task):
            if trainer.global_step == 3:
                lose()
            super().on_after_backward(trainer, task)

    with pytest.raises(RuntimeError, match="planned") as caught:
        made(tmp_path, Loses("backward", 3), saver(tmp_path)).fit(Task(), *loaders())
    assert "ModelCheckpoint.on_exception raised" in caught.value.__notes__[-1]


def test_what_is_saved_already_is_not_saved_again(tmp_path):
    often = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1, save_top_k=-1, save_on_exception=True)
    with pytest.raises(RuntimeError):
        made(tmp_path, Fails("forward", 3), often).fit(Task(), *loaders())
    assert sorted(store.read_manifest(path).step for path in (tmp_path / "c").iterdir()) == [1, 2, 3]


def test_weights_only(tmp_path):
    with pytest.raises(RuntimeError):
        made(tmp_path, Fails("forward", 3), saver(tmp_path, save_weights_only=True)).fit(Task(), *loaders())
    (path,) = (tmp_path / "c").iterdir()
    assert [*store.read_manifest(path).files] == ["model.safetensors"]
    store.verify(path)


def test_no_error_no_checkpoint_and_no_fit_no_checkpoint(tmp_path):
    kept = saver(tmp_path)
    own = made(tmp_path, kept)
    own.fit(Task(), *loaders())
    with pytest.raises(RuntimeError):
        own.validate(Task(), [torch.zeros(1)], verbose=False)
    assert list((tmp_path / "c").iterdir()) == []


class FailsOnOne(Fails):
    def __init__(self, rank, place, step):
        super().__init__(place, step)
        self.rank = rank

    def _at(self, place, trainer):
        if trainer.global_rank == self.rank:
            super()._at(place, trainer)


def two(root, rank):
    """Rank ``rank`` fails; what the others come to then."""
    root = Path(root)
    treadle.seed_everything(1)
    try:
        made(root, FailsOnOne(rank, "forward", 2), saver(root), strategy="ddp", accumulate_grad_batches=2).fit(
            Task(norm=False), *loaders()
        )
    except RuntimeError as error:
        return str(error)


def go_on(root):
    root = Path(root)
    task = Task(norm=False)
    own = made(root, saver(root), strategy="ddp", accumulate_grad_batches=2)
    own.fit(task, *loaders(), ckpt_path="last")
    return own.global_step, {name: value.tolist() for name, value in task.state_dict().items() if name != "seen"}


@pytest.mark.guarantee
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_of_two_processes_rank_zero_saves_and_nobody_waits(tmp_path, rank):
    assert "planned" in run(two, 2, str(tmp_path), rank, timeout=60)[rank]
    (path,) = (tmp_path / "c").iterdir()
    assert store.read_manifest(path).step == 2
    first, second = run(go_on, 2, str(tmp_path))
    assert first == second
    assert first[0] > 2


def sharded(root):
    own = made(Path(root), saver(Path(root)), Fails("batch_end", 2), strategy="fsdp")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="planned"):
            own.fit(Task(norm=False), *loaders())
    return [str(warning.message) for warning in caught]


def test_a_sharded_model_can_not_be_saved_by_rank_zero_alone(tmp_path):
    first, _ = run(sharded, 2, str(tmp_path))
    assert any("save_on_exception=True saves this run after Ctrl-C, but not after an error" in text for text in first)
    assert list((tmp_path / "c").iterdir()) == []


def fails_at(step):
    def fail(trainer, *_):
        if trainer.global_step == step:
            raise RuntimeError("planned")

    return LambdaCallback(on_train_batch_start=fail)


def test_a_checkpoint_when_an_error_comes(tmp_path):
    whole, task = Tiny(), Tiny()
    fit(tmp_path, task=whole)
    for step in (3, 7):  # the second one replaces the first
        saver = OnExceptionCheckpoint(tmp_path / "c")
        with pytest.raises(RuntimeError, match="planned"):
            fit(tmp_path, fails_at(step), saver)
        assert [path.name for path in (tmp_path / "c").iterdir()] == ["on_exception.ckpt"]
    made = fit(tmp_path, OnExceptionCheckpoint(tmp_path / "c"), task=task, ckpt_path="auto")
    assert Path(made.ckpt_path).name == "on_exception.ckpt"
    assert torch.equal(task.net.weight, whole.net.weight)
    assert saver.ckpt_path == str(tmp_path / "c" / "on_exception.ckpt")
    with pytest.raises(ValueError, match="filename"):
        OnExceptionCheckpoint(tmp_path, "")
    with pytest.raises(ValueError, match=r"filename='a-\{epoch\}' contains a field"):
        OnExceptionCheckpoint(tmp_path, "a-{epoch}")


def test_it_is_in_addition_to_other_checkpoints(tmp_path):
    both = treadle.Trainer(callbacks=OnExceptionCheckpoint(tmp_path), default_root_dir=tmp_path)
    assert [type(c) for c in both.checkpoint_callbacks] == [OnExceptionCheckpoint, ModelCheckpoint]
    assert type(both.checkpoint_callback) is ModelCheckpoint
    alone = treadle.Trainer(callbacks=OnExceptionCheckpoint(tmp_path), enable_checkpointing=False)
    assert len(alone.checkpoint_callbacks) == 1
