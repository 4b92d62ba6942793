"""A run of a configuration, by command and by hand."""

from pathlib import Path

import cli_samples

import treadle

RUN = """
trainer:
  max_epochs: 2
  accelerator: cpu
  enable_progress_bar: false
  enable_model_summary: false
  enable_report: false
  logger: false
model:
  class: cli_samples.Line
  lr: 0.02
data:
  class: cli_samples.Points
  batch_size: 8
"""


def by_hand(lr=0.02, epochs=2):
    """The same run in plain PyTorch."""
    treadle.seed_everything(0)
    task, data = cli_samples.Line(lr), cli_samples.Points(8)
    optimizer = task.configure_optimizers()
    for _ in range(epochs):
        for batch in data.train_dataloader():
            optimizer.zero_grad()
            task.loss(batch).backward()
            optimizer.step()
    return task.net.weight


def weights(folder):
    (path,) = Path(folder, "checkpoints").glob("*.ckpt")
    return cli_samples.Line.load_from_checkpoint(path).net.weight
