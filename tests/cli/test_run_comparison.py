"""`treadle runs compare`: what differs between runs, and a page with the curves of all of them."""

import json
import math
import re

import pytest
import torch
from support.models import LoggedLine, loader
from treadle.callbacks import LearningRateMonitor, ModelCheckpoint
from treadle.cli.commands.runs import main

import treadle
from treadle.runs import RunFolder

STEPS = list(range(1, 101))


def make_run(directory, config="", charts=None, **facts):
    with RunFolder.create(directory, "base") as folder:
        if config:
            folder.write_config(config)
        folder.record({"state": "finished", **facts}, charts)


def loss(rate):
    return {"loss": {"train_loss": (STEPS, [rate**step for step in STEPS])}}


def compare(capsys, *arguments, status=0):
    assert main(["compare", *map(str, arguments)]) == status
    printed = capsys.readouterr()
    return printed.err if status else printed.out


def rows_of(text):
    """The printed cells by the first of their row."""
    return {cells[0]: cells[1:] for line in text.splitlines() if (cells := re.split(r"\s{2,}", line.strip()))}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = "data:\n  batch_size: 32\ntrainer:\n  default_root_dir: {}\n"
    first = common.format(1) + "optimizer: {class: SGD, lr: 0.1}\n"
    second = common.format(2) + "optimizer: {class: AdamW, lr: 0.1, betas: [0.9, 0.99]}\n"
    make_run("runs", first, loss(0.9), steps=100, metrics={"acc": 0.5})
    make_run("runs", second, loss(0.95), steps=90, metrics={"acc": 0.75, "val_loss": "nan"})
    return tmp_path


def test_what_differs_is_printed_and_what_does_not_is_counted(runs, capsys):
    printed = compare(capsys, 1, 2)
    rows = rows_of(printed)
    assert rows["run"] == ["base/1", "base/2"]
    assert rows["steps"] == ["100", "90"]
    assert rows["acc"] == ["0.5", "0.75"]
    assert rows["val_loss"] == ["nan"]  # of the second alone
    assert rows["optimizer.class"] == ["SGD", "AdamW"]
    assert rows["optimizer.betas.0"] == ["0.9"]
    assert not {"optimizer.lr", "data.batch_size", "trainer.default_root_dir"} & set(rows)
    assert "the same in all runs: 2 configuration values" in printed


def test_the_page_has_a_chart_per_metric_with_a_line_per_run(runs, capsys):
    assert "page with the curves: compare-base-1-base-2.html" in compare(capsys, 1, 2)
    page = (runs / "compare-base-1-base-2.html").read_text()
    assert page.count("<figure") == 1
    assert page.count("<polyline") == 2
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert [line["name"] for line in data[0]["lines"]] == ["base/1", "base/2"]
    assert data[0]["lines"][1]["values"][0] == 0.95
    assert "AdamW" in page
    assert "http" not in page.replace("http-equiv", "")


def test_a_run_has_one_colour_on_the_whole_page(runs, capsys):
    make_run("runs", "", {"f1": {"f1": (STEPS, [0.5] * 100)}})
    compare(capsys, 1, 2, 3)
    page = (runs / "compare-base-1-base-2-base-3.html").read_text()
    head = dict(re.findall(r"<th>(base/\d).*?stroke=\"(#\w+)\"", page))
    assert len(set(head.values())) == 3
    drawn = re.search(r"<figcaption>f1.*?<polyline points=\"[^\"]*\" stroke=\"(#\w+)\"", page, re.DOTALL)
    assert drawn[1] == head["base/3"]  # the only line of its chart


def test_json_has_all_of_it_and_writes_no_page(runs, capsys):
    found = json.loads(compare(capsys, "base/1", "runs/base/2", "--json"))
    assert found["config"]["optimizer.class"] == ["SGD", "AdamW"]
    assert found["charts"]["train_loss"]["base/2"]["steps"] == STEPS
    assert found["problems"] == []
    assert not list(runs.glob("*.html"))


