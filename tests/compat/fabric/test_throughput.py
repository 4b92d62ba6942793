"""The throughput of a loop, as Fabric measures it."""

from treadle.compat.fabric.utilities.throughput import ThroughputMonitor
from treadle.loggers import CSVLogger

from treadle import Fabric


def test_the_throughput_meter_of_a_loop(tmp_path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, loggers=CSVLogger(tmp_path))
    meter = ThroughputMonitor(fabric, window_size=3)
    for step in range(1, 5):
        meter.update(time=step / 2, batches=step, samples=4 * step)
    assert meter.compute_and_log() == {
        "time": 2.0,
        "batches": 4,
        "samples": 16,
        "device/batches_per_sec": 2.0,
        "device/samples_per_sec": 8.0,
    }
    assert meter.step == 0
    fabric.logger.save()
    text = (tmp_path / "treadle_logs" / "version_0" / "metrics.csv").read_text()
    assert text.splitlines()[1].split(",")[0] == "0"
