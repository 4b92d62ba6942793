"""What Lightning's module of the loggers' base class holds."""

import pytest
from treadle.compat.loggers.logger import DummyExperiment, DummyLogger, merge_dicts

from treadle import Trainer


def test_merged_dicts() -> None:
    first = {"a": 1.7, "b": 2.0, "c": 1, "d": {"d1": 1, "d3": 3}}
    second = {"a": 1.1, "b": 2.2, "v": 1, "d": {"d1": 2, "d2": 3}}
    third = {"a": 1.1, "v": 2.3, "d": {"d3": 3, "d4": {"d5": 1}}}
    merged = merge_dicts([first, second, third], {"a": lambda v: sum(v) / 3, "v": max, "d": {"d1": sum}}, min)
    assert merged == {
        "a": pytest.approx(1.3), "b": 2.0, "c": 1, "d": {"d1": 3, "d2": 3, "d3": 3, "d4": {"d5": 1}}, "v": 2.3,
    }  # fmt: skip


def test_a_logger_that_keeps_nothing_takes_every_call() -> None:
    logger = DummyLogger()
    logger.log_metrics("1", 2, three="three")
    logger.log_hyperparams("1", 2, three="three")
    assert isinstance(logger.experiment, DummyExperiment)
    logger.experiment.add_image("x", 1)
    logger.log_image("x", [1])
    assert logger[0] is logger
    trainer = Trainer(accelerator="cpu", fast_dev_run=1, enable_progress_bar=False)
    assert isinstance(trainer.logger, DummyLogger)
