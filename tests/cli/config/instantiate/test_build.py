"""Values become the arguments that annotations ask for, objects are built, defaults are written out."""

import inspect

import cli_samples
import pytest
import torch
from support.configs import MANY, checked
from treadle.cli.config.values import ConfigError

import treadle


def test_nested_objects():
    text = """
model:
  class: cli_samples.Line
  backbone:
    class: Sequential
    args:
    - {class: Linear, in_features: 4, out_features: 8}
    - {class: ReLU}
    - {class: torch.nn.Linear, in_features: 8, out_features: 2, bias: false}
"""
    net = checked(text).build_task().net
    assert [type(part) for part in net] == [torch.nn.Linear, torch.nn.ReLU, torch.nn.Linear]
    assert net[2].bias is None


def test_the_trainers_objects():
    text = """
trainer:
  logger: {class: CSVLogger, save_dir: logs}
  profiler: {class: SimpleProfiler}
  strategy: {class: DDP, find_unused_parameters: true}
  callbacks: [{class: EarlyStopping, monitor: a}, Timer, {class: GradientAccumulationScheduler, scheduling: {0: 2}}]
model: cli_samples.Line
"""
    flags = checked(text).build_flags()
    assert list(flags) == list(inspect.signature(treadle.Trainer).parameters)
    assert isinstance(flags["logger"], treadle.loggers.CSVLogger)
    assert isinstance(flags["strategy"], treadle.strategies.DDP)
    kinds = [type(one).__name__ for one in flags["callbacks"]]
    assert kinds == ["EarlyStopping", "Timer", "GradientAccumulationScheduler"]
    assert checked("model: cli_samples.Line", "trainer.strategy=fsdp").build_flags()["strategy"] == "fsdp"
    one = checked("model: cli_samples.Line", "trainer.callbacks=Timer").build_flags()["callbacks"]
    assert isinstance(one, treadle.callbacks.Timer)


def test_optimizer_and_scheduler():
    text = """
model: cli_samples.Bare
optimizer: {class: SGD, lr: 0.5}
lr_scheduler:
  class: SequentialLR
  milestones: [3]
  schedulers: [{class: LinearLR, total_iters: 3}, {class: CosineAnnealingLR, T_max: 10}]
  interval: step
  frequency: 2
"""
    task = checked(text).build_task()
    made = task.configure_optimizers()
    assert type(made["optimizer"]) is torch.optim.SGD
    assert [len(group["params"]) for group in made["optimizer"].param_groups] == [2]
    config = made["lr_scheduler"]
    assert (config["interval"], config["frequency"]) == ("step", 2)
    assert [type(one).__name__ for one in config["scheduler"]._schedulers] == ["LinearLR", "CosineAnnealingLR"]


def test_frozen_parameters_are_not_trained():
    task = checked("model: cli_samples.Line\noptimizer: AdamW").build_task()
    task.net.bias.requires_grad = False
    assert len(task.configure_optimizers().param_groups[0]["params"]) == 1


def test_errors_while_building_name_the_place():
    with pytest.raises(ConfigError, match=r"run.yaml:1: optimizer: AdamW: Invalid learning rate: -1"):
        checked("optimizer: {class: AdamW, lr: -1}\nmodel: cli_samples.Line").build_task().configure_optimizers()
    with pytest.raises(RuntimeError, match="no such rate") as raised:  # the user's own error, with its traceback
        checked("\nmodel: {class: cli_samples.Picky, lr: -1}").build_task()
    assert raised.value.__notes__ == ["while building model: cli_samples.Picky, run.yaml:2"]


def test_nothing_is_built_to_check(monkeypatch):
    built = []
    monkeypatch.setattr(cli_samples.Head, "__post_init__", built.append, raising=False)
    checked(MANY, "model.head={width: 3}")
    assert built == []
