"""Which implementation computes an optimizer's steps: the script's choice, or the fastest where it left it open."""

import pytest
import torch
from torch import nn
from treadle.engine.optim.optimizer_state import choose_fused

from treadle import Accelerator

CUDA = torch.device("cuda")


def build(kind=torch.optim.AdamW, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=dtype)
    return model, kind(model.parameters(), lr=0.01, **options)


def train(model, optimizer, steps=5):
    for step in range(steps):
        model(torch.full((4, 3), 1.0 + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_fused_steps_are_chosen_and_equal_up_to_rounding(kind):
    reference = train(*build(kind))
    model, optimizer = build(kind)
    assert choose_fused(optimizer, CUDA)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    assert optimizer._step_supports_amp_scaling == build(kind, fused=True)[1]._step_supports_amp_scaling
    for value, expected in zip(train(model, optimizer), reference, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {"fused": False},
        {"foreach": True},
        {"foreach": False},
        {"capturable": True},
        {"differentiable": True},
        {"dtype": torch.complex64},
        {"kind": torch.optim.SGD},
        {"kind": type("Own", (torch.optim.AdamW,), {})},
    ],
)
def test_what_the_script_chose_stays(options):
    _, optimizer = build(**options)
    before = [dict(group) for group in optimizer.param_groups]
    assert not choose_fused(optimizer, CUDA)
    assert all(map(dict.__eq__, optimizer.param_groups, before))


def test_what_has_begun_and_what_runs_on_the_cpu_stays():
    model, optimizer = build()
    assert not choose_fused(optimizer, torch.device("cpu"))
    train(model, optimizer, steps=1)
    assert not choose_fused(optimizer, CUDA)
    assert not Accelerator(cpu=True).prepare(build()[1]).fused_by_choice


@pytest.mark.parametrize(("saved", "resumed"), [(True, None), (None, True)])
def test_a_resume_computes_as_its_script_says(tmp_path, saved, resumed):
    """As between a GPU, where fused steps are chosen, and a CPU."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*build(fused=saved))
    train(model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    expected = train(model, optimizer)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*build(fused=resumed))
    accelerator.load_state(tmp_path / "saved")
    assert [group["fused"] for group in optimizer.param_groups] == [resumed]
    for value, reference in zip(train(model, optimizer), expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-6, atol=1e-7)
