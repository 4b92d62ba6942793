"""When a resumed run restores what: its hooks see which states."""

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoint_dicts import Recording, Task, are_equal, fitted, loader
from support.models import Count
from support.processes import run
from support.trainers import NO_OUTPUT, make_trainer
from treadle.callbacks import Callback
from treadle.compat.demos.boring_classes import BoringModel
from treadle.trainer.checkpointing import resolve

import treadle


class Counts(Count, Callback):
    seen = ()

    def on_train_batch_end(self, *args):
        self.value += 1

    def on_fit_start(self, trainer, task):
        self.seen = (*self.seen, self.value)

    on_train_start = on_fit_start


def test_states_of_callbacks_are_restored_after_on_fit_start(tmp_path):
    def fit(epochs, path=None):
        counts = Counts()
        trainer = make_trainer(max_epochs=epochs, limit_train_batches=3, callbacks=[counts])
        trainer.fit(BoringModel(), ckpt_path=path)
        return trainer, counts

    trainer, _ = fit(1)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    _, counts = fit(2, tmp_path / "c.ckpt")
    assert counts.seen == (0, 3)
    assert counts.value == 6


def two_ranks(folder):
    strategy = {"strategy": "ddp", "devices": 2}
    plugin = Recording()
    _, trainer = fitted(f"{folder}/plugin", 2, plugin, **strategy)
    resumed, _ = fitted(f"{folder}/plugin", 4, plugin, trainer.checkpoint_callback.last_model_path, **strategy)
    whole, _ = fitted(f"{folder}/whole", 4, **strategy)
    return are_equal(resumed, whole), [name for call, name in plugin.calls if call == "save"]


@pytest.mark.long
def test_two_ranks(tmp_path):
    (first, saves), (second, none) = run(two_ranks, 2, str(tmp_path))
    assert first is second is True
    assert saves
    assert none == []


def test_hooks_see_the_dict_and_what_they_change_is_written(tmp_path):
    class Hooks(Callback):
        def on_save_checkpoint(self, trainer, task, checkpoint):
            self.seen = set(checkpoint)
            if "optimizer_states" in checkpoint:
                checkpoint["optimizer_states"][0]["mine"] = "kept"
            checkpoint["more"] = torch.ones(2)
            checkpoint["state_dict"]["net.0.bias"] = torch.zeros(4)
            checkpoint.pop("lr_schedulers", None)

        def on_load_checkpoint(self, trainer, task, checkpoint):
            self.loaded = checkpoint["more"]

    hooks, path = Hooks(), tmp_path / "c.ckpt"
    trainer = treadle.Trainer(max_epochs=1, callbacks=hooks, **NO_OUTPUT)
    trainer.fit(Task(), loader())
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    assert hooks.seen >= {"state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "hyper_parameters"}
    assert content["optimizer_states"][0]["mine"] == "kept"
    assert "lr_schedulers" not in content
    assert torch.equal(content["more"], torch.ones(2))
    assert content["state_dict"]["net.0.bias"].count_nonzero() == 0
    resumed = treadle.Trainer(max_epochs=2, callbacks=hooks, **NO_OUTPUT)
    resumed.fit(Task(), loader(), ckpt_path=path)
    assert torch.equal(hooks.loaded, torch.ones(2))
    connector = resumed._checkpoint_connector
    assert set(connector.dump_checkpoint(weights_only=True)) < set(connector.dump_checkpoint())
    assert resumed._checkpoint_connector.dump_checkpoint()["global_step"] == 16


def test_names_are_compared_before_a_file_of_another_library_is_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(resolve, "open_dict", lambda *_: pytest.fail("it is copied"))
    save_file({"other": torch.ones(1)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"w\.safetensors was saved by a different model:\n  missing: net\.0\.bias"):
        treadle.Trainer(**NO_OUTPUT).validate(Task(), loader(), ckpt_path=tmp_path / "w.safetensors")
