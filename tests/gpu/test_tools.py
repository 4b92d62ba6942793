"""What looks at a device or fills it: searches for a batch size, profilers, monitors, models that do not fit."""

import pytest
import torch
from support.gpus import CUDA, DEVICE, Net, Task, loader, needs_gpu, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.engine import find_executable_batch_size
from treadle.engine.big_models import cpu_offload, dispatch_model, infer_auto_device_map

import treadle


@needs_gpu
def test_a_batch_size_that_fits_is_found():
    total = torch.cuda.get_device_properties(DEVICE).total_memory

    @find_executable_batch_size(starting_batch_size=64)
    def fill(batch_size):
        return torch.empty(batch_size * (total // 16), dtype=torch.uint8, device=DEVICE).numel() and batch_size

    assert fill() <= 8
    assert torch.cuda.memory_allocated() < total // 16


@needs_gpu
def test_batch_size_finder():
    class Hungry(Task):
        def __init__(self):
            super().__init__()
            self.batch_size = 2

        def train_dataloader(self):
            x = torch.randn(4096, 8)
            return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), self.batch_size)

        def training_step(self, batch, batch_idx):
            share = torch.cuda.get_device_properties(DEVICE).total_memory // 100
            ballast = torch.empty(len(batch[0]) * share, dtype=torch.uint8, device=DEVICE)
            return self.loss(batch) + 0 * ballast[0]

    task = Hungry()
    trainer(callbacks=treadle.callbacks.BatchSizeFinder(mode="power"), max_steps=2).fit(task)
    assert 16 <= task.batch_size <= 64


@needs_gpu
def test_the_simple_profiler_reads_the_devices_clock():
    profiler = treadle.profilers.SimpleProfiler()
    trainer(profiler=profiler).fit(Task(slow=True), loader())
    shares = {name: action.seconds for name, action in profiler.actions.items() if hasattr(action, "seconds")}
    assert profiler.actions
    assert not shares or max(shares.values()) > 0.05


def test_monitors_write_their_rows(tmp_path):
    logger = treadle.loggers.CSVLogger(tmp_path)
    watch = [treadle.callbacks.ThroughputMonitor(window_size=4), treadle.callbacks.DeviceStatsMonitor()]
    trainer(logger=logger, callbacks=watch, log_every_n_steps=2).fit(Task(), loader())
    header = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0]
    assert "train/device/samples_per_sec" in header
    assert not CUDA or "allocated_bytes" in header


@needs_gpu
def test_tokens_that_the_device_counts_are_read_with_the_rest(tmp_path):
    monitor = treadle.callbacks.ThroughputMonitor(length_fn=lambda batch: (batch[0] > -100).sum(), window_size=4)
    logger = treadle.loggers.CSVLogger(tmp_path)
    trainer(logger=logger, callbacks=monitor, log_every_n_steps=2).fit(Task(), loader())
    assert "items_per_sec" in next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0]


def test_a_model_over_several_places(tmp_path):
    torch.manual_seed(0)
    net, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), torch.ones(2, 64)
    expected = net(x)
    layer = sum(parameter.nbytes for parameter in net[0].parameters())
    memory = {0: 2 * layer + 1, "cpu": 2 * layer + 1} if CUDA else {"cpu": 3 * layer + 1}
    placed = infer_auto_device_map(net, max_memory=memory)
    assert "disk" in placed.values()
    spread = dispatch_model(net, placed, offload_dir=tmp_path, main_device=DEVICE if not CUDA else 0)
    torch.testing.assert_close(spread(x.to(DEVICE)).cpu(), expected, rtol=1e-4, atol=1e-5)


@needs_gpu
def test_weights_in_host_memory():
    net = Net()
    expected = net.eval()(torch.ones(2, 8))
    cpu_offload(net, DEVICE)
    torch.testing.assert_close(net(torch.ones(2, 8, device=DEVICE)).cpu(), expected, rtol=1e-4, atol=1e-5)


@needs_gpu
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"])
def test_every_precision_trains(precision):
    task = Task()
    trainer(precision=precision, max_epochs=3).fit(task, loader(20))
    losses = torch.stack(task.losses).float().cpu()
    assert torch.isfinite(losses[-20:]).all()
    assert losses[-20:].mean() < losses[:20].mean()


@needs_gpu
def test_full_precision_products_are_said_with_their_flag(caplog):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        run = trainer()
        run.fit(Task(), loader(2))
        assert "float32_matmul_precision='high'" in run.decided
        run = trainer(float32_matmul_precision="high")
        run.fit(Task(), loader(2))
        assert "float32_matmul_precision" not in run.decided
    finally:
        torch.set_float32_matmul_precision(before)
