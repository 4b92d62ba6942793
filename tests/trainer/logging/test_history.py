"""What a Trainer remembers of a run, and the page it leaves about it."""

import html
import json
import os
import re
import sys
import time
import types

import pytest
import torch
from support import reports
from support.models import Scored, optimize
from support.processes import run
from support.reports import page_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import LambdaCallback, LearningRateMonitor, RunReport
from treadle.callbacks.reporting.html import Chart, Page, format_duration, group_names
from treadle.loggers import CSVLogger
from treadle.trainer.logging.history import MOST_POINTS, Curve

import treadle


class Task(Scored):
    features = 4

    def __init__(self, name="a </script> & <b>"):
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def loader(samples=24):
    values = torch.linspace(-1, 1, samples * 4).reshape(samples, 4)
    return DataLoader(TensorDataset(values), batch_size=4)


def trainer(folder, **flags):
    return reports.trainer(folder, **{"log_every_n_steps": 2, "default_root_dir": folder, **flags})


def curves(one):
    return {name: curve.points() for name, curve in one.history.items()}


# -- curves ----------------------------------------------------------------------------------------------------------


def test_what_was_logged_is_there_with_and_without_a_logger(tmp_path):
    for logger in (CSVLogger(str(tmp_path)), False):
        one = trainer(tmp_path, logger=logger)
        one.fit(Task(), loader(), loader())
        assert sorted(one.history) == ["train_loss_epoch", "train_loss_step", "val_loss"]
        assert one.history["train_loss_step"].steps == [2, 4, 6, 8, 10, 12]
        assert one.history["val_loss"].steps == [6, 12]
        assert one.history["val_loss"].values[-1] == pytest.approx(float(one.callback_metrics["val_loss"]))
    assert len(list(tmp_path.rglob("report.html"))) == 1
    with pytest.raises(KeyError, match=r"val_los.*Did you mean 'val_loss'"):
        one.history["val_los"]


def test_the_loggers_rows_are_the_curves(tmp_path):
    one = trainer(tmp_path, log_every_n_steps=1)
    one.fit(Task(), loader(), loader())
    with open(f"{one.log_dir}/metrics.csv", encoding="utf-8") as file:
        head, *rows = [line.rstrip("\n").split(",") for line in file]
    for name, curve in one.history.items():
        place = head.index(name)
        written = [(int(row[head.index("step")]), float(row[place])) for row in rows if row[place]]
        assert written == list(zip(curve.steps, curve.values, strict=True))


def test_rates_are_those_the_next_step_is_taken_with(tmp_path):
    one = trainer(tmp_path, log_every_n_steps=3)
    one.fit(Task(), loader())
    assert one.history.rates["lr-SGD"].points() == ([0, 3, 6, 9, 12], [0.1, 0.1, 0.05, 0.05, 0.025])


def test_rates_have_the_names_that_the_monitor_gives_them(tmp_path):
    task = Task()
    task.other = nn.Linear(4, 1)
    task.loss = lambda batch: Task.loss(task, batch) + task.other(batch[0]).mean()
    groups = [{"params": [p]} for p in task.net.parameters()]
    both = torch.optim.SGD(groups, lr=0.1), torch.optim.SGD(task.other.parameters(), lr=0.2)
    task.configure_optimizers = lambda: both
    monitor = LearningRateMonitor("step")
    one = trainer(tmp_path, callbacks=monitor)
    one.fit(task, loader())
    assert one.history.rates.keys() == monitor.lrs.keys() == {"lr-SGD/pg1", "lr-SGD/pg2", "lr-SGD-1"}


def test_a_resumed_run_goes_on_with_the_curves(tmp_path):
    whole, first = trainer(tmp_path / "whole", max_epochs=4), trainer(tmp_path / "parts")
    for one in (whole, first):
        torch.manual_seed(0)
        one.fit(Task(), loader(), loader())
    second = trainer(tmp_path / "parts", max_epochs=4)
    second.fit(Task(), loader(), loader(), ckpt_path="last")
    assert curves(second) == curves(whole)
    assert second.history.rates["lr-SGD"].points() == whole.history.rates["lr-SGD"].points()
    assert "finished" in page_of(second)


