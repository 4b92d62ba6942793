"""The base class, the object on other ranks, and the numbered directory."""

import copy
import pickle
from typing import Any

import pytest
from treadle.loggers import CSVLogger, Logger, NullExperiment, TensorBoardLogger, rank_zero_experiment

BUILT_IN = [CSVLogger, TensorBoardLogger]


class ListLogger(Logger):
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))

    def log_hyperparams(self, params, metrics=None):
        self.rows.append(params)


def test_a_logger_of_ten_lines_answers_everything():
    logger = ListLogger()
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"loss": 1.0}, step=3)
    logger.log_graph(None, input_array=None)  # keywords as in Lightning
    logger.after_save_checkpoint(checkpoint_callback=None)
    logger.on_resume(2)
    logger.save()
    logger.finalize("success")
    assert logger.rows == [{"lr": 0.1}, (3, {"loss": 1.0})]
    assert (logger.name, logger.save_dir, logger.root_dir, logger.log_dir, logger.experiment) == (None,) * 5
    assert logger.version is None
    logger.version = 4
    assert (logger.version, ListLogger().version) == (4, None)


def test_class_attributes_may_take_the_place_of_properties():
    class Named(ListLogger):
        name = "mine"
        version = "a"

    logger = Named()
    logger.version = "b"
    assert (logger.name, logger.version) == ("mine", "b")


def test_null_experiment_takes_any_use():
    null = NullExperiment()
    null.config.update({"a": 1})
    null.value = 3
    null["key"] = 4
    with null.scope("x") as scope:
        scope.add_image("x", None)
    assert null.value is null
    assert list(null[0].items()) == []
    assert not null
    assert isinstance(pickle.loads(pickle.dumps(copy.deepcopy(null))), NullExperiment)
    with pytest.raises(AttributeError):
        null.__array__  # noqa: B018


def test_decorated_experiment_is_built_on_rank_zero_only(request):
    class Backend(ListLogger):
        @property
        @rank_zero_experiment
        def experiment(self):
            """The backend."""
            return self.rows

    logger = Backend()
    assert logger.experiment is logger.rows
    assert Backend.experiment.__doc__ == "The backend."
    request.getfixturevalue("rank_one")
    assert isinstance(logger.experiment, NullExperiment)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"save_dir": "https://host/logs"}, ValueError, "https:// URLs are read-only"),
        ({"save_dir": 3}, TypeError, "int"),
        ({"name": 3}, TypeError, "name=3 must be a string"),
        ({"prefix": 3}, TypeError, "prefix=3 must be a string"),
        ({"version": -1}, ValueError, "version=-1 must be at least 0"),
        ({"version": 1.5}, TypeError, r"version=1\.5 must be an integer, a directory name or None"),
        ({"version": True}, TypeError, "version=True"),
    ],
)
@pytest.mark.parametrize("kind", BUILT_IN)
def test_a_wrong_argument_is_named(kind, arguments, error, message, tmp_path):
    with pytest.raises(error, match=message):
        kind(**{"save_dir": tmp_path, **arguments})
