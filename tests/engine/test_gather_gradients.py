"""A loss on the gathered batch trains as on one process that holds the whole batch."""

import pytest
import torch
from support.models import SGDTask
from support.processes import run
from support.trainers import NO_OUTPUT
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle
from treadle import Accelerator

FORMS = ("whole", "own rows", "stacked")


def batches(samples, batch_size, **options):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size, **options)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def contrast(rows, columns, first=0):
    """CLIP's loss of some rows, of which the first belongs to column ``first``, and a term of the rows alone."""
    similar = nn.functional.normalize(rows, dim=1) @ nn.functional.normalize(columns, dim=1).T / 0.1
    positives = torch.arange(first, first + len(rows))
    return nn.functional.cross_entropy(similar, positives) + rows.pow(2).mean()


def loss_of(accelerator, all_gather, form, net, x, y):
    rows, columns = net(x), net(y)
    if form == "own rows":
        counts = accelerator.gather(torch.tensor([len(x)])).tolist()
        first = sum(counts[: accelerator.process_index])
        return contrast(rows, accelerator.gather({"columns": columns}, sync_grads=True)["columns"], first)
    if form == "stacked":
        rows, columns = all_gather([rows, columns], sync_grads=True)
        return contrast(rows.reshape(-1, 4), columns.reshape(-1, 4))
    return contrast(*accelerator.gather((rows, columns), sync_grads=True))


class Contrastive(treadle.TaskModule):
    def __init__(self, form):
        super().__init__()
        self.net, self.form = network(), form

    def training_step(self, batch, batch_idx):
        return loss_of(self.trainer.accelerator, self.all_gather, self.form, self.net, *batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def flat(model):
    return torch.cat([getattr(p.detach(), "full_tensor", p.detach)().reshape(-1) for p in model.parameters()]).tolist()


def by_trainer(world, strategy, form, samples, accumulate=1):
    task = Contrastive(form)
    trainer = treadle.Trainer(
        accelerator="cpu",
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        **NO_OUTPUT,
    )
    trainer.fit(task, batches(samples, 8 // world))
    return flat(task)


def by_hand(world, samples):
    """An own loop of Accelerate's kind."""
    accelerator = Accelerator(cpu=True)
    net = network()
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.5), batches(samples, 8 // world)
    )
    for x, y in loader:
        loss = loss_of(accelerator, None, "whole", net, x, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return flat(net)


CASES = [
    ("ddp", "whole", 16, 1),
    ("ddp", "whole", 16, 2),
    ("ddp", "whole", 19, 1),  # the last batch: two samples and one
    ("ddp", "whole", 17, 1),  # the last batch: one sample, and none on the other process
    ("ddp", "own rows", 19, 1),
    ("ddp", "stacked", 16, 1),
    ("fsdp", "whole", 16, 2),
    ("fsdp", "whole", 17, 1),
    ("fsdp", "own rows", 19, 1),
]


def on_two():
    return [by_trainer(2, *case) for case in CASES] + [by_hand(2, 19), by_hand(2, 17)]


def test_two_processes_train_as_one():
    expected = [by_trainer(1, "auto", *case[1:]) for case in CASES] + [by_hand(1, 19), by_hand(1, 17)]
    plain = network()
    assert all(abs(a - b) > 1e-3 for a, b in zip(expected[0], flat(plain), strict=True))
    for rank in run(on_two, 2):
        for case, ours, theirs in zip([*CASES, "by hand", "by hand"], rank, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-13), case


class Gathers(SGDTask):
    """Notes what all_gather returns, and what it raises."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        rank, group = self.global_rank, None
        if self.trainer.world_size > 1:
            group = [torch.distributed.new_group([one]) for one in (0, 1)]
        found = self.all_gather({"x": [torch.full((2,), rank), rank + 0.5], "name": "kept"})
        self.found = {"x": [part.tolist() for part in found["x"]], "name": found["name"]}
        self.cut = not self.all_gather(self.weight * 2).requires_grad
        self.errors = []
        if group is not None:
            self.alone = self.all_gather(self.weight * rank, group=group[rank], sync_grads=True).tolist()
            for uneven, wrong in [(torch.ones(rank + 1), group[rank]), (torch.ones(1), group[1 - rank])]:
                try:
                    self.all_gather(uneven, group=wrong if wrong is group[1 - rank] else None)
                except ValueError as error:
                    self.errors.append(str(error))
            try:
                self.all_gather(self.weight * 1 if rank else torch.ones(1), sync_grads=True)
            except ValueError as error:
                self.errors.append(str(error))
        return self.weight.sum()


def gathers():
    task = Gathers()
    treadle.Trainer(accelerator="cpu", max_steps=1, **NO_OUTPUT).fit(task, batches(2, 1))
    return task.found, task.cut, getattr(task, "alone", None), task.errors


def test_forms_of_all_gather():
    assert gathers() == ({"x": [[0, 0], 0.5], "name": "kept"}, False, None, [])
    for rank, (found, cut, alone, errors) in enumerate(run(gathers, 2)):
        assert found == {"x": [[[0, 0], [1, 1]], [0.5, 1.5]], "name": "kept"}
        assert cut
        assert alone == [float(rank)]
        uneven, outside, without = errors
        assert "the same shapes" in uneven
        assert "rank 0: (1,) torch.float32; rank 1: (2,) torch.float32" in uneven
        assert f"rank {rank} is not in the given process group" in outside
        assert "rank 0: (1,) torch.float32 without gradient; rank 1: (1,) torch.float32." in without
