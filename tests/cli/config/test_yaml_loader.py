"""Text becomes values as in YAML 1.2, and nothing of it is run."""

import math
import sys
import time

import pytest
from support import hostile_files
from support.configs import made
from treadle.cli.config.resolve import load
from treadle.cli.config.values import ConfigError, to_plain
from treadle.cli.config.yaml_loader import parse, parse_scalar

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1_000", 1000),
        ("0x10", 16),
        ("3e-4", 3e-4),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        # Text to YAML 1.2, and not a bool, a base-60 number, a date or an octal one, as YAML 1.1 has it.
        *((text, text) for text in ("no", "on", "12:30:00", "2026-11-22", "1.2.3", "1_", "1__0.5")),
        ("0123", 123),
    ],
)
def test_words(text, value):
    for found in (parse_scalar(text), to_plain(parse(f"a: {text}", "f"))["a"]):
        assert type(found) is type(value)
        assert found == value


def test_anchors_and_merges():
    text = """
vars: {defaults: &d {lr: 1, momentum: 0.5}, more: &m {lr: 2, decay: 3}}
optimizer: {<<: *d, lr: 9}
lr_scheduler: {<<: [*m, *d]}
seed: *d
"""
    found = made(text)
    assert found["optimizer"] == {"lr": 9, "momentum": 0.5}
    assert found["lr_scheduler"] == {"lr": 2, "decay": 3, "momentum": 0.5}
    assert found["seed"] == {"lr": 1, "momentum": 0.5}


@pytest.mark.long
def test_hostile_files_do_no_harm(here):
    marker = here / "marker"
    for name, file in hostile_files.settings(here, str(marker)).items():
        began = time.perf_counter()
        with pytest.raises(ConfigError) as raised:
            load([file])
        assert str(raised.value).startswith(str(file)), name
        assert time.perf_counter() - began < 20, name
    assert not marker.exists()
    assert hostile_files.PAYLOAD not in sys.modules
