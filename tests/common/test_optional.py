"""Optional packages: one check, whose error names what to install."""

import re
import tomllib
from pathlib import Path

import pytest
from support.trainers import says
from treadle.common.optional import is_installed, require

ROOT = Path(__file__).parents[2]


def test_what_is_installed(tmp_path, monkeypatch):
    assert is_installed("torch")
    assert not is_installed("a_package_that_nobody_wrote")
    require("this", "torch", "numpy", extra="test")
    (tmp_path / "a_package_that_nobody_wrote").mkdir()  # a folder is none
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("a_package_that_nobody_wrote")


def test_the_error_names_what_to_install():
    with pytest.raises(ModuleNotFoundError) as raised:
        require("to_onnx", "torch", "no_onnx", extra="onnx")
    words = "to_onnx needs the package 'no_onnx', which is not installed. Run pip install 'treadle[onnx]', or "
    assert str(raised.value) == words + "pip install no_onnx."
    assert raised.value.name == "no_onnx"
    with says(ModuleNotFoundError, "packages 'no_a' and 'no_b', which are not", "pip install no_a no_b"):
        require("this", "no_a", "no_b", extra="x")


def test_every_extra_that_an_error_names_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    rooms = ("callbacks", "engine", "loggers", "trainer")
    text = "".join(path.read_text(encoding="utf-8") for room in rooms for path in (ROOT / room).rglob("*.py"))
    named = set(re.findall(r'\brequire\((?:[^()]|\([^()]*\))*\bextra="(\w+)"', text))
    services = {"clearml", "comet", "mlflow", "swanlab", "trackio", "wandb"}
    assert named == {"cli", "onnx", "plot", "psutil", "rich", *services}
    assert named <= set(extras)
