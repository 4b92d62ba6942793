"""What is Neptune's own, kept by GoodSeed; `test_service_logger` has what all services share."""

import os

import pytest
from tracking_services import GoodSeed
from treadle.loggers import NeptuneLogger

goodseed = GoodSeed()
goodseed.skip_if_missing()


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith(("GOODSEED_", "NEPTUNE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GOODSEED_HOME", str(tmp_path / "goodseed"))
    monkeypatch.chdir(tmp_path)


def test_a_script_written_for_lightning(tmp_path):
    logger = NeptuneLogger(project="me/digits", name="first", tags=["a"], capture_hardware_metrics=False)
    logger.log_metrics({"loss": 0.5}, 1)
    logger.log_hyperparams({"lr": 0.1})
    logger.experiment["eval/score"].append(0.75, step=2)
    logger.experiment["best"] = 3
    logger.experiment["sys/tags"].add("b")
    logger.finalize("success")
    assert goodseed.rows(tmp_path, logger.version)["training/loss"] == [(1, 0.5)]
    assert goodseed.rows(tmp_path, logger.version)["eval/score"] == [(2, 0.75)]
    found = goodseed._configs(tmp_path, logger.version)
    assert {"training/hyperparams/lr": 0.1, "best": 3, "sys/name": "first", "sys/state": "finished"}.items() <= (
        found.items()
    )
    assert found["sys/tags"] == {"a", "b"}


def test_a_custom_id_continues_its_run(tmp_path):
    for value in (1, 2):
        logger = goodseed.make(tmp_path, custom_id="job-7")
        logger.log_metrics({"x": value}, value)
        logger.finalize("success")
    assert goodseed.rows(tmp_path, "job-7") == {"x": [(1, 1.0), (2, 2.0)]}
    with pytest.raises(RuntimeError, match="Cannot resume run 'SAN-12'"):
        goodseed.make(tmp_path, with_id="SAN-12").log_metrics({"x": 1}, 1)


def test_a_run_that_was_begun(tmp_path):
    from goodseed.neptune import init_run

    run = init_run(project="me/digits", mode="offline", capture_stdout=False, capture_stderr=False)
    logger = NeptuneLogger(run=run, project="me/digits", prefix="")
    logger.log_metrics({"x": 1}, 1)
    assert (logger.experiment, logger.version) == (run, run.run_id)
    logger.finalize("failed")
    assert goodseed.failed(tmp_path, run.run_id)


def test_modes(tmp_path):
    with pytest.raises(ValueError, match="mode='of' must be one of 'async', 'sync', 'offline', 'debug'"):
        NeptuneLogger(mode="of")
    debug = goodseed.make(tmp_path, mode="debug")
    debug.log_metrics({"x": 1}, 1)
    debug.finalize("success")
    assert not (tmp_path / "goodseed").exists()
    with pytest.raises(RuntimeError, match="API key required"):
        goodseed.make(tmp_path, mode="async").log_metrics({"x": 1}, 1)
