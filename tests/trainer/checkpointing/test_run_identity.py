"""A checkpoint found by a word must be this run's: its task, its hyperparameters, its parameters' names and shapes."""

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from support import models
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from treadle.callbacks import LearningRateFinder, ModelCheckpoint
from treadle.trainer.checkpointing.run_identity import class_name
from treadle.trainer.runs.folder import RunFolder

import treadle


class Line(models.Line):
    """A linear layer; five steps an epoch."""

    def __init__(self, lr=0.1, width=1, **more):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(2, width)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Other(Line):
    """The same in all but the name."""


class Data(treadle.DataModule):
    def __init__(self, crop=1, batch_size=2):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return models.loader(10, self.hparams.batch_size)


def fit(root, task, word="auto", data=None, saver=None, **flags):
    """As in a new process, in one folder for all; returns after how many steps it began."""
    callbacks = [saver or ModelCheckpoint(Path(root) / "c"), *flags.pop("callbacks", [])]
    own = make_trainer(**flags, enable_checkpointing=None, callbacks=callbacks)
    own.fit(task, data or Data(), ckpt_path=word)
    name = Path(own.ckpt_path or "step=0").name
    return int(name.partition("step=")[2].partition(".")[0].split("-")[0])


OTHER_RUNS = {
    "learning rate": (lambda: Line(lr=0.1), lambda: Line(lr=0.01), r"lr=0.1 in the checkpoint, 0.01 in this run"),
    "class": (Line, Other, r"task .*test_run_identity.Line in the checkpoint, .*test_run_identity.Other in this run"),
    "nested": (
        lambda: Line(net={"sizes": [1, 2]}),
        lambda: Line(net={"sizes": [1, 3]}),
        r"net.sizes=\[1, 2\] in the checkpoint, \[1, 3\] in this run",
    ),
}


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_another_runs_checkpoints_are_skipped_and_said_once(tmp_path, name):
    first, second, text = OTHER_RUNS[name]
    fit(tmp_path, first(), saver=ModelCheckpoint(tmp_path / "c", "{step}", every_n_train_steps=1, save_top_k=-1))
    with pytest.raises(ValueError, match=f"'last', but there is no intact checkpoint from this run .*{text}"):
        fit(tmp_path, second(), "last")
    words = f"skips a checkpoint: .*step=5.ckpt and 4 more belong to another run .*{text}"
    with pytest.warns(UserWarning, match=words) as said:
        assert fit(tmp_path, second()) == 0
    assert sum("skips" in str(one.message) for one in said) == 1


def test_the_newest_of_this_run_is_taken_from_among_others(tmp_path):
    fit(tmp_path, Line(lr=0.1))
    with pytest.warns(UserWarning, match="lr=0.1 in the checkpoint, 0.2 in this run"):
        assert fit(tmp_path, Line(lr=0.2), max_epochs=3) == 0
    with pytest.warns(UserWarning, match="lr=0.2 in the checkpoint, 0.1 in this run"):
        assert fit(tmp_path, Line(lr=0.1), max_epochs=2) == 5
    with pytest.warns(UserWarning, match="lr=0.1 in the checkpoint, 0.2 in this run"):
        assert fit(tmp_path, Line(lr=0.2), "best", max_epochs=4) == 15


def test_shapes_and_names_are_compared_where_no_hyperparameters_are(tmp_path):
    def built(width, bias=True):
        task = Line()
        task.net = nn.Linear(2, width, bias=bias)
        return task

    fit(tmp_path, built(1))
    with pytest.warns(UserWarning, match=r"net.weight: \(1, 2\) in the checkpoint, \(2, 2\) in the model"):
        assert fit(tmp_path, built(2), max_epochs=2) == 0
    with pytest.warns(UserWarning, match="unexpected: net.bias"):
        assert fit(tmp_path, built(1, bias=False), max_epochs=3) == 0
    loose = built(2)
    loose.strict_loading = False
    with pytest.warns(UserWarning, match="State that does not fit is not restored"):
        assert fit(tmp_path, loose, max_epochs=4) == 15  # the newest, of which it takes what fits


def test_a_model_that_is_built_in_setup_is_no_other_model(tmp_path):
    class Late(Line):
        def setup(self, stage):
            self.head = nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            return self.head(self.net(batch[0])).pow(2).mean()

    fit(tmp_path, Late())
    assert fit(tmp_path, Late(), max_epochs=2) == 5


