"""Fixtures of checkpoints."""

import shutil
import subprocess

import pytest
from support.saved_nets import prepared


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of a small network after two steps, the network and its optimizer."""
    accelerator, model, optimizer = prepared(steps=2)
    accelerator.save_state(tmp_path / "saved")
    return tmp_path / "saved", model, optimizer


@pytest.fixture
def small_disk(request, tmp_path):
    """An empty file system that the options in the parameter, tmpfs's, keep small."""
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", request.param, "tmpfs"]
    if mount is None or subprocess.run([mount, *options, tmp_path], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a file system")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)
