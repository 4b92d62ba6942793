"""Strategies by name."""

import sys

import pytest
from treadle.strategies import DDP, SingleDevice, World, register_strategy, registry, resolve_strategy, strategy_names

import treadle


@pytest.fixture
def names(monkeypatch):
    """A registry that forgets afterwards."""
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))


class Mine(SingleDevice):
    name = "mine"


def test_a_registered_name(names):
    register_strategy("mine", Mine)
    assert type(treadle.Accelerator(cpu=True, strategy="mine").strategy) is Mine
    for taken in ("mine", "ddp", "auto"):
        with pytest.raises(ValueError, match=f"'{taken}' is already registered"):
            register_strategy(taken, Mine)


def test_an_entry_point(tmp_path, monkeypatch, names):
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[treadle.strategies]\nfrom_package = strategy_of_a_package:Theirs\n")
    (tmp_path / "strategy_of_a_package.py").write_text(
        "from treadle.strategies import SingleDevice\nclass Theirs(SingleDevice):\n    name = 'theirs'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "from_package" in strategy_names()
    assert "strategy_of_a_package" not in sys.modules  # not loaded to be listed
    assert resolve_strategy("from_package", World()).name == "theirs"
    with pytest.raises(ValueError, match="already registered"):
        register_strategy("from_package", Mine)


def test_names_and_objects():
    world = World()
    assert type(resolve_strategy("auto", world)) is SingleDevice
    assert type(resolve_strategy("ddp", world)) is DDP
    assert resolve_strategy("ddp_find_unused_parameters_true", world).options["find_unused_parameters"]
    mine = Mine()
    assert resolve_strategy(mine, world) is mine
    with pytest.raises(ValueError, match="Did you mean 'single_device'"):
        resolve_strategy("single_devise", world)
    with pytest.raises(TypeError, match="not a type"):
        resolve_strategy(Mine, world)
