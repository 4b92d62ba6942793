"""What the average of gradients in backward passes costs, and where it must not take part."""

import contextlib
import copy
import io
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.models import SGDTask
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Task(SGDTask):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch[0]).square().mean())
        optimizer.step()


def data(samples=16, batch_size=2):
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size)


def counting(sizes):
    """Appends the number of elements of each collective of gradients."""
    reduce = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        if tensor.is_floating_point():
            sizes.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    return mock.patch.object(dist, "all_reduce", counted)


class Accumulates(Task):
    def training_step(self, batch, batch_idx):
        optimizer, last = self.optimizers(), batch_idx % 2 == 1
        with counting(self.sizes), optimizer.toggle_model(sync_grad=last):
            self.manual_backward(self.net(batch[0]).square().mean())
            if last:
                optimizer.step()
                optimizer.zero_grad()


class Part(Task):
    def training_step(self, batch, batch_idx):
        with counting(self.sizes):
            self.manual_backward(self.net[0](batch[0]).square().mean())


class OnePartPerRank(Task):
    """Each rank uses another layer, as a mixture of experts does."""

    def training_step(self, batch, batch_idx):
        self.zero_grad()
        layer = self.net[0] if self.global_rank == 0 else self.net[1]
        self.manual_backward(layer.weight.sum())
        self.gradients = [None if p.grad is None else p.grad.flatten()[0].item() for p in self.net.parameters()]


class OneExpertPerRank(Task):
    """Each rank uses another layer without a reduction, and an optimizer per layer steps on all ranks."""

    def training_step(self, batch, batch_idx):
        self.zero_grad()
        layer = self.net[0] if self.global_rank == 0 else self.net[1]
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(layer.weight.sum())
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), 0.1) for layer in self.net]


class OneAssignedPerRank(OneExpertPerRank):
    def training_step(self, batch, batch_idx):
        layer = self.net[0] if self.global_rank == 0 else self.net[1]
        layer.weight.grad = torch.ones_like(layer.weight)
        for optimizer in self.optimizers():
            optimizer.step()


class AfterAnError(Task):
    """A backward pass that raised an error on the way, as one that runs out of memory does."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            failing = self.net[0](batch[0])
            failing.register_hook(lambda gradient: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                self.manual_backward(self.net[1](failing).sum())
        super().training_step(batch, batch_idx)


class Copies(Task):
    """The copies are trained on each rank alone."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        torch.save(self.net, io.BytesIO())
        if self.global_rank == 0:
            twin = copy.deepcopy(self.net)
            optimizer = torch.optim.SGD(twin.parameters(), 0.1)
            twin(batch[0]).sum().backward()
            optimizer.step()


class AttacksInValidation(Task):
    """Three batches on rank zero, two on rank one."""

    def validation_step(self, batch, batch_idx):
        with torch.inference_mode(False), torch.enable_grad():
            inputs = batch[0].clone().requires_grad_()
            self.net(inputs).sum().backward()
        self.log("slope", inputs.grad.sum())


class UpdatesBlocked(Task):
    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            return super().training_step(batch, batch_idx)
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.net(batch[0]).square().mean())
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter -= parameter.grad


class UpdatesFromAutograd(Task):
    def training_step(self, batch, batch_idx):
        parameters = list(self.net.parameters())
        loss = self.net(batch[0]).square().mean()
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.data -= gradient


class Sparse(Task):
    def training_step(self, batch, batch_idx):
        self.manual_backward(nn.functional.embedding(torch.tensor([0]), self.net[0].weight, sparse=True).sum())


def fit(task, val=None, **flags):
    task.sizes = []
    make_trainer(devices=2, strategy="ddp", **flags).fit(task, data(), val)
    return task


def fit_all():
    found = {
        "accumulates": fit(Accumulates()).sizes,
        "part": fit(Part(), limit_train_batches=1).sizes,
        "one part per rank": fit(OnePartPerRank()).gradients,
    }
    for kind in (AfterAnError, Copies, AttacksInValidation):
        task = fit(kind(), data(5, 1) if kind is AttacksInValidation else None)
        found[kind.__name__] = [p.detach() for p in task.parameters()]
    for kind in (UpdatesBlocked, UpdatesFromAutograd):
        with pytest.raises(ValueError, match=r"net.*was updated with gradients that are not averaged, .* manual_back"):
            fit(kind())
    start, task = Task(), fit(OneExpertPerRank(), limit_train_batches=3)
    found["experts"] = [(task.net[n].weight - start.net[n].weight).detach() for n in range(2)]
    with pytest.raises(ValueError, match=r"optimizer of net.0.weight is about to step on 1 of 2 ranks"):
        fit(OneAssignedPerRank())
    with pytest.raises(ValueError, match=r"sparse gradients can't be averaged .* sparse=False"):
        fit(Sparse())
    task = fit(Task())
    if dist.get_rank() == 0:  # after fit, a backward pass is nobody else's business
        before = [p.grad.clone() for p in task.parameters()]
        task.net(torch.ones(1, 3)).sum().backward()
        found["after"] = [not torch.equal(p.grad, old) for p, old in zip(task.parameters(), before, strict=True)]
    return found


@pytest.mark.long
def test_on_two_processes():
    first, second = run(fit_all, 2)
    size = sum(p.numel() for p in Task().parameters())
    # One reduction per step, with one number beside the gradients; the other collectives are the votes after a batch.
    assert first["accumulates"] == [size + 1] * 2
    assert first["part"] == [3 * 4 + 4 + 1]
    assert first["one part per rank"] == second["one part per rank"] == [0.5, None, 0.5, None]
    for change in (*first["experts"], *second["experts"]):  # each gradient is the mean of 1 and 0
        assert torch.allclose(change, torch.full_like(change, -3 * 0.1 * 0.5))
    for name in ("AfterAnError", "Copies", "AttacksInValidation"):
        assert all(map(torch.equal, first[name], second[name]))
    assert all(first["after"])
