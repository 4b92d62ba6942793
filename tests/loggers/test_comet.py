"""What is Comet's own; `test_service_logger` has what all services share."""

import os

import pytest
from support.processes import script
from support.tracking_services import Comet
from treadle.loggers import CometLogger

pytestmark = pytest.mark.long

comet = Comet()
comet.skip_if_missing()


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("COMET_") and name != "COMET_DISABLE_AUTO_LOGGING"]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


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


OFFLINE = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from support.tracking_services import Comet

asked = []
socket.getaddrinfo = lambda *args, **kwargs: asked.append(args) or exit("a host was asked for")
logger = Comet().make(Path(sys.argv[2]))
logger.log_metrics({"x": 1}, 1)
logger.finish()
print(asked, os.environ["COMET_DISABLE_AUTO_LOGGING"], os.environ["COMET_ERROR_TRACKING_ENABLE"])
"""


def test_offline_nothing_is_sent(tmp_path):
    done = script(OFFLINE, os.path.join(os.path.dirname(__file__), ".."), str(tmp_path))
    assert done.stdout.splitlines()[-1:] == ["[] 1 0"], done.stderr
