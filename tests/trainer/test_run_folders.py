"""A folder per run, also where the loggers have none of their own; and the newest run found again in them."""

import os
import time
from pathlib import Path

import pytest
from support.callback_runs import Rows
from support.models import LoggedLine, loader
from support.processes import run
from support.trainers import make_trainer
from treadle.callbacks import RunReport
from treadle.loggers import CSVLogger, Logger


class ServiceLogger(Rows):
    """Sends numbers somewhere, and has no files; a run has an id once it has begun."""

    begun = 0
    name = "/Users/me/digits"  # as Databricks has them
    version = Logger.version

    def __init__(self, run=None, fails=False):
        super().__init__()
        self._version = run
        self.fails = fails

    @property
    def experiment(self):
        if self.fails:
            raise ConnectionError("no server")
        if self._version is None:
            ServiceLogger.begun += 1
            self._version = f"run-{os.getpid()}-{ServiceLogger.begun}"
        return self


class Documented(ServiceLogger):
    """As loggers in tutorials have it."""

    version = "0.1"


def fit(root, logger, ckpt_path=None, **flags):
    options = {"enable_checkpointing": None, "log_every_n_steps": 1, **flags}
    trainer = make_trainer(default_root_dir=root, logger=logger, **options)
    trainer.fit(LoggedLine(), loader(8), ckpt_path=ckpt_path)
    return trainer


def folder_of(trainer):
    """The run's folder, which everything of it is in."""
    folder = Path(trainer.log_dir)
    assert Path(trainer.checkpoint_callback.dirpath) == folder / "checkpoints"
    return folder


def test_runs_of_a_service_are_named_by_their_id(tmp_path):
    first, second = ServiceLogger(), ServiceLogger()
    folders = [folder_of(fit(tmp_path, logger, enable_report=True)) for logger in (first, second)]
    assert folders == [tmp_path / "Users_me_digits" / logger.version for logger in (first, second)]
    assert [sorted(os.listdir(folder)) for folder in folders] == [["checkpoints", "report.html"]] * 2
    assert os.listdir(tmp_path) == ["Users_me_digits"]
    # This run goes on, though it is not the newest.
    again = fit(tmp_path, ServiceLogger(first.version), "last", max_epochs=2)
    assert folder_of(again) == folders[0]
    assert (again.global_step, len(again.loggers[0].rows)) == (8, 4)


@pytest.mark.parametrize("make", [Documented, lambda: ServiceLogger(fails=True)], ids=["fixed version", "no server"])
def test_runs_without_an_id_are_numbered(tmp_path, make):
    folders = [folder_of(fit(tmp_path, make(), enable_report=True)) for _ in range(2)]
    assert folders == [tmp_path / "Users_me_digits" / f"version_{number}" for number in range(2)]
    assert [sorted(os.listdir(folder)) for folder in folders] == [["checkpoints", "report.html"]] * 2


@pytest.mark.filterwarnings("ignore:.*failed, so the logger is disabled")
@pytest.mark.parametrize("make", [ServiceLogger, Documented], ids=["id", "fixed version"])
def test_the_newest_run_is_found_again(tmp_path, make):
    fit(tmp_path, make(), max_epochs=3)
    time.sleep(0.02)
    newest = folder_of(fit(tmp_path, make()))
    again = fit(tmp_path, make(), "last", max_epochs=2)
    assert Path(again.ckpt_path).parent.parent == newest
    assert again.global_step == 8
    assert folder_of(again) != newest
    assert fit(tmp_path, make(), "auto", max_epochs=3).global_step == 12


def test_several_fits_of_a_trainer_are_one_run(tmp_path):
    trainer = fit(tmp_path, Documented())
    first = folder_of(trainer)
    trainer.fit(LoggedLine(), loader(8))
    assert folder_of(trainer) == first


def test_without_loggers_and_with_one_that_has_a_folder_all_is_as_it_was(tmp_path):
    trainer = fit(tmp_path / "a", False, callbacks=[RunReport()])
    assert trainer.log_dir == str(tmp_path / "a")
    assert sorted(os.listdir(tmp_path / "a")) == ["checkpoints", "report.html"]
    trainer = fit(tmp_path / "b", [ServiceLogger(), CSVLogger(tmp_path / "b")])
    assert folder_of(trainer) == tmp_path / "b" / "treadle_logs" / "version_0"


def test_neither_a_run_without_files_nor_fast_dev_run_makes_a_folder(tmp_path):
    fit(tmp_path, Documented(), enable_checkpointing=False)
    fit(tmp_path, Documented(), fast_dev_run=True)
    assert os.listdir(tmp_path) == []


def at_once(root):
    trainer = fit(root, Documented(), strategy="single" if os.environ["WORLD_SIZE"] == "1" else "ddp")
    return trainer.log_dir, trainer.checkpoint_callback.best_model_path


@pytest.mark.long
def test_two_processes_are_one_run(tmp_path):
    first, second = run(at_once, 2, str(tmp_path))
    assert first == second
    assert first[0] == str(tmp_path / "Users_me_digits" / "version_0")
