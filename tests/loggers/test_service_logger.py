"""What every logger of a tracking service must do, asked of each with the service itself, which has no network here."""

import copy
import enum
import importlib
import pickle
import random
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from support.failing_runs import Fails
from support.processes import run
from support.service_runs import Task, Tell, loader, trainer
from support.tracking_services import SERVICES, same
from treadle.callbacks import ModelCheckpoint
from treadle.loggers import CSVLogger, MLFlowLogger, NullExperiment, WandbLogger
from treadle.loggers.service_logger import Uploads

pytestmark = pytest.mark.long


@pytest.fixture(params=SERVICES, ids=lambda service: service.package)
def service(request, alone):
    request.param.skip_if_missing()
    return request.param


@pytest.fixture
def make(service, tmp_path):
    """Makes loggers, whose runs end with the test."""
    made = []

    def make_logger(version=None, **options):
        made.append(service.make(tmp_path, **options) if version is None else service.resume(tmp_path, version))
        return made[-1]

    yield make_logger
    for logger in made:
        logger.finish()


BY_ONE = pytest.mark.parametrize(
    "service",
    [
        pytest.param(each, id=each.package, marks=() if each.package == "swanlab" else pytest.mark.exhaustive)
        for each in SERVICES
    ],
    indirect=True,
)
"""For what one service shows by default, and `make test-all` with all of them."""


class Color(enum.Enum):
    RED = 1


def test_numbers_and_hyperparameters_are_kept(service, make, tmp_path):
    before = list(tmp_path.iterdir())
    logger = make(prefix="run")
    assert logger.version is None
    assert list(tmp_path.iterdir()) == before
    logger.log_hyperparams({"net": {"width": [1, 2]}, "act": torch.nn.ReLU(), "color": Color.RED}, {"best": 3})
    logger.log_metrics({"loss": 0.1 + 0.2, "epoch": 0}, step=5)
    logger.log_metrics({"loss": torch.tensor(0.5), "top": {"one": np.float32(1)}}, step=np.int64(10))
    logger.log_metrics({"loss": 1.5e-300})
    logger.finalize("success")
    logger.finish()
    start = f"run{service.separator}"
    rows = service.rows(tmp_path, logger.version)
    rows.pop(f"{start}epoch", None)  # which some services keep beside each value
    assert rows == {
        f"{start}best": [(0, 3.0)],
        f"{start}loss": [(5, 0.1 + 0.2), (10, 0.5), (11, 1.5e-300)],
        f"{start}top/one": [(10, 1.0)],
    }
    params = {name.removeprefix(start): str(value) for name, value in service.params(tmp_path, logger.version).items()}
    assert params == {"net/width": "[1, 2]", "act": "ReLU()", "color": "Color.RED"}
    assert not service.failed(tmp_path, logger.version)


@BY_ONE
def test_a_value_that_is_not_finite_is_kept_or_left_out(service, make, tmp_path):
    logger = make()
    nan, infinite = (6, float("nan")), (7, float("inf"))
    with nullcontext() if service.keeps_nan else pytest.warns(UserWarning, match="loss"):
        for step, value in ((5, 1.0), nan, infinite, (8, 2.0)):
            logger.log_metrics({"loss": value}, step)
    logger.finish()
    rest = [nan, infinite] if service.keeps_nan else []
    assert same(service.rows(tmp_path, logger.version)["loss"], [(5, 1.0), *rest, (8, 2.0)])


def test_a_run_is_continued_by_its_id(service, make, tmp_path):
    first = make()
    first.log_hyperparams({"lr": 0.1})
    first.log_metrics({"x": 1}, 1)
    for twin in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert twin.experiment is first.experiment
        twin.log_metrics({"x": 2}, 2)
        first.log_metrics({"x": 3}, 3)
    first.finalize("failed")
    assert service.failed(tmp_path, first.version)
    twin.log_metrics({"x": 4}, 4)
    first.finalize("success")
    first.finish()
    again = make(first.version)
    again.log_metrics({"x": 2.5}, 2)
    again.log_hyperparams({"late": 1})
    again.log_metrics({"x": 5}, 5)
    again.finalize("success")
    again.finish()
    assert again.version == first.version
    # Offline, a continued run of a service that rewrites has files of its own, with a first value of their own.
    logged = [(2, 2.0), (3, 3.0)] * (1 if service.rewrites else 2)
    assert service.rows(tmp_path, first.version)["x"] == [(1, 1.0), *logged, (4, 4.0), (2, 2.5), (5, 5.0)]
    params = service.params(tmp_path, first.version)
    assert {name: float(value) for name, value in params.items()} == {"lr": 0.1, "late": 1.0}
    assert service.failed(tmp_path, first.version) is (service.package == "trackio")  # whose alerts stay


