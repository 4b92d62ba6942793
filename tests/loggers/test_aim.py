"""What is Aim's own; `test_service_logger` has what all services share."""

import pytest
from tracking_services import Aim
from treadle.loggers import AimLogger

aim = Aim()
aim.skip_if_missing()


def test_the_start_of_a_name_is_its_context(tmp_path):
    logger = aim.make(tmp_path, context_postfixes={"unit": {"percent": "_pct"}})
    logger.log_metrics({"train_loss": 1, "val_loss": 2, "val_": 3, "gpu_pct": 4, "loss": 5}, 1)
    logger.finish()
    run = aim._run(tmp_path, logger.version)
    found = {(metric.name, *metric.context.to_dict().items()) for metric in run.metrics()}
    train, val = (("loss", ("subset", subset)) for subset in ("train", "val"))
    assert found == {train, val, ("val_",), ("gpu", ("unit", "percent")), ("loss",)}
    assert run.experiment == "digits"


def test_the_epoch_is_kept_beside_each_value(tmp_path):
    logger = aim.make(tmp_path, run_name="first", context_prefixes={})
    for epoch in range(2):
        logger.log_metrics({"train_loss": epoch, "epoch": epoch}, epoch)
    logger.finish()
    (metric,) = aim._run(tmp_path, logger.version).metrics()
    assert (metric.name, sorted(metric.epochs.values_list())) == ("train_loss", [0, 1])
    assert aim._run(tmp_path, logger.version).name == "first"


def test_a_remote_repository(tmp_path):
    assert AimLogger("aim://127.0.0.1:1").save_dir is None
    assert AimLogger(tmp_path).save_dir == str(tmp_path)
    with pytest.raises(ValueError, match=r"log_model=True cannot store checkpoints in the remote repository 'aim://"):
        AimLogger("aim://127.0.0.1:1", log_model=True)
    with pytest.raises(ValueError, match="system_tracking_interval=-1 must be a number of at least 0"):
        AimLogger(tmp_path, system_tracking_interval=-1)
