"""What scripts read from `Trainer.callback_metrics`, and what they write into it."""

import copy
import os
import pickle

import numpy as np
import pytest
import torch
from support.callback_runs import Tiny, fit
from support.processes import run
from torch.optim.lr_scheduler import ReduceLROnPlateau
from treadle.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint

SCORES = [0.5, 0.3, 0.1, 0.2, 0.4, 0.6]


class Writes(Callback):
    """Writes ``score(trainer)`` after each validation."""

    def __init__(self, score):
        self.score = score

    def on_validation_end(self, trainer, pl_module):
        if (score := self.score(trainer)) is not None:
            trainer.callback_metrics["own"] = score


class Scheduled(Tiny):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "own"}}


def monitored(root, score, **flags):
    """Return what three monitors made of a value that nobody logged."""
    stop, kept, task = EarlyStopping("own", patience=2), ModelCheckpoint(root, "{epoch}", "own"), Scheduled()
    trainer = fit(root, Writes(score), stop, kept, task=task, max_epochs=6, samples=4, **flags)
    rate, name = trainer.optimizers[0].param_groups[0]["lr"], os.path.basename(kept.best_model_path)
    return trainer.current_epoch, name, stop.best_score.item(), float(kept.best_model_score), rate


@pytest.mark.parametrize("flags", [{}, {"val_check_interval": 1}])
def test_what_is_written_is_monitored(tmp_path, flags):
    kinds = (float, torch.tensor, lambda x: torch.tensor([x], dtype=torch.float64), np.float64)
    epochs = 3 if flags else 5  # with two validations an epoch, each value is checked twice
    for kind in kinds:
        root = tmp_path / str(kinds.index(kind))
        found = monitored(root, lambda trainer, k=kind: k(SCORES[trainer.current_epoch]), **flags)
        assert found[0] == epochs
        assert found[1] == "epoch=2.ckpt"
        assert found[2:4] == pytest.approx((0.1, 0.1))


def test_what_is_written_is_kept_until_it_is_logged_or_removed(tmp_path):
    seen = []

    class Uses(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            values = trainer.callback_metrics
            seen.append({name: values.get(name) for name in ("own", "curve", "val_loss", "gone")})

        def on_validation_end(self, trainer, pl_module):
            values = trainer.callback_metrics
            values.update({"own": 3, "gone": 1.0})
            values |= {"curve": torch.arange(3)}
            assert values.setdefault("own", 4) == 3
            assert values.pop("gone") == 1.0
            assert values.pop("never", None) is None
            values["val_loss"] = 7.0 + trainer.current_epoch
            assert "gone" not in trainer.callback_metrics
            assert pickle.loads(pickle.dumps(values)).keys() == copy.deepcopy(values).keys() == values.keys()

    trainer = fit(tmp_path, Uses(), values=[1.0, 2.0, 3.0], max_epochs=3)
    assert [record["own"] for record in seen] == [None, 3, 3]
    assert [record["val_loss"] for record in seen] == [None, 7, 8]  # it was written last; then it was logged again
    assert [record["gone"] for record in seen] == [None] * 3
    assert torch.equal(seen[1]["curve"], torch.arange(3))
    assert trainer.callback_metrics["own"] == 3
    trainer.callbacks.clear()
    trainer.validate(Tiny([5.0]), [trainer.val_dataloaders], verbose=False)
    assert trainer.callback_metrics == trainer.logged_metrics == {"val_loss": 5.0}  # of the latest stage
    assert trainer.progress_bar_metrics == {"val_loss": 5.0}


def test_a_written_value_is_in_the_checkpoint(tmp_path):
    kept = ModelCheckpoint(tmp_path, save_top_k=1)
    fit(tmp_path, kept, Writes(lambda trainer: 1 / 3), max_epochs=1)
    seen = []
    read = LambdaCallback(on_train_start=lambda trainer, _: seen.append(trainer.callback_metrics["own"].item()))
    fit(tmp_path, read, max_epochs=2, ckpt_path=kept.best_model_path)
    assert seen == [1 / 3]


def on_each_rank(root):
    rank, flags = int(os.environ["RANK"]), {"devices": 2, "strategy": "ddp"}

    def score(trainer):
        return SCORES[trainer.current_epoch]

    return [
        monitored(f"{root}/0", score, **flags),
        monitored(f"{root}/1", lambda trainer: score(trainer) if rank == 0 else None, **flags),
        monitored(f"{root}/2", lambda trainer: score(trainer) if rank == 1 else None, **flags),
        monitored(f"{root}/3", lambda trainer: score(trainer) if rank == 0 else trainer.current_epoch, **flags),
    ]


@pytest.mark.long
def test_ranks_that_write_different_values_decide_alike(tmp_path):
    """Rank zero's number counts, or else that of the rank that wrote one."""
    alone = monitored(tmp_path / "alone", lambda trainer: SCORES[trainer.current_epoch])
    assert run(on_each_rank, 2, str(tmp_path)) == [[alone] * 4] * 2


class Logs(Tiny):
    def training_step(self, batch, batch_idx):
        third = torch.tensor(1 / 3, dtype=torch.float64)
        self.log_dict({"step": third, "number": 1 / 3, "numpy": np.float64(1 / 3)})
        self.log_dict({"mean": third + batch_idx, "whole": 16777217 + batch_idx}, on_step=False, on_epoch=True)
        self.log_dict({"narrow": third.float() + batch_idx, "half": third.half()}, on_step=False, on_epoch=True)
        self.seen = self.trainer.callback_metrics
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val", torch.tensor(1 / 3, dtype=torch.float64))


def test_numbers_are_not_rounded(tmp_path):
    task = Logs()
    trainer = fit(tmp_path, task=task, max_epochs=1)
    values, third = trainer.callback_metrics, torch.tensor(1 / 3, dtype=torch.float64)
    assert {values[name].item() for name in ("step", "number", "numpy", "val")} == {1 / 3}
    assert {task.seen[name].item() for name in ("step", "number", "numpy")} == {1 / 3}
    assert values["mean"].item() == pytest.approx(1 / 3 + 2, abs=1e-15)
    assert values["whole"].item() == 16777219
    # As in the calculation of a float32 model, which torch.allclose compares with float32 tensors only.
    assert values["narrow"].dtype == values["half"].dtype == values["train_loss"].dtype == torch.float32
    assert torch.allclose(values["narrow"], third.float() + 2)
    assert trainer.logged_metrics["step"].item() == 1 / 3
    task = Logs()
    double = fit(tmp_path, task=task, max_epochs=1, precision="64-true")
    assert double.callback_metrics["train_loss"].dtype == torch.float64


def test_a_name_of_a_step_and_of_an_epoch_is_told(tmp_path):
    """Lightning keeps the later value too, without a word. The case of a reduction does not matter."""
    task, options = Tiny(), {"reduce_fx": "MAX", "on_step": False, "on_epoch": True}
    task.on_train_batch_start = lambda batch, index: task.log("x", float(index), **options)
    assert fit(tmp_path, task=task, max_epochs=1).callback_metrics["x"] == 4.0
    task.on_train_epoch_end = lambda: task.log("x", 9.0)
    with pytest.warns(UserWarning, match="'x' is logged both within batches and between them") as caught:
        assert fit(tmp_path, task=task, max_epochs=2).callback_metrics["x"] == 9.0
    assert len([w for w in caught if "logged both" in str(w.message)]) <= 2
