"""Classes, functions and callables with the arguments that a configuration gives them."""

import functools

import cli_samples
import pytest
import torch
from support.configs import MANY, checked
from torch import nn
from treadle.cli.config.values import ConfigError
from treadle.trainer.core.signatures import signature


def test_arguments_that_bases_take():
    task = checked("model: {class: cli_samples.Many, hidden: 3, lr: 0.5}").build_task()
    assert task.lr == 0.5
    assert set(signature(cli_samples.Many).arguments) >= {"hidden", "lr", "backbone"}
    assert not signature(cli_samples.Many).open


def test_functions_that_make_a_task():
    assert checked("model: {class: cli_samples.make_line, lr: 2}").build_task().lr == 2.0
    with pytest.raises(ConfigError, match=r"run.yaml:1: model: cli_samples.make_nothing returned None, which"):
        checked("model: cli_samples.make_nothing").build_task()


def test_a_callable_that_makes_an_optimizer():
    task = checked(MANY, "model.optimizer={class: AdamW, lr: 0.5}").build_task()
    made = task.given["optimizer"]
    assert isinstance(made, functools.partial)
    assert made([nn.Parameter(torch.zeros(1))]).defaults["lr"] == 0.5