def test_a_curve_gets_coarser_and_not_longer():
    curve = Curve()
    for step in range(10 * MOST_POINTS + 3):
        curve.add(step, float(step))
    assert MOST_POINTS // 2 <= len(curve) < MOST_POINTS
    steps, values = curve.points()
    assert steps[-1] == values[-1] == 10 * MOST_POINTS + 2
    gaps = {after - before for before, after in zip(curve.steps, curve.steps[1:], strict=False)}
    assert len(gaps) == 1
    again = Curve()
    again.load_state_dict(curve.state_dict())
    for each in (curve, again):
        for step in range(10 * MOST_POINTS + 3, 20 * MOST_POINTS):
            each.add(step, float(step))
    assert again.points() == curve.points()


def test_a_newer_value_of_a_step_takes_the_place():
    curve = Curve()
    for step, value in ((1, 1.0), (2, 2.0), (2, 3.0), (3, 4.0)):
        curve.add(step, value)
    assert curve.points() == ([1, 2, 3], [1.0, 3.0, 4.0])


def test_time_is_spent_on_one_thing_at_once(tmp_path):
    def collate(samples):
        time.sleep(0.02)
        return [torch.stack(samples)]

    one = trainer(tmp_path)
    one.fit(Task(), DataLoader(torch.zeros(8, 4), batch_size=2, collate_fn=collate), loader())
    assert set(one.history.spent) == {"setup", "training", "validation", "checkpoints"}
    assert all(seconds > 0 for seconds in one.history.spent.values())
    assert 2 * 0.08 <= one.history.waits["training"] < one.history.spent["training"]
    before = dict(one.history.spent)
    one.test(dataloaders=loader(), verbose=False)
    assert one.history.spent.pop("test") > 0
    assert one.history.spent == before
    assert "finished, test done" in page_of(one)


