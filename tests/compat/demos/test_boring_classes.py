"""Lightning's boring classes; expected values are those of lightning 2.6.6."""

import pytest
import torch
from support.trainers import make_trainer
from torch.utils.data import DataLoader
from treadle.compat.demos import boring_classes as boring

import treadle


def test_the_boring_model_trains_as_in_lightning(tmp_path) -> None:
    treadle.seed_everything(1)
    model = boring.BoringModel()
    trainer = make_trainer(max_epochs=1, limit_train_batches=4, limit_val_batches=1, num_sanity_val_steps=0)
    trainer.fit(model, DataLoader(boring.RandomDataset(32, 8)), DataLoader(boring.RandomDataset(32, 8)))
    assert model.layer.weight.sum().item() == pytest.approx(0.7426187992095947, rel=1e-5)


@pytest.mark.parametrize("data", [boring.BoringDataModule, None])
def test_boring_classes_run(data) -> None:
    trainer = make_trainer(fast_dev_run=2)
    trainer.fit(boring.BoringModel(), datamodule=None if data is None else data())
    assert trainer.global_step == 2
    assert boring.DemoModel()(torch.ones(2, 32)).shape == (2, 10)
