"""Accelerate's trackers by class and by name."""

import pytest

import treadle
from treadle import tracking
from treadle.utils import LoggerType


def test_a_tracker_by_its_class_or_name(tmp_path):
    tracker = tracking.TensorBoardTracker("run", tmp_path)
    accelerator = treadle.Accelerator(cpu=True, log_with=[tracker], project_dir=tmp_path)
    accelerator.init_trackers("project", {"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=0)
    assert accelerator.get_tracker("tensorboard") is tracker
    assert tracker.writer is tracker.tracker
    accelerator.end_training()
    assert list((tmp_path / "run").glob("events*"))
    accelerator = treadle.Accelerator(cpu=True, log_with=LoggerType.TENSORBOARD, project_dir=tmp_path)
    accelerator.init_trackers("project")
    assert type(accelerator.trackers[0]) is tracking.TensorBoardTracker
    accelerator.end_training()


def test_a_registered_class(tmp_path):
    class Memory(tracking.GeneralTracker):
        name = "memory"
        requires_logging_directory = True

        def __init__(self, run_name, logging_dir, flavour="plain"):
            super().__init__()
            self.place, self.rows = (run_name, logging_dir, flavour), []

        @property
        def tracker(self):
            return self.rows

        @tracking.on_main_process
        def log(self, values, step=None, **kwargs):
            self.rows.append((values, step))

    assert tracking.LOGGER_TYPE_TO_CLASS["tensorboard"] is tracking.TensorBoardTracker
    tracking.register_tracker_class(Memory)
    assert tracking.LOGGER_TYPE_TO_CLASS["memory"] is Memory
    with pytest.raises(ValueError, match="project_dir"):
        treadle.Accelerator(cpu=True, log_with="memory")
    accelerator = treadle.Accelerator(cpu=True, log_with="memory", project_dir=tmp_path)
    accelerator.init_trackers("project", init_kwargs={"memory": {"flavour": "round"}})
    accelerator.log({"loss": 1.0}, step=3)
    tracker = accelerator.get_tracker("memory")
    assert (tracker.place, tracker.rows) == (("project", tmp_path, "round"), [({"loss": 1.0}, 3)])
    with pytest.raises(ValueError, match="GeneralTracker"):
        tracking.register_tracker_class(dict)
