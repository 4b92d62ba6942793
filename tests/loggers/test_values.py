"""Values that loggers take."""

import pytest
import torch
from treadle.common.optional import is_installed
from treadle.loggers import CSVLogger, TensorBoardLogger, WandbLogger

KINDS = [CSVLogger, TensorBoardLogger, *([WandbLogger] if is_installed("wandb") else [])]


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
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_is_named_before_anything_is_written(kind, metrics, step, error, message, tmp_path):
    logger = kind(save_dir=tmp_path)
    with pytest.raises(error, match=message):
        logger.log_metrics(metrics, step)
    with pytest.raises(TypeError, match=r"params=\[1, 2\] must be a dict"):
        logger.log_hyperparams([1, 2])
    assert list(tmp_path.iterdir()) == []
