"""Durations, wherever they are given: the same forms, the same kinds of error, the same words."""

import re
from datetime import timedelta

import pytest
from treadle.callbacks import ModelCheckpoint, Timer
from treadle.common.durations import parse_duration

import treadle
from treadle.utils import InitProcessGroupKwargs, PartialState

TAKERS = {
    "duration": Timer,
    "max_time": treadle.Trainer,
    "val_check_interval": treadle.Trainer,
    "train_time_interval": ModelCheckpoint,
    "timeout": InitProcessGroupKwargs,
}


@pytest.mark.parametrize(
    "value",
    ["00:01:30:00", " 0:1:30:0 ", timedelta(minutes=90), {"hours": 1, "minutes": 30}, {"hours": 1.5}],
)
def test_every_form_of_the_same_time(value):
    assert parse_duration("max_time", value) == timedelta(minutes=90)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (5, TypeError, "must be a string of the form DD:HH:MM:SS, a datetime.timedelta, or a dict of its arguments"),
        ({"hour": 1}, TypeError, "Did you mean 'hours'?"),
        ({"hours": "2"}, TypeError, "hours must be a number, not a str"),
        ("1h", ValueError, "must have the form DD:HH:MM:SS, such as"),
        ("0:0:0:" + "9" * 5000, ValueError, "must have the form DD:HH:MM:SS, such as"),
        ("0:0:0:²", ValueError, "must have the form DD:HH:MM:SS, such as"),
        ("999999999:99:0:0", ValueError, "must be a finite duration"),
        ({"hours": float("nan")}, ValueError, "must be a finite duration"),
        ("00:00:00:00", ValueError, "must be a positive duration"),
        ({}, ValueError, "must be a positive duration"),
    ],
)
def test_what_is_not_a_duration(value, error, words):
    with pytest.raises(error, match=re.escape(words)) as raised:
        parse_duration("max_time", value)
    assert str(raised.value).startswith(f"max_time={value!r}")


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("value", [{"hours": "2"}, "0:0:0:²", timedelta(seconds=-3)])
def test_every_taker_refuses_the_same_with_the_same_words(name, value):
    with pytest.raises((TypeError, ValueError)) as expected:
        parse_duration(name, value)
    with pytest.raises(expected.type, match=re.escape(str(expected.value))):
        TAKERS[name](**{name: value})


@pytest.mark.parametrize("value", ["00:00:01:30", {"seconds": 90}, timedelta(seconds=90)])
def test_every_taker_takes_every_form(value):
    assert Timer(value).time_remaining() == 90
    assert treadle.Trainer(max_time=value).max_seconds == 90
    assert treadle.Trainer(val_check_interval=value).val_check_seconds == 90
    assert ModelCheckpoint(train_time_interval=value).train_time_interval == timedelta(seconds=90)
    assert InitProcessGroupKwargs(timeout=value).timeout == timedelta(seconds=90)


def test_the_timeout_of_a_partial_state():
    assert PartialState(cpu=True, timeout="00:00:01:30").num_processes == 1
    with pytest.raises(ValueError, match="timeout='1h' must have the form DD:HH:MM:SS"):
        PartialState(cpu=True, timeout="1h")
