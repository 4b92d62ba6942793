"""Loops over replicas, beside the same by hand."""

import itertools

import torch
from torch import nn

import treadle


def message(function, *args):
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


ROWS, STEPS = 5, 4


class Net(nn.Module):
    def __init__(self, extra=False):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(3, 4).double()
        self.last = nn.Linear(4, 1).double()
        if extra:
            self.extra = nn.Linear(4, 2).double()

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

    def training_step(self, batch):
        return {"loss": self(batch).pow(2).mean(), "other": [batch]}


def inputs(k, steps=STEPS):
    """[step, micro-batch, rank, row, column]"""
    return torch.randn(steps, k, 2, ROWS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_hand(k, extra=False, tokens=None, optimizer=sgd):
    """One process; with `tokens`, each rank's micro-batch weighs that many."""
    model = Net(extra)
    stepper = optimizer(model)
    for step in inputs(k):
        stepper.zero_grad()
        for micro, rank in itertools.product(range(k), range(2)):
            share = 1 / (2 * k) if tokens is None else tokens[rank] / (k * sum(tokens))
            (model(step[micro, rank]).pow(2).mean() * share).backward()
        stepper.step()
    return weights(model)


def trained(strategy, k, extra=False, voting=True, tokens=None, optimizer=sgd):
    """The same over two processes, through the task's step and its ballot, or by hand."""
    accelerator = treadle.Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=k)
    net = Net(extra)
    model = accelerator.prepare_model(net, step="training_step" if voting else None)
    stepper = accelerator.prepare(optimizer(net))
    rank = accelerator.process_index
    call = accelerator.method(model, "training_step") if voting else lambda x: {"loss": model(x).pow(2).mean()}
    if voting:
        accelerator.accumulation.agree_on_steps(finite=True, at_once=False)
    summed = []
    for step in inputs(k):
        for micro in range(k):
            with accelerator.accumulate(model):
                loss = call(step[micro, rank])["loss"]
                accelerator.backward(loss, weight=None if tokens is None else tokens[rank])
        if voting:
            start = accelerator.accumulation.agreement.count
            accelerator.accumulation.agreement.count = lambda start=start: summed.append(start()) or summed[-1]
            accelerator.accumulation.agreement.stop_vote = False
            assert accelerator.accumulation.exchange_votes().finite
            del accelerator.accumulation.agreement.count
        stepper.step()
        stepper.zero_grad()
    return weights(net), [float(s) for s in summed]


TOKENS = (100_003, 77)


POWER = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 0.1}
