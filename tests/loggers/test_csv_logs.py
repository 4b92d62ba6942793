"""What `CSVLogger` leaves on the disk."""

import argparse
import csv
import dataclasses
import enum
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from support.models import Scored
from support.trainers import make_trainer
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import ModelCheckpoint
from treadle.loggers import CSVLogger


def rows(path: Path) -> list[list[str]]:
    with open(path / "metrics.csv", newline="") as file:
        return list(csv.reader(file))


def test_rows_and_columns(tmp_path):
    logger = CSVLogger(tmp_path, name="a", version=0)
    logger.log_metrics({"loss": 0.1 + 0.2, "epoch": 0}, step=5)
    logger.log_metrics({"loss": torch.tensor(0.5), "epoch": np.int64(1), "best": np.bool_(True)}, step=np.int64(10))
    logger.log_metrics({"top": {"one": 1, "five": float("nan")}})
    logger.finalize("success")
    assert rows(tmp_path / "a" / "version_0") == [
        ["step", "loss", "epoch", "best", "top/one", "top/five"],
        ["5", "0.30000000000000004", "0", "", "", ""],
        ["10", "0.5", "1", "1", "", ""],
        ["11", "", "", "", "1", "nan"],
    ]


def test_an_existing_file_is_continued(tmp_path):
    for start in (0, 2):
        logger = CSVLogger(tmp_path, name="", version="x")
        logger.log_metrics({"loss": 1.5}, start)
        logger.log_metrics({"loss": 2.5, f"since_{start}": 1}, start + 1)
        logger.finalize("success")
    assert rows(tmp_path / "x") == [
        ["step", "loss", "since_0", "since_2"],
        ["0", "1.5", "", ""],
        ["1", "2.5", "1", ""],
        ["2", "1.5", "", ""],
        ["3", "2.5", "", "1"],
    ]


class Task(Scored):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def test_a_run_that_goes_on_in_its_file_leaves_the_rows_of_one_that_never_stopped(tmp_path):
    def fit(folder, steps, ckpt_path=None):
        kept = ModelCheckpoint(tmp_path / folder, save_top_k=-1, every_n_train_steps=2, filename="{step}")
        flags = {"max_steps": steps, "max_epochs": -1, "callbacks": [kept], "enable_checkpointing": True}
        flags |= {"log_every_n_steps": 1, "num_sanity_val_steps": 0, "enable_report": False}
        trainer = make_trainer(logger=CSVLogger(tmp_path, folder, version=0), **flags)
        data = DataLoader(TensorDataset(torch.linspace(0, 1, 8).reshape(4, 2)))
        torch.manual_seed(1)
        trainer.fit(Task(), data, data, ckpt_path=ckpt_path)
        return rows(tmp_path / folder / "version_0")

    whole = fit("whole", 12)
    for step in (2, 4):  # within an epoch, and at its end
        fit(f"from_{step}", 7)
        assert fit(f"from_{step}", 12, tmp_path / f"from_{step}" / f"step={step}.ckpt") == whole


def test_going_on_leaves_what_is_no_row_of_ours(tmp_path):
    (tmp_path / "metrics.csv").write_bytes(b'epoch,step,"loss, all"\r\n0,1,0.5\r\n0,,0.75\r\n0,2.0,1.5\r\nodd\r\n')
    CSVLogger(tmp_path).on_resume(0)  # takes no version before something is logged
    assert os.listdir(tmp_path) == ["metrics.csv"]
    logger = CSVLogger(tmp_path, name="", version="")
    logger.on_resume(1)
    kept = [["epoch", "step", "loss, all"], ["0", "1", "0.5"], ["0", "", "0.75"], ["odd", "", ""]]
    assert rows(tmp_path) == kept
    logger.log_metrics({"loss, all": 0.25}, 2)
    logger.save()
    assert rows(tmp_path) == [*kept, ["", "2", "0.25"]]


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        ("", []),
        ("step,lo", []),  # a header that a crash has cut
        ("step,loss\n1,0.5\n2,0.1", [["1", "0.5"]]),
        ("step,loss\n1,0.5\n" + "2,0.1" * 30000, [["1", "0.5"]]),
    ],
    ids=["empty", "header", "row", "long row"],
)
def test_what_a_crash_has_cut_is_dropped(content, kept, tmp_path):
    (tmp_path / "metrics.csv").write_text(content)
    logger = CSVLogger(tmp_path, name="", version="")
    logger.log_metrics({"loss": 0.25}, 2)
    logger.save()
    assert rows(tmp_path) == [["step", "loss"], *kept, ["2", "0.25"]]


def test_flush_counts_steps_and_keeps_few_rows_in_memory(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="", flush_logs_every_n_steps=100)
    logger.log_metrics({"loss": 1}, 0)
    logger.log_metrics({"loss": 1}, 50)
    assert not (tmp_path / "metrics.csv").exists()
    logger.log_metrics({"loss": 1}, 100)
    assert len(rows(tmp_path)) == 4
    for _ in range(250):
        logger.log_metrics({"loss": 1}, 101)
    assert len(rows(tmp_path)) == 204
    logger.save()
    assert len(rows(tmp_path)) == 254


