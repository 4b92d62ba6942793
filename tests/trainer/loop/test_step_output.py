"""What training_step may return."""

import pytest
import torch
from support.models import Line, loader, with_step
from support.trainers import make_trainer, says

NAN = float("nan")


def test_what_training_step_returns():
    def net(task):
        return task.net(torch.ones(3, 2)).squeeze(1)

    for step, error, words in [
        (lambda t: {"los": net(t).mean()}, ValueError, ["a dict without 'loss' (keys: 'los')"]),
        (lambda t: {"loss": 1.0}, ValueError, ["'loss' is a float", "tensor"]),
        (lambda t: 1.0, TypeError, ["float", "tensor"]),
        (lambda t: [net(t).mean()], TypeError, ["list", "tensor"]),
        (lambda t: net(t).mean().detach(), ValueError, ["without a gradient", "detach"]),
        (lambda t: torch.tensor(3), ValueError, ["without a gradient"]),
        (net, ValueError, ["the shape (3,)", "mean()"]),
        (lambda t: {"loss": net(t)}, ValueError, ["the shape (3,)", "mean()"]),
        (lambda t: {"loss": net(t).mean(), "weight": -1}, ValueError, ["returned -1 as the weight", "at least 0"]),
        (lambda t: {"loss": net(t).mean(), "weight": NAN}, ValueError, ["returned nan as the weight"]),
        (lambda t: {"loss": net(t).mean(), "weight": "a"}, ValueError, ["returned 'a' as the weight", "one finite"]),
        (
            lambda t: {"loss": net(t).mean(), "weight": torch.ones(3)},
            ValueError,
            ["returned a tensor of shape (3,) as the weight"],
        ),
    ]:
        with says(error, *words):
            make_trainer().fit(with_step(step), loader(6))
    make_trainer().fit(with_step(lambda t: net(t).mean().reshape(1)), loader(6))  # one number, whatever its shape


@pytest.mark.parametrize(
    "form", [float, torch.tensor, lambda weight: torch.tensor([weight])], ids=["float", "0-d", "1-d"]
)
def test_a_mean_over_nothing_counts_nothing_with_weight_zero(form):
    """Such as the loss of a row of documents that have no token to predict; its gradient is finite."""

    def loss(task, batch, target):
        return torch.nn.functional.nll_loss(task.net(batch), torch.full((4,), target), ignore_index=-100)

    spotty, sparse = Line(), Line()
    spotty.training_step = lambda batch, batch_idx: {
        "loss": loss(spotty, batch, 0 if batch_idx % 2 else -100),
        "weight": form(float(batch_idx % 2 * len(batch))),
    }
    sparse.training_step = lambda batch, batch_idx: loss(sparse, batch, 0)
    sparse.load_state_dict(spotty.state_dict())
    batches = [torch.randn(4, 2, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    make_trainer(accumulate_grad_batches=4).fit(spotty, batches)
    make_trainer(accumulate_grad_batches=2).fit(sparse, batches[1::2])
    for weight, expected in zip(spotty.parameters(), sparse.parameters(), strict=True):
        torch.testing.assert_close(weight, expected)
