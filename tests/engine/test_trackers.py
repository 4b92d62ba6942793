"""Trackers: what is asked for is logged, once, or the start fails."""

import csv
import json
import sys

import numpy
import pytest
import torch
from support import tracking_services
from support.processes import run

import treadle
from treadle import loggers, tracking, utils


def cpu(**options):
    return treadle.Accelerator(cpu=True, **options)


class Memory(utils.GeneralTracker):
    name = "memory"
    requires_logging_directory = False

    def __init__(self, everywhere=False):
        self.tracker = self.calls = []
        super().__init__()
        self.main_process_only = not everywhere

    def start(self):
        self.calls.append("start")

    def store_init_configuration(self, values):
        self.calls.append(values)

    def log(self, values, step=None, **kwargs):
        self.calls.append((values, step, kwargs))

    def finish(self):
        self.calls.append("finish")


def lines(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def track(folder):
    own, every = Memory(), Memory(everywhere=True)
    every.name = "every"
    accelerator = cpu(log_with=["csv", "tensorboard", own, every], project_dir=folder)
    if accelerator.is_main_process:
        with pytest.raises(RuntimeError, match=r"before accelerator\.init_trackers"):
            accelerator.log({"x": 1})
    accelerator.init_trackers("digits", {"rate": 0.1}, {"csv": {"flush_logs_every_n_steps": 1}})
    accelerator.log({"loss": torch.tensor(2.5), "rank": accelerator.process_index}, step=3)
    accelerator.log({"loss": 1.0}, step=4, log_kwargs={"memory": {"commit": True}})
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    writer.add_scalar("direct", 1.0, 0)
    assert accelerator.get_tracker("memory") is own
    with pytest.raises(ValueError, match="Did you mean 'memory'"):
        accelerator.get_tracker("memori")
    accelerator.end_training()
    assert accelerator.trackers == []
    other = cpu(log_with="csv", project_dir=folder)  # after the end, in the same process
    other.init_trackers("second")
    other.log({"y": 1}, step=0)
    other.end_training()
    return own.calls, every.calls, type(writer).__name__


@pytest.mark.long
def test_trackers(tmp_path):
    found = run(track, 2, str(tmp_path))
    calls = [{"rate": 0.1}, ({"loss": 2.5, "rank": 0}, 3, {}), ({"loss": 1.0}, 4, {"commit": True})]
    assert found[0][0] == ["start", *calls, "finish"]
    assert found[0][2] == "SummaryWriter"
    assert found[1][0] == []
    assert found[1][1][2] == ({"loss": 2.5, "rank": 1}, 3, {})
    assert lines(tmp_path / "digits" / "metrics.csv") == [
        {"step": "3", "loss": "2.5", "rank": "0"},
        {"step": "4", "loss": "1.0", "rank": ""},
    ]
    assert (tmp_path / "digits" / "hparams.yaml").read_text() == "rate: 0.1\n"
    assert len(lines(tmp_path / "second" / "metrics.csv")) == 1
    assert len([p for p in (tmp_path / "digits").iterdir() if p.name.startswith("events.out")]) == 1


@pytest.mark.parametrize("name", ["run", "own"])
def test_texts(tmp_path, name, recwarn):
    """TensorBoard has a place for texts; a CSV file stores numbers alone. A logger of one's own keeps its name."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = loggers.TensorBoardLogger(tmp_path, name="own", version="") if name == "own" else "tensorboard"
    accelerator = cpu(log_with=[tracker, "csv"], project_dir=tmp_path)
    # Scripts have a --report_to, and give the options of each choice.
    accelerator.init_trackers("run", init_kwargs={"wandb": {"name": "first"}, "comet_ml": {}, "csv": {"name": "rows"}})
    for step in (1, 2):
        accelerator.log({"prompt": "a text", "loss": torch.tensor([0.5])}, step=step)
    accelerator.log({"prompt": "only a text"}, step=3)
    accelerator.log({"vector": torch.ones(3), "array": numpy.ones(2), "none": None, "loss": numpy.float32(0.5)}, step=4)
    accelerator.end_training()
    events = event_accumulator.EventAccumulator(str(tmp_path / name)).Reload()
    texts = {e.step: e.tensor_proto.string_val[0] for e in events.Tensors("prompt/text_summary")}
    assert texts == {1: b"a text", 2: b"a text", 3: b"only a text"}
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.5), (2, 0.5), (4, 0.5)]
    assert lines(tmp_path / "rows" / "metrics.csv")[-1] == {"step": "4", "loss": "0.5"}
    warned = [str(w.message).split(", but ")[1] for w in recwarn if "are left out" in str(w.message)]
    assert warned == [
        "the tracker 'csv' stores only numbers. Other values are left out.",
        "the tracker 'tensorboard' stores only numbers and texts. Other values are left out.",
    ]


def test_tensorboard_gets_no_scalar_that_was_not_logged(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accelerator = cpu(log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run", {"rate": 0.1})
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    found = {event_accumulator.EventAccumulator(str(path)).Reload() for path in tmp_path.rglob("events*")}
    assert {tag for events in found for tag in events.Tags()["scalars"]} == {"loss"}


class Broken(Memory):
    name = "broken"
    strict = False

    def log(self, values, step=None, **kwargs):
        raise ConnectionError("the server is gone")


def test_a_tracker_that_fails_does_not_end_training(recwarn):
    """It is disabled with one warning, the other trackers get all values; a strict one ends the run."""
    broken, sound = Broken(), Memory()
    accelerator = cpu(log_with=[broken, sound])
    accelerator.init_trackers("run")
    for step in (1, 2):
        accelerator.log({"loss": 0.5}, step=step)
    assert sound.calls[1:] == [({"loss": 0.5}, 1, {}), ({"loss": 0.5}, 2, {})]
    assert [str(w.message) for w in recwarn] == [
        "the tracker 'broken' failed in accelerator.log, so it is disabled: ConnectionError: the server is gone"
    ]
    accelerator.init_trackers("again")
    broken.strict = True
    with pytest.raises(ConnectionError):
        accelerator.log({"loss": 0.5}, step=3)


def test_logging_without_trackers_is_nothing():
    accelerator = cpu()
    accelerator.init_trackers("none")
    accelerator.log({"x": 1})
    accelerator.end_training()
    with pytest.raises(ValueError, match=r"init_kwargs names 'cvs', but log_with names no tracker"):
        accelerator.init_trackers("none", init_kwargs={"cvs": {}})


def test_all_are_those_that_can_be_used(tmp_path):
    accelerator = cpu(log_with="all", project_dir=tmp_path)
    assert {"csv", "tensorboard"} <= set(accelerator.log_with)
    assert not {"csv", "tensorboard"} & set(cpu(log_with="all").log_with)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "clearml", "comet_ml", "swanlab", "trackio"])
def test_a_package_that_is_not_there(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {name}"):
        cpu(log_with=name, project_dir=tmp_path)


def track_wandb(folder):
    ids = set()
    for value in (1.5, 2.5):  # the end of training ends the run: the next one is another
        accelerator = cpu(log_with="wandb", project_dir=folder)
        accelerator.init_trackers("digits", {"rate": 0.1}, {"wandb": {"name": "mine", "tags": ["a"]}})
        accelerator.log({"loss": torch.tensor(value), "note": "a text"}, step=3)
        run = accelerator.get_tracker("wandb", unwrap=True)
        if accelerator.is_main_process:
            ids.add(run.id)
            assert (run.project, run.name, run.tags, run.config["rate"]) == ("digits", "mine", ("a",), 0.1)
            assert {"loss": value, "note": "a text", "trainer/global_step": 3}.items() <= dict(run.summary).items()
        accelerator.end_training()
    return len(ids)


@pytest.mark.slow
def test_wandb(tmp_path):
    pytest.importorskip("wandb")
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    assert run(track_wandb, 2, str(tmp_path), env=quiet) == [2, 0]
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 2


def test_the_directory_of_wandb_is_that_of_its_variable_unless_one_is_passed(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    places = []
    for variable in (None, str(tmp_path / "variable")):
        monkeypatch.setenv("WANDB_DIR", variable) if variable else monkeypatch.delenv("WANDB_DIR", raising=False)
        trackers = [tracking.WandBTracker("run", tmp_path / "project", **options) for options in ({}, {"dir": "own"})]
        places.append([tracker.logger.save_dir for tracker in trackers])
    assert places == [[str(tmp_path / "project"), "own"], [str(tmp_path / "variable"), "own"]]


def track_mlflow(folder):
    accelerator = cpu(log_with="mlflow", project_dir=folder)
    accelerator.init_trackers("digits", {"rate": 0.1}, {"mlflow": {"run_name": "mine"}})
    accelerator.log({"loss": torch.tensor(2.5)}, step=3)
    accelerator.end_training()


@pytest.mark.long
def test_mlflow(tmp_path):
    pytest.importorskip("mlflow")
    run(track_mlflow, 1, str(tmp_path), env={"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"})
    (found,) = [path.parent for path in tmp_path.glob("*/*/metrics")]
    assert (found / "metrics" / "loss").read_text().split()[1:] == ["2.5", "3"]
    assert (found / "params" / "rate").read_text() == "0.1"
    assert (found / "tags" / "mlflow.runName").read_text() == "mine"
    assert "name: digits" in (found.parent / "meta.yaml").read_text()


# What each is started with in a test: without a network, and with nothing of its own in the background.
SERVICES = {service.package: service for service in tracking_services.SERVICES}
OPTIONS = {
    "clearml": {
        "offline": True,
        "auto_connect_frameworks": {"detect_repository": False},
        "auto_connect_streams": False,
    },
    "comet_ml": {"online": False, "log_env_details": False, "auto_output_logging": False},
    "swanlab": {"mode": "offline"},
    "trackio": {"auto_log_cpu": False, "auto_log_gpu": False, "embed": False},
}


@pytest.fixture
def service(name, tmp_path, monkeypatch):
    """The service of this name, alone in a folder."""
    SERVICES[name].skip_if_missing()
    for variable, value in SERVICES[name].environment(tmp_path).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    return SERVICES[name]


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name in ("comet_ml", "clearml") else ()) for name in SERVICES],
)
def test_services(name, service, tmp_path):
    options = dict(OPTIONS[name])
    if name == "comet_ml":
        options["offline_directory"] = str(tmp_path / "comet")
    accelerator = cpu(log_with=name, project_dir=tmp_path)
    project = service._project(tmp_path) if name == "trackio" else "digits"
    accelerator.init_trackers(project, {"rate": 0.1}, {name: options})
    accelerator.log({"loss": torch.tensor(2.5)}, step=3)
    if name != "trackio":  # which stores it in the row that `rows` reads as numbers
        accelerator.log({"note": "a text"}, step=3)
    tracker = accelerator.get_tracker(name)
    assert accelerator.get_tracker(name, unwrap=True) is tracker.tracker
    version = tracker.logger.version
    accelerator.end_training()
    assert service.rows(tmp_path, version) == {"loss": [(3, 2.5)]}
    assert {key: float(value) for key, value in service.params(tmp_path, version).items()} == {"rate": 0.1}
    assert not service.failed(tmp_path, version)
    assert type(tracker).__name__.removesuffix("Tracker").lower() == name.replace("_", "")


@pytest.mark.long
@pytest.mark.parametrize("name", ["clearml", "swanlab"])
def test_images_and_tables(name, service, tmp_path):
    pytest.importorskip("PIL.Image")
    picture = numpy.zeros((4, 4, 3), numpy.uint8)
    accelerator = cpu(log_with=name, project_dir=tmp_path)
    accelerator.init_trackers("digits", init_kwargs={name: OPTIONS[name]})
    tracker = accelerator.get_tracker(name)
    tracker.log_images({"picture": [picture] if name == "swanlab" else picture}, step=1)
    if name == "clearml":
        with pytest.raises(ValueError, match=r"log_table\('cells'\) got no table. Pass data= or dataframe="):
            tracker.log_table("cells", columns=["a"])
        tracker.log_table("cells", columns=["a", "b"], data=[[1, 2]], step=1)
    accelerator.end_training()
    version = tracker.logger.version
    if name == "clearml":
        with open(service._folder(tmp_path, version) / "metrics.jsonl") as lines:
            events = [event for line in lines for event in json.loads(line)]
        assert sorted(event["type"] for event in events) == ["plot", "training_debug_image"]
    else:
        assert len(list(tmp_path.glob(f"swanlog/run-*-{version}/media/**/*.png"))) == 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["clearml"])
def test_a_task_that_the_script_began_stays_open(name, service, tmp_path):
    clearml = pytest.importorskip(name)
    task = service.make(tmp_path).experiment
    try:
        accelerator = cpu(log_with="clearml")
        accelerator.init_trackers("digits", init_kwargs={"clearml": {"task_id": task.id}})
        accelerator.log({"x": 1.0}, step=1)
        assert accelerator.get_tracker("clearml").task is task
        accelerator.end_training()
        assert clearml.Task.current_task() is task
    finally:
        task.close()


def track_on_the_main_process(folder):
    """Scripts start trackers on the main process alone and use them on all."""
    accelerator = cpu(log_with=["csv", "tensorboard"], project_dir=folder)
    if accelerator.is_main_process:
        accelerator.init_trackers("digits", {"rate": 0.1})
    accelerator.log({"loss": torch.tensor(2.5)}, step=3)
    accelerator.get_tracker("tensorboard").log({"more": 1.0}, step=3)
    accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("by_hand", 1.0, 3)
    with pytest.raises(ValueError, match="'tensorbord' is not a started tracker"):
        accelerator.get_tracker("tensorbord")
    accelerator.end_training()
    accelerator.end_training()
    return accelerator.process_index


@pytest.mark.long
def test_trackers_of_the_main_process_alone(tmp_path):
    assert run(track_on_the_main_process, 2, str(tmp_path), timeout=60) == [0, 1]
    assert (tmp_path / "digits" / "metrics.csv").read_text() == "step,loss\n3,2.5\n"
    assert len(list((tmp_path / "digits").glob("events.*"))) == 1


def test_a_tracker_that_is_none():
    class Half(utils.GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match="'requires_logging_directory', 'tracker'"):
        Half()
    with pytest.raises(ValueError, match=r"Wrap aim\.Run in a GeneralTracker"):
        cpu(log_with="aim")
    for value, words in ((Memory, "is a class, not a tracker"), (7, "is not a tracker")):
        with pytest.raises(TypeError, match=words):
            cpu(log_with=value)
    own = Memory()
    own.requires_logging_directory = True  # which asks for a directory only if Accelerate makes the tracker by its name
    assert [*cpu(log_with=own).log_with] == ["memory"]