@pytest.mark.parametrize(
    ("before", "after", "flags"),
    [
        ({"max_epochs": 1}, {"max_epochs": 2}, {"max_epochs": 2}),
        ({"data_dir": "/a"}, {"data_dir": "/b"}, {}),
        pytest.param({"corpus": "/a/x.txt"}, {"corpus": "s3://b/x.txt"}, {}, marks=pytest.mark.exhaustive),
        pytest.param({"opt": {"max_steps": 5}}, {"opt": {"max_steps": 9}}, {}, marks=pytest.mark.exhaustive),
        ({"num_workers": 0, "devices": 1}, {"num_workers": 4, "devices": 8}, {}),
        ({}, {"added_since": 3}, {}),
        pytest.param({"dropped_since": 3}, {}, {}, marks=pytest.mark.exhaustive),
        ({"sizes": (1, 2), "rate": 1}, {"sizes": [1, 2], "rate": 1.0}, {}),
        ({"nan": float("nan")}, {"nan": float("nan")}, {}),
    ],
)
def test_what_an_ordinary_resume_changes_is_no_other_run(tmp_path, recwarn, before, after, flags):
    fit(tmp_path, Line(**before))
    assert fit(tmp_path, Line(**after), **flags) == 5
    assert not [one for one in recwarn if "skips" in str(one.message)]


def test_the_data_modules_hyperparameters_count_too(tmp_path):
    fit(tmp_path, Line(), data=Data(crop=1))
    assert fit(tmp_path, Line(), data=Data(batch_size=5), max_epochs=2) == 5
    with pytest.warns(UserWarning, match=r"data.crop=1 in the checkpoint, 2 in this run"):
        assert fit(tmp_path, Line(), data=Data(crop=2)) == 0


def test_what_a_run_changes_of_its_hyperparameters_is_no_difference(tmp_path):
    class Counts(Line):
        def setup(self, stage):
            self.hparams.classes = self.hparams.get("classes", 0) + 7

    fit(tmp_path, Counts(classes=0))
    assert fit(tmp_path, Counts(classes=0), max_epochs=2) == 5
    again = Counts(classes=0)
    fit(tmp_path, again, max_epochs=3)
    assert fit(tmp_path, again, max_epochs=4) == 15  # the same object, which setup has changed

    def finder():
        return LearningRateFinder(num_training_steps=8)

    (tmp_path / "f").mkdir()
    fit(tmp_path / "f", Line(), callbacks=[finder()])
    assert fit(tmp_path / "f", Line(), callbacks=[finder()], max_epochs=2) == 5


def test_a_path_is_never_skipped(tmp_path):
    fit(tmp_path, Line(lr=0.1))
    (path,) = (tmp_path / "c").iterdir()
    task = Other(lr=0.3)
    assert fit(tmp_path, task, path, max_epochs=2) == 5
    with pytest.raises(ValueError, match=r"was saved by a different model"):
        fit(tmp_path, Line(width=2), path, max_epochs=2)


def test_in_the_folder_of_a_run_nothing_is_begun_beside_it(tmp_path):
    with RunFolder.create(tmp_path) as folder:
        fit(folder.path, Line(), saver=ModelCheckpoint(folder.path / "checkpoints"))
    with pytest.raises(ValueError, match=r"'auto', but there is no .* from this run .*lr=0.1 in the checkpoint, 0.2"):
        fit(folder.path, Line(lr=0.2), saver=ModelCheckpoint(folder.path / "checkpoints"))


@pytest.mark.parametrize(
    ("file", "spec", "name"),
    [("/a/train.py", None, "train.Task"), ("/a/train.py", "b.train", "b.train.Task"), (None, None, "__main__.Task")],
    ids=["script", "module", "notebook"],
)
def test_a_class_of_the_running_program_has_the_name_that_its_module_has_elsewhere(monkeypatch, file, spec, name):
    main = types.ModuleType("__main__")
    main.__file__, main.__spec__ = file, spec and ModuleSpec(spec, None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert class_name(type("Task", (), {"__module__": "__main__"})) == name


def test_a_file_has_another_prefix_when_it_is_run_from_within_its_package(tmp_path):
    def task(module):
        return type("Task", (Line,), {"__module__": module})()

    fit(tmp_path, task("b.train"))
    assert fit(tmp_path, task("train"), max_epochs=2) == 5
    with pytest.warns(UserWarning, match=r"task train\.Task in the checkpoint, copied\.Task in this run"):
        assert fit(tmp_path, task("copied")) == 0


def two(root):
    return [fit(root, Line(lr=lr), strategy="ddp", max_epochs=epochs) for lr, epochs in ((0.1, 2), (0.2, 1))]


def test_another_number_of_processes_and_another_strategy(tmp_path):
    fit(tmp_path, Line())
    assert run(two, 2, str(tmp_path)) == [[5, 0]] * 2
    assert fit(tmp_path, Line(), max_epochs=3) == 8
