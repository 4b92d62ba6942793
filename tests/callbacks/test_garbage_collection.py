"""`GarbageCollection`: collects at the same steps everywhere, and what it leaves as it was."""

import gc

import pytest
from support.callback_runs import Tiny, loader, trainer
from treadle.callbacks import (
    GarbageCollection,
    LambdaCallback,
)
from treadle.trainer.default_callbacks import choose_callbacks


def is_frozen(container):
    return not any(each is container for each in gc.get_objects())  # which lists all objects but the frozen ones


@pytest.fixture
def collector():
    """Python's garbage collector as every test expects it, before and after the test."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("others_froze", [False, True])
def test_what_is_there_is_frozen_while_a_run_collects_unless_other_code_froze_objects(collector, others_froze):
    callback, first = GarbageCollection(), []
    if others_froze:
        gc.freeze()
    second = []
    callback.on_train_start(None, None)
    third = []
    assert [is_frozen(each) for each in (first, second, third)] == [True, not others_froze, False]
    assert not gc.isenabled()
    callback.teardown(None, None, "fit")
    assert [is_frozen(first), gc.get_freeze_count() > 0, gc.isenabled()] == [others_froze, others_froze, True]


def test_several_gpus_collect_together():
    flags = dict.fromkeys(("checkpointing", "progress_bar", "model_summary", "report"), False)
    (added,) = choose_callbacks(None, **flags, in_folder=False, collects_garbage=True)
    assert (type(added), added.every_n_steps) == (GarbageCollection, 100)
    own = GarbageCollection(7)
    assert choose_callbacks(own, **flags, in_folder=False, collects_garbage=True) == [own]
    assert choose_callbacks(None, **flags, in_folder=False) == []


def test_garbage_is_collected_at_chosen_steps(tmp_path, collector):
    steps, enabled = [], []
    look = LambdaCallback(on_train_batch_start=lambda *_: enabled.append(gc.isenabled()))
    made = trainer(tmp_path, GarbageCollection(every_n_steps=4), look)

    def collected(phase, info):
        if phase == "start" and made.global_step:
            steps.append(made.global_step)

    gc.callbacks.append(collected)
    try:
        made.fit(Tiny(), loader())
    finally:
        gc.callbacks.remove(collected)
    assert [step for step in steps if step < 10] == [4, 8]
    assert not any(enabled)
    assert gc.isenabled()
    with pytest.raises(ValueError, match="generation"):
        GarbageCollection(generation=3)
