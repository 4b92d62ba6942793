"""The sweep file: what it says in the words of several libraries, and what is wrong with it."""

from pathlib import Path

import pytest
from treadle.cli.config import ConfigError, Value, make_value, to_plain
from treadle.tools.sweep.sweep_file import Choice, Metric, Range, list_changes, parse_parameters, read_sweep

GOOD = """
config: base.yaml
method: random
metric: {name: val_loss, goal: minimize}
trials: 20
parameters:
  model.lr: [0.1, 0.2]
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("trainer: {max_epochs: 3}\nmodel: {class: tasks.Line}\n")


def read(text, *overrides):
    Path("s.yaml").write_text(text)
    return read_sweep("s.yaml", overrides)


def wrong(text, *overrides):
    with pytest.raises(ConfigError) as caught:
        read(text, *overrides)
    return caught.value.problems


def test_defaults():
    sweep = read(GOOD)
    assert (sweep.name, sweep.directory, sweep.processes, sweep.seed, sweep.max_failures) == ("s", "runs", 1, 0, 3)
    assert sweep.metric == Metric("val_loss", "minimize", "best")
    assert (sweep.prune, sweep.storage) == (None, None)
    assert sweep.folder == Path("runs/s").absolute()
    assert to_plain(sweep.base) == {"trainer": {"max_epochs": 3}, "model": {"class": "tasks.Line"}}


def test_the_words_of_wandb_and_optuna():
    sweep = read("""
