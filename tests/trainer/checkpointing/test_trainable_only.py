"""A checkpoint without the frozen weights resumes exactly, and loads beside no others than those it was trained on."""

import pytest
import torch
from support.failing_runs import Fails
from support.processes import run
from support.saved_nets import prepared
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader
from treadle.callbacks import Callback, ModelCheckpoint
from treadle.engine.checkpoint import OpenCheckpoint
from treadle.engine.weights import load_weights

import treadle

WORLDS = [("ddp", 2), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (("auto", 1), ("fsdp", 2)))]


class Adapted(treadle.TaskModule):
    def __init__(self, seed=0):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(seed)
        self.base = nn.Linear(4, 4)
        self.base.requires_grad_(False)
        torch.manual_seed(99)
        self.adapter = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second_name = self.base.weight

    def forward(self, x):
        return self.norm(self.base(x) + self.adapter(torch.dropout(x, 0.2, self.training)))

    def training_step(self, batch, batch_idx):
        return self(batch).pow(2).mean() + self.adapter(batch).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1, fused=True)  # as on a GPU: it leaves _version as it is


def loader():
    return DataLoader(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), 4, shuffle=True)


def fit(task, folder, epochs, ckpt_path=None, strategy="auto", callbacks=(), **options):
    saved = ModelCheckpoint(
        folder, "{step}", save_top_k=-1, save_trainable_only=True, enable_version_counter=False, **options
    )
    trainer = make_trainer(
        max_epochs=epochs, strategy=strategy, callbacks=[saved, *callbacks], enable_checkpointing=True
    )
    treadle.seed_everything(3)
    trainer.fit(task, loader(), ckpt_path=ckpt_path)
    weights = trainer.accelerator.get_state_dict(trainer.task)
    return {name: value.clone() for name, value in weights.items()} if trainer.is_global_zero else {}


def saved_names(checkpoint):
    names = {*OpenCheckpoint(checkpoint).part("model").tensors}
    if checkpoint.is_file():
        assert {*torch.load(checkpoint)["state_dict"]} == names
    return names


def resumed_equals_uninterrupted(folder, strategy):
    whole = fit(Adapted(), folder / "whole", 3, strategy=strategy)
    fit(Adapted(), folder / "cut", 1, strategy=strategy)
    steps = 6 if strategy == "auto" else 3
    path = folder / "cut" / f"step={steps}.ckpt"
    with pytest.raises(ValueError, match="frozen weights that the checkpoint omits \\(3 of 3\\)"):  # on every rank
        fit(Adapted(seed=5), folder / "other", 2, path, strategy=strategy)
    return whole, fit(Adapted(), folder / "cut", 3, path, strategy=strategy)


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "ranks"), WORLDS)
def test_a_resumed_run_equals_the_uninterrupted_one_and_needs_its_base(tmp_path, strategy, ranks):
    (whole, resumed), *_ = run(resumed_equals_uninterrupted, ranks, tmp_path, strategy)
    assert whole
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    checkpoint = next((tmp_path / "cut").glob("*.ckpt"))
    names = saved_names(checkpoint)
    assert {"adapter.weight", "adapter.bias", "norm.weight", "norm.running_mean"} <= names
    assert not names & {"base.weight", "base.bias", "second_name"}


def test_a_task_is_loaded_beside_its_base(tmp_path):
    trained = fit(Adapted(), tmp_path, 1)
    path = next(tmp_path.glob("*.ckpt"))
    loaded = Adapted.load_from_checkpoint(path).state_dict()
    assert all(torch.equal(trained[name], loaded[name]) for name in trained)
    with pytest.raises(ValueError, match="Build the model from the same pretrained weights"):
        Adapted.load_from_checkpoint(path, seed=5)
    with pytest.warns(UserWarning, match="frozen weights"):
        other = Adapted.load_from_checkpoint(path, seed=5, strict=False)
    assert torch.equal(other.adapter.weight, trained["adapter.weight"])
    bare = Adapted()
    load_weights(bare, path)
    assert torch.equal(bare.adapter.weight, trained["adapter.weight"])


class EditsWeights(Adapted):
    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["adapter.bias"] = torch.zeros(4)


def test_a_hook_may_edit_what_is_there(tmp_path):
    fit(EditsWeights(), tmp_path, 1)
    path = next(tmp_path.glob("*.ckpt"))
    assert EditsWeights.load_from_checkpoint(path).adapter.bias.abs().sum() == 0
    fit(EditsWeights(), tmp_path / "again", 2, path)


class Thaws(Callback):
    """Trains the base in the second epoch alone."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.base.requires_grad_(trainer.current_epoch == 1)

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.base.requires_grad_(False)


def test_what_was_trained_at_any_time_is_saved(tmp_path):
    fit(Adapted(), tmp_path, 3, callbacks=[Thaws()])
    first, *_, last = sorted(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.removeprefix("step=")))
    assert "base.bias" not in saved_names(first)
    assert "base.bias" in saved_names(last)


def test_what_an_error_leaves_has_what_was_trained(tmp_path):
    with pytest.raises(RuntimeError, match="planned"):
        fit(Adapted(), tmp_path, 1, callbacks=[Fails("batch_end", 4)], save_on_exception=True)
    (path,) = tmp_path.glob("*.ckpt")
    assert "base.weight" not in saved_names(path)
    resumed, whole = fit(Adapted(), tmp_path / "r", 2, path), fit(Adapted(), tmp_path / "w", 2)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def own_loop(folder):
    accelerator, task, _ = prepared(Adapted, Adapted.configure_optimizers)
    accelerator.save_state(folder, trainable_only=True)
    weight = accelerator.unwrap_model(task).adapter.weight
    trained = weight.detach().clone()
    nn.init.zeros_(weight)
    accelerator.load_state(folder)
    return torch.equal(weight, trained)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_own_loop_saves_what_is_trained(tmp_path, ranks):
    assert run(own_loop, ranks, tmp_path / "state") == [True] * ranks
    assert "adapter.weight" in saved_names(tmp_path / "state")
    assert "base.weight" not in saved_names(tmp_path / "state")


def test_the_digest_of_a_frozen_weight_is_taken_once(tmp_path, monkeypatch):
    from treadle.engine.checkpoint import model_check

    taken = []
    digest = model_check._digest
    monkeypatch.setattr(model_check, "_digest", lambda tensor: taken.append(tensor.shape) or digest(tensor))
    fit(Adapted(), tmp_path, 3)
    assert len(taken) == 3  # weight, bias, and the weight's second name
