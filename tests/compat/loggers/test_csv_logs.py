"""The writer behind Lightning's CSVLogger."""

import torch
from treadle.compat.loggers.csv_logs import ExperimentWriter


def test_the_writer_of_a_csv_logger(tmp_path) -> None:
    writer = ExperimentWriter(str(tmp_path / "run"))
    writer.log_hparams({"a": 1})
    writer.log_metrics({"loss": torch.tensor(0.5)})
    writer.log_metrics({"loss": 0.25}, step=7)
    assert [row["step"] for row in writer.metrics] == [0, 7]
    writer.save()
    assert (tmp_path / "run" / "metrics.csv").read_text() == "step,loss\n0,0.5\n7,0.25\n"
    assert (tmp_path / "run" / "hparams.yaml").read_text() == "a: 1\n"
