"""Fabric's modules of file systems, data and types."""

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_fabrics_modules() -> None:
    from treadle.compat import loggers
    from treadle.compat.fabric.loggers import CSVLogger
    from treadle.compat.fabric.utilities import rank_zero_only
    from treadle.compat.fabric.utilities.cloud_io import get_filesystem
    from treadle.compat.fabric.utilities.data import has_len, sized_len
    from treadle.compat.fabric.utilities.types import _PATH, Optimizable

    assert issubclass(CSVLogger, loggers.CSVLogger)
    assert rank_zero_only.rank == 0
    assert get_filesystem(ROOT).isdir(str(ROOT))
    assert get_filesystem("memory://a").protocol == "memory"
    assert isinstance(ROOT, _PATH)
    assert isinstance(torch.optim.SGD([torch.zeros(1, requires_grad=True)]), Optimizable)
    assert (has_len([1]), sized_len(iter([1]))) == (True, None)
    with pytest.warns(UserWarning, match="length 0"):
        assert has_len([])
