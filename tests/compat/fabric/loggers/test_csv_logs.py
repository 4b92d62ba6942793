"""Fabric's CSVLogger."""

import torch
from treadle.compat.fabric import Fabric
from treadle.compat.fabric.loggers import CSVLogger, Logger


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
