"""The parameters of a sweep file: W&B's and Optuna's words, and what is wrong with others."""

import math

import pytest
from treadle.cli.config import Value, make_value
from treadle.tools.sweep.sweep_file import Choices, Range, parse_parameters


def parse(space):
    problems = []
    parameters = parse_parameters(Value({"model.lr": make_value(space, "s.yaml:3")}, "s.yaml:2"), problems)
    assert problems == []
    return parameters[0]


def wrong(space):
    problems = []
    parse_parameters(Value({"model.lr": make_value(space, "s.yaml:3")}, "s.yaml:2"), problems)
    (problem,) = problems
    return problem.removeprefix("s.yaml:3: parameters: model.lr: ")


@pytest.mark.parametrize(
    ("words", "space"),
    [
        ({"min": 1, "max": 9}, Range(1, 9, None, False, True)),
        ({"min": 1.0, "max": 9}, Range(1.0, 9.0, None, False, False)),
        ({"low": 1, "high": 9, "distribution": "float"}, Range(1.0, 9.0, None, False, False)),
        ({"distribution": "uniform", "min": 1, "max": 9}, Range(1.0, 9.0, None, False, False)),
        ({"distribution": "int_uniform", "min": 1, "max": 9}, Range(1, 9, None, False, True)),
        ({"distribution": "log_uniform_values", "min": 0.1, "max": 1}, Range(0.1, 1.0, None, True, False)),
        ({"type": "float", "low": 0.1, "high": 1, "log": True}, Range(0.1, 1.0, None, True, False)),
        ({"type": "int", "low": 1, "high": 100, "log": True}, Range(1, 100, None, True, True)),
        ({"distribution": "q_uniform", "min": 0.0, "max": 1.0, "q": 0.3}, Range(0.0, 0.9, 0.3, False, False)),
        ({"min": 8, "max": 30, "step": 8}, Range(8, 24, 8, False, True)),
    ],
)
def test_ranges(words, space):
    assert parse(words).space == space
    assert parse(space.describe()).space == space


@pytest.mark.parametrize(
    "words",
    [[1, "a", None], {"values": [1, "a", None]}, {"choices": [1, "a", None], "type": "categorical"}],
)
def test_choices(words):
    space = parse(words).space
    assert space.labels == [1, "a", None]
    assert parse(space.describe()).space.labels == [1, "a", None]


@pytest.mark.parametrize("words", [5, {"value": 5}, {"value": 5, "distribution": "constant"}])
def test_constants(words):
    assert parse(words).space == Choices((Value(5, "s.yaml:3"),))


def test_objects_are_stored_as_text_and_come_back():
    parameter = parse([{"class": "SGD", "lr": 0.1}, "Adam"])
    assert parameter.space.labels == ['{"class": "SGD", "lr": 0.1}', "Adam"]
    assert parameter.to_value(parameter.space.labels[0]).data["lr"].data == 0.1
    assert parameter.to_value("Adam").data == "Adam"


def test_the_values_of_a_grid():
    assert parse([1, 2]).list_grid() == [1, 2]
    assert parse({"min": 0.1, "max": 0.5, "step": 0.2}).list_grid() == [0.1, 0.3, 0.5]
    assert parse({"min": 2, "max": 4}).list_grid() == [2, 3, 4]
    assert parse({"min": 0.1, "max": 0.5}).list_grid() is None
    assert parse({"min": 1, "max": 100, "log": True}).list_grid() is None
    assert parse({"min": 3.0, "max": 3.0}).list_grid() == [3.0]


def test_parameters_in_wandbs_nested_form():
    problems = []
    nested = make_value({"optimizer": {"parameters": {"lr": [0.1, 0.2]}}, "seed": [0, 1]}, "s.yaml:3")
    assert [parameter.key for parameter in parse_parameters(nested, problems)] == ["optimizer.lr", "seed"]
    assert problems == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"vales": [1]}, "a parameter has no key 'vales'. Did you mean 'values'?"),
        ({"min": 1}, "a parameter needs 'values', 'value', or both 'min' and 'max'."),
        ({"min": 1, "max": 2, "type": ["int"]}, "distribution=['int'] is not one of"),
        ({"min": 1, "max": 2, "type": "categorical"}, "distribution='categorical' needs 'values'."),
        ({"min": 1, "max": 2, "type": "constant"}, "distribution='constant' needs 'value'."),
        ({"min": 2, "max": 1}, "min=2 must not be larger than max=1."),
        ({"min": "a", "max": 1}, "min='a' must be a finite number."),
        ({"min": True, "max": 1}, "min=True must be a finite number."),
        ({"min": math.inf, "max": 1}, "min=inf must be a finite number."),
        (
            {"min": 0, "max": 1, "log": True},
            "min=0 must be larger than 0, because values are drawn on a logarithmic scale.",
        ),
        ({"min": 0.1, "max": 1, "log": "yes"}, "log='yes' must be true or false."),
        ({"min": 0.1, "max": 1, "step": 0}, "step=0 must be larger than 0."),
        ({"min": 1, "max": 9, "step": 2, "log": True}, "log and step can't be combined. Keep one of them."),
        (
            {"min": 0.5, "max": 9, "type": "int"},
            "distribution='int' takes integers for min, max and step, not min=0.5.",
        ),
        ({"values": [1], "min": 2}, "values and min can't be combined. Keep one of them."),
        ({"values": [1], "type": "float"}, "distribution='float' and values can't be combined. Keep one of them."),
        ({"values": [1, 1.0]}, "the value 1.0 appears twice. Keep one of them."),
        ({"values": []}, "values=[] must be a list of at least one value."),
        ({"min": 1, "low": 1, "max": 2}, "low and min mean the same. Keep one of them."),
        ({"distribution": "log_unform_values", "min": 1, "max": 2}, "Did you mean 'log_uniform_values'?"),
        ({"distribution": "log_uniform", "min": 1, "max": 2}, "its min and max are exponents."),
        ({"values": [1, 2], "probabilities": [0.5, 0.5]}, "probabilities: every value is equally likely, so"),
    ],
)
def test_what_is_wrong_is_said(words, said):
    assert said in wrong(words)


def test_a_key_and_one_within_it_are_refused():
    problems = []
    parse_parameters(make_value({"optimizer": ["SGD"], "optimizer.lr": [1]}, "s.yaml:3"), problems)
    assert problems == ["s.yaml:3: parameters: optimizer and optimizer.lr set the same value. Keep one of them."]
    problems.clear()
    parse_parameters(make_value({"model lr": [1]}, "s.yaml:3"), problems)
    assert "is not a key" in problems[0]
