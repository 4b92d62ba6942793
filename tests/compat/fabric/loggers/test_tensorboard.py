"""Fabric's TensorBoardLogger."""

import torch
from torch import nn
from treadle.compat.fabric.loggers import TensorBoardLogger


def test_tensorboard(tmp_path) -> None:
    logger = TensorBoardLogger(str(tmp_path), "run", None, False, "p", "events", max_queue=5)
    assert (logger.root_dir, logger.sub_dir, logger.version) == (str(tmp_path), "events", 0)
    assert logger.log_dir == str(tmp_path / "run" / "version_0" / "events")
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_graph(nn.Linear(2, 1), torch.ones(1, 2))
    logger.finalize("success")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(logger.log_dir).Reload()
    assert events.Tags()["graph"]
    assert [(event.step, event.value) for event in events.Scalars("p-loss")] == [(1, 0.5)]
    assert events.Tags()["scalars"] == ["p-loss"]
