"""Rates and operations, and what devices can do."""

import pytest
import torch
from torch import nn
from treadle.callbacks import Throughput, measure_flops
from treadle.callbacks._throughput import look_up_peak_flops


def test_rates_by_hand():
    meter = Throughput(available_flops=1000.0, world_size=2, window_size=3, separator="-")
    with pytest.raises(ValueError, match=r"first update\(\)"):
        meter.compute()
    meter.update(time=1.0, batches=1, samples=4, lengths=40, flops=100)
    meter.update(time=2.0, batches=3, samples=10, lengths=90, flops=200)
    assert meter.compute() == {"time": 2.0, "batches": 3, "samples": 10, "lengths": 90}
    meter.update(time=4.0, batches=5, samples=20, lengths=200, flops=400)
    meter.update(time=6.0, batches=7, samples=30, lengths=290, flops=800)  # the first one falls out
    assert meter.compute() == {
        "time": 6.0,
        "batches": 7,
        "samples": 30,
        "lengths": 290,
        "device-batches_per_sec": 1.0,
        "batches_per_sec": 2.0,
        "device-samples_per_sec": 5.0,
        "samples_per_sec": 10.0,
        "device-items_per_sec": 50.0,
        "items_per_sec": 100.0,
        "device-flops_per_sec": 300.0,
        "flops_per_sec": 600.0,
        "device-mfu": 0.3,
    }
    with pytest.raises(ValueError, match=r"time=6.0 must exceed the previous total, 6.0"):
        meter.update(time=6.0, batches=8, samples=31, lengths=300)
    with pytest.raises(ValueError, match="Pass the same arguments"):
        meter.update(time=7.0, batches=8, samples=31)
    meter.reset()
    for second in range(4):  # FLOPs that were counted before the window are not counted in it
        more = {} if second == 1 else {"flops": 100}
        meter.update(time=1.0 + second, batches=1 + second, samples=1 + second, **more)
    assert meter.compute()["device-flops_per_sec"] == 100.0
    meter.reset()
    meter.update(time=0.0, batches=0, samples=0)
    for wrong in ({"window_size": 1}, {"world_size": 0}, {"available_flops": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Throughput(**wrong)


def test_operations_by_hand():
    with torch.device("meta"):
        model, x = nn.Linear(8, 16), torch.randn(4, 8, requires_grad=True)
    forward = 2 * 4 * 8 * 16
    assert measure_flops(model, lambda: model(x)) == forward
    assert measure_flops(model, lambda: model(x), torch.Tensor.sum) == 3 * forward
    here = nn.Linear(8, 16)
    here.weight.grad = before = torch.ones(16, 8)
    measure_flops(here, lambda: here(torch.randn(4, 8)), torch.sum)
    assert here.weight.grad is before
    assert torch.equal(before, torch.ones(16, 8))


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA A100-SXM4-40GB", "tf32", 156e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "tf32", None),
        ("Tesla T4", torch.bfloat16, None),
        ("NVIDIA L40S", torch.float16, 362e12),
        ("NVIDIA L4", torch.float16, 121e12),
        ("NVIDIA GeForce RTX 3090 Ti", torch.float16, 80e12),
        ("NVIDIA GeForce RTX 3070 Ti", torch.float16, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.float16, None),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4e12),
        ("Some other device", torch.float32, None),
    ],
)
def test_what_a_device_could_do(name, dtype, peak):
    assert look_up_peak_flops(name, dtype) == (peak and pytest.approx(peak))