@BY_ONE
def test_runs_of_one_process_are_apart(service, make, tmp_path):
    one, two = make(), make()
    for step in range(2):
        one.log_metrics({"x": step}, step)
        two.log_metrics({"y": step}, step)
    one.finalize("failed")  # which the other has closed, where there is one at a time
    two.finish()
    assert one.version != two.version
    assert service.rows(tmp_path, one.version) == {"x": [(0, 0.0), (1, 1.0)]}
    assert service.rows(tmp_path, two.version) == {"y": [(0, 0.0), (1, 1.0)]}
    assert (service.failed(tmp_path, one.version), service.failed(tmp_path, two.version)) == (True, False)


@BY_ONE
def test_random_states_and_signal_handlers_stay(service, make, tmp_path):
    def state():
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), handlers

    def handler(number, frame):
        raise AssertionError

    previous = signal.signal(signal.SIGTERM, handler)
    try:
        random.seed(7)
        before = state()
        logger = make()
        logger.log_metrics({"x": 1}, 1)
        logger.log_hyperparams({"a": 1})
        logger.finalize("success")
        logger.log_metrics({"x": 2}, 2)
        logger.finalize("failed")
        assert state() == before
        ids = {logger.version}
        for _ in range(2):  # the same seed makes no two runs one
            random.seed(7)
            other = make()
            other.log_metrics({"x": 1}, 1)
            other.finish()
            ids.add(other.version)
        assert len(ids) == 3
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_rank_one_does_nothing(service, make, tmp_path, rank_one):
    before = sorted(tmp_path.rglob("*"))
    logger = make()
    assert isinstance(logger.experiment, NullExperiment)
    logger.log_metrics({"x": 1}, 1)
    logger.log_hyperparams({"a": 1}, {"x": 0})
    logger.finalize("success")
    logger.finish()
    assert (logger.version, logger.log_dir) == (None, None)
    logger.version = "told"
    assert logger.version == "told"
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_wrong_is_named_before_a_run_begins(service, make):
    logger = make()
    with pytest.raises(TypeError, match=r"metric 'loss' is 'low'.*must be one number"):
        logger.log_metrics({"loss": "low"}, 0)
    with pytest.raises(ValueError, match="step=-1 must be at least 0"):
        logger.log_metrics({"loss": 1.0}, -1)
    with pytest.raises(TypeError, match=r"params=\[1, 2\] must be a dict"):
        logger.log_hyperparams([1, 2])
    assert logger.version is None
    with pytest.raises(TypeError, match="prefix=3 must be a string"):
        make(prefix=3)
    with pytest.raises(TypeError, match="strict='no' must be True or False"):
        make(strict="no")
    with pytest.raises(ValueError, match="log_model='best' must be True, False or 'all'"):
        make(log_model="best")
    with pytest.raises(TypeError, match=r"has no argument 'porject'\. Its arguments are "):
        make(porject="x")


LOGGERS = {**{service.package: service.logger for service in SERVICES}, "wandb": WandbLogger, "mlflow": MLFlowLogger}


@pytest.mark.parametrize("package", LOGGERS)
@pytest.mark.parametrize("how", ["missing", "folder"])
def test_a_missing_package_is_named_at_once(package, how, monkeypatch, tmp_path):
    if how == "missing":
        monkeypatch.setitem(sys.modules, package, None)
    else:  # such as W&B's own folder of earlier runs, which can be imported as an empty package
        (tmp_path / package).mkdir()
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
        monkeypatch.setattr(sys, "meta_path", [importlib.machinery.PathFinder])
    extra = {"comet_ml": "comet"}.get(package, package)
    with pytest.raises(ModuleNotFoundError, match=rf"treadle\[{extra}\].* pip install {package}"):
        LOGGERS[package]()


