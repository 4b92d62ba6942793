"""The counters and the phase of a run, and the forms in which checkpoints hold them."""

import pytest
from treadle.trainer.loop.progress import Phase, Progress

NAMES = ("epoch", "step", "batch", "batches", "samples", "validated", "skipped", "seconds", "loaded", "val_loaded")
COUNTERS = {name: number for number, name in enumerate(NAMES, 2)}


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.EPOCH_END])
def test_what_is_saved_is_restored(phase):
    saved, restored = Progress(**COUNTERS, phase=phase), Progress()
    restored.load_state_dict(saved.state_dict())
    assert restored == saved


def test_at_an_epochs_end_the_next_one_is_saved():
    saved, restored = Progress(**COUNTERS, phase=Phase.EPOCH_END), Progress()
    restored.load_state_dict(saved.state_dict())
    assert restored == Progress(**{**COUNTERS, "epoch": 3, "batch": 0})
    assert saved.epoch_is_over


def test_of_a_checkpoint_without_it_nothing_is_taken():
    progress = Progress(**COUNTERS)
    progress.load_state_dict({})
    assert progress == Progress(**COUNTERS)
