"""What is Trackio's own; `test_service_logger` has what all services share."""

from support.tracking_services import Trackio

trackio = Trackio()
trackio.skip_if_missing()


def test_a_name_that_exists_is_a_new_run_unless_it_is_resumed(tmp_path):
    for options in ({}, {}, {"resume": "allow"}):
        logger = trackio.make(tmp_path, name="base", **options)
        logger.log_hyperparams({"lr": 0.1})
        logger.log_metrics({"x": 1}, 1)
        logger.finalize("success")
        logger.log_metrics({"x": 2}, 2)  # the same run, though there is another of the name
        logger.finalize("success")
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    project = trackio._project(tmp_path)
    runs = [run for run in Api().runs(project) if run.name == "base"]
    rows = [len(SQLiteStorage.get_logs(project, "base", run_id=run.id)) for run in runs]
    assert sorted(rows) == [2, 4]


def test_hyperparameters_that_come_after_rows_are_kept(tmp_path):
    logger = trackio.make(tmp_path, config={"own": 1})
    logger.log_metrics({"x": 1}, 1)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"x": 2}, 2)
    run = logger.experiment
    logger.log_hyperparams({"lr": 0.1})  # nothing is new
    assert logger.experiment is run
    logger.finish()
    assert trackio.params(tmp_path, logger.version) == {"own": 1, "lr": 0.1}
    assert trackio.rows(tmp_path, logger.version) == {"x": [(1, 1.0), (2, 2.0)]}
