"""A checkpoint of another model is refused before anything changes."""

import warnings

import pytest
import torch
from support.saved_nets import Net, WithBank, prepared, same, snapshot
from torch import nn

import treadle


@pytest.mark.parametrize(
    ("make", "lines"),
    [
        (lambda: Net(9), ["parts.body.weight: (8, 4) in the checkpoint, (9, 4) in the model"]),
        (lambda: Net(head="top"), ["missing: parts.top.weight", "unexpected: parts.head.weight"]),
    ],
)
def test_another_model_is_refused_before_anything_changes(saved, make, lines):
    accelerator, model, optimizer = prepared(make)
    before = snapshot(model, optimizer)
    random = torch.get_rng_state()
    with pytest.raises(ValueError, match="was saved by a different model") as error:
        accelerator.load_state(saved[0])
    assert all(line in str(error.value) for line in lines)
    same(snapshot(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_module_that_resizes_its_buffers_as_it_loads_is_loaded(tmp_path):
    prepared(lambda: WithBank(size=3))[0].save_state(tmp_path / "c")
    accelerator, model, _ = prepared(WithBank)
    accelerator.load_state(tmp_path / "c")
    same(model.bank.rows, torch.arange(3.0))
    with pytest.raises(RuntimeError, match=r"size mismatch for bank\.rows"):
        prepared(lambda: WithBank(resizes=False))[0].load_state(tmp_path / "c")
    with pytest.raises(ValueError, match=r"layer\.weight: \(2, 4\) in the checkpoint, \(5, 4\) in the model"):
        prepared(lambda: WithBank(width=5))[0].load_state(tmp_path / "c")


class Lenient(Net):
    strict_loading = False


@pytest.mark.parametrize(("kind", "options"), [(Net, {"strict": False}), (Lenient, {})])
def test_what_fits_is_taken_where_it_is_asked_for(saved, kind, options):
    path, model, optimizer = saved
    accelerator, other, stepper = prepared(lambda: kind(head="top"))
    with pytest.warns(UserWarning, match="was saved") as said:
        accelerator.load_state(path, **options)
    text = "\n".join(str(one.message) for one in said)
    assert "missing: parts.top.weight" in text
    assert "a different optimizer" in text
    same(other.parts["body"].weight, model.parts["body"].weight)
    there = stepper.state[other.parts["body"].weight]
    same(there["exp_avg"], optimizer.state[model.parts["body"].weight]["exp_avg"])
    assert other.parts["top"].weight not in stepper.state
    accelerator.backward(other(torch.ones(2, 4)).square().mean())
    stepper.step()


def test_the_same_shapes_that_compute_something_else(saved):
    accelerator, *_ = prepared(lambda: Net(activation=nn.GELU))
    with pytest.warns(UserWarning, match=r"different results:\n  parts\.act: Tanh in the checkpoint, GELU"):
        accelerator.load_state(saved[0])


def test_a_part_that_is_compiled_is_the_same_part(saved):
    def compiled():
        made = Net()
        made.parts["act"] = torch.compile(made.parts["act"], backend="eager")
        return made

    path, model, optimizer = saved
    accelerator, other, stepper = prepared(compiled, steps=0)
    with warnings.catch_warnings(action="error"):
        accelerator.load_state(path)
    same(snapshot(other, stepper), snapshot(model, optimizer))


class Pair(nn.Module):
    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b = (nn.Linear(3, 3, bias=False) for _ in range(2))
        if tied:
            self.b.weight = self.a.weight


@pytest.mark.guarantee
def test_weights_that_are_tied_here_and_differ_there(tmp_path):
    """torch would take one of the two without a word."""
    accelerator = treadle.Accelerator(cpu=True)
    apart = accelerator.prepare(Pair(False))
    accelerator.save_state(tmp_path / "x")
    again = treadle.Accelerator(cpu=True)
    tied = again.prepare(Pair(True))
    words = r"b\.weight: tied to a\.weight in the model, but has different values in the checkpoint"
    with pytest.raises(ValueError, match=words):
        again.load_state(tmp_path / "x")
    with torch.no_grad():
        tied.a.weight.zero_()
    with pytest.warns(UserWarning, match=words):
        again.load_state(tmp_path / "x", strict=False)
    same(tied.b.weight, apart.a.weight)
    with torch.no_grad():
        apart.b.weight.copy_(apart.a.weight)
    accelerator.save_state(tmp_path / "equal")
    again.load_state(tmp_path / "equal")
    again.save_state(tmp_path / "tied")
    accelerator.load_state(tmp_path / "tied")
