"""What `MLFlowLogger` leaves in MLflow's files, read back from the files themselves."""

import copy
import pickle
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.service_runs import Task, Tell, loader, trainer
from treadle.loggers import MLFlowLogger, NullExperiment

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("alone")]

pytest.importorskip("mlflow")
VARIABLES = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}


def folder(root: Path, run: str) -> Path:
    (found,) = root.glob(f"*/{run}")
    return found


def metric(root: Path, run: str, name: str) -> list[tuple[int, float]]:
    """Steps and values of a metric; a line holds its time, value and step."""
    lines = (folder(root, run) / "metrics" / name).read_text().splitlines()
    return [(int(step), float(value)) for _, value, step in (line.split() for line in lines)]


def texts(root: Path, run: str, kind: str) -> dict[str, str]:
    here = folder(root, run) / kind
    return {str(path.relative_to(here)): path.read_text() for path in here.rglob("*") if path.is_file()}


def status(root: Path, run: str) -> int:
    return yaml.safe_load((folder(root, run) / "meta.yaml").read_text())["status"]


RUNNING, FINISHED, FAILED = 1, 3, 4


def test_numbers_are_in_the_files(tmp_path):
    root = tmp_path / "ml"
    logger = MLFlowLogger("digits", "first", save_dir=root, prefix="run", tags={"team": "a"})
    assert list(tmp_path.iterdir()) == []
    assert (logger.version, logger.name, logger.save_dir, logger.log_dir) == (None, "digits", str(root), None)
    logger.log_metrics({"loss": 0.1 + 0.2, "epoch": 0}, step=5)
    logger.log_metrics({"loss": torch.tensor(0.5), "top": {"one": np.float32(1)}}, step=np.int64(10))
    logger.log_metrics({"loss": float("nan")})
    assert status(root, logger.version) == RUNNING
    logger.finalize("success")
    assert metric(root, logger.version, "run-loss")[:2] == [(5, 0.1 + 0.2), (10, 0.5)]
    assert metric(root, logger.version, "run-loss")[2][0] == 11
    assert np.isnan(metric(root, logger.version, "run-loss")[2][1])
    assert metric(root, logger.version, "run-epoch") == [(5, 0.0)]
    assert metric(root, logger.version, "run-top/one") == [(10, 1.0)]
    assert status(root, logger.version) == FINISHED
    tags = texts(root, logger.version, "tags")
    assert (tags["team"], tags["mlflow.runName"]) == ("a", "first")
    assert logger.run_id == logger.version
    assert (root / logger.experiment_id / logger.version).is_dir()


def test_hyperparameters(tmp_path):
    logger = MLFlowLogger(save_dir=tmp_path)
    logger.log_hyperparams({"net": {"width": [1, 2], "none": {}}, "act": torch.nn.ReLU()})
    logger.log_hyperparams({f"p{i}": i for i in range(101)}, {"best": 3})  # more than a request may hold
    found = texts(tmp_path, logger.version, "params")
    assert {name: found.pop(f"p{name}") for name in range(101)} == {i: str(i) for i in range(101)}
    assert found == {"net/width": "[1, 2]", "net/none": "{}", "act": "ReLU()"}
    assert metric(tmp_path, logger.version, "best") == [(0, 3.0)]


def test_a_changed_hyperparameter_is_told_and_training_goes_on(tmp_path):
    first = MLFlowLogger(save_dir=tmp_path)
    first.log_hyperparams({"lr": 0.1, "same": 1})
    for logger in (first, MLFlowLogger(save_dir=tmp_path, run_id=first.version)):
        with pytest.warns(UserWarning, match=r"lr=0\.2 is ignored.* has lr=0\.1") as told:
            logger.log_hyperparams({"lr": 0.2, "same": 1, "new": 3})
        assert len(told) == 1
    assert texts(tmp_path, first.version, "params") == {"lr": "0.1", "same": "1", "new": "3"}