def test_rows_wait_while_the_disk_is_full(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="", flush_logs_every_n_steps=1000)
    logger.log_metrics({"loss": 0}, 0)
    logger.save()
    for step in range(1, 500):
        logger.log_metrics({"loss": step}, step)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            logger.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert rows(tmp_path) == [["step", "loss"], ["0", "0"]]
    logger.save()
    assert rows(tmp_path)[1:] == [[str(step), str(step)] for step in range(500)]


def test_prefix_and_the_name_of_the_step_column(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="", prefix="run")
    logger.log_metrics({"loss": 1, "step": 3}, 0)
    logger.finalize("success")
    assert rows(tmp_path)[0] == ["step", "run-loss", "run-step"]
    logger = CSVLogger(tmp_path, name="", version="other")
    for step in (0, 3, None):
        logger.log_metrics({"step": 3, "loss": 1}, step)
    logger.finalize("success")
    assert rows(tmp_path / "other") == [
        ["step", "loss", "step_metric"],
        ["0", "1", "3"],
        ["3", "1", ""],
        ["3", "1", ""],
    ]


@pytest.mark.parametrize("value", [0, 2.5, True])
def test_a_wrong_flush_interval_is_named(value, tmp_path):
    with pytest.raises(ValueError, match=f"flush_logs_every_n_steps={value} must be an integer of at least 1"):
        CSVLogger(tmp_path, flush_logs_every_n_steps=value)


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Optimizer:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)


def test_hyperparameters_of_any_kind_reach_the_file(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    logger.log_hyperparams(
        {
            "optimizer": Optimizer(),
            "width": np.int64(3),
            "scale": torch.tensor(0.5),
            "mask": torch.zeros(2),
            "colour": Colour.RED,
            "path": Path("data"),
            "nothing": None,
            "layers": OmegaConf.create([1, {"a": True}]),
            "grüße": 'ja: "nein"\n',
        }
    )
    logger.log_hyperparams(argparse.Namespace(seed=1))
    logger.log_hyperparams(OmegaConf.create({"batch": 8, "twice": "${batch}"}))
    logger.log_hyperparams(None, metrics={"score": 0.0})
    logger.finalize("success")
    assert yaml.safe_load((tmp_path / "hparams.yaml").read_text(encoding="utf-8")) == {
        "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]},
        "width": 3,
        "scale": 0.5,
        "mask": "tensor([0., 0.])",
        "colour": "Colour.RED",
        "path": "data",
        "nothing": None,
        "layers": [1, {"a": True}],
        "grüße": 'ja: "nein"\n',
        "seed": 1,
        "batch": 8,
        "twice": 8,
    }
    assert rows(tmp_path) == [["step", "score"], ["0", "0.0"]]


def test_metrics_are_all_rows_also_after_the_run(tmp_path):
    logger = CSVLogger(tmp_path, name="a", version=0, flush_logs_every_n_steps=2)
    for step in range(1, 4):
        logger.log_metrics({"loss": 0.5 * step}, step=step)
    expected = [{"step": step, "loss": 0.5 * step} for step in range(1, 4)]
    assert logger.experiment.metrics == expected
    logger.finalize("success")
    assert logger.experiment.metrics == expected
    logger.log_metrics({"other": 1.0}, step=4)
    assert logger.experiment.metrics == [*expected, {"step": 4, "other": 1.0}]


def test_a_subclass_that_saves_nothing_keeps_its_rows(tmp_path):
    class Kept(CSVLogger):
        def save(self):
            pass

    logger = Kept(tmp_path, name="a", version=0)
    logger.log_metrics({"loss": 0.5}, step=1)
    logger.finalize("success")
    assert logger.experiment.metrics == [{"step": 1, "loss": 0.5}]


def test_the_default_name(tmp_path):
    logger = CSVLogger(tmp_path)
    assert logger.log_dir == str(tmp_path / "treadle_logs" / "version_0")
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.save()
    experiment = logger.experiment
    assert (experiment.log_dir, experiment.metrics_file_path) == (logger.log_dir, f"{logger.log_dir}/metrics.csv")


def test_rows_without_a_step_are_numbered(tmp_path):
    logger = CSVLogger(tmp_path)
    for loss in (3.0, 2.0):
        logger.experiment.log_metrics({"loss": loss})
    assert [(row["step"], row["loss"]) for row in logger.experiment.metrics] == [(0, 3.0), (1, 2.0)]


def test_a_subclass_with_a_name_of_its_own(tmp_path):
    class Named(CSVLogger):
        @property
        def name(self):
            return "mine"

        @property
        def version(self):
            return "v"

    assert Named(tmp_path).log_dir == str(tmp_path / "mine" / "v")
    assert Named(tmp_path).root_dir == str(tmp_path / "mine")