def test_plot(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    from matplotlib import pyplot
    from matplotlib.backends import backend_agg

    matplotlib.use("Agg")
    one = trainer(tmp_path, logger=False)
    one.fit(Task(), loader(), loader())
    figure = one.history.plot()
    assert [place.get_ylabel() for place in figure.axes] == ["loss", "lr-SGD"]
    assert [line.get_label() for line in figure.axes[0].lines] == ["train_loss_step", "val_loss", "train_loss_epoch"]
    assert list(figure.axes[0].lines[1].get_xdata()) == [6, 12]
    assert len(one.history.plot("val_loss").axes[0].lines) == 1
    assert [place.get_ylabel() for place in one.history.plot("lr-SGD").axes] == ["lr-SGD"]
    with pytest.raises(KeyError, match="was not logged"):
        one.history.plot("nothing")
    # A notebook shows the figure that is returned, and not what pyplot keeps as well.
    inline = types.ModuleType("inline_backend")
    vars(inline).update({name: value for name, value in vars(backend_agg).items() if not name.startswith("__")})
    monkeypatch.setitem(sys.modules, "inline_backend", inline)
    for backend, kept in (("module://inline_backend", 0), ("agg", 1)):
        pyplot.close("all")
        matplotlib.use(backend)
        assert one.history.plot("val_loss").axes
        assert len(pyplot.get_fignums()) == kept
    pyplot.close("all")


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_page_has_it_all_and_needs_nothing_else(tmp_path):
    one = trainer(tmp_path, profiler="simple")
    one.fit(Task(), loader(), loader())
    page = page_of(one)
    assert not re.search(r"(?:src|href)=|https?://|@import|url\(", page)
    charts = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert [[line["name"] for line in chart["lines"]] for chart in charts] == [
        ["train_loss_step", "val_loss", "train_loss_epoch"],
        ["lr-SGD"],
        ["training, all processes"],
    ]
    assert charts[0]["lines"][1]["values"] == one.history["val_loss"].values
    for word in ("finished", "Profile of fit", "Verdict", "effective batch 4", "log_every_n_steps"):
        assert word in page
    assert html.escape("a </script> & <b>") in page
    assert page.count("</script>") == 2
    for name in ("Python", "torch", "processor", "command"):
        assert f"<td>{name}</td>" in page


@pytest.mark.parametrize(("failure", "said"), [(ValueError, "failed: ValueError"), (KeyboardInterrupt, "interrupted")])
def test_the_page_of_a_run_that_did_not_end_well(tmp_path, failure, said):
    class Fails(Task):
        automatic_optimization = failure is ValueError

        def training_step(self, batch, batch_idx):
            return optimize(self, super().training_step(batch, batch_idx))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.trainer.global_step == 5:
                raise failure("that <i>was</i> it")

    one = trainer(tmp_path)
    with pytest.raises(failure):
        one.fit(Fails(), loader(), loader())
    page = page_of(one)
    assert said in page
    assert ("that &lt;i&gt;was&lt;/i&gt; it" in page) == (failure is ValueError)
    assert one.history["train_loss_step"].steps == [2, 4]
    one.test(dataloaders=loader(), verbose=False)  # which does not make it better
    page = page_of(one)
    assert f"{said}, test done" in page
    assert ("What ended fit" in page) == (failure is ValueError)
    # The same Trainer's next fit is another one.
    one.fit(Task(), loader(), loader())
    assert "finished" in page_of(one)
    assert "What ended fit" not in page_of(one)


def test_the_page_of_a_run_that_is_under_way(tmp_path):
    seen = []
    looks = LambdaCallback(on_train_epoch_end=lambda trainer, _: seen.append(page_of(trainer)))
    trainer(tmp_path, callbacks=[RunReport(every_seconds=0), looks]).fit(Task(), loader(), loader())
    assert "under way" in seen[1]


@pytest.mark.parametrize(
    "flags", [{"enable_report": False}, {"logger": False}, {"fast_dev_run": True}, {"barebones": True, "logger": None}]
)
def test_no_page_where_none_is_wanted(tmp_path, flags):
    if flags.get("barebones"):
        one = treadle.Trainer(barebones=True, accelerator="cpu", max_epochs=1, default_root_dir=tmp_path)
    else:
        one = trainer(tmp_path, max_epochs=1, **flags)
    one.fit(Task(), loader(), loader())
    assert not list(tmp_path.rglob("report.html"))


def test_a_folder_where_no_logger_has_one(tmp_path):
    own = {"callbacks": RunReport(tmp_path / "own", "x.html")}
    for flags in ({"enable_report": True}, {"callbacks": RunReport()}, own):
        one = trainer(tmp_path, logger=False, max_epochs=1, enable_checkpointing=False, **flags)
        one.fit(Task(), loader())
        assert one.callbacks[-1].path.read_text(encoding="utf-8").endswith("</html>")
    assert {*tmp_path.rglob("*.html")} == {tmp_path / "report.html", tmp_path / "own" / "x.html"}


def test_no_page_before_training_has_begun(tmp_path):
    one = trainer(tmp_path, callbacks=LambdaCallback(on_fit_start=lambda *_: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        one.fit(Task(), loader())
    treadle.Trainer(default_root_dir=tmp_path, accelerator="cpu").test(Task(), loader(), verbose=False)
    assert not list(tmp_path.rglob("report.html"))


def test_odd_names_and_long_values(tmp_path):
    class Odd(Task):
        def __init__(self, values, text):
            super().__init__()
            self.save_hyperparameters()

        def training_step(self, batch, batch_idx):
            for name in ("learning rate", "samples per second", "lr-SGD", "<!-- <script>", "\ud800", "a/b c"):
                self.log(name, float(batch_idx))
            return super().training_step(batch, batch_idx)

    one = trainer(tmp_path, logger=False, enable_report=True)
    one.fit(Odd(list(range(100_000)), "x" * 5000), loader())
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert len(page) < 200_000
    assert not list(tmp_path.glob("*.tmp"))
    charts = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    lines = [[line["name"] for line in chart["lines"]] for chart in charts]
    assert ["learning rate = lr-SGD"] in lines  # the same values
    assert ["samples per second", "training, all processes"] in lines
    assert ["<!-- <script>"] in lines
    assert "<!--" not in page


def test_both_ways_at_once_are_refused():
    with pytest.raises(ValueError, match="enable_report=False contradicts"):
        treadle.Trainer(enable_report=False, callbacks=RunReport())
    with pytest.raises(ValueError, match="every_seconds"):
        RunReport(every_seconds=-1)


def test_a_page_that_can_not_be_written_ends_no_run(tmp_path):
    blocks = LambdaCallback(on_train_start=lambda trainer, _: os.makedirs(f"{trainer.log_dir}/report.html"))
    one = trainer(tmp_path, callbacks=blocks)
    with pytest.warns(UserWarning, match="RunReport failed and is disabled"):
        one.fit(Task(), loader(), loader())
    assert one.global_step == 12


def train(folder):
    one = trainer(folder, strategy="ddp")
    one.fit(Task(), loader(), loader())
    return curves(one), one.log_dir


@pytest.mark.long
def test_two_processes_know_the_same_and_write_one_page(tmp_path):
    (first, folder), (second, _) = run(train, 2, str(tmp_path))
    assert first == second
    assert [path.parent for path in tmp_path.rglob("report.html*")] == [tmp_path / folder]


# -- drawing ---------------------------------------------------------------------------------------------------------


def test_names_that_say_the_same_are_on_one_chart():
    names = ["train_loss", "val/loss", "loss_epoch", "valid-acc", "test_acc/dataloader_idx_1", "value", "train", "val_"]
    assert group_names(names) == {
        "loss": ["train_loss", "val/loss", "loss_epoch"],
        "acc": ["valid-acc", "test_acc/dataloader_idx_1"],
        "value": ["value"],
        "train": ["train"],
        "val_": ["val_"],
    }


def test_what_is_no_number_is_counted_and_not_drawn():
    values = [1.0, float("nan"), 2.0, float("inf"), float("-inf")]
    chart = Chart("x", {"x": (range(5), values), "nothing": ([3], [float("nan")]), "empty": ([], [])})
    drawn = chart.draw(0)
    assert "nan" not in drawn
    assert "not finite or above 1e+300: 4<" in drawn
    assert chart.data()["lines"][0]["steps"] == [0, 2]


@pytest.mark.parametrize(
    "values", [[5.0], [0.0, 0.0], [-1e-30, 1e-30], [1e-8, 1e8], [1e300, -1e300], [3.0] * 3, [1.0, 1.0 + 1e-16], []]
)
def test_every_range_can_be_drawn(values):
    drawn = Chart("x", {"x": (range(len(values)), values)}).draw(0)
    places = [float(number) for number in re.findall(r'(?:points="|[ ,])(-?[\d.]+)(?=[ ,"])', drawn)]
    assert all(0 <= place <= 560 for place in places)


def test_no_peak_is_lost_in_a_long_curve():
    values = [0.0] * 100_000
    values[77_777], values[33_333] = 9.0, -9.0
    steps, kept = Chart("x", {"x": (range(100_000), values)}).lines["x"]
    assert len(kept) <= 1002
    assert {max(kept), min(kept)} == {9.0, -9.0}
    assert (steps[0], steps[-1]) == (0, 99_999)
    assert steps == sorted(steps)


def test_durations():
    assert [format_duration(s) for s in (0.0123, 59.94, 125, 11_220)] == ["12 ms", "59.9 s", "2:05 min", "3:07:00 h"]


def test_a_page_without_anything():
    text = Page(title="x", state="finished").render()
    assert "<h2>" not in text
