"""Names that the peers use for two things lead to the right one, and kinds of names are those of the peers."""

import importlib
import typing

import pytest
import torch
from treadle.callbacks import Callback
from treadle.compat.utilities.seed import isolate_rng
from treadle.compat.utilities.types import OptimizerConfig, OptimizerLRSchedulerConfig


@pytest.mark.parametrize(
    ("name", "paths", "is_callback"),
    [
        ("ModelSummary", ["callbacks", "callbacks.model_summary"], True),
        ("ModelSummary", ["utilities.model_summary", "utilities.model_summary.model_summary"], False),
        ("ThroughputMonitor", ["callbacks", "callbacks.throughput_monitor"], True),
        ("ThroughputMonitor", ["fabric.utilities", "fabric.utilities.throughput"], False),
    ],
)
def test_a_name_of_two_things(name, paths, is_callback) -> None:
    """Classes of one name in Lightning 2.6.6: where it is a callback of the Trainer, and where it is something else."""
    for path in paths:
        kind = getattr(importlib.import_module(f"treadle.compat.{path}"), name)
        assert issubclass(kind, Callback) is is_callback, path


def test_types_of_configure_optimizers_can_be_called() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0)
    assert OptimizerConfig(optimizer=optimizer) == {"optimizer": optimizer}
    assert typing.is_typeddict(OptimizerLRSchedulerConfig)


def test_isolated_random_numbers() -> None:
    torch.manual_seed(0)
    with isolate_rng(include_cuda=False):
        inside = torch.rand(1)
    assert torch.equal(torch.rand(1), inside)
