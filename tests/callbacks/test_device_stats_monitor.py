"""`DeviceStatsMonitor` on the CPU, and where a sensor is missing or fails."""

import pytest
from support.callback_runs import Rows, fit
from treadle.callbacks import (
    DeviceStatsMonitor,
)


def rows_of(rows, name):
    return [(step, row) for step, row in rows.rows if name in row]


def test_the_cpu(tmp_path):
    rows = Rows()
    fit(tmp_path, DeviceStatsMonitor(), values=[1.0], logger=rows, log_every_n_steps=2, accumulate_grad_batches=2)
    assert [step for step, _ in rows_of(rows, "DeviceStatsMonitor.on_train_batch_start/cpu_percent")] == [2, 4, 6]
    found = rows_of(rows, "DeviceStatsMonitor.on_train_batch_end/cpu_vm_percent")
    assert [step for step, _ in found] == [2, 4, 6]
    assert 0 < found[0][1]["DeviceStatsMonitor.on_train_batch_end/cpu_vm_percent"] <= 100
    assert "DeviceStatsMonitor.on_train_batch_end/cpu_swap_percent" in found[0][1]
    assert len(rows_of(rows, "DeviceStatsMonitor.on_validation_batch_end/cpu_percent")) == 2
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
