"""The processes and GPUs of a trial, as its configuration requests them."""

from pathlib import Path

import pytest
import torch
from treadle.cli.config import ConfigError
from treadle.tools.sweep.sweep_file import read_sweep
from treadle.tools.sweep.trial_config import TrialConfigs


def find_devices(trainer):
    Path("base.yaml").write_text(f"trainer: {trainer}\nmodel: {{class: tasks.Line}}\n")
    Path("s.yaml").write_text(
        "config: base.yaml\nmethod: random\nmetric: {name: loss, goal: minimize}\ntrials: 4\nprocesses: 2\n"
        "parameters: {model.lr: [0.1, 0.2]}\n"
    )
    return TrialConfigs(read_sweep("s.yaml", [])).find_devices()


@pytest.fixture(autouse=True)
def four_gpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.parametrize(
    ("devices", "count"), [("2", 2), ("'2'", 2), ("[0, 1]", 2), ("'0,1'", 2), ("auto", 2), ("-1", 2), ("1", 1)]
)
def test_every_spelling_of_devices_is_counted(devices, count):
    assert find_devices(f"{{devices: {devices}}}") == (count, ["0", "1", "2", "3"])


def test_without_gpus_all_devices_are_one_process(monkeypatch):
    assert find_devices("{accelerator: cpu, devices: -1}") == (1, None)
    assert find_devices("{accelerator: cpu, devices: 3}") == (3, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_devices("{max_epochs: 1}") == (1, None)


@pytest.mark.parametrize("devices", ["true", "0", "'x'"])
def test_wrong_devices_are_named_before_a_trial_starts(devices):
    with pytest.raises(ConfigError, match=r"base\.yaml.*: trainer\.devices=.* must be a number of at least 1"):
        find_devices(f"{{devices: {devices}}}")
