"""`treadle plan --config`: the run of a configuration, against what that run really does."""

import textwrap

import pytest
from processes import run
from traffic import Written

from treadle.__main__ import main

TASK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import treadle


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


class Task(treadle.TaskModule):
    def __init__(self, width: int = 8, manual: bool = False):
        super().__init__()
        self.automatic_optimization = not manual
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 1)

    def training_step(self, batch, batch_idx):
        loss = self.head(self.blocks(batch[0])).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(100, self.head.in_features)), batch_size=4)
"""
CONFIG = """
trainer: {max_epochs: 2, strategy: fsdp, devices: 2, accumulate_grad_batches: 2, gradient_clip_val: 1.0}
model: {class: planned_task.Task, width: 12}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "planned_task.py").write_text(textwrap.dedent(TASK))
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def plan(capsys, *arguments):
    status = main(["plan", "--config", "run.yaml", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_run_of_a_configuration(here, capsys):
    status, out, _ = plan(capsys, "--no-advice")
    assert status == 0
    assert "plan of planned_task.Task on 2 x h100, fsdp, 32-true" in out
    assert "16 samples = 4 per micro-batch x 2 accumulated x 2 processes" in out
    assert "14 in all, 7 per epoch" in out  # 100 samples: six batches of 16 and one of 4
    assert "learning rate" in out
    assert "█" in out
    status, out, _ = plan(capsys, "--no-advice", "--world-size", "64", "--micro-batch", "2", "model.width=8")
    assert "256 samples = 2 per micro-batch x 2 accumulated x 64 processes" in out


def test_what_is_wrong_is_explained(here, capsys):
    status, _, err = plan(capsys, "trainer.max_epoch=3")
    assert status == 2
    assert "max_epochs" in err
    status, _, err = plan(capsys, "model.manual=true")
    assert status == 2
    assert "automatic_optimization=False" in err


def sent_in_a_run():
    """What one process of the real run sends in its second step."""
    import planned_task

    import treadle

    written = Written()

    class Watch(treadle.Callback):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            if batch_idx == 2:
                written.__enter__()

        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            if batch_idx == 3:
                written.__exit__(None, None, None)

    trainer = treadle.Trainer(
        accelerator="cpu", max_epochs=1, strategy="fsdp", devices=2, accumulate_grad_batches=2, gradient_clip_val=1.0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[Watch()],
    )  # fmt: skip
    trainer.fit(planned_task.Task(width=12))
    return dict(written.found)


def test_the_exchange_is_that_of_the_real_run(here):
    import argparse

    from treadle.engine.planning.simulation import simulate
    from treadle.trainer.plan_command import _settings, parser
    from treadle.trainer.plan_config import of_config

    options: argparse.Namespace = parser().parse_args(["--config", "run.yaml"])
    subject = of_config(options)
    settings = _settings(options, subject)
    made = simulate(
        subject.build_model, subject.make_batch, subject.loss, subject.optimizer,
        strategy=subject.strategy(2), step=subject.step, **settings,
    )  # fmt: skip
    sizes = {f"{kind} bytes": number for kind, number in made.traffic.size.items()}
    assert run(sent_in_a_run, 2)[0] == {**made.traffic.count, **sizes}
