"""What `TensorBoardLogger` leaves on the disk, read back with TensorBoard's own reader."""

import argparse
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from treadle.loggers import TensorBoardLogger


def read(path: str | os.PathLike[str] | None) -> EventAccumulator:
    events = EventAccumulator(os.fspath(path))  # type: ignore[arg-type]
    events.Reload()
    return events


def scalars(path: str | os.PathLike[str] | None, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(path).Scalars(tag)]


def put_in_order(path: str, place: int) -> None:
    """Rename the newest file: they are read in the order of names, which tell seconds, and end with .9, .10, ..."""
    files = (file for file in Path(path).glob("events.*") if file.suffix != ".hparams")  # which stays the first one
    newest = max(files, key=lambda file: file.stat().st_mtime_ns)
    newest.rename(newest.with_name(f"events.out.tfevents.{place:010d}"))


def hparams(path: str | None) -> tuple[dict[str, object], list[str]]:
    found = {
        tag: HParamsPluginData.FromString(content) for tag, content in read(path).PluginTagToContent("hparams").items()
    }
    start = found["_hparams_/session_start_info"].session_start_info.hparams
    metrics = found["_hparams_/experiment"].experiment.metric_infos if "_hparams_/experiment" in found else []
    values = {key: getattr(value, value.WhichOneof("kind")) for key, value in start.items()}
    return values, [metric.name.tag for metric in metrics]


def test_scalars(tmp_path):
    logger = TensorBoardLogger(tmp_path, prefix="run")
    logger.log_metrics({"loss": 0.5, "epoch": 0}, step=5)
    logger.log_metrics({"loss": torch.tensor(0.25), "epoch": np.float32(1)}, step=10)
    logger.log_metrics({"loss": 0.125, "top": {"one": 0.5, "five": 1}})  # a dict shares one chart
    logger.finalize("success")
    assert scalars(logger.log_dir, "run-loss") == [(5, 0.5), (10, 0.25), (11, 0.125)]
    assert scalars(logger.log_dir, "run-epoch") == [(5, 0.0), (10, 1.0)]
    assert scalars(Path(logger.log_dir) / "run-top_one", "run-top") == [(11, 0.5)]
    assert scalars(Path(logger.log_dir) / "run-top_five", "run-top") == [(11, 1.0)]


@pytest.mark.parametrize("opened", [True, False], ids=["opened", "new"])
def test_what_later_steps_logged_is_not_shown_where_a_run_goes_on(tmp_path, opened):
    logger = TensorBoardLogger(tmp_path, version=0)
    for step in range(4):
        logger.log_metrics({"loss": step}, step)
    logger.finalize("failed")
    put_in_order(logger.log_dir, 0)
    again = TensorBoardLogger(tmp_path, version=0)
    if opened:
        again.log_hyperparams({"lr": 0.5})
    again.on_resume(2)
    for step in (3, 4):
        again.log_metrics({"loss": 10 * step}, step)
    again.finalize("success")
    assert scalars(again.log_dir, "loss") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    if opened:
        assert hparams(again.log_dir)[0] == {"lr": 0.5}


def test_fit_then_test_share_the_directory(tmp_path):
    logger = TensorBoardLogger(tmp_path, purge_step=0)
    for step in range(2):
        logger.log_metrics({"loss": step}, step)
        logger.save()
        logger.finalize("success")
        logger.finalize("success")
        put_in_order(logger.log_dir, step)
    assert scalars(logger.log_dir, "loss") == [(0, 0.0), (1, 1.0)]
    assert os.listdir(logger.root_dir) == ["version_0"]


def test_user_code_reaches_the_writer(tmp_path):
    logger = TensorBoardLogger(tmp_path, sub_dir="deep", filename_suffix=".mine", max_queue=5)
    assert os.listdir(tmp_path) == []
    logger.experiment.add_text("note", "hello", global_step=1)
    assert logger.experiment is logger.experiment
    logger.save()
    assert logger.log_dir == str(tmp_path / "treadle_logs" / "version_0" / "deep")
    assert [name.endswith(".mine") for name in os.listdir(logger.log_dir)] == [True]
    assert "note/text_summary" in read(logger.log_dir).Tags()["tensors"]
    logger.finalize("success")


