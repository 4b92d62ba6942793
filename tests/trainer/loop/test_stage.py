"""A stage ends on all ranks together."""

import pytest
import torch
from processes import run
from quiet import QUIET
from torch.utils.data import DataLoader
from treadle.strategies.distributed.tracebacks import PeerFailed

import treadle


class Task(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def teardown(self, stage):
        if self.trainer.global_rank == 1:
            raise OSError("no such disk")


def fail_in_teardown():
    trainer = treadle.Trainer(accelerator="cpu", devices=2, max_steps=1, **QUIET)
    error = OSError if trainer.global_rank == 1 else PeerFailed
    with pytest.raises(error, match="no such disk") as caught:
        trainer.fit(Task(), DataLoader(torch.ones(4, 1)))
    return str(caught.value)


def test_a_teardown_that_fails_on_one_rank_fails_on_all():
    assert run(fail_in_teardown, 2) == ["rank 1 failed: OSError: no such disk", "no such disk"]


class Leaky(torch.utils.data.IterableDataset):
    """Samples from a generator that is suspended within ``no_grad``, which disables gradients for its caller."""

    def __iter__(self):
        for _ in range(6):
            with torch.no_grad():
                yield torch.ones(1)


class Modes(treadle.TaskModule):
    """Trains y = 2x by hand or not, and notes the grad mode of its hooks."""

    def __init__(self, manual, build):
        super().__init__()
        self.automatic_optimization = not manual
        self.build, self.modes = build, {}
        self.net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.net.weight)

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - 2).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def validation_step(self, batch, batch_idx):
        self.modes["validation_step"] = torch.is_grad_enabled()

    def configure_optimizers(self):
        self.modes["configure_optimizers"] = torch.is_grad_enabled()
        return self.build(self.parameters())

    def on_fit_start(self):
        self.modes["on_fit_start"] = torch.is_grad_enabled()

    def on_train_start(self):
        self.modes["on_train_start"] = torch.is_grad_enabled()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(
    ("manual", "build"),
    [
        (False, lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
        (False, lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=1)),
        (True, lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    ],
)
@pytest.mark.parametrize("data", [torch.ones(6, 1), Leaky()])
def test_fit_trains_although_its_caller_or_its_data_disabled_gradients(around, manual, build, data):
    # Outside of the caller's mode: tensors made within inference_mode never take part in autograd.
    task, batches = Modes(manual, build), DataLoader(data, batch_size=2)
    with around():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        treadle.Trainer(accelerator="cpu", devices=1, max_epochs=1, **QUIET).fit(task, batches, batches)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    plain = torch.zeros(1, requires_grad=True)
    optimizer = build([plain])
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            loss = (plain - 2).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert task.net.weight.item() == pytest.approx(plain.item())
    assert plain.item() > 0.1
    assert task.modes.pop("validation_step") is False
    assert task.modes == dict.fromkeys(("configure_optimizers", "on_fit_start", "on_train_start"), True)
