"""Gradients are divided by the float16 loss scale once, also where they are discarded without a step."""

import pytest
import torch
from support.models import SGDTask
from support.trainers import make_trainer
from torch import nn

import treadle


def prepare(count=1, precision="fp16"):
    """An Accelerator with a loss scale, and models with an optimizer each, whose loss has the gradient 0.25."""
    accelerator = treadle.Accelerator(cpu=True, mixed_precision=precision)
    models = [nn.Linear(1, 1, bias=False) for _ in range(count)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    return accelerator, [accelerator.prepare(*pair) for pair in zip(models, optimizers, strict=True)]


def backward(accelerator, model, factor=0.25):  # times 65,536 it is finite in float16
    accelerator.backward(model(torch.ones(1, 1)).sum() * factor)


def norm(accelerator, model):
    return accelerator.clip_grad_norm_(model.parameters(), 100.0).item()


@pytest.mark.parametrize(
    "discard",
    [
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: model.zero_grad(),
    ],
    ids=["none", "zeros", "model"],
)
def test_gradients_that_were_discarded_without_a_step(discard):
    accelerator, [(model, optimizer)] = prepare()
    for _ in range(3):
        backward(accelerator, model)
        assert norm(accelerator, model) == 0.25
        discard(model, optimizer)
    backward(accelerator, model)
    before = model.weight.item()
    optimizer.step()
    assert model.weight.item() == pytest.approx(before - 0.025)


def test_an_overflow_lowers_the_scale_without_a_step_too():
    accelerator, [(model, optimizer)] = prepare()
    scale = accelerator.scaler.get_scale()
    backward(accelerator, model, float("inf"))
    assert norm(accelerator, model) == float("inf")
    optimizer.zero_grad()
    backward(accelerator, model)
    assert accelerator.scaler.get_scale() == scale / 2
    assert norm(accelerator, model) == 0.25


def test_a_backward_pass_of_another_optimizer_in_between():
    accelerator, [(first, of_first), (second, of_second)] = prepare(2)
    backward(accelerator, first)
    assert norm(accelerator, first) == 0.25  # unscales all optimizers; the second has no gradients yet
    backward(accelerator, second)
    before = first.weight.item(), second.weight.item()
    of_first.step()
    of_second.step()
    assert (first.weight.item(), second.weight.item()) == pytest.approx([weight - 0.025 for weight in before])


def test_gradients_added_to_unscaled_ones_are_an_error():
    accelerator, [(model, optimizer)] = prepare()
    backward(accelerator, model)
    norm(accelerator, model)
    with pytest.raises(ValueError, match="already divided by the float16 loss scale"):
        backward(accelerator, model)
    optimizer.zero_grad()
    backward(accelerator, model)
    assert norm(accelerator, model) == 0.25


class Skips(SGDTask):
    """Skips every second optimizer step, as `optimizer_step` allows."""

    def __init__(self):
        super().__init__()
        self.net, self.norms = nn.Linear(1, 1, bias=False), []

    def training_step(self, batch, batch_idx):
        return self.net(batch).float().mean() * 0.25

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(self.net.weight.grad.norm().item())

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


@pytest.mark.parametrize("clip", [None, 100.0])
def test_steps_that_a_task_skips(clip):
    task = Skips()
    before = task.net.weight.item()
    trainer = make_trainer(precision="16-mixed", gradient_clip_val=clip)
    trainer.fit(task, torch.utils.data.DataLoader(torch.ones(6, 1)))
    assert set(task.norms) == {0.25}
    assert task.net.weight.item() == pytest.approx(before - 0.075)


def test_clipping_one_optimizer_leaves_the_group_of_another_alone():
    accelerator, [(first, of_first), (second, of_second)] = prepare(2)
    before = second.weight.item()
    for _ in range(2):  # two micro-batches of the second optimizer, with a step of the first after each
        backward(accelerator, second, 0.125)
        backward(accelerator, first)
        assert norm(accelerator, first) == 0.25
        of_first.step()
        of_first.zero_grad()
    of_second.step()
    assert second.weight.item() == pytest.approx(before - 0.025)


def test_an_optimizer_without_gradients_changes_nothing():
    accelerator, [(model, optimizer)] = prepare()
    before = model.weight.item()
    assert norm(accelerator, model) == 0
    optimizer.step()
    assert (model.weight.item(), accelerator.scaler.get_scale()) == (before, 65536)


def test_a_closure_that_runs_a_backward_pass_is_an_error():
    accelerator, [(model, optimizer)] = prepare()
    for _ in range(2):
        with pytest.raises(ValueError, match="closure of an optimizer's step runs a backward pass"):
            optimizer.step(lambda: backward(accelerator, model))
        backward(accelerator, model)


def test_loading_a_state_drops_the_update_that_is_due(tmp_path):
    accelerator, [(model, optimizer)] = prepare()
    for factor in (0.25, float("inf")):
        backward(accelerator, model, factor)
        optimizer.step()
        optimizer.zero_grad()
        if factor == 0.25:
            accelerator.save_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved")
    backward(accelerator, model)
    assert (accelerator.scaler.get_scale(), accelerator.scaler._get_growth_tracker()) == (65536, 1)


@pytest.mark.parametrize("fused", [None, True])
def test_momentum_after_an_overflow_in_the_first_step(fused):
    accelerator = treadle.Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.Linear(64, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = model.weight.detach().clone()
    for factor in (float("inf"), 0.125, 0.125):
        accelerator.backward(model(torch.ones(1, 64)).sum() * factor)
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(model.weight, before - 0.1 * 0.125 * (1 + 1.9), atol=1e-6)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_forward_pass_after_a_step_uses_the_new_weights(precision):
    """Also within one autocast context, as in a `training_step` with several steps."""
    accelerator, [(model, optimizer)] = prepare(precision=precision)
    nn.init.constant_(model.weight, 0.5)
    optimizer.param_groups[0]["lr"] = 1.0
    outputs = []
    with accelerator.autocast():
        for _ in range(3):
            outputs.append(model(torch.ones(1, 1)).item())
            backward(accelerator, model)
            optimizer.step()
            optimizer.zero_grad()
    assert outputs == [0.5, 0.25, 0.0]
