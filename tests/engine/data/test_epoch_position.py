"""The phases of a dataloader between, in and after its epochs."""

import itertools

from torch.utils.data import DataLoader
from treadle.engine.data.epoch_position import SAVED, EpochPosition, Phase

import treadle


def prepared(state=None):
    loader = treadle.Accelerator(cpu=True).prepare(DataLoader(range(6), batch_size=2, shuffle=True))
    if state is not None:
        loader.load_state_dict(state)
    return loader, loader._position


def read(loader, count):
    return [batch.tolist() for batch in itertools.islice(loader, count)]


def test_an_epoch_that_is_left_early_ends_with_the_next_iteration():
    loader, position = prepared()
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


def test_a_loaded_epoch_is_continued_once():
    whole, _ = prepared()
    first, state = read(whole, 2), whole.state_dict()
    loader, position = prepared(state)
    assert (position.phase, position.batches) == (Phase.LOADED, 2)
    assert {name: getattr(position, name) for name in SAVED} == {name: state[name] for name in SAVED}
    rest = list(loader)
    assert sorted(i for batch in [*first, *(batch.tolist() for batch in rest)] for i in batch) == list(range(6))
    assert position.phase is Phase.BETWEEN

    iterator = iter(whole)
    for _ in range(3):
        next(iterator)
    loader, position = prepared(whole.state_dict())  # after the last batch, before the end of the epoch
    assert loader.finish_epoch()
    assert (position.phase, position.epoch) == (Phase.FINISHED, 2)
    assert not loader.start_at(3)  # a loop that asks for the rest of that epoch gets nothing
    assert position.phase is Phase.BETWEEN


def test_what_is_loaded_takes_the_place_of_an_older_position():
    position = EpochPosition(9, 9, 9, items_ahead=1, phase=Phase.FINISHED)
    position.load_state_dict({"epoch": 3, "samples": 8, "batches": 2, "order": {"stream": None}, "started": True})
    assert position == EpochPosition(3, 8, 2, {"stream": None}, True, phase=Phase.LOADED)