class Task(LoggedLine):
    def __init__(self, kind="SGD", lr=0.1):
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self):
        optimizer = getattr(torch.optim, self.hparams.kind)(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Changing(LoggedLine):
    """A task whose learning rate is 0.1, and from the fourth step on a given one."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def on_step_end(self):
        if self.global_step == 3:
            self.trainer.optimizers[0].param_groups[0]["lr"] = self.rate

    def on_train_batch_end(self, outputs, batch, index):
        if self.global_step in (2, 5):
            self.trainer.accelerator.record_weights()


def test_the_first_step_at_which_the_weights_differ(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for rate, leaves in ((0.1, 2), (0.1, 2), (0.05, 2), (0.05, None)):
        treadle.seed_everything(1)
        with RunFolder.create("runs", "digests") as run:
            checkpoints = ModelCheckpoint(every_n_train_steps=1, save_top_k=1)
            flags = {"accelerator": "cpu", "max_epochs": 1, "step_micro_batches": leaves, "callbacks": [checkpoints]}
            trainer = treadle.Trainer(**run.flags({**flags, "accumulate_grad_batches": 1 if leaves else 2}))
            trainer.fit(Changing(rate), loader(12, 1))
    assert "the weights are equal at all recorded steps, up to 6\n" in compare(capsys, 1, 2, "--no-page")
    assert "the weights differ at step 4, after equality at 3\n" in compare(capsys, 1, 2, 3, "--no-page")
    assert json.loads(compare(capsys, 1, 3, "--json"))["weights"] == {"equal_until": 3, "differ_at": 4}
    assert json.loads(compare(capsys, 3, 4, "--json"))["weights"] == {"equal_until": 5, "differ_at": None}
    assert list(json.loads((tmp_path / "runs/digests/4/run.json").read_text())["digests"]) == ["2", "5"]


def test_a_comparison_is_written_anew_and_nothing_else_is_replaced(runs, capsys):
    compare(capsys, 1, 2, "--output", "page.html")
    compare(capsys, 2, 1, "--output", "page.html")
    assert (runs / "page.html").read_text().index("base/2") < (runs / "page.html").read_text().index("base/1")
    (runs / "notes.html").write_text("mine")
    assert "notes.html exists and is not a comparison" in compare(capsys, 1, 2, "--output", "notes.html", status=2)
    assert (runs / "notes.html").read_text() == "mine"
    assert "page" not in compare(capsys, 1, 2, "--no-page")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs two or more runs, but got 0"),
        ([1], "needs two or more runs, but got 1"),
        ([1, 1], "given twice"),
        ([1, 9], "no run 9"),
        ([1, 2, "--name", "bse"], "--name 'bse' must be 'base'."),
    ],
)
def test_what_cannot_be_compared_is_said(arguments, words, runs, capsys):
    assert words in compare(capsys, *arguments, status=2)


def test_damaged_files_are_named_and_the_rest_is_compared(runs, capsys):
    (runs / "runs/base/1/curves.json").write_text("{")
    (runs / "runs/base/2/config.yaml").write_text("a: !!python/object:os.system {}\n")
    printed = compare(capsys, 1, 2)
    assert "can't be compared: base/1: curves.json cannot be read" in printed
    assert "can't be compared: base/2: config.yaml:1: the tag" in printed
    assert rows_of(printed)["acc"] == ["0.5", "0.75"]


def test_what_a_folder_holds_is_shown_and_not_obeyed(runs, capsys):
    script = "<script>alert(1)</script>"
    make_run("runs", "", {script: {script: (STEPS, STEPS)}}, metrics={script: 1.0, "\x1b[2J": 2.0})
    printed = compare(capsys, 1, 3)
    assert "\x1b" not in printed
    page = (runs / "compare-base-1-base-3.html").read_text()
    assert script not in page.replace("\\u003c", "<").split("<main>")[1].split('<script type="application/json"')[0]
    assert page.count("<script") == 2


def test_runs_of_a_script_differ_in_hyperparameters_flags_and_rates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = {"base/1": ("SGD", 0.1, 20), "base/2": ("AdamW", 0.2, 10)}
    for kind, lr, steps in runs.values():
        flags = {"max_steps": steps, "log_every_n_steps": 1, "accelerator": "cpu", "callbacks": [LearningRateMonitor()]}
        with RunFolder.create("runs", "base", flags) as folder:
            treadle.Trainer(**folder.flags(flags)).fit(Task(kind, lr), loader(10, 1))
    rows = rows_of(compare(capsys, 1, 2, "--output", "page.html"))
    assert rows["task.lr"] == ["0.1", "0.2"]
    assert rows["trainer.max_steps"] == rows["steps"] == ["20", "10"]
    assert "trainer.accelerator" not in rows
    page = (tmp_path / "page.html").read_text()
    titles = re.findall(r"<figcaption>([\w ]+?)(?: \(log.*?)?</figcaption>", page)
    assert [title for title in titles if title != "loss"] == ["learning rate", "samples per second"]
    # The rates of different optimizers are one chart, with the values of the table.
    found = json.loads(compare(capsys, 1, 2, "--json"))
    assert [name for name in found["charts"] if "r" in name] == ["learning rate", "samples per second"]
    for column, (label, (kind, lr, steps)) in enumerate(runs.items()):
        rates = found["charts"]["learning rate"][label]
        assert rates["steps"] == list(range(1, steps + 1))
        assert float(found["metrics"][f"lr-{kind}"][column]) == pytest.approx(rates["values"][-1], rel=1e-3)
        assert rates["values"][-1] == pytest.approx(lr * (1 + math.cos(math.pi * (steps - 1) / 20)) / 2)
