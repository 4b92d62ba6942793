"""The base class, the object on other ranks, and the numbered directory."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only
from treadle.loggers import CSVLogger, Logger, NullExperiment, TensorBoardLogger, rank_zero_experiment

BUILT_IN = [CSVLogger, TensorBoardLogger]


@pytest.fixture
def rank_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)


class ListLogger(Logger):
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))

    def log_hyperparams(self, params, metrics=None):
        self.rows.append(params)


def test_a_logger_of_ten_lines_answers_everything():
    logger = ListLogger()
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"loss": 1.0}, step=3)
    logger.log_graph(None, input_array=None)  # keywords as in Lightning
    logger.after_save_checkpoint(checkpoint_callback=None)
    logger.on_resume(2)
    logger.save()
    logger.finalize("success")
    assert logger.rows == [{"lr": 0.1}, (3, {"loss": 1.0})]
    assert (logger.name, logger.save_dir, logger.root_dir, logger.log_dir, logger.experiment) == (None,) * 5
    assert logger.version is None
    logger.version = 4
    assert (logger.version, ListLogger().version) == (4, None)


def test_class_attributes_may_take_the_place_of_properties():
    class Named(ListLogger):
        name = "mine"
        version = "a"

    logger = Named()
    logger.version = "b"
    assert (logger.name, logger.version) == ("mine", "b")


def test_a_logger_without_log_metrics_cannot_be_built():
    class Half(Logger):
        def log_hyperparams(self, params, metrics=None):
            pass

    with pytest.raises(TypeError, match="log_metrics"):
        Half()


def test_null_experiment_takes_any_use():
    null = NullExperiment()
    null.config.update({"a": 1})
    null.value = 3
    null["key"] = 4
    with null.scope("x") as scope:
        scope.add_image("x", None)
    assert null.value is null
    assert list(null[0].items()) == []
    assert not null
    assert isinstance(pickle.loads(pickle.dumps(copy.deepcopy(null))), NullExperiment)
    with pytest.raises(AttributeError):
        null.__array__  # noqa: B018


def test_decorated_experiment_is_built_on_rank_zero_only(monkeypatch):
    class Backend(ListLogger):
        @property
        @rank_zero_experiment
        def experiment(self):
            """The backend."""
            return self.rows

    logger = Backend()
    assert logger.experiment is logger.rows
    assert Backend.experiment.__doc__ == "The backend."
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    assert isinstance(logger.experiment, NullExperiment)


@pytest.mark.parametrize("kind", BUILT_IN)
def test_rank_one_writes_nothing_and_waits_for_its_version(kind, tmp_path, rank_one):
    logger = kind(tmp_path)
    assert logger.version is None
    assert logger.log_dir is None
    for _ in range(2):
        assert isinstance(logger.experiment, NullExperiment)
        logger.experiment.add_image("image", None, global_step=1)
        logger.log_metrics({"loss": 1.0}, step=0)
        logger.log_hyperparams({"lr": 0.1})
        logger.log_graph(None)
        logger.on_resume(3)
        logger.save()
        logger.finalize("success")
        logger.version = 7
    assert logger.log_dir == str(tmp_path / "treadle_logs" / "version_7")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", BUILT_IN)
def test_versions_count_up_and_are_taken_at_the_first_read(kind, tmp_path):
    (tmp_path / "treadle_logs" / "version_4").mkdir(parents=True)
    (tmp_path / "treadle_logs" / "version_x").mkdir()
    first, second = kind(tmp_path), kind(tmp_path)
    assert sorted(os.listdir(tmp_path / "treadle_logs")) == ["version_4", "version_x"]
    assert (second.version, first.version, second.version) == (5, 6, 5)
    assert second.log_dir == str(tmp_path / "treadle_logs" / "version_5")
    assert (tmp_path / "treadle_logs" / "version_6").is_dir()
    assert (first.save_dir, first.root_dir) == (str(tmp_path), str(tmp_path / "treadle_logs"))


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("a", 3, "a/version_3"),
        ("a", "run-b", "a/run-b"),
        ("a", "", "a"),
        (None, 0, "version_0"),
        ("", "x", "x"),
        ("", "", ""),
    ],
)
def test_a_given_version_is_used_as_it_is(name, version, expected, tmp_path):
    logger = CSVLogger(str(tmp_path), name=name, version=version)
    assert logger.version == version
    assert logger.log_dir == str(tmp_path / expected)
    assert os.listdir(tmp_path) == []


RACE = """
import sys, time
from pathlib import Path
from treadle.loggers import CSVLogger
root, me = Path(sys.argv[1]), sys.argv[2]
(root / f"ready_{me}").touch()
while len(list(root.glob("ready_*"))) < 2:
    time.sleep(0.001)