def test_names_that_mlflow_refuses(tmp_path):
    logger = MLFlowLogger(save_dir=tmp_path)
    with pytest.warns(UserWarning, match="'f1@5' is logged as 'f15'"):
        logger.log_metrics({"f1@5": 1}, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger.log_metrics({f"m {i}/a-b_c.d": i for i in range(1001)}, 0)  # more than a request may hold
    assert metric(tmp_path, logger.version, "f15") == [(0, 1.0)]
    assert metric(tmp_path, logger.version, "m 1000/a-b_c.d") == [(0, 1000.0)]


def test_a_run_is_continued_by_its_id(tmp_path):
    first = MLFlowLogger(save_dir=tmp_path)
    first.log_metrics({"x": 1}, 1)
    for end in ("failed", "KILLED"):
        first.finalize(end)
        assert status(tmp_path, first.version) == FAILED
    first.log_metrics({"x": 2}, 2)
    assert status(tmp_path, first.version) == RUNNING
    for twin in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        twin.log_metrics({"x": 3}, 3)
    again = MLFlowLogger("another", "named", save_dir=tmp_path, run_id=first.version, tags={"late": 1})
    again.log_metrics({"x": 4}, 4)
    assert again.experiment_id == first.experiment_id
    assert status(tmp_path, first.version) == RUNNING
    again.finalize()
    assert status(tmp_path, first.version) == FINISHED
    assert metric(tmp_path, first.version, "x") == [(1, 1.0), (2, 2.0), (3, 3.0), (3, 3.0), (4, 4.0)]
    tags = texts(tmp_path, first.version, "tags")
    assert (tags["late"], tags["mlflow.runName"]) == ("1", "named")


def test_runs_share_an_experiment(tmp_path):
    place = (tmp_path / "art").as_uri()
    first = MLFlowLogger("e", save_dir=tmp_path / "ml", artifact_location=place)
    first.log_metrics({"x": 1}, 1)
    second = MLFlowLogger("e", save_dir=tmp_path / "ml", artifact_location="file:/elsewhere")
    with pytest.warns(UserWarning, match="artifact_location='file:/elsewhere' is ignored"):
        second.log_metrics({"x": 1}, 1)
    assert first.experiment_id == second.experiment_id
    assert first.version != second.version


def test_written_in_the_background(tmp_path):
    logger = MLFlowLogger(save_dir=tmp_path, synchronous=False)
    for step in range(150):
        logger.log_metrics({"x": step}, step)
    logger.finalize("success")
    assert sorted(metric(tmp_path, logger.version, "x")) == [(step, float(step)) for step in range(150)]
    assert status(tmp_path, logger.version) == FINISHED


def test_the_environment_names_the_store(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/env")
    logger = MLFlowLogger()
    logger.log_metrics({"x": 1}, 1)
    assert metric(tmp_path / "env", logger.version, "x") == [(1, 1.0)]
    assert MLFlowLogger(tracking_uri="http://127.0.0.1:1").save_dir is None


def test_rank_one_does_nothing(tmp_path, rank_one):
    logger = MLFlowLogger(save_dir=tmp_path / "none")
    assert isinstance(logger.experiment, NullExperiment)
    logger.log_metrics({"x": 1}, 1)
    logger.log_hyperparams({"a": 1}, {"x": 0})
    logger.finalize("success")
    assert (logger.version, logger.run_id, logger.log_dir) == (None, None, None)
    logger.version = "told"
    assert logger.run_id == "told"
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_argument_is_named():
    with pytest.raises(TypeError, match="experiment_name=3 must be a string"):
        MLFlowLogger(experiment_name=3)
    with pytest.raises(ValueError, match=r"run_name='a' contradicts .*'b'"):
        MLFlowLogger(run_name="a", tags={"mlflow.runName": "b"})


def test_a_store_that_cannot_be_written_is_named_at_once(monkeypatch):
    from mlflow import environment_variables

    with monkeypatch.context() as without:
        without.setitem(sys.modules, "sqlalchemy", None)
        with pytest.raises(ModuleNotFoundError, match=r"'sqlite:///a\.db' needs the full mlflow .* pip install mlflow"):
            MLFlowLogger(tracking_uri="sqlite:///a.db")
    if hasattr(environment_variables, "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
        for arguments in ({}, {"tracking_uri": "runs"}):
            with pytest.raises(ValueError, match=r"needs file storage.*MLFLOW_ALLOW_FILE_STORE=true"):
                MLFlowLogger(**arguments)


@pytest.mark.parametrize("when", [True, pytest.param("all", marks=pytest.mark.exhaustive)], ids=["end", "all"])
def test_checkpoints_are_artifacts(when, tmp_path):
    logger = MLFlowLogger(save_dir=tmp_path / "ml", log_model=when)
    own = trainer(tmp_path, logger, callbacks=[Tell()])
    own.fit(Task(), loader())
    saved = Path(own.checkpoint_callback.best_model_path)
    found = folder(tmp_path / "ml", logger.version) / "artifacts" / saved.stem
    assert {str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()} == {
        saved.name,
        "metadata.yaml",
        "aliases.txt",
    }
    assert yaml.safe_load((found / "metadata.yaml").read_text())["original_filename"] == saved.name
    assert (found / "aliases.txt").read_text() == "['latest', 'best']"


def test_opening_a_run_in_a_database_draws_no_random_number(tmp_path):
    random.seed(1)
    expected = random.getstate()
    logger = MLFlowLogger("e", tracking_uri=f"sqlite:///{tmp_path}/runs.db")
    logger.log_hyperparams({"width": 3})
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.finalize("success")
    assert random.getstate() == expected