config: {model: {class: tasks.Line}, run: {dir: elsewhere}}
method: bayes
metric: {name: acc, direction: maximize}
run_cap: 7
n_jobs: 2
study_name: mine
early_terminate: {type: hyperband, min_iter: 2, eta: 4}
parameters: {model.lr: {min: 0.1, max: 1.0}}
max_failures: null
storage: journal
""")
    assert (sweep.name, sweep.trials, sweep.processes, sweep.method.kind) == ("mine", 7, 2, "tpe")
    assert sweep.metric == Metric("acc", "maximize", "best")
    assert sweep.prune == Choice("hyperband", {"min_resource": 2, "reduction_factor": 4}, sweep.prune.source)
    assert (sweep.max_failures, sweep.storage, sweep.directory) == (None, "journal", "elsewhere")


def test_a_grid_knows_its_number_of_trials():
    text = GOOD.replace("random", "grid").replace("trials: 20\n", "") + "  data.size: {min: 1, max: 3}\n"
    sweep = read(text)
    assert sweep.trials == 6
    assert [tuple(sweep.get_combination(number).values())[::-1] for number in range(6)] == [
        (lr, size) for lr in (0.1, 0.2) for size in (1, 2, 3)
    ]
    assert read(text, "trials=4").trials == 4
    assert "a grid needs a list of values, or min, max and step" in wrong(text + "  model.x: {min: 0.1, max: 1}\n")[0]


def test_overrides_go_to_the_sweep_or_to_the_configuration():
    sweep = read(GOOD, "trials=5", "trainer.max_epochs=1", "vars.size=3", "seed=7", "~model.class")
    assert (sweep.trials, sweep.seed) == (5, 7)
    assert to_plain(sweep.base) == {"trainer": {"max_epochs": 1}, "model": {}, "vars": {"size": 3}}


def test_several_configurations_are_merged_and_paths_are_relative_to_the_sweep_file():
    Path("below").mkdir()
    Path("below/s.yaml").write_text(GOOD.replace("base.yaml", "[../base.yaml, {trainer: {max_epochs: 9}}]"))
    assert to_plain(read_sweep("below/s.yaml").base)["trainer"] == {"max_epochs": 9}


def test_its_description_is_a_sweep_file():
    sweep = read(GOOD + "prune: median\n")
    Path("copy.yaml").write_text(__import__("json").dumps(sweep.describe()))
    again = read_sweep("copy.yaml")
    assert list_changes(sweep.describe(), again.describe()) == []
    assert again.folder == sweep.folder


def test_changes_are_named_and_some_are_none():
    sweep = read(GOOD)
    assert list_changes(sweep.describe(), read(GOOD, "trials=50", "processes=4").describe()) == []
    changed = read(GOOD.replace("0.2", "0.3"), "trainer.max_epochs=5", "trainer.precision=64-true")
    assert list_changes(sweep.describe(), changed.describe()) == [
        "config.trainer.max_epochs: 3 is now 5",
        'config.trainer.precision: null is now "64-true"',
        "parameters.model.lr.values: [0.1, 0.2] is now [0.1, 0.3]",
    ]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("method", "metod", "s.yaml:3: a sweep has no key 'metod'. Did you mean 'method'?"),
        ("random", "randm", "s.yaml:3: method='randm' is not one of grid, random, tpe. Did you mean 'random'?"),
        ("trials: 20", "trials: many", "s.yaml:5: trials='many' must be an integer of at least 1."),
        ("trials: 20\n", "", "s.yaml: the number of trials is missing. Add trials: 20."),
        ("goal: minimize", "goal: minimise", "goal='minimise' is not one of minimize, maximize."),
        ("{name: val_loss, goal: minimize}", "val_loss", "metric='val_loss' must be a mapping, such as metric: {"),
        ("{name:", "{nam:", "metric has no key 'nam'. Did you mean 'name'?"),
        ("config: base.yaml", "config: bas.yaml", "the file 'bas.yaml' does not exist"),
        ("config: base.yaml", "program: train.py", "a sweep runs `treadle fit`"),
        ("trials: 20", "trainer: {}\ntrials: 20", "it is a section of the configuration. Put it below 'config'."),
        ("trials: 20", "trials: 20\nrun_cap: 3", "run_cap and trials mean the same. Keep one of them."),
        ("trials: 20", "trials: 20\nname: a/b", "cannot be the name of a run"),
        ("trials: 20", "trials: 20\nprune: hyperbund", "prune='hyperbund' is not one of hyperband, asha,"),
        ("trials: 20", "trials: 20\nstorage: study.db", "storage='study.db' must be a URL"),
        ("model.lr", "run.name", "run.name can't be varied"),
        ("parameters:\n  model.lr: [0.1, 0.2]", "", "there are no parameters"),
        ("method: random\n", "", "there is no method"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(before, after, said):
    assert any(said in problem for problem in wrong(GOOD.replace(before, after))), wrong(GOOD.replace(before, after))


def test_what_a_trial_resumes_from_is_not_set():
    assert "each trial resumes from its own checkpoints" in wrong(GOOD, "ckpt_path=last")[0]
    assert "must be a local folder" in wrong(GOOD, "run.dir=s3://bucket/runs")[0]


def parse(space):
    (parameter,) = parse_parameters(Value({"model.lr": make_value(space, "s.yaml:3")}, "s.yaml:2"), problems := [])
    assert problems == []
    return parameter


def wrong_parameter(space):
    parse_parameters(Value({"model.lr": make_value(space, "s.yaml:3")}, "s.yaml:2"), problems := [])
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
    ("words", "labels"),
    [
        ([1, "a", None], [1, "a", None]),
        ({"values": [1, "a", None]}, [1, "a", None]),
        ({"choices": [1, "a", None], "type": "categorical"}, [1, "a", None]),
        (5, [5]),
        ({"value": 5, "distribution": "constant"}, [5]),
    ],
)
def test_choices_and_constants(words, labels):
    space = parse(words).space
    assert space.labels == parse(space.describe()).space.labels == labels


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
    nested = make_value({"optimizer": {"parameters": {"lr": [0.1, 0.2]}}, "seed": [0, 1]}, "s.yaml:3")
    parsed = parse_parameters(nested, problems := [])
    assert ([parameter.key for parameter in parsed], problems) == (["optimizer.lr", "seed"], [])


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
        ({"min": 0, "max": 1, "log": True}, "min=0 must be larger than 0, because"),
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
        ({"distribution": "log_unform_values", "min": 1, "max": 2}, "Did you mean 'log_uniform_values'?"),
        ({"distribution": "log_uniform", "min": 1, "max": 2}, "its min and max are exponents."),
        ({"values": [1, 2], "probabilities": [0.5, 0.5]}, "probabilities: every value is equally likely, so"),
    ],
)
def test_what_is_wrong_is_said(words, said):
    assert said in wrong_parameter(words)


def test_a_key_and_one_within_it_are_refused():
    problems = []
    parse_parameters(make_value({"optimizer": ["SGD"], "optimizer.lr": [1]}, "s.yaml:3"), problems)
    assert problems == ["s.yaml:3: parameters: optimizer and optimizer.lr set the same value. Keep one of them."]
    problems.clear()
    parse_parameters(make_value({"model lr": [1]}, "s.yaml:3"), problems)
    assert "is not a key" in problems[0]