print(*[CSVLogger(root / "logs").version for _ in range(100)])
"""


def test_two_jobs_at_once_never_share_a_version(tmp_path):
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    jobs = [subprocess.Popen([*command, str(job)], stdout=subprocess.PIPE, text=True) for job in range(2)]
    versions = []
    for job in jobs:
        out, _ = job.communicate(timeout=120)
        assert job.returncode == 0
        versions.append([int(word) for word in out.split()])
    assert sorted(versions[0] + versions[1]) == list(range(200))


def test_a_claim_moves_on_when_another_job_was_faster(tmp_path, monkeypatch):
    root = tmp_path / "treadle_logs"
    for version in range(3):
        (root / f"version_{version}").mkdir(parents=True)
    monkeypatch.setattr(os, "listdir", lambda path: ["version_0"])  # what this job saw before the others' claims
    assert CSVLogger(tmp_path).version == 3


def test_an_open_logger_keeps_its_version(tmp_path):
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0})
    logger.version = 0
    with pytest.raises(ValueError, match=r"version='b' cannot replace version=0 .* finalize\(\)"):
        logger.version = "b"
    logger.finalize("success")
    logger.version = "b"
    logger.log_metrics({"a": 2.0})
    logger.save()
    assert (tmp_path / "treadle_logs" / "b" / "metrics.csv").exists()
    logger.finalize("success")
    logger.version = None
    assert logger.version == 1


@pytest.mark.parametrize("kind", BUILT_IN)
def test_a_copy_of_an_open_logger_opens_its_own_files(kind, tmp_path):
    logger = kind(tmp_path)
    logger.log_metrics({"a": 1.0})
    for twin in (copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))):
        assert twin.version == 0
        assert twin.experiment is not logger.experiment
        twin.finalize("success")
    logger.finalize("success")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"save_dir": "https://host/logs"}, ValueError, "https:// URLs are read-only"),
        ({"save_dir": 3}, TypeError, "int"),
        ({"name": 3}, TypeError, "name=3 must be a string"),
        ({"prefix": 3}, TypeError, "prefix=3 must be a string"),
        ({"version": -1}, ValueError, "version=-1 must be at least 0"),
        ({"version": 1.5}, TypeError, r"version=1\.5 must be an integer, a directory name or None"),
        ({"version": True}, TypeError, "version=True"),
    ],
)
@pytest.mark.parametrize("kind", BUILT_IN)
def test_a_wrong_argument_is_named(kind, arguments, error, message, tmp_path):
    with pytest.raises(error, match=message):
        kind(**{"save_dir": tmp_path, **arguments})


@pytest.mark.parametrize(
    ("metrics", "step", "error", "message"),
    [
        ({"loss": "low"}, 0, TypeError, "metric 'loss' is 'low'.*must be one number"),
        ({"loss": None}, 0, TypeError, "metric 'loss' is None"),
        ({"loss": 1j}, 0, TypeError, "metric 'loss' is 1j"),
        ({"top": {"five": []}}, 0, TypeError, "metric 'top/five'"),
        ({3: 1.0}, 0, TypeError, "metric name 3 must be a non-empty string"),
        ([1.0], 0, TypeError, "must be a dict of numbers"),
        ({"loss": 1.0}, -1, ValueError, "step=-1 must be at least 0"),
        ({"loss": 1.0}, 0.5, TypeError, r"step=0\.5 must be an integer"),
    ],
)
@pytest.mark.parametrize("kind", BUILT_IN)
def test_a_wrong_metric_is_named(kind, metrics, step, error, message, tmp_path):
    logger = kind(tmp_path)
    with pytest.raises(error, match=message):
        logger.log_metrics(metrics, step)


@pytest.mark.parametrize("kind", BUILT_IN)
def test_wrong_hyperparameters_are_named(kind, tmp_path):
    with pytest.raises(TypeError, match=r"params=\[1, 2\] must be a dict"):
        kind(tmp_path).log_hyperparams([1, 2])


@pytest.mark.parametrize("kind", BUILT_IN)
def test_many_values_in_one_metric_are_refused(kind, tmp_path):
    import torch

    with pytest.raises(ValueError, match=r"metric 'loss' has shape \(3,\).*\.mean\(\)"):
        kind(tmp_path).log_metrics({"loss": torch.zeros(3)}, 0)


def test_the_room_imports_nothing_of_ours_but_common():
    import ast

    import treadle.loggers

    for path in Path(treadle.loggers.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1 or (node.level, (node.module or "").split(".")[0]) == (2, "common")
                assert not (node.module or "").startswith("treadle")
            elif isinstance(node, ast.Import):
                assert not any(name.name.startswith("treadle") for name in node.names)
