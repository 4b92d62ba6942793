"""What training_step may return."""

import re

import pytest
import torch
from support.models import Line, loader
from support.trainers import make_trainer

NAN = float("nan")


class Plain(Line):
    pass


def with_step(step):
    return type("Odd", (Plain,), {"training_step": lambda self, batch, batch_idx: step(self)})()


def says(error, *words):
    """A check that `error` comes, with each of `words` in its text."""
    return pytest.raises(error, match="".join(f"(?=.*{re.escape(word)})" for word in words).join(("(?s)", "")))


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
