"""Functions reach the tensors in nested data, whose own types remain."""

import dataclasses
from functools import cached_property
from typing import Any

import pytest
import torch
from support.models import Line
from support.processes import run
from support.trainers import make_trainer
from torch.utils.data import DataLoader
from treadle.strategies import Precision, apply_nested
from treadle.strategies.nested_data import iter_tensors

import treadle


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "n"
    more: Any = None
    built: int = dataclasses.field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "built", self.built + 1)

    @cached_property
    def total(self):
        return float(self.x.sum())


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    x: torch.Tensor


@dataclasses.dataclass
class Open:
    x: torch.Tensor
    inner: Any = None


def double(value):
    return apply_nested(value, torch.Tensor, lambda tensor: tensor * 2)


def test_frozen_dataclasses():
    batch = Frozen(torch.ones(2), more=[FrozenSlots(torch.ones(1)), Open(torch.ones(1), {"a": torch.ones(1)}), Frozen])
    assert batch.total == 2.0
    assert len(list(iter_tensors(batch))) == 4
    found = double(batch)
    assert type(found) is Frozen
    assert (found.name, found.built) == ("n", 1)
    assert found.total == 4.0
    assert batch.total == 2.0
    slots, inner, kind = found.more
    assert type(slots) is FrozenSlots
    assert slots.x.item() == 2
    assert type(inner) is Open
    assert inner.x.item() == inner.inner["a"].item() == 2
    assert kind is Frozen


def test_a_dataclass_that_is_a_mapping_too():
    from transformers.modeling_outputs import SequenceClassifierOutput  # 1 s, which not every worker needs

    found = double(SequenceClassifierOutput(loss=torch.ones(1), logits=torch.ones(2)))
    assert type(found) is SequenceClassifierOutput
    assert found["loss"].item() == found.loss.item() == 2
    assert found.logits.tolist() == found["logits"].tolist() == [2, 2]


@pytest.mark.parametrize("precision", ["64-true", "16-true"])
def test_a_frozen_batch_reaches_the_step(precision):
    class Task(Line):
        def training_step(self, batch, batch_idx):
            assert type(batch) is Frozen
            return self.net(batch.x).sum()

    loader = DataLoader([Frozen(torch.ones(1, 2))], batch_size=None)
    make_trainer(precision=precision).fit(Task(), loader)
    cast = Precision.parse(precision).cast(Frozen(torch.ones(1)))
    assert cast.x.dtype == Precision.parse(precision).storage


def gather():
    accelerator = treadle.Accelerator(cpu=True)
    rank = accelerator.process_index
    value = Frozen(torch.full((1,), float(rank)))
    return accelerator.gather(value).x.tolist(), accelerator.reduce(value, "sum").x.tolist()


def test_frozen_dataclasses_are_gathered():
    assert run(gather, 2) == [([0.0, 1.0], [1.0])] * 2
