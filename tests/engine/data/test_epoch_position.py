"""The phases of a dataloader between, in and after its epochs."""

import itertools

from torch.utils.data import DataLoader
from treadle.engine.data.epoch_position import EpochPosition, Phase

import treadle


def read(loader, count):
    return [batch.tolist() for batch in itertools.islice(loader, count)]


def test_an_epoch_that_is_left_early_ends_with_the_next_iteration():
    loader = treadle.Accelerator(cpu=True).prepare(DataLoader(range(6), batch_size=2, shuffle=True))
    position = loader._position
    iterator = iter(loader)
    assert position.phase is Phase.BETWEEN  # nothing is drawn before a batch is asked for
    next(iterator)
    assert (position.phase, position.epoch, position.batches, position.samples) == (Phase.RUNNING, 0, 1, 2)
    read(loader, 1)
    assert (position.phase, position.epoch, position.batches) == (Phase.RUNNING, 1, 1)
    loader.set_epoch(7)
    assert position.phase is Phase.RENUMBERED
    read(loader, 3)
    assert (position.phase, position.epoch) == (Phase.RUNNING, 7)  # the number was the next epoch's
    assert len(list(loader)) == 3
    assert (position.phase, position.epoch, position.batches, position.order) == (Phase.BETWEEN, 9, 0, None)


def test_what_is_loaded_takes_the_place_of_an_older_position():
    position = EpochPosition(9, 9, 9, items_ahead=1, phase=Phase.FINISHED)
    position.load_state_dict({"epoch": 3, "samples": 8, "batches": 2, "order": {"stream": None}, "started": True})
    assert position == EpochPosition(3, 8, 2, {"stream": None}, True, phase=Phase.LOADED)
