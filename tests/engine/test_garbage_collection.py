"""No garbage collection on the way of a short fit; what a run no longer needs is freed without one."""

import contextlib
import gc
import weakref

import pytest
import torch
from support.models import Scored, loader
from support.processes import run
from treadle.engine import garbage_collection

import treadle


class Task(Scored):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


@contextlib.contextmanager
def collections():
    """The generations that something asks to collect, while Python itself never does."""
    found = []

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.collect()
    gc.disable()
    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)
        gc.enable()


def test_a_fit_with_all_its_defaults_collects_nothing(tmp_path):
    with collections() as found:
        for _ in range(2):
            trainer = treadle.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path)
            trainer.fit(Task(), loader(), loader())
            trainer.validate(dataloaders=loader(), verbose=False)
    assert found == []


def refitted(root, strategy="auto", **options):
    """What of a first fit is left when the same Trainer fits another task, without a collection."""
    trainer = treadle.Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, default_root_dir=root)
    task, data = Task(), loader(**options)
    trainer.fit(task, data, data)
    accelerator = trainer.accelerator
    prepared = [accelerator.models[0], accelerator.optimizers[0].optimizer, accelerator.schedulers[0]]
    kept = [weakref.ref(value) for value in (task, data, *prepared, *accelerator.loaders[:2])]
    with collections() as found:
        del task, data, prepared
        trainer.fit(Task(), loader(), loader())
        left = [type(value()).__name__ for value in kept if value() is not None]
    return left, found


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["here", "workers"])
def test_what_the_stage_before_prepared_is_freed_at_once(tmp_path, options):
    assert refitted(tmp_path, **options) == ([], [])


@pytest.mark.long
def test_replicas_are_freed_at_once(tmp_path):
    """A replica that was left would keep buffers of the gradients' size."""
    assert run(refitted, 2, tmp_path, "ddp") == [([], [])] * 2


def dropped(root):
    """A Trainer that nobody holds any more, but its own task."""
    trainer = treadle.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=root)
    trainer.fit(Task(), loader(), loader())
    return weakref.ref(trainer.optimizers[0])


def test_a_dropped_run_is_collected_where_memory_is_short(tmp_path, monkeypatch):
    with collections() as found:
        optimizer = dropped(tmp_path)
        dropped(tmp_path)
        assert optimizer() is not None
        assert found == []
        monkeypatch.setattr(garbage_collection, "HOST_SHARE", 0.0)
        dropped(tmp_path)
        assert optimizer() is None
        assert found == [2]


def test_free_memory_collects():
    accelerator = treadle.Accelerator(cpu=True)
    with collections() as found:
        accelerator.free_memory()
    assert found == [2]
