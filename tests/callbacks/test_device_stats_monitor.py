"""`DeviceStatsMonitor` on the CPU, and where a sensor is missing or fails."""

import pytest
from support.callback_runs import Rows, fit
from treadle.callbacks import (
    DeviceStatsMonitor,
)


def test_the_cpu(tmp_path):
    rows = Rows()
    fit(tmp_path, DeviceStatsMonitor(), values=[1.0], logger=rows, log_every_n_steps=2, accumulate_grad_batches=2)
    names = ("start/cpu_percent", "end/cpu_vm_percent", "end/cpu_swap_percent")
    start, memory, swap = (rows.of(f"DeviceStatsMonitor.on_train_batch_{name}") for name in names)
    assert [[step for step, _ in found] for found in (start, memory, swap)] == [[2, 4, 6]] * 3
    assert 0 < memory[0][1] <= 100
    assert len(rows.of("DeviceStatsMonitor.on_validation_batch_end/cpu_percent")) == 2
    rows = Rows()
    fit(tmp_path, DeviceStatsMonitor(cpu_stats=False), logger=rows, log_every_n_steps=1)
    assert not any("DeviceStats" in name for _, row in rows.rows for name in row)


def test_what_it_needs(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="DeviceStatsMonitor needs a logger"):
        fit(tmp_path, DeviceStatsMonitor())
    with pytest.raises(ValueError, match="log_every_n_steps=0 does not work with DeviceStatsMonitor"):
        fit(tmp_path, DeviceStatsMonitor(), logger=Rows(), log_every_n_steps=0)
    with pytest.raises(TypeError, match="cpu_stats='yes'"):
        DeviceStatsMonitor("yes")
    monkeypatch.setattr("treadle.common.optional.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"psutil.*treadle\[psutil\]"):
        DeviceStatsMonitor(cpu_stats=True)
    with pytest.raises(ModuleNotFoundError, match="psutil"):
        fit(tmp_path, DeviceStatsMonitor(), logger=Rows())


def test_a_failing_sensor_does_not_end_the_run(tmp_path, monkeypatch):
    def broken():
        raise OSError("no /proc")

    monkeypatch.setattr("psutil.virtual_memory", broken)
    with pytest.warns(UserWarning, match="DeviceStatsMonitor failed and is disabled: OSError"):
        assert fit(tmp_path, DeviceStatsMonitor(), logger=Rows()).global_step == 10
