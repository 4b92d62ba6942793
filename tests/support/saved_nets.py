"""Small networks with an optimizer, as a loop of one's own saves them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle


def net(width=8, activation=nn.Tanh, head="head"):
    torch.manual_seed(1)
    parts = {"body": nn.Linear(4, width), "act": activation(), head: nn.Linear(width, 2)}
    return nn.Sequential(*parts.values()) if head == "" else nn.ModuleDict(parts)


class Net(nn.Module):
    def __init__(self, width=8, activation=nn.Tanh, head="head"):
        super().__init__()
        self.parts = net(width, activation, head)

    def forward(self, x):
        for part in self.parts.values():
            x = part(x)
        return x


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def prepared(make=Net, optimizer=adamw, accumulate=1, batch=4, steps=1, **options):
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **options)
    model = make()
    data = DataLoader(TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(2))), batch)
    model, stepper, data = accelerator.prepare(model, optimizer(model), data)
    for _ in range(steps):
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        stepper.step()
        stepper.zero_grad()
    return accelerator, model, stepper


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


class Extra(Net):
    """Has something of its own in its state."""

    def __init__(self, extra=None):
        super().__init__()
        self.extra = {"kind": "own"} if extra is None else extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


class Bank(nn.Module):
    """A buffer that takes the shape of what is loaded, unless it is told not to."""

    def __init__(self, size=0, resizes=True):
        super().__init__()
        self.register_buffer("rows", torch.arange(float(size)))
        self.resizes = resizes

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if self.resizes:
            self.rows.resize_(state_dict[f"{prefix}rows"].shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


class WithBank(nn.Module):
    def __init__(self, width=2, **options):
        super().__init__()
        self.layer, self.bank = nn.Linear(4, width), Bank(**options)

    def forward(self, x):
        return self.layer(x)


def snapshot(model, optimizer):
    slots = {i: {k: v.clone() for k, v in s.items()} for i, s in optimizer.state_dict()["state"].items()}
    return {name: value.clone() for name, value in model.state_dict().items()}, slots
