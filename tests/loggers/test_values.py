"""Values that loggers take."""

import pytest
import torch
from treadle.loggers import CSVLogger, TensorBoardLogger

BUILT_IN = [CSVLogger, TensorBoardLogger]


@pytest.mark.parametrize(
    ("metrics", "step", "error", "message"),
    [
        ({"loss": "low"}, 0, TypeError, "metric 'loss' is 'low'.*must be one number"),
        ({"loss": None}, 0, TypeError, "metric 'loss' is None"),
        ({"loss": 1j}, 0, TypeError, "metric 'loss' is 1j"),
        ({"top": {"five": []}}, 0, TypeError, "metric 'top/five'"),
        ({3: 1.0}, 0, TypeError, "metric name 3 must be a non-empty string"),
        ([1.0], 0, TypeError, "must be a dict of numbers"),
        ({"loss": torch.zeros(3)}, 0, ValueError, r"metric 'loss' has shape \(3,\).*\.mean\(\)"),
        ({"loss": 1.0}, -1, ValueError, "step=-1 must be at least 0"),
        ({"loss": 1.0}, 0.5, TypeError, r"step=0\.5 must be an integer"),
    ],
)
@pytest.mark.parametrize("kind", BUILT_IN)
def test_a_wrong_metric_is_named(kind, metrics, step, error, message, tmp_path):
    logger = kind(tmp_path)
    with pytest.raises(error, match=message):
        logger.log_metrics(metrics, step)


@pytest.mark.parametrize("kind", BUILT_IN)
def test_wrong_hyperparameters_are_named(kind, tmp_path):
    with pytest.raises(TypeError, match=r"params=\[1, 2\] must be a dict"):
        kind(tmp_path).log_hyperparams([1, 2])
