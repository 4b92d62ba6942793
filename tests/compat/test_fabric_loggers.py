"""Fabric's loggers take ``root_dir``, and have its properties."""

import torch
from torch import nn
from treadle.compat.fabric import Fabric
from treadle.compat.fabric.loggers import CSVLogger, Logger, TensorBoardLogger


def test_csv(tmp_path) -> None:
    logger = CSVLogger(root_dir=tmp_path, name="run", version=3, prefix="p")
    fabric = Fabric(accelerator="cpu", loggers=logger)
    fabric.log_dict({"loss": torch.tensor(0.5)}, step=2)
    fabric.logger.save()
    assert isinstance(logger, Logger)
    assert (logger.root_dir, logger.name, logger.version) == (str(tmp_path), "run", 3)
    assert logger.log_dir == str(tmp_path / "run" / "version_3")
    assert (tmp_path / "run" / "version_3" / "metrics.csv").read_text() == "step,p-loss\n2,0.5\n"
    assert CSVLogger(tmp_path, "run").version == 4
    assert CSVLogger(tmp_path, name=None, version="here").log_dir == str(tmp_path / "here")


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
