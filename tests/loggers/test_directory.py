"""Loggers with a folder: versions are counted, claimed and kept."""

import copy
import os
import pickle

import pytest
from support.run_folders import at_once
from treadle.loggers import CSVLogger, NullExperiment, TensorBoardLogger

BUILT_IN = [CSVLogger, TensorBoardLogger]


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


def test_two_jobs_at_once_never_share_a_version(tmp_path):
    first, second = at_once(2, lambda: [CSVLogger(tmp_path).version for _ in range(100)])
    assert sorted(first + second) == list(range(200))


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
