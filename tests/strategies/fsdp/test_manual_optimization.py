"""Tasks that step their optimizers themselves, whose submodules are sharded each on its own, against a plain loop."""

import pytest
import torch
from support.processes import run
from support.sharded_models import Block
from support.trainers import make_trainer
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.data import DataLoader, TensorDataset
from treadle.strategies import FSDP

import treadle

SAMPLES, BATCH, EPOCHS = 15, 4, 2  # the last batch of 3 is uneven over two processes


def data():
    return torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Encoder(nn.Sequential):
    def forward(self, x):
        return self.encode(x)

    def encode(self, x):
        return super().forward(x)


class Deep(treadle.TaskModule):
    """A generator with repeated blocks, and critics in a list, of which each batch uses one."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_model(self):
        if not hasattr(self, "encoder"):
            torch.manual_seed(0)
            self.encoder = Encoder(nn.Linear(4, 4), Block(4), Block(4))
            self.critics = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def critic_loss(self, x, index):
        critic = self.critics[index % 2]
        return (critic(x) - 1).square().mean() + critic(self.encoder(x).detach()).square().mean()

    def loss(self, x, index):
        with torch.no_grad():
            target = self.frozen(x)
        x = self.encoder(x)
        return (self.critics[index % 2](x) - 1).square().mean() + (x - target).square().mean()

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        with self.toggled_optimizer(second):
            self.manual_backward(self.critic_loss(batch[0], batch_idx))
            second.step()
            second.zero_grad()
        with self.toggled_optimizer(first):
            self.manual_backward(self.loss(batch[0], batch_idx))
            if batch_idx % 2 or self.trainer.is_last_batch:  # accumulates two batches
                self.clip_gradients(first, 0.5)
                first.step()
                first.zero_grad()

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.encoder.parameters(), 0.05)
        return [first, torch.optim.SGD(self.critics.parameters(), 0.1, momentum=0.9)]


class Penalized(Deep):
    """With a gradient penalty, whose backward pass needs the parameters that an earlier pass has used."""

    def loss(self, x, index):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.encoder(x).tanh().sum(), x, create_graph=True)
        return super().loss(x, index) + (slope.norm(dim=1) - 1).square().mean()


def by_hand(kind=Deep):
    task = kind()
    torch.set_default_dtype(torch.float64)  # as in configure_model with precision="64-true"
    try:
        task.configure_model()
    finally:
        torch.set_default_dtype(torch.float32)
    first, second = task.configure_optimizers()
    for _ in range(EPOCHS):
        for index, x in enumerate(data().split(BATCH)):
            task.critic_loss(x, index).backward()
            second.step()
            second.zero_grad()
            task.loss(x, index).backward()
            second.zero_grad()
            if index % 2:
                nn.utils.clip_grad_norm_(task.encoder.parameters(), 0.5)
                first.step()
                first.zero_grad()
    return {name: p.detach() for name, p in task.named_parameters()}


def fit(task, processes, dtype=torch.float64, **flags):
    trainer = make_trainer(**{"max_epochs": EPOCHS, "precision": "64-true", "devices": processes} | flags)
    trainer.fit(task, DataLoader(TensorDataset(data().to(dtype)), BATCH // processes))
    return {name: getattr(p, "full_tensor", p.clone)().detach() for name, p in task.named_parameters()}


VARIANTS = {
    "blocks": {},
    "kept": {"reshard_after_forward": False},
    "recomputed": {"activation_checkpointing_policy": True},
    "chosen": {"auto_wrap_policy": {nn.Linear}},
}


class Raw(Deep):
    """Calls ``loss.backward()``, whose gradients the strategy of each run weights by the ranks' shares."""

    def manual_backward(self, loss, *args, **kwargs):
        loss.backward(*args, **kwargs)


def fit_twice(processes, **flags):
    task = Raw()
    fit(task, processes, **flags)
    return fit(task, processes, **flags)


class Encodes(Deep):
    """Calls another method of a submodule than its forward."""

    registers = False

    def critic_loss(self, x, index):
        return (self.critics[0](x) - 1).square().mean() + self.encoder.encode(x).square().mean()

    def configure_optimizers(self):
        if self.registers:
            register_fsdp_forward_method(self.encoder, "encode")
        return super().configure_optimizers()


class Shares(Deep):
    def configure_model(self):
        super().configure_model()
        self.critics[0].weight = self.critics[1].weight


class Holds(Deep):
    def configure_model(self):
        super().configure_model()
        self.scale = nn.Parameter(torch.ones(2))


def on_two_processes():
    found = {name: fit(Deep(), 2, strategy=FSDP(**options)) for name, options in VARIANTS.items()}
    with pytest.raises(ValueError, match=r"used outside of the forward pass.*register_fsdp_forward_method"):
        fit(Encodes(), 2, strategy=FSDP())
    registered = Encodes()
    registered.registers = True
    fit(registered, 2, strategy=FSDP())
    fit(Deep(), 2, torch.float32, strategy=FSDP(), precision="bf16-mixed", max_epochs=1)
    return found | {"twice": fit_twice(2, strategy=FSDP()), "penalized": fit(Penalized(), 2, strategy=FSDP())}


@pytest.mark.long
def test_two_processes():
    special = {"twice": fit_twice(1), "penalized": by_hand(Penalized)}
    right = by_hand()
    for rank in run(on_two_processes, 2):
        for name, found in rank.items():
            for key, value in special.get(name, right).items():
                torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12, msg=f"{name}: {key}")


def test_parameters_that_no_single_submodule_gathers():
    with pytest.raises(ValueError, match=r"critics\.0\.weight, .*can't be sharded with automatic_optimization=False"):
        fit(Shares(), 1, strategy=FSDP())
    with pytest.raises(ValueError, match=r"scale can't be sharded .*into one submodule whose forward uses it"):
        fit(Holds(), 1, strategy=FSDP())


def test_a_model_sharded_for_one_kind_of_optimization_is_refused_by_the_other():
    task = Deep()
    fit(task, 1, strategy=FSDP())
    task.automatic_optimization = True
    with pytest.raises(ValueError, match=r"sharded this Deep with automatic_optimization=False"):
        fit(task, 1, strategy=FSDP())
