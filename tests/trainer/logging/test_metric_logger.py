"""What `self.log` takes, what becomes of it, and who gets to see it."""

import csv
import math

import pytest
import torch
from support.callback_runs import Rows
from support.fit_runs import Staged, numbers
from support.models import SaveEach
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torchmetrics import CatMetric, MetricCollection, MetricTracker, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy
from treadle.loggers import CSVLogger, TensorBoardLogger

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing is validated")


class Base(Staged):
    def __init__(self):
        super().__init__(lr=0.1)


def rows(path):
    """The rows of a metrics file: numbers by name, without the empty ones."""
    with open(path, newline="") as file:
        return [{k: float(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]


def floats(values):
    return {name: float(value) for name, value in values.items()}


class Forms(Base):
    def training_step(self, batch, batch_idx):
        x = batch[0].mean()
        self.log("plain", x)
        self.log("both", x, on_epoch=True, prog_bar=True)
        self.log("epoch", x, on_step=False, on_epoch=True)
        for how in ("sum", "min", "max"):
            self.log(how, x, on_step=False, on_epoch=True, reduce_fx=how)
        self.log("torch_max", x, on_step=False, on_epoch=True, reduce_fx=torch.max)
        self.log("silent", x, logger=False, prog_bar=True)
        self.log("weighed", x, on_step=False, on_epoch=True, batch_size=10 if batch_idx else 1)
        self.log_dict({"one": x.item(), "two": int(x)}, on_step=True)
        self.log("shape", x.reshape(1, 1), on_step=False, on_epoch=True)
        # Arguments that Lightning has and that change nothing here.
        self.log("peer", x, sync_dist=False, rank_zero_only=True, enable_graph=True, metric_attribute="m")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        x = batch[0].mean()
        self.log("val", x, prog_bar=True)
        self.log("val_both", x, on_step=True, on_epoch=True)


def test_forms_and_names(tmp_path):
    task = Forms()
    own = make_trainer(logger=CSVLogger(tmp_path, "", 0), log_every_n_steps=2, max_epochs=2)
    own.fit(task, numbers(1, 2, 3, 4, 9, batch_size=2), numbers(1, 2, 6, batch_size=2))
    # Batches (1, 2), (3, 4), (9): means 1.5, 3.5, 9.
    last = {"plain": 9.0, "both_step": 9.0, "one": 9.0, "two": 9.0, "silent": 9.0, "peer": 9.0}
    means = {"both_epoch": 3.8, "both": 3.8, "epoch": 3.8, "shape": 3.8, "weighed": (1.5 + 35 + 90) / 21}
    others = {"sum": 14.0, "min": 1.5, "max": 9.0, "torch_max": 9.0}
    validated = {"val": 3.0, "val_both": 3.0, "val_both_epoch": 3.0}
    found = floats(own.callback_metrics)
    assert found == pytest.approx({**last, **means, **others, **validated})
    bar = {"both_epoch": 3.8, "both_step": 9.0, "silent": 9.0, "val": 3.0}
    assert own.progress_bar_metrics == pytest.approx(bar)
    assert "silent" not in own.logged_metrics
    assert floats(own.logged_metrics)["epoch"] == pytest.approx(3.8)
    written = rows(tmp_path / "version_0" / "metrics.csv")
    assert all("silent" not in row for row in written)
    by_step = [row for row in written if "plain" in row]
    assert [(row["step"], row["plain"]) for row in by_step] == [(2, 3.5), (4, 1.5), (6, 9.0)]
    # A value named "epoch" is the user's; else that column is the epoch the row belongs to.
    validations = [row for row in written if "val" in row]
    assert [(row["step"], row["epoch"], row["val"]) for row in validations] == [(3, 0, 3.0), (6, 1, 3.0)]
    ends = [row for row in written if "both_epoch" in row]
    assert [row["step"] for row in ends] == [3, 6]
    assert ends[0]["both_epoch"] == pytest.approx(3.8)


class Epochs(Base):
    """Logs the epoch as the place on the x-axis."""

    def training_step(self, batch, batch_idx):
        self.log("loss", loss := super().training_step(batch, batch_idx), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", batch[0].mean())
        self.log("batch", batch[0].mean(), on_step=True, on_epoch=False)
        self.log("step", float(batch_idx), on_step=True, on_epoch=False)

    def on_train_epoch_end(self):
        self.log("step", self.current_epoch if self.current_epoch < 2 else math.nan)

    def on_validation_epoch_end(self):
        self.log("step", self.current_epoch + 10)


def test_a_value_logged_as_step_is_the_place_of_its_row(tmp_path):
    own = make_trainer(logger=CSVLogger(tmp_path, "", 0), max_epochs=2, enable_checkpointing=True)
    own.fit(Epochs(), numbers(1, 2, 3, batch_size=1), numbers(1, 2, batch_size=1))
    other = make_trainer(logger=CSVLogger(tmp_path, "", 1), max_epochs=3)
    other.fit(Epochs(), numbers(1, 2, 3, batch_size=1))
    assert [row["step"] for row in rows(tmp_path / "version_1" / "metrics.csv") if "loss" in row] == [0, 1, 9]
    written = rows(tmp_path / "version_0" / "metrics.csv")
    assert [row["step"] for row in written if "loss" in row] == [0, 1]
    assert [row["step"] for row in written if "val" in row] == [10, 11]
    batches = [row for row in written if "batch" in row]
    assert [(row["step"], row.get("step_metric", row["step"])) for row in batches] == [(1, 0), (2, 1), (3, 0), (4, 1)]
    assert [row["evaluation/global_step"] for row in written if "loss" in row or "val" in row] == [3, 3, 6, 6]
    assert own.history["loss"].steps == [3, 6]
    assert not own.callback_metrics["loss"].requires_grad
    assert own.checkpoint_callback.best_model_path.endswith("epoch=1-step=6.ckpt")


ALLOWED = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    "on_validation_epoch_end",
)


def test_every_hook_that_may_log(tmp_path):
    def hook(name):
        return lambda self, *arguments: self.log(name, 3.0, on_epoch=True)

    task = type("Logs", (Base,), {name: hook(name) for name in ALLOWED})()
    own = make_trainer(logger=CSVLogger(tmp_path, "", 0), log_every_n_steps=1)
    own.fit(task, numbers(1, 2), numbers(1, 2))
    found = floats(own.callback_metrics)
    assert {name: found.get(name) for name in ALLOWED} == dict.fromkeys(ALLOWED, 3.0)
    written = set().union(*rows(tmp_path / "version_0" / "metrics.csv"))
    missing = [name for name in ALLOWED if not written & {name, f"{name}_epoch"}]
    assert missing == []


def test_a_value_of_the_start_is_one_of_the_first_epoch(tmp_path):
    task = Base()
    task.on_train_start = lambda: task.log("start", 3.0)
    own = make_trainer(logger=CSVLogger(tmp_path, "", 0), log_every_n_steps=1, max_epochs=2)
    own.fit(task, numbers(1, 2))
    assert [(row["step"], row["start"]) for row in rows(tmp_path / "version_0" / "metrics.csv")] == [(2, 3.0)]


class Logs(Base):
    def training_step(self, batch, batch_idx):
        self.log("x", batch[0].mean())
        return super().training_step(batch, batch_idx)


def test_several_loggers_and_hyperparameters(tmp_path):
    class Task(Logs):
        def __init__(self, width=3, name="x"):
            super().__init__()
            self.save_hyperparameters()

    loggers = [CSVLogger(tmp_path, "a", 0), CSVLogger(tmp_path, "b", 0), TensorBoardLogger(tmp_path, "t", 0)]
    own = make_trainer(logger=loggers, log_every_n_steps=1)
    own.fit(Task(5), numbers(1, 2))
    assert own.loggers == loggers
    assert own.logger is loggers[0]
    assert own.log_dir == str(tmp_path / "a" / "version_0")
    for name in ("a", "b"):
        folder = tmp_path / name / "version_0"
        assert [row["x"] for row in rows(folder / "metrics.csv")] == [1.0, 2.0]
        assert sorted((folder / "hparams.yaml").read_text().splitlines()) == ["name: x", "width: 5"]
    assert list((tmp_path / "t" / "version_0").glob("events*"))

    quiet = Logs()
    quiet.save_hyperparameters({"secret": 1}, logger=False)
    make_trainer(logger=CSVLogger(tmp_path, "c", 0)).fit(quiet, numbers(1))
    assert "secret" not in str([p.read_text() for p in (tmp_path / "c").rglob("*.*")])


def test_writing_every_so_often(tmp_path):
    for every, accumulate, steps in [(3, 1, [3, 6]), (0, 1, []), (2, 2, [2, 4]), (50, 1, [])]:
        folder = tmp_path / f"{every}-{accumulate}"
        own = make_trainer(logger=CSVLogger(folder, "", 0), log_every_n_steps=every, accumulate_grad_batches=accumulate)
        own.fit(Logs(), numbers(1, 2, 3, 4, 5, 6, 7))
        path = folder / "version_0" / "metrics.csv"
        assert [row["step"] for row in rows(path)] == steps if steps else not path.exists()
        assert float(own.callback_metrics["x"]) == 7.0  # what is not written is known all the same


def test_a_skipped_step_is_not_written_twice(tmp_path):
    own = make_trainer(logger=CSVLogger(tmp_path, "", 0), log_every_n_steps=1, on_nonfinite="skip")
    own.fit(Logs(), numbers(math.nan, 1, math.nan, 3, 4))
    written = rows(tmp_path / "version_0" / "metrics.csv")
    assert [(row["step"], row["x"]) for row in written] == [(1, 1.0), (2, 3.0), (3, 4.0)]


# -- means and metrics, on one process and on two ---------------------------------------------------------------------


# -- metric objects and their epochs ----------------------------------------------------------------------------------

LEVELS = {
    "default": {},
    "step": {"on_step": True, "on_epoch": False},
    "epoch": {"on_step": False, "on_epoch": True},
    "both": {"on_step": True, "on_epoch": True},
}


class Sums(Base):
    """Sums up its batches in metric objects, which it logs on one of the levels; reads the sums at the end."""

    def __init__(self, level):
        super().__init__()
        self.level = LEVELS[level]
        self.totals = nn.ModuleDict({stage: SumMetric() for stage in ("fit", "val")})
        self.several = nn.ModuleDict(
            {stage: MetricCollection({f"{stage}_{name}": SumMetric() for name in "ab"}) for stage in self.totals}
        )
        self.sums = []

    def count(self, stage, batch):
        self.totals[stage](batch[0].mean())
        self.several[stage](batch[0].mean())
        self.log(stage, self.totals[stage], **self.level)
        self.log_dict(self.several[stage], **self.level)

    def read(self, stage):
        if not self.trainer.sanity_checking:
            self.sums += [float(self.totals[stage].compute()), float(self.several[stage][f"{stage}_b"].compute())]

    def training_step(self, batch, batch_idx):
        self.count("fit", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.count("val", batch)

    def on_train_epoch_end(self):
        self.read("fit")

    def on_validation_epoch_end(self):
        self.read("val")


@pytest.mark.parametrize("level", LEVELS)
def test_a_metric_object_counts_one_epoch(level):
    task = Sums(level)
    make_trainer(max_epochs=4).fit(task, numbers(1, 3), numbers(1, 3))
    assert task.sums == [4.0] * 16


def test_a_resumed_epoch_counts_what_it_would_have(tmp_path):
    for saved_after in (1, 2, 4, 5):  # within an epoch, and at its last step
        whole, first, second = (Sums("step") for _ in range(3))
        make_trainer(max_epochs=3).fit(whole, numbers(1, 3))
        make_trainer(max_epochs=3, max_steps=saved_after, callbacks=SaveEach(tmp_path)).fit(first, numbers(1, 3))
        make_trainer(max_epochs=3).fit(second, numbers(1, 3), ckpt_path=tmp_path / str(saved_after))
        assert whole.sums == [4.0] * 6
        assert second.sums == whole.sums[(saved_after - 1) // 2 * 2 :]


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (SumMetric.update, r"'total' is logged with on_step=True, but SumMetric.update\(\) does not compute a value"),
        (SumMetric.__call__, "training logs 'total' and validation logs 'val_total' with the same SumMetric object"),
    ],
    ids=["no value of the step", "one object for two stages"],
)
def test_a_metric_object_that_does_not_do_what_is_asked_is_named(count, words):
    class Task(Base):
        def __init__(self):
            super().__init__()
            self.total = SumMetric()

        def training_step(self, batch, batch_idx):
            count(self.total, batch[0])
            self.log("total", self.total)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.total(batch[0])
            self.log("val_total", self.total)

    with pytest.warns(UserWarning, match=words):
        make_trainer().fit(Task(), numbers(1, 2), numbers(1, 2))


def test_log_dict_copies_no_states_of_a_collection():
    class Task(Base):
        def __init__(self):
            super().__init__()
            self.several = MetricCollection({name: BinaryAUROC() for name in "ab"})

        def validation_step(self, batch, batch_idx):
            self.several.update(batch[0] / 9, (batch[0] > 4).long())
            self.log_dict(self.several)
            a, b = self.several.values(copy_state=False)
            self.shared = a.preds is b.preds

    task, own = Task(), make_trainer()
    own.fit(task, numbers(1), numbers(1, 9, 3, 8))
    assert floats(own.callback_metrics) == {"a": 1.0, "b": 1.0}
    assert task.shared


def test_what_would_be_lost_is_an_error():
    task = Base()
    task.totals, task.each = nn.ModuleList([SumMetric(), SumMetric()]), MulticlassAccuracy(3, average=None)

    def log_classes(batch, batch_idx):
        task.each(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
        task.log("x", task.each)

    def log_two(batch, batch_idx):
        task.totals[batch_idx](batch[0])
        task.log("x", task.totals[batch_idx], on_epoch=True)

    for log, words in [
        (log_classes, r"'x'\) got a tensor of shape \(3,\), but can log only one number"),
        (log_two, "'x' was logged as two SumMetric objects in one epoch"),
        (lambda *_: task.log("x", 1.0, on_step=False), "'x' is logged with on_step=False and on_epoch=False"),
    ]:
        task.on_train_batch_start = log
        with pytest.raises(ValueError, match=words):
            make_trainer().fit(task, numbers(1, 2))


class Uneven(Base):
    """Training batches of which the last has fewer samples than there are processes."""

    def __init__(self):
        super().__init__()
        self.total, self.seen, self.tested = SumMetric(), CatMetric(), SumMetric()
        self.each_epoch = MetricTracker(SumMetric(), maximize=True)

    def on_train_epoch_start(self):
        self.each_epoch.increment()

    def training_step(self, batch, batch_idx):
        x = batch[0]
        self.total(x)
        self.seen.update(x)
        self.each_epoch.update(x)
        self.log("total", self.total, on_step=True, on_epoch=True)
        self.log("share", x.mean(), on_step=False, on_epoch=True)
        self.log("mean", x.mean(), on_step=False, on_epoch=True, batch_size=len(x))
        self.log("sum", x.sum(), on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1)
        return (self.w * x).mean()

    def on_train_epoch_end(self):
        self.values = sorted(self.seen.compute().reshape(-1).tolist())
        self.seen.reset()
        self.tracked = self.each_epoch.compute_all().tolist()  # those of earlier epochs have their results

    def test_step(self, batch, batch_idx):
        self.tested.update(batch[0])
        self.log("tested", self.tested)

    def on_test_epoch_end(self):
        self.read = floats(self.trainer.callback_metrics)  # what the steps have logged is there, of all processes
        self.log("rank", float(self.global_rank))


class UnevenByHand(Uneven):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()
        self.optimizers().zero_grad()


class UnevenWithClosure(Uneven):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=1, max_eval=1)


def uneven():
    results = []
    for kind in (Uneven, UnevenByHand, UnevenWithClosure):
        task, own = kind(), make_trainer(max_epochs=2)
        own.fit(task, numbers(1, 2, 3, 4, 5, batch_size=2))
        found = floats(own.callback_metrics)
        (tested,) = own.test(task, numbers(7), verbose=False)
        assert task.read == {"tested": tested["tested"]}
        assert tested["rank"] == (own.world_size - 1) / 2  # logged between batches, every process weighs the same
        logged = [found[name] for name in ("total_epoch", "share", "mean", "sum")]
        results.append((*logged, task.values, task.tracked, tested["tested"]))
    return results


@pytest.mark.long
def test_an_empty_share_counts_nothing():
    """Five samples in batches of two on two processes: of the last batch one process has none of its own."""
    (one, *others) = uneven()
    assert one == (15.0, 3.0, 3.0, 15.0, [1.0, 2.0, 3.0, 4.0, 5.0], [15.0, 15.0], 7.0)
    assert others == [one, one]
    for rank in run(uneven, 2):
        assert rank == [one, one, one]


# -- single batches of an evaluation ----------------------------------------------------------------------------------


class Batches(Base):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x = batch[0].mean()
        self.log("both", x, on_step=True, prog_bar=True)
        self.log("only", x, on_step=True, on_epoch=False, reduce_fx="max")
        if batch_idx == 1:
            self.log("second", x, on_step=True, on_epoch=False)
        self.shown = dict(self.trainer.progress_bar_metrics)

    test_step = validation_step


def test_batches_of_an_evaluation():
    recorder, task = Rows(), Batches()
    own = make_trainer(logger=recorder, max_epochs=2)
    own.fit(task, numbers(1, 2), numbers(1, 2, 3))
    at = "evaluation/global_step"
    rows = [(step, row) for step, row in recorder.rows if at in row]
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[:2] == [
        (1, {at: 2, "both_step": 1.0, "only": 1.0}),
        (2, {at: 2, "both_step": 2.0, "only": 2.0, "second": 2.0}),
    ]
    assert rows[5] == (6, {at: 4, "both_step": 3.0, "only": 3.0})
    assert task.shown["both_step"] == 3.0
    assert own.progress_bar_metrics == {"both_step": 3.0, "both_epoch": 2.0}
    assert floats(own.logged_metrics) == {"both_step": 3.0, "only": 3.0, "second": 2.0, "both_epoch": 2.0}
    assert floats(own.callback_metrics) == {"both": 2.0, "both_epoch": 2.0}

    recorder.rows.clear()
    assert own.test(task, [numbers(1, 2), numbers(5)], verbose=False) == [
        {"both_epoch/dataloader_idx_0": 1.5},
        {"both_epoch/dataloader_idx_1": 5.0},
    ]
    first, second, third, _ = recorder.rows
    assert first == (1, {at: 4, "both_step/dataloader_idx_0": 1.0, "only/dataloader_idx_0": 1.0})
    assert second[1]["second/dataloader_idx_0"] == 2.0
    assert third == (1, {at: 4, "both_step/dataloader_idx_1": 5.0, "only/dataloader_idx_1": 5.0})
    assert own.test(task, [numbers(5)], verbose=False) == [{"both_epoch": 5.0}]


def test_more_batches_than_are_kept_at_once():
    recorder, values = Rows(), [float(v) for v in range(200)]
    make_trainer(logger=recorder).test(Batches(), numbers(*values), verbose=False)
    assert [row["only"] for _, row in recorder.rows if "only" in row] == values


def batches_of_two():
    recorder = Rows()
    make_trainer(logger=recorder).test(Batches(), numbers(1, 2, 3, 4, 9), verbose=False)
    return recorder.rows


@pytest.mark.exhaustive
def test_batches_of_two_processes():
    rows, nothing = run(batches_of_two, 2)
    # Batches (1 | 2) and (3, 4 | 9), of both processes.
    found = [(step, row["both_step"], row["only"]) for step, row in rows if "only" in row]
    assert found == [(1, 1.5, 2.0), (2, pytest.approx(16 / 3), 9.0)]
    assert nothing == []


def test_a_resumed_file_has_the_batches_of_evaluations(tmp_path):
    def logger():
        return CSVLogger(tmp_path, "", 0, flush_logs_every_n_steps=1)

    train, val = numbers(1, 2), numbers(*range(9))
    make_trainer(logger=logger(), max_epochs=2, callbacks=SaveEach(tmp_path)).fit(Batches(), train, val)
    before = rows(tmp_path / "version_0" / "metrics.csv")
    assert [row["step"] for row in before if "only" in row] == list(range(1, 19))
    make_trainer(logger=logger(), max_epochs=2).fit(Batches(), train, val, ckpt_path=tmp_path / "3")
    assert rows(tmp_path / "version_0" / "metrics.csv") == before


def test_one_name_for_several_loaders():
    def log(batch, batch_idx, dataloader_idx):
        task.log("mean", batch[0].mean(), add_dataloader_idx=False)

    task, own, several = Base(), make_trainer(), [numbers(1, 2), numbers(6)]
    task.validation_step = log
    own.fit(task, numbers(1), several)
    assert floats(own.callback_metrics) == {"mean": 3.0}
    assert own.validate(task, several, verbose=False) == [{"mean": 3.0}] * 2


class Both(Base):
    """One name by step and by epoch; schedules by the steps' values."""

    def __init__(self):
        super().__init__()
        self.seen, self.schedule = [], []

    def training_step(self, batch, batch_idx):
        loss = self.w.sum() * 0 + float(batch_idx + 1)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.seen.append(self.trainer.callback_metrics["loss"].item())
        self.schedule.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def on_train_epoch_end(self):
        self.seen.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=8.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss", "interval": "step"}}


def test_a_bare_name_has_the_steps_value_until_the_epoch_is_over():
    task = Both()
    run = make_trainer(max_epochs=2)
    run.fit(task, numbers(1.0, 1.0, 1.0))
    assert task.seen == [1.0, 2.0, 3.0, 2.0, 1.0, 2.0, 3.0, 2.0]
    assert task.schedule == [8.0, 8.0, 4.0, 2.0, 1.0, 0.5]  # worse than the first in each step but that one
    assert run.callback_metrics["loss"] == 2.0


def test_a_custom_logger_saves_after_each_row():
    logger = Rows()
    logger.save = lambda: logger.saved.append(len(logger.rows))
    make_trainer(logger=logger, log_every_n_steps=1).fit(Both(), numbers(1.0, 1.0))
    assert logger.saved[-1] == len(logger.rows) > 0
