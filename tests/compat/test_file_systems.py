"""Fabric's modules of file systems, data and types."""

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_fabrics_modules() -> None:
    from treadle.compat.fabric.utilities.cloud_io import _is_dir, get_filesystem
    from treadle.compat.fabric.utilities.data import sized_len
    from treadle.compat.fabric.utilities.types import Optimizable

    assert _is_dir(get_filesystem(ROOT), ROOT)
    assert not _is_dir(get_filesystem(ROOT), ROOT / "README.md", strict=True)
    assert get_filesystem("memory://a").protocol == "memory"
    assert isinstance(torch.optim.SGD([torch.zeros(1, requires_grad=True)]), Optimizable)
    assert sized_len(iter([1])) is None


def test_files_whose_tensors_are_read_when_used(tmp_path) -> None:
    from treadle.compat.fabric.utilities.load import _lazy_load, _NotYetLoadedTensor

    torch.save({"weight": torch.arange(3)}, tmp_path / "weights.pth")
    weights = _lazy_load(tmp_path / "weights.pth")
    assert weights["weight"].tolist() == [0, 1, 2]
    assert "weights.pth" in Path("/proc/self/maps").read_text()  # the file is mapped, not read
    assert not isinstance(weights["weight"], _NotYetLoadedTensor)
    with pytest.raises(FileNotFoundError):
        _lazy_load(tmp_path / "none.pth")