def test_hyperparameters_stand_in_the_run_itself(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    params = {"lr": 0.5, "net": {"width": 3, "names": ["a"], "empty": {}}, "on": True, "none": None}
    logger.log_hyperparams(params)
    logger.log_metrics({"hp_metric": 0.75}, step=4)
    logger.finalize("success")
    values, metrics = hparams(logger.log_dir)
    assert values == {
        "lr": 0.5, "net/width": 3.0, "net/names": "['a']", "net/empty": "{}", "on": True, "none": "None"
    }  # fmt: skip
    assert metrics == ["hp_metric"]
    assert scalars(logger.log_dir, "hp_metric") == [(0, -1.0), (4, 0.75)]
    assert [path for path in Path(logger.log_dir).iterdir() if path.is_dir()] == []
    assert yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text()) == params


def test_hyperparameters_with_metrics_of_their_own(tmp_path):
    logger = TensorBoardLogger(tmp_path, prefix="p")
    logger.log_hyperparams(argparse.Namespace(lr=1), {"score": 2.0}, step=3)
    logger.finalize("success")
    assert hparams(logger.log_dir) == ({"lr": 1.0}, ["p-score"])
    assert scalars(logger.log_dir, "p-score") == [(3, 2.0)]

    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"lr": 1}, 2.0)
    logger.finalize("success")
    assert scalars(logger.log_dir, "hp_metric") == [(0, 2.0)]

    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    logger.experiment.close()
    logger.log_hyperparams({"lr": 1})
    logger.finalize("success")
    assert hparams(logger.log_dir) == ({"lr": 1.0}, [])
    assert read(logger.log_dir).Tags()["scalars"] == []


@pytest.mark.parametrize("default", [False, True])
def test_metrics_of_later_calls_are_shown_too(tmp_path, default):
    """As in a run: the Trainer's call without metrics, the user's, one at the end, and one of a later process."""
    shown = {"hp_metric"} if default else set()
    logger = TensorBoardLogger(tmp_path, version=0, default_hp_metric=default)
    calls = [({"lr": 0.5}, None), ({"lr": 0.5}, {"best": 0.0, "acc": 0.0}), ({"seed": 3}, {"test_acc": 0.75})]
    for number, (params, metrics) in enumerate(calls):
        logger.log_hyperparams(params, metrics)
        logger.finalize("success")
        put_in_order(logger.log_dir, number + 1)
        shown |= set(metrics or {})
        values, found = hparams(logger.log_dir)
        assert (values, set(found)) == ({"lr": 0.5} | ({"seed": 3.0} if number == 2 else {}), shown)
    logger = TensorBoardLogger(tmp_path, version=0, default_hp_metric=False)
    logger.log_hyperparams({"lr": 0.5, "seed": 3}, {"late": 1.0})
    logger.finalize("success")
    assert hparams(logger.log_dir) == ({"lr": 0.5, "seed": 3.0}, hparams(logger.log_dir)[1])
    assert set(hparams(logger.log_dir)[1]) == {*shown, "late"}
    assert scalars(logger.log_dir, "test_acc") == [(0, 0.75)]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.BatchNorm1d(3).eval()
        self.head = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(x)) + torch.rand(1)


@pytest.mark.parametrize("on_the_model", [False, True])
def test_a_graph_is_recorded_and_changes_nothing(tmp_path, on_the_model):
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    model, state = Net(), torch.get_rng_state()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        model.example_input_array = torch.ones(2, 3) if on_the_model else None
        logger.log_graph(model, None if on_the_model else torch.ones(2, 3))
    logger.finalize("success")
    assert any("head" in node.name for node in read(logger.log_dir).Graph().node)
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, model.frozen.training, model.head.training) == (True, False, True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_no_graph_unless_asked(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    logger.log_graph(Net(), input_array=torch.ones(2, 3))
    assert os.listdir(tmp_path) == []


class Untraceable(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("no graph here")


@pytest.mark.parametrize(
    ("input", "message"),
    [(torch.ones(2), "tracing Untraceable failed.*no graph here"), (None, "example_input_array")],
)
def test_a_graph_that_fails_is_one_warning(input, message, tmp_path):
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    with pytest.warns(UserWarning, match=message):
        logger.log_graph(Untraceable(), input)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger.log_graph(Untraceable(), input)
    logger.log_metrics({"loss": 1.0}, 0)
    logger.finalize("failed")
    assert scalars(logger.log_dir, "loss") == [(0, 1.0)]


def test_an_unknown_writer_option_is_named_at_once(tmp_path):
    with pytest.raises(TypeError, match=r"SummaryWriter has no argument 'flush_sec'\. Its arguments are.*flush_secs"):
        TensorBoardLogger(tmp_path, flush_sec=3)
