"""What is SwanLab's own; `test_service_logger` has what all services share."""

import pytest
from support.tracking_services import SwanLab
from treadle.loggers import SwanLabLogger

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("alone")]

swanlab = SwanLab()
swanlab.skip_if_missing()


@pytest.mark.exhaustive
def test_a_run_that_the_user_began_is_used(tmp_path):
    import swanlab as service

    own = service.init(project="mine", mode="offline", log_dir=str(tmp_path / "swanlog"), id="own1")
    logger = swanlab.make(tmp_path)
    logger.log_metrics({"x": 1}, 1)
    assert (logger.experiment, logger.version) == (own, "own1")
    other = swanlab.make(tmp_path, id="two2")
    other.log_metrics({"x": 2}, 1)
    assert (own.alive, other.version) == (False, "two2")
    logger.log_metrics({"x": 3}, 2)  # continues the run, in a folder of its own
    logger.finish()
    assert swanlab.rows(tmp_path, "own1") == {"x": [(1, 1.0), (2, 3.0)]}
    assert swanlab.rows(tmp_path, "two2") == {"x": [(1, 2.0)]}


def test_what_is_none_is_named(tmp_path):
    logger = swanlab.make(tmp_path, experiment_name="first", tags=["a"])
    logger.log_hyperparams({"a": None, "b": {"c": [None, 1]}})
    assert logger.experiment.name == "first"
    logger.finish()
    assert swanlab.params(tmp_path, logger.version) == {"a": "None", "b/c": ["None", 1]}
    assert SwanLabLogger().name == "treadle_logs"
    assert (logger.name, logger.save_dir) == ("digits", str(tmp_path))