def test_loggers_that_are_not_used_import_no_package():
    made = {package: kind.__name__ for package, kind in LOGGERS.items() if importlib.util.find_spec(package)}
    code = (
        f"import sys, treadle.loggers as l; made = [getattr(l, name) for name in {list(made.values())}]; "
        "made = [kind() for kind in made if kind.__name__ != 'MLFlowLogger']; "  # which asks MLflow for its storage
        "made += [l.CSVLogger('x'), l.TensorBoardLogger('x')]; "
        f"print([m for m in {[*made, 'yaml', 'tensorboard', 'torch.utils.tensorboard']} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def fit(folder, service):
    logger = service.make(folder)
    table = CSVLogger(folder, "csv", 0)
    for _ in range(2):  # the second fit continues the run
        trainer(folder, [logger, table]).fit(Task(), loader())
    logger.finish()
    return logger.version


@BY_ONE
def test_two_ranks(service, tmp_path):
    ids = run(fit, 2, tmp_path, service)
    assert len(set(ids)) == 1
    once = [(i + 1, 2 * i + 0.5) for i in range(4)]
    rows = service.rows(tmp_path, ids[0])["mean"]
    assert rows == (once if service.rewrites else once * 2)
    assert {name: int(value) for name, value in service.params(tmp_path, ids[0]).items()} == {"width": 2}
    assert not service.failed(tmp_path, ids[0])


@pytest.mark.parametrize("when", [True, pytest.param("all", marks=pytest.mark.exhaustive)], ids=["end", "all"])
@BY_ONE
def test_checkpoints(when, service, make, tmp_path):
    logger = make(log_model=when)
    own = trainer(tmp_path, [CSVLogger(tmp_path, "csv", 0), logger], callbacks=[Tell()])
    own.fit(Task(), loader())
    logger.finalize("success")  # what was given is not given again
    logger.finish()
    assert service.rows(tmp_path, logger.version)["mean"] == [(i + 1, float(i)) for i in range(8)]
    saved = Path(own.checkpoint_callback.best_model_path)
    found = service.files(tmp_path, logger.version)
    assert [Path(name).name for name in found] == [saved.name]


@BY_ONE
def test_a_run_that_fails_is_marked(service, make, tmp_path):
    logger = make()
    flags = {"callbacks": [Fails("backward", 2)], "enable_checkpointing": False}
    with pytest.raises(RuntimeError, match="planned"):
        trainer(tmp_path, [CSVLogger(tmp_path, "csv", 0), logger], **flags).fit(Task(), loader())
    assert service.failed(tmp_path, logger.version)
    assert service.rows(tmp_path, logger.version)["mean"] == [(1, 0.0), (2, 1.0)]


WRONG = {
    "clearml": {"offline": True},
    "comet_ml": {"offline": True, "offline_directory": "taken/below"},
    "swanlab": {"mode": "offline", "save_dir": "taken"},
    "trackio": {"name": "none", "resume": "must"},
}


def test_a_service_that_fails_does_not_end_training(service, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("no directory")
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "taken"))
    logger = service.logger(**WRONG[service.package])
    table = CSVLogger(tmp_path, "csv", 0)
    name = service.logger.__name__
    with pytest.warns(UserWarning, match=rf"{name}\.log_hyperparams failed, so the logger is disabled"):
        trainer(tmp_path, [table, logger], enable_checkpointing=False).fit(Task(), loader())
    assert (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().count("\n") == 9
    strict = service.logger(**WRONG[service.package], strict=True)
    with pytest.raises(Exception, match=r"taken|Not a directory|does not exist|archive"):
        trainer(tmp_path, [strict], enable_checkpointing=False).fit(Task(), loader())


def test_checkpoints_in_an_object_store_are_named_once():
    uploads, callback = Uploads(True), ModelCheckpoint(save_top_k=-1)
    callback.best_model_path = "s3://bucket/run/epoch=1.ckpt"
    with pytest.warns(UserWarning, match="those in s3://bucket/run are not uploaded") as caught:
        uploaded = [list(uploads.collect_after_save(callback)) for _ in range(2)]
    assert (uploaded, len(caught)) == ([[], []], 1)
