"""What a message about NaN says: the samples, the inputs, the rank, and the module next to where it began."""

import math

import pytest
import torch
from support.models import SGDTask, Stream, gathered
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader
from treadle.callbacks import NonFiniteWatch

BREAKS = 5  # the sample in which something is not finite
ORIGIN = "the gradient of middle.bias is not, the first of 4 such gradients in the order of the backward pass"


class BreaksInBackward(torch.autograd.Function):
    """The identity, whose gradient is NaN for some rows."""

    @staticmethod
    def forward(ctx, x, rows):
        ctx.rows = rows
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[ctx.rows] = math.nan
        return gradient, None


def samples(bad_input=False):
    """Sample k is k in both columns; one can be made infinite."""
    values = torch.arange(8.0)[:, None].repeat(1, 2)
    if bad_input:
        values[BREAKS, 1] = math.inf
    return [{"x": value, "number": number} for number, value in enumerate(values)]


class Net(SGDTask):
    """Registers its layers in another order than it runs them: last, first, middle."""

    def __init__(self, where="backward", manual=False, clip=None):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(2, 1)
        self.entry, self.middle = nn.Linear(2, 2), nn.Linear(2, 2)
        self.where, self.clip = where, clip
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        rows = batch["number"] == BREAKS
        h = self.middle(self.entry(torch.nan_to_num(batch["x"], posinf=1.0)))
        if self.where == "backward":
            h = BreaksInBackward.apply(h, rows)
        loss = self.head(h).square().mean() / 100
        if self.where == "loss" and rows.any():
            loss = loss * math.nan
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        if self.clip is not None:
            self.clip_gradients(optimizer, 1.0, self.clip)
        optimizer.step()
        optimizer.zero_grad()
        return None


def fail(task, data, *callbacks, batch_size=2, **flags):
    """Return the message that a run ends with."""
    one = make_trainer(**{"callbacks": list(callbacks), **flags})
    with pytest.raises(ValueError, match=r"not finite|infinity|but the gradient") as raised:
        one.fit(task, DataLoader(data, batch_size))
    assert all(gathered(p).isfinite().all() for p in task.parameters())
    return str(raised.value)


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_the_parameter_next_to_the_origin_is_named(strategy):
    message = fail(Net(), samples(), strategy=strategy)
    assert f"{ORIGIN}, in optimizer step 3" in message
    assert "On rank 0: samples 4, 5 of the dataset. Check" in message


@pytest.mark.parametrize("manual", [False, True])
def test_a_loss_is_named_with_its_samples_and_inputs(manual):
    message = fail(Net("loss", manual), samples(bad_input=True))
    assert "on rank 0 in optimizer step 3 (epoch 0, micro-batch 2). On rank 0: samples 4, 5 of the dataset; " in message
    assert "batch['x'] contains infinity in sample 5." in message


class NoLabels(SGDTask):
    """The mean over no labels is NaN, and its gradients are zero."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def training_step(self, batch, batch_idx):
        ignored = torch.full((len(batch["x"]),), -1)
        return nn.functional.cross_entropy(self.layer(batch["x"]), ignored, ignore_index=-1)


def test_the_policy_that_takes_steps_is_named_for_a_loss_alone():
    named = "If only the loss is NaN and its gradients are finite, 'ignore' takes such steps."
    assert named in fail(NoLabels(), samples())
    assert named not in fail(Net(), samples())
    trainer = make_trainer(on_nonfinite="ignore")
    trainer.fit(NoLabels(), DataLoader(samples(), 2))
    assert trainer.global_step == 4


@pytest.mark.parametrize(("where", "named"), [("backward", "samples 0, 1, 2, 3, 4, 5"), ("loss", "samples 4, 5")])
def test_samples_of_an_accumulation_group(where, named):
    message = fail(Net(where), samples(bad_input=True), accumulate_grad_batches=3)
    assert f"On rank 0: {named} of the dataset; " in message
    batch = "the last batch['x']" if where == "backward" else "; batch['x']"
    assert f"{batch} contains infinity in sample 5" in message
    assert ("micro-batch 0 to 2" if where == "backward" else "micro-batch 2") in message


def test_many_samples_are_cut_short():
    message = fail(Net("loss"), samples() * 1250, batch_size=5000)
    assert "samples 0, 1, 2, 3, 4, 5, 6, 7 and 4,992 more of the dataset" in message


def test_a_stream_has_no_numbers():
    message = fail(Net("loss"), Stream(samples()))
    assert "micro-batch 2). Check" in message


@pytest.mark.parametrize("manual", [False, True])
def test_a_skipped_step_is_logged_with_its_samples(manual, caplog):
    make_trainer(on_nonfinite="skip").fit(Net("loss", manual), DataLoader(samples(), 2))
    assert "which is skipped. On rank 0: samples 4, 5 of the dataset." in caplog.text


@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("manual", [False, True])
def test_clipping_hides_nothing(clip, manual):
    flags = {} if manual else {"gradient_clip_val": 1.0, "gradient_clip_algorithm": clip}
    assert f"{ORIGIN}, in" in fail(Net(manual=manual, clip=clip), samples(), **flags)


def on_two_ranks(strategy):
    cases = [(where, bad_input) for where in ("loss", "backward") for bad_input in (True, False)]
    flags = {"devices": 2, "strategy": strategy, "batch_size": 1}
    return {(where, bad_input): fail(Net(where), samples(bad_input), **flags) for where, bad_input in cases}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_two_ranks(strategy):
    # Of the third global batch rank 0 has sample 4, rank 1 sample 5.
    first, second = run(on_two_ranks, 2, strategy)
    for where in ("loss", "backward"):
        assert first[where, True] == second[where, True]
        message = first[where, True]
        assert "On rank 1: sample 5 of the dataset; batch['x'] contains infinity in sample 5. Check" in message
        assert "rank 0" not in message
    assert "On rank 1: sample 5 of the dataset. Check" in first["loss", False]
    assert ORIGIN in first["backward", False]
    named = "On rank 0: sample 4 of the dataset. On rank 1: sample 5 of the dataset."
    assert f"{named} The gradients are already reduced over ranks" in first["backward", False]


def watched_on_two_ranks(strategy, manual):
    """The message on all ranks, or an error on the one rank that gets it."""
    flags = {"devices": 2, "strategy": strategy, "callbacks": [NonFiniteWatch()]}
    if not manual:
        return fail(Net(), samples(), batch_size=1, **flags)
    return make_trainer(**flags).fit(Net(manual=manual), DataLoader(samples(), 1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "manual"), [("ddp", False), pytest.param("fsdp", False, marks=pytest.mark.exhaustive), ("ddp", True)]
)
def test_the_watch_names_the_rank(strategy, manual):
    if manual:  # a task that calls backward itself may do so on one rank alone, so that rank raises alone
        with pytest.raises(ValueError, match="NaN or infinity") as raised:
            run(watched_on_two_ranks, 2, strategy, manual)
        messages = [str(raised.value)]
    else:
        messages = run(watched_on_two_ranks, 2, strategy, manual)
    for message in messages:
        assert message.startswith("the gradient of the output of middle (Linear) is the first tensor to contain NaN")
        assert "on rank 1 in optimizer step 3 (epoch 0, micro-batch 2)" in message
