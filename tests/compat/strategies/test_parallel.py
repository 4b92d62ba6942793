"""The base class of Lightning's strategies of several processes."""

from support.trainers import make_trainer
from treadle.compat.strategies import ParallelStrategy
from treadle.strategies import DDP, SingleDevice


def test_parallel_strategies() -> None:
    assert isinstance(DDP(), ParallelStrategy)
    assert not isinstance(SingleDevice(), ParallelStrategy)
    assert not isinstance(make_trainer(devices=1).strategy, ParallelStrategy)
