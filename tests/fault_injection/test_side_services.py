"""What only shows and logs never ends a run, nor changes it: with the disk full and the terminal gone."""

import json
import re

import pytest
from support.processes import script

PROGRAM = """
import json, os, resource, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import (
    DeviceStatsMonitor, LearningRateMonitor, ModelSummary, RichModelSummary, RichProgressBar,
    ThroughputMonitor, TQDMProgressBar,
)
from treadle.loggers import CSVLogger, TensorBoardLogger
import treadle

class Task(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)
        self.save_hyperparameters()
    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).square().mean(), prog_bar=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

kind, broken, out = sys.argv[1:]
shows = {
    "tqdm": [TQDMProgressBar(refresh_rate=1), ModelSummary()],
    "rich": [RichProgressBar(refresh_rate=1), RichModelSummary()],
}
watches = [LearningRateMonitor("step"), DeviceStatsMonitor(cpu_stats=True), ThroughputMonitor(batch_size_fn=len)]
samples = torch.randn(120, 4, generator=torch.Generator().manual_seed(1))
if broken == "disk":  # bytes that any file may have, as if it had no more room
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))
if broken == "terminal":
    for stream in (1, 2):
        os.dup2(os.open("/dev/full", os.O_WRONLY), stream)
task = Task()
trainer = treadle.Trainer(
    accelerator="cpu", max_epochs=2, log_every_n_steps=1, profiler="simple",
    logger=[CSVLogger("logs", flush_logs_every_n_steps=1), TensorBoardLogger("logs")],
    callbacks=[*shows[kind], *watches], enable_checkpointing=False,
)
trainer.fit(task, DataLoader(TensorDataset(samples), 4), DataLoader(TensorDataset(samples), 40))
with open(out, "w") as file:
    json.dump([task.net.weight.tolist(), task.net.bias.tolist(), trainer.global_step], file)
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_a_full_disk_and_a_lost_terminal_change_nothing(tmp_path, kind):
    weights = {}
    for broken in ("nothing", "disk", "terminal"):
        done = script(PROGRAM, kind, broken, str(tmp_path / broken))
        assert done.returncode == 0, done.stderr
        weights[broken] = json.loads((tmp_path / broken).read_text())
        for service in ("CSVLogger", "TensorBoardLogger", "RunReport"):
            told = re.findall(rf"{service}\S* failed(?:, so the logger| and) is disabled", done.stderr)
            assert len(told) == (broken == "disk"), done.stderr
    assert weights["disk"] == weights["terminal"] == weights["nothing"]
    assert weights["nothing"][-1] == 60
