"""What is Comet's own; `test_service_logger` has what all services share."""

import os
import socket

import pytest
from support.processes import run
from support.tracking_services import Comet
from treadle.loggers import CometLogger

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("alone")]

comet = Comet()
comet.skip_if_missing()


def test_older_names_of_arguments(tmp_path):
    logger = CometLogger(
        project_name="digits", experiment_name="first", save_dir=str(tmp_path / "out"), offline=True, rest_api_key="x"
    )
    assert (logger.name, logger.save_dir) == ("digits", str(tmp_path / "out"))
    logger.log_metrics({"loss": 1.0, "epoch": 2}, 3)
    assert logger.experiment.get_name() == "first"
    logger.finish()
    messages = list(comet._messages(tmp_path, logger.version))
    (metric,) = [p["metric"] for kind, p in messages if kind == "metric_msg" and p["metric"]["metricName"] == "loss"]
    assert metric == {"metricName": "loss", "metricValue": 1.0, "step": 3, "epoch": 2}


def test_arguments_that_contradict(monkeypatch):
    with pytest.raises(TypeError, match="online='no' must be True or False"):
        CometLogger(online="no")
    monkeypatch.setenv("COMET_EXPERIMENT_KEY", "k" * 32)
    assert CometLogger().version == "k" * 32


def test_an_experiment_that_must_be_new_is_continued_once_it_is(tmp_path):
    logger = comet.make(tmp_path, mode="create", tags=["mine"])
    logger.log_metrics({"x": 1}, 1)
    logger.finish()
    logger.log_metrics({"x": 2}, 2)
    logger.finish()
    assert comet.rows(tmp_path, logger.version) == {"x": [(1, 1.0), (2, 2.0)]}
    assert len(list((tmp_path / "comet").iterdir())) == 2  # archives of one key, which `comet upload` sends to one


def log_offline(folder):
    asked = []
    socket.getaddrinfo = lambda *args, **kwargs: asked.append(args) or exit("a host was asked for")
    logger = comet.make(folder)
    logger.log_metrics({"x": 1}, 1)
    logger.finish()
    return asked, os.environ["COMET_DISABLE_AUTO_LOGGING"], os.environ["COMET_ERROR_TRACKING_ENABLE"]


def test_offline_nothing_is_sent(tmp_path):
    assert run(log_offline, 1, tmp_path) == [([], "1", "0")]
