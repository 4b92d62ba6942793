"""The sweep file: what it says in the words of several libraries, and what is wrong with it."""

from pathlib import Path

import pytest
from treadle.cli.config import ConfigError, to_plain
from treadle.tools.sweep.sweep_file import Choice, Metric, list_changes, read_sweep

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
        (", goal: minimize", "", "goal=None is not one of minimize, maximize."),
        (
            "{name: val_loss, goal: minimize}",
            "val_loss",
            "metric='val_loss' must be a mapping, such as metric: {name: val_loss, goal: minimize}.",
        ),
        ("{name:", "{nam:", "metric has no key 'nam'. Did you mean 'name'?"),
        ("config: base.yaml", "config: bas.yaml", "the file 'bas.yaml' does not exist"),
        ("config: base.yaml", "program: train.py", "a sweep runs `treadle fit`"),
        ("trials: 20", "trainer: {}\ntrials: 20", "it is a section of the configuration. Put it below 'config'."),
        ("trials: 20", "trials: 20\nrun_cap: 3", "run_cap and trials mean the same. Keep one of them."),
        ("trials: 20", "trials: 20\nname: a/b", "cannot be the name of a run"),
        ("trials: 20", "trials: 20\nprune: hyperbund", "prune='hyperbund' is not one of hyperband, asha,"),
        ("trials: 20", "trials: 20\nstorage: study.db", "storage='study.db' must be a URL"),
        ("model.lr", "run.name", "run.name can't be varied"),
        ("model.lr", "ckpt_path", "ckpt_path can't be varied"),
        ("parameters:\n  model.lr: [0.1, 0.2]", "", "there are no parameters"),
        ("method: random\n", "", "there is no method"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(before, after, said):
    assert any(said in problem for problem in wrong(GOOD.replace(before, after))), wrong(GOOD.replace(before, after))


def test_what_a_trial_resumes_from_is_not_set():
    assert "each trial resumes from its own checkpoints" in wrong(GOOD, "ckpt_path=last")[0]
    assert "must be a local folder" in wrong(GOOD, "run.dir=s3://bucket/runs")[0]
