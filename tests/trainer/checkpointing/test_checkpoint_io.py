"""Plugins that write and read the files of checkpoints, as in Lightning."""

from __future__ import annotations

import pytest
import torch
from treadle.compat.plugins import AsyncCheckpointIO, TorchCheckpointIO


@pytest.mark.parametrize("io", [TorchCheckpointIO(), AsyncCheckpointIO()], ids=["torch", "async"])
def test_checkpoint_files(io, tmp_path) -> None:
    path, weight = tmp_path / "deep" / "x.ckpt", torch.ones(2)
    io.save_checkpoint({"weight": weight, "epoch": 3}, path)
    weight.zero_()
    io.teardown()
    loaded = io.load_checkpoint(path)
    assert loaded["epoch"] == 3
    if isinstance(io, AsyncCheckpointIO):
        assert loaded["weight"].tolist() == [1.0, 1.0]
    io.remove_checkpoint(path)
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(path)


def test_a_failed_write_beside_the_training_raises(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    io = AsyncCheckpointIO()
    io.save_checkpoint({}, tmp_path / "file" / "x.ckpt")
    with pytest.raises(OSError, match="file"):
        io.teardown()
