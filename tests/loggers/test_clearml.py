"""What is ClearML's own; `test_service_logger` has what all services share."""

import json
import signal

import pytest
from support.tracking_services import ClearML
from treadle.loggers import ClearMLLogger

pytestmark = pytest.mark.long

clearml = ClearML()
clearml.skip_if_missing()


@pytest.fixture(autouse=True)
def signals_are_handled_as_before(alone):
    # ClearML handles these signals from its first task on, and so in all processes that later tests fork.
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_subsets_share_a_plot(tmp_path):
    logger = clearml.make(tmp_path)
    logger.log_metrics({"train_loss": 1, "val_loss": 2, "val_": 3, "loss": 4, "lr-SGD": 5}, 1)
    logger.finish()
    with open(clearml._folder(tmp_path, logger.version) / "metrics.jsonl") as lines:
        found = {(event["metric"], event["variant"]) for line in lines for event in json.loads(line)}
    assert found == {("loss", "train"), ("loss", "val"), ("val_", "val_"), ("loss", "loss"), ("lr-SGD", "lr-SGD")}


def test_a_task_that_the_user_began_is_used(tmp_path):
    from clearml import Task

    Task.set_offline(True)
    ClearMLLogger(offline=True)._open().close()  # which has set up ClearML not to fork
    task = Task.init("mine", "own", auto_connect_frameworks={"detect_repository": False}, auto_connect_streams=False)
    try:
        logger = clearml.make(tmp_path)
        logger.log_metrics({"x": 1}, 1)
        assert (logger.experiment, logger.version) == (task, task.id)
        other = clearml.make(tmp_path)
        other.log_metrics({"x": 2}, 1)  # the task is the first logger's now
        assert other.version != task.id
        other.finish()
    finally:
        task.close()


def test_the_environment_names_what_the_arguments_leave_open(monkeypatch):
    assert ClearMLLogger().name == "treadle_logs"
    monkeypatch.setenv("CLEARML_PROJECT", "p")
    assert ClearMLLogger().name == "p"
    assert ClearMLLogger(project_name="mine").name == "mine"
