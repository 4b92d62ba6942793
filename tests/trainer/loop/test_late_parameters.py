"""Layers whose weights, and optimizers, come into being with the first batch."""

import itertools

import pytest
import torch
from support.models import Line, LoggedLine
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import ModelCheckpoint

import treadle


def loader(batch_size=2):
    return DataLoader(TensorDataset(torch.linspace(0, 1, 16).view(8, 2)), batch_size)


class Lazy(LoggedLine):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))


def train_by_hand():
    torch.manual_seed(3)
    task, batches = Lazy(), loader()
    optimizer = task.configure_optimizers()
    for (batch,) in itertools.chain(batches, batches):  # each begins with the number that a DataLoader draws
        task.net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return task


def test_a_lazy_layer_trains_as_in_a_loop_by_hand(tmp_path):
    torch.manual_seed(3)
    task = Lazy()
    saving = ModelCheckpoint(tmp_path, save_top_k=-1)  # which looks at the room on the disk before the first batch
    make_trainer(max_epochs=2, enable_checkpointing=None, callbacks=saving).fit(task, loader())
    for trained, expected in zip(task.parameters(), train_by_hand().parameters(), strict=True):
        assert torch.equal(trained, expected)

    first = next(path for path in tmp_path.iterdir() if path.name.startswith("epoch=0"))
    resumed = Lazy()
    make_trainer(max_epochs=2).fit(resumed, loader(), ckpt_path=first)
    for trained, expected in zip(resumed.parameters(), task.parameters(), strict=True):
        assert torch.equal(trained, expected)


def fit_on_several():
    with pytest.raises(ValueError, match=r"Lazy.net.0.weight belongs to a lazy layer .* Run a batch through"):
        make_trainer(devices=2, strategy="ddp").fit(Lazy(), loader())
    task, rank = Private(), treadle.Accelerator(cpu=True).process_index
    task.start = 1.0 + rank  # rank zero's value counts from the first step on
    make_trainer(devices=2, strategy="ddp").fit(task, loader(batch_size=1))
    return task.scale.item(), task.first_gradient


@pytest.mark.long
def test_several_ranks_need_lazy_layers_before():
    (first, gradient), (second, other) = run(fit_on_several, 2)
    assert first == second
    assert gradient == other


class Private(Line):
    """Keeps its own optimizer, which it makes with its parameters in the first step, as Pyro does."""

    start, optimizer, automatic_optimization = 1.0, None, False

    def training_step(self, batch, batch_idx):
        if self.optimizer is None:
            self.scale = nn.Parameter(torch.tensor(self.start))
            self.optimizer = torch.optim.SGD([self.scale], lr=0.1)
        loss = (self.scale * batch[0]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if batch_idx == 0:
            self.first_gradient = self.scale.grad.item()

    def configure_optimizers(self):
        return None


def test_a_task_with_an_optimizer_of_its_own():
    task = Private()
    run = make_trainer(max_epochs=-1, max_steps=6)
    with pytest.warns(UserWarning, match="each batch counts as a step"):
        run.fit(task, loader())
    scale = torch.ones((), requires_grad=True)
    optimizer = torch.optim.SGD([scale], lr=0.1)
    for (batch,) in [*loader(), *loader()][:6]:
        optimizer.zero_grad()
        (scale * batch).square().mean().backward()
        optimizer.step()
    assert torch.equal(task.scale, scale)
    assert run.global_step == 6


class Counting(Line):
    """Has no optimizer, and steps the one that `optimizers` returns in every other batch."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.kinds = set()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.kinds |= {type(optimizer), type(self.optimizers(use_pl_optimizer=False))}
        if batch_idx % 2 == 0:
            self.manual_backward(self.net(batch[0]).mean())
            optimizer.step()

    def configure_optimizers(self):
        return None


def test_a_task_without_an_optimizer_steps_one_that_changes_nothing():
    task, run = Counting(), make_trainer(max_epochs=-1, max_steps=5)
    weights = {name: value.clone() for name, value in task.state_dict().items()}
    with pytest.warns(UserWarning, match="returned no optimizer"):
        run.fit(task, loader())
    assert (run.global_step, run.optimizers, len(task.kinds)) == (5, [], 2)
    assert all(torch.equal(value, weights[name]) for name, value in task.state_dict().items())
    assert all(issubclass(kind, torch.optim.Optimizer) for kind in task.kinds)


def test_without_a_trainer_there_is_no_mesh():
    assert Lazy().device_mesh is None
