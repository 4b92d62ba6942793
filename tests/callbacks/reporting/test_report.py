"""What the page about a run says of errors, hyperparameters, checkpoints and settings, and how its curves are told
apart."""

import json
import math
import re

import pytest
import torch
from support.reports import Data, Task, page_of, section, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import ModelCheckpoint
from treadle.callbacks.reporting.html import Chart


def rows(content):
    return dict(re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td></tr>", content, re.DOTALL))


def test_hyperparameters_of_what_was_trained_and_where_the_checkpoints_are(tmp_path):
    saves = ModelCheckpoint(monitor="val_loss", save_last=True)
    one = trainer(tmp_path, callbacks=[saves])
    with pytest.warns(UserWarning, match="checkpoints cannot store net"):
        one.fit(Task(0.2, nn.Linear(2, 1)), datamodule=Data(4))
    first = page_of(one)
    one.validate(Task(0.7), DataLoader(TensorDataset(torch.ones(8, 2))), verbose=False)
    for page in (first, page_of(one)):
        assert rows(section(page, "Hyperparameters")[0]) == {
            "lr": "0.2",
            "fails": "False",
            "net": "not stored: net (Linear)",
        }
        assert rows(section(page, "Data module's hyperparameters")[0]) == {"batch_size": "4"}
        expected = {"best val_loss": saves.best_model_path, "last": saves.last_model_path}
        assert rows(section(page, "Checkpoints")[0]) == expected
    again = trainer(tmp_path, max_epochs=3)
    again.fit(Task(), datamodule=Data(4), ckpt_path=saves.last_model_path)
    resumed = {"resumed from": saves.last_model_path, "latest": again.checkpoint_callback.best_model_path}
    assert rows(section(page_of(again), "Checkpoints")[0]) == resumed
    # A later stage's checkpoint and task are not those of fit.
    for fitted, listed in ((one, expected), (again, resumed)):
        other = type("Other", (Task,), {})()
        fitted.validate(other, DataLoader(TensorDataset(torch.ones(8, 2))), saves.best_model_path, verbose=False)
        assert rows(section(page_of(fitted), "Checkpoints")[0]) == listed
        assert "<title>Task</title>" in page_of(fitted)


def test_settings_that_were_given_stand_before_the_defaults(tmp_path):
    one = trainer(tmp_path, gradient_clip_val=0.5, log_every_n_steps=50, min_epochs=None)
    one.fit(Task(), datamodule=Data())
    given, folded = section(page_of(one), "Settings")
    found = {"device": "cpu", "loggers": "CSVLogger", "max_epochs": "2", "gradient_clip_val": "0.5"}
    found |= {"enable_progress_bar": "False", "enable_model_summary": "False", "log_every_n_steps": "50"}
    assert rows(given) == found
    assert rows(folded).keys() > {"min_epochs", "precision", "on_nonfinite"}
    assert not rows(folded).keys() & found.keys()
    assert f"{len(rows(folded))} defaults" in folded


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", ["nan", "error", "interrupt", "bad gradient"])
def test_the_losses_before_a_failure_are_drawn(tmp_path, kind, size):
    """Logged values alone show nothing before step 50."""
    losses = []

    class Fails(Task):
        def training_step(self, batch, batch_idx):
            step = batch_idx // size + 1
            loss = self.loss(batch)
            if step == 5 and kind == "nan":
                loss = loss * torch.nan
            if step == 5 and batch_idx % size == size - 1 and kind in ("error", "interrupt"):
                raise {"error": KeyError, "interrupt": KeyboardInterrupt}[kind]("a mistake")
            losses.append((step, loss.item()))
            self.log("train_loss", loss)
            return loss

        def on_after_backward(self):
            if losses[-1][0] == 5 and kind == "bad gradient":
                self.net.weight.grad.fill_(torch.inf)

    one = trainer(tmp_path, accumulate_grad_batches=size)
    data = DataLoader(TensorDataset(torch.linspace(-1, 1, 80).reshape(40, 2)), batch_size=1)
    with pytest.raises((ValueError, KeyError, KeyboardInterrupt)):
        one.fit(Fails(), data)
    assert list(one.history) == []
    chart = json.loads(re.search(r'id="data">(.*?)</script>', page_of(one), re.DOTALL)[1])[0]
    (line,) = chart["lines"]
    wanted = {step: [loss for at, loss in losses if at == step] for step, _ in losses}
    wanted = {step: sum(values) / len(values) for step, values in wanted.items() if math.isfinite(sum(values))}
    assert line["steps"] == list(wanted)
    assert line["values"] == pytest.approx(list(wanted.values()))
    assert ("not finite or above 1e+300: 1<" in page_of(one)) == (kind == "nan")


def test_the_losses_before_a_failure_are_the_last_ones_of_this_fit(tmp_path):
    class Counts(Task):
        def training_step(self, batch, batch_idx):
            if batch_idx == 150 and self.hparams.fails:
                raise KeyError("a mistake")
            return self.loss(batch) * 0 + batch_idx + 1

    one = trainer(tmp_path, max_epochs=1)
    data = DataLoader(TensorDataset(torch.ones(200, 2)), batch_size=1)
    one.fit(Counts(fails=False), data)
    assert "loss of the last steps" not in page_of(one)
    again = trainer(tmp_path, max_epochs=1)
    with pytest.raises(KeyError):
        again.fit(Counts(fails=True), data)
    chart = json.loads(re.search(r'id="data">(.*?)</script>', page_of(again), re.DOTALL)[1])[0]
    assert chart["lines"][0]["steps"] == chart["lines"][0]["values"] == list(range(87, 151))


def test_a_constant_rate_is_a_number_and_the_throughput_is_folded(tmp_path):
    one = trainer(tmp_path, log_every_n_steps=2)
    one.fit(Task(0.25), datamodule=Data())
    assert "<b>0.25</b>learning rate" in page_of(one)
    shown, folded = section(page_of(one), "Curves")
    assert re.findall(r"<figcaption>(\w+)", shown) == ["loss"]
    assert re.findall("<figcaption>(.*?)</figcaption>", folded) == ["samples per second"]


def test_curves_that_are_the_same_are_one_with_all_names():
    chart = Chart("lr", {"a": ([1, 2], [3.0, 4.0]), "b": ([1, 2], [3.0, 4.0]), "c": ([1, 2], [3.0, 5.0])})
    assert chart.lines == {"a = b": ([1, 2], [3.0, 4.0]), "c": ([1, 2], [3.0, 5.0])}
    many = Chart("lr", {f"pg{n}": ([1, 2], [3.0, 4.0]) for n in range(50)})
    assert list(many.lines) == ["pg0 = ... = pg49 (50 are the same)"]
    assert list(Chart("x", {"a": ([], []), "b": ([], [])}).lines) == ["a", "b"]
