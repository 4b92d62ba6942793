"""What `WandbLogger` leaves in the file of a run without a network, read back record by record."""

import copy
import json
import os
import pickle
import struct
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import run
from support.service_runs import Task, Tell, loader, trainer
from treadle.loggers import CSVLogger, NullExperiment, WandbLogger

pytestmark = pytest.mark.long

pytest.importorskip("wandb")
VARIABLES = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_CONSOLE": "off"}
STEP = "trainer/global_step"


@pytest.fixture(autouse=True)
def no_run_is_left(alone):
    yield
    while getattr(sys.modules.get("wandb"), "run", None) is not None:
        sys.modules["wandb"].finish()


def records(path: Path) -> list[Any]:
    """The records of a .wandb file: LevelDB's log format, 32 KiB blocks of parts with 7 bytes before each."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, found = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + size > len(data):
            break  # it is being written
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(whole))
            whole = b""
    return found


def ended(path: Path) -> list[Any]:
    """The records once the last one is there: without a network, `finish` does not wait until W&B has written them."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        found = records(path) if path.stat().st_size else []
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.01)
    raise TimeoutError(f"{path} has no end")


def name_of(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


class Run:
    """What is in the files of a run, in the order of writing."""

    def __init__(self, folder: Path, run: str) -> None:
        self.files = sorted(folder.glob(f"wandb/offline-run-*-{run}*/run-{run}.wandb"))
        self.history: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.artifacts: list[Any] = []
        for record in [record for path in self.files for record in ended(path)]:
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = {name_of(item): json.loads(item.value_json) for item in record.history.item}
                self.history.append({key: value for key, value in row.items() if not key.startswith("_")})
            elif kind in ("run", "config"):
                self.begun = record.run if kind == "run" else self.begun
                for item in (record.run.config if kind == "run" else record.config).update:
                    self.config[name_of(item)] = json.loads(item.value_json)
            elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
                self.artifacts.append(record.request.log_artifact.artifact)
            elif kind == "artifact":
                self.artifacts.append(record.artifact)


def test_numbers_and_hyperparameters_are_in_the_file(tmp_path):
    options = {"tags": ["a"], "config": {"own": 1}}
    logger = WandbLogger(name="first", project="digits", save_dir=tmp_path / "new", prefix="run", **options)
    assert list(tmp_path.iterdir()) == []
    logger.log_hyperparams({"net": {"width": [1, 2]}, "act": torch.nn.ReLU()}, {"best": 3})
    logger.log_hyperparams({"own": 2})
    logger.log_metrics({"loss": 0.1 + 0.2, "epoch": 0}, step=5)
    logger.log_metrics({"loss": torch.tensor(0.5), "top": {"one": np.float32(1)}}, step=np.int64(10))
    logger.log_metrics({"loss": 0.25})
    logger.finalize("success")
    logger.finish()
    found = Run(tmp_path / "new", logger.version)
    wanted = {"net": {"width": [1, 2]}, "act": "ReLU()", "own": 2}
    assert {key: value for key, value in found.config.items() if key in wanted} == wanted
    assert found.history == [
        {"run-best": 3, STEP: 0},
        {"run-loss": 0.1 + 0.2, "run-epoch": 0, STEP: 5},
        {"run-loss": 0.5, "run-top/one": 1.0, STEP: 10},
        {"run-loss": 0.25, STEP: 10},
    ]
    assert (found.begun.project, found.begun.display_name, found.begun.run_id) == ("digits", "first", logger.version)
    assert list(found.begun.tags) == ["a"]
    assert (logger.name, logger.save_dir) == ("digits", str(tmp_path / "new"))
    assert logger.log_dir == str(tmp_path / "new" / "digits" / logger.version)


def test_the_printed_place_of_an_offline_run_holds_it(tmp_path, capsys):
    loggers = [CSVLogger("rows"), WandbLogger(project="digits")]
    trainer(tmp_path, loggers).fit(Task(), loader())
    loggers[1].finish()
    error = capsys.readouterr().err
    places = dict.fromkeys(line.partition(": ")[2] for line in error.splitlines() if line.startswith("logs: "))
    rows, run = map(Path, places)
    assert (rows / "metrics.csv").exists()
    assert Run(tmp_path, loggers[1].version).history
    assert (run / f"run-{loggers[1].version}.wandb").exists()
    assert run.parent == tmp_path / "wandb"
    paths = [line.partition(": ")[2] for line in error.splitlines() if line.startswith(("report", "last checkpoint"))]
    assert len(paths) == 2
    assert all(Path(path).is_absolute() and Path(path).exists() for path in paths)


def test_media_and_tables(tmp_path):
    logger = WandbLogger(save_dir=tmp_path)
    with pytest.raises(TypeError, match="must be a list"):
        logger.log_image("x", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"caption=\[\.\.\.\] has length 2, but images=\[\.\.\.\] has length 1"):
        logger.log_image("x", [np.zeros((2, 2))], caption=["a", "b"])
    logger.log_image("picture", [np.zeros((4, 4, 3), np.uint8)], step=1, caption=["black"])
    logger.log_text("words", columns=["a", "b"], data=[["x", "y"], ["z", "w"]], step=2)
    logger.finish()
    picture, words = Run(tmp_path, logger.version).history
    assert (picture["picture/captions"], picture["picture/width"], picture[STEP]) == (["black"], 4, 1)
    assert (words["words/nrows"], words["words/ncols"], words[STEP]) == (2, 2, 2)
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/images/*.png"))) == 1


def test_watch_records_gradients(tmp_path):
    logger = WandbLogger(save_dir=tmp_path)
    model = torch.nn.Linear(2, 1)
    logger.watch(model, log_freq=1, log_graph=False)
    model(torch.ones(1, 2)).sum().backward()
    logger.log_metrics({"loss": 1}, 1)
    logger.experiment.unwatch(model)
    logger.finish()
    (row,) = Run(tmp_path, logger.version).history
    assert (row["gradients/weight/values"], row["gradients/bias/values"], row["loss"]) == ([2], [1], 1)


def test_a_run_is_continued_by_its_id(tmp_path):
    first = WandbLogger(save_dir=tmp_path, id="known")
    first.log_metrics({"x": 1}, 1)
    copies = [copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for twin in copies:
            assert twin.experiment is first.experiment
    with pytest.raises(ValueError, match=r"version='b' cannot replace version='known' .* finish\(\)"):
        first.version = "b"
    first.finalize("success")
    first.log_metrics({"x": 2}, 2)
    first.finish()
    second = WandbLogger(save_dir=tmp_path, version="known")
    second.log_metrics({"x": 3}, 3)
    second.finish()
    found = Run(tmp_path, "known")
    assert [row["x"] for row in found.history] == [1, 2, 3]
    assert found.begun.run_id == "known"


def test_a_run_that_is_active_is_used_or_left_alone(tmp_path):
    import wandb

    active = wandb.init(project="sweep", dir=tmp_path)
    with pytest.warns(UserWarning, match=rf"logs to the active W&B run '{active.id}'"):
        WandbLogger(save_dir=tmp_path).log_metrics({"x": 1}, 1)
    other = WandbLogger(save_dir=tmp_path, project="other")
    other.log_metrics({"y": 1}, 1)
    given = WandbLogger(experiment=active)
    given.log_metrics({"z": 1}, 1)
    assert given.version == active.id != other.version
    other.finish()
    active.finish()
    assert [set(row) for row in Run(tmp_path, active.id).history] == [{"x", STEP}, {"z", STEP}]
    assert [set(row) for row in Run(tmp_path, other.version).history] == [{"y", STEP}]


def test_the_environment_names_what_the_arguments_leave_open(tmp_path, monkeypatch):
    for name, value in (("WANDB_PROJECT", "p"), ("WANDB_RUN_ID", "r"), ("WANDB_DIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    logger = WandbLogger()
    assert (logger.name, logger.version, logger.save_dir) == ("p", "r", str(tmp_path))
    assert WandbLogger(project="mine", id="own", dir="d").log_dir == os.path.join("d", "mine", "own")


def test_ids_are_new_and_leave_random_state_alone():
    state = torch.random.get_rng_state()
    ids = {WandbLogger().version for _ in range(20)}
    assert len(ids) == 20
    assert torch.equal(state, torch.random.get_rng_state())


def test_rank_one_does_nothing(tmp_path, rank_one):
    logger = WandbLogger(save_dir=tmp_path / "none")
    assert (logger.version, logger.log_dir) == (None, None)
    assert isinstance(logger.experiment, NullExperiment)
    logger.log_metrics({"x": 1}, 1)
    logger.log_hyperparams({"a": 1})
    logger.log_image("x", [np.zeros((2, 2))])
    logger.log_text("x", columns=["a"], data=[["b"]])
    logger.watch(torch.nn.Linear(1, 1))
    logger.finalize("success")
    logger.finish()
    assert WandbLogger.download_artifact("a/b/c:latest") is None
    logger.version = "told"
    assert logger.log_dir == str(tmp_path / "none" / "treadle_logs" / "told")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"save_dir": "a", "dir": "b"}, ValueError, "save_dir='a' and dir='b' set the same option"),
        ({"version": "a", "id": "b"}, ValueError, "version='a' and id='b' set the same option"),
        ({"offline": True, "mode": "online"}, ValueError, "offline=True contradicts mode='online'"),
        ({"offline": True, "log_model": True}, ValueError, "log_model=True needs uploads"),
        ({"mode": "offline", "log_model": "all"}, ValueError, "log_model='all' needs uploads"),
        ({"add_file_policy": "fast"}, ValueError, "add_file_policy='fast'"),
        ({"porject": "x"}, TypeError, "wandb.init has no argument 'porject'. Its arguments are .*project"),
        ({"project": 3}, TypeError, "project=3 must be a string"),
    ],
)
def test_a_wrong_argument_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        WandbLogger(**arguments)


def fit(folder):
    logger = WandbLogger(project="p", save_dir=folder)
    table = CSVLogger(folder, "csv", 0)
    for _ in range(2):  # the second fit continues the run
        trainer(folder, [logger, table]).fit(Task(), loader())
    logger.finish()
    return logger.version


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_trainer(world, tmp_path):
    ids = run(fit, world, str(tmp_path))
    assert len(set(ids)) == 1
    found = Run(tmp_path, ids[0])
    assert len(found.files) == len(list(tmp_path.glob("wandb/offline-run-*"))) == 1
    steps = [(row[STEP], row["mean"]) for row in found.history if "mean" in row]
    once = [(i + 1, float(i)) for i in range(8)] if world == 1 else [(i + 1, 2 * i + 0.5) for i in range(4)]
    assert steps == once * 2
    assert found.config["width"] == 2
    assert len(list(tmp_path.glob(f"p/{ids[0]}/checkpoints/*.ckpt"))) == 2


def test_checkpoints_are_artifacts(tmp_path):
    logger = WandbLogger(project="p", save_dir=tmp_path, log_model=True)
    own = trainer(tmp_path, logger, callbacks=[Tell()])
    own.fit(Task(), loader())
    logger.finalize("success")  # what was given is not given again
    logger.finish()
    (artifact,) = Run(tmp_path, logger.version).artifacts
    assert (artifact.name, artifact.type) == (f"model-{logger.version}", "model")
    assert sorted(artifact.aliases) == ["best", "latest"]
    saved = Path(own.checkpoint_callback.best_model_path)
    assert {entry.path for entry in artifact.manifest.contents} == {"model.ckpt"}
    assert json.loads(artifact.metadata)["original_filename"] == saved.name


def test_checkpoints_nobody_tells_of_are_not_forgotten_in_silence(tmp_path):
    with pytest.warns(UserWarning, match="log_model=True uploads nothing, because the logger was not notified of any"):
        WandbLogger(save_dir=tmp_path, log_model=True).finalize("success")
