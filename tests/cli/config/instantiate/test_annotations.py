"""Values of a configuration become arguments by their annotations."""

from pathlib import Path

import cli_samples
import pytest
import torch
from support.configs import MANY, checked
from treadle.cli.commands.yaml_dump import dump_yaml


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("hidden=5", "hidden", 5),
        ("mode=max", "mode", "max"),
        ("widths=[1, 2]", "widths", [1, 2]),
        ("sizes={a: 1}", "sizes", {"a": 1}),
        ("where=a/b", "where", Path("a/b")),
        ("head={width: 3}", "head", cli_samples.Head(3)),
        ("head={class: cli_samples.Head, width: 3, bias: false}", "head", cli_samples.Head(3, False)),
        ("color=BLUE", "color", cli_samples.Color.BLUE),
        ("color=2", "color", cli_samples.Color.BLUE),
        ("activation=torch.tanh", "activation", torch.tanh),
        ("layer=Conv2d", "layer", torch.nn.Conv2d),
        ("name=1.10", "name", "1.10"),  # text, as it was written
        ("pair=[3, 4]", "pair", (3, 4.0)),
        ("kind=bfloat16", "kind", torch.bfloat16),
        ("amount=3", "amount", 3),
        ("amount=many", "amount", "many"),
        ("wrong_default=null", "wrong_default", None),
        ("strange=[1, {a: 2}]", "strange", [1, {"a": 2}]),
    ],
)
def test_values_become_arguments(override, name, value):
    given = checked(MANY, f"model.{override}").build_task().given[name]
    assert type(given) is type(value)
    assert given == value


def test_float_arguments_get_floats():
    lr = checked("model: {class: cli_samples.Line, lr: 1}").build_task().lr
    assert (lr, type(lr)) == (1.0, float)


def test_what_takes_anything_is_given_anything():
    task = checked("model: {class: cli_samples.Open, what: [1], ever: {class: torch.nn.ReLU}}").build_task()
    assert task.given["what"] == [1]
    assert isinstance(task.given["ever"], torch.nn.ReLU)


def test_rarer_kinds_of_arguments():
    def given(override):
        task = checked("model: {class: cli_samples.Odd}", f"model.{override}").build_task()
        return task.given[override.partition("=")[0]]

    assert given("word={text: a}") == {"text": "a"}
    assert vars(given("wide={factor: 3, bias: false}")) == {"width": 9, "bias": False}
    assert given("placed={first: 1}").given == (1, 2)
    assert given("placed={first: 1, rest: [3, 4]}").given == (1, 2, 3, 4)
    assert given("by_color={RED: 1}") == {cli_samples.Color.RED: 1}
    assert given("by_path={a/b: 1}") == {Path("a/b"): 1}
    found = checked("model: {class: cli_samples.Odd, by_color: {RED: 1}, wide: {bias: false}}")
    again = checked(dump_yaml(found.resolve_defaults()))  # without the width, which would be given twice
    assert vars(again.build_task().given["wide"]) == {"width": 6, "bias": False}
    assert again.build_task().given["by_color"] == {cli_samples.Color.RED: 1}
