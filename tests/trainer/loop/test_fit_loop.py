"""The training loop against the loop one would write by hand: what a step is, when a run ends, who is told."""

import math
from datetime import timedelta
from unittest import mock

import pytest
import torch
from support.fit_runs import Line, Recorder, Staged, Watched, fit, numbers, ones
from support.models import Stream
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.loggers import CSVLogger
from treadle.trainer.loop import fit_loop

import treadle

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing is validated")


# -- when a run ends --------------------------------------------------------------------------------------------------


def test_limits_of_epochs_and_steps():
    for flags, steps, epochs in [
        ({"max_epochs": 2}, 10, 2),
        ({"max_epochs": 0}, 0, 0),
        ({"max_epochs": -1, "max_steps": 7}, 7, 1),
        ({"max_epochs": 3, "max_steps": 100}, 15, 3),
        ({"max_epochs": 3, "max_steps": 5}, 5, 1),
        ({"max_steps": 0}, 0, 0),
        ({"max_epochs": 2, "accumulate_grad_batches": 2}, 6, 2),
        ({"max_epochs": 2, "limit_train_batches": 3}, 6, 2),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, 4, 2),
        ({"max_epochs": 2, "limit_train_batches": 1.0}, 10, 2),
        ({"max_epochs": 2, "limit_train_batches": 99}, 10, 2),
    ]:
        own = fit(Line(), ones(5), **flags)
        assert (own.global_step, own.current_epoch) == (steps, epochs), flags
        assert own.estimated_stepping_batches == steps or flags.get("max_epochs") == 0, flags


class StopAt(treadle.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.should_stop = True


def test_stopping_respects_the_minimum():
    for flags, steps in [
        ({}, 3),
        ({"min_steps": 7}, 7),
        ({"min_epochs": 2}, 10),
        ({"min_epochs": 1, "min_steps": 2}, 5),
    ]:
        own = fit(Line(), ones(5), max_epochs=4, callbacks=StopAt(3), **flags)
        assert own.global_step == steps, flags
    # The last step of an epoch is as good a place to stop as any.
    assert fit(Line(), ones(5), max_epochs=4, callbacks=StopAt(5)).global_step == 5


class Clocked(Line):
    """A task on whose clock, which is the loop's, a step takes a number of seconds."""

    def __init__(self, seconds=1):
        super().__init__()
        self.seconds, self.now = seconds, 0.0

    def monotonic(self):
        return self.now

    def training_step(self, batch, batch_idx):
        self.now += self.seconds
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("batches", [1, 1000])
def test_max_time(batches, monkeypatch):
    for limit in ("00:00:00:09", timedelta(seconds=9), {"seconds": 9}):
        monkeypatch.setattr(fit_loop, "time", task := Clocked())
        assert fit(task, ones(batches), max_epochs=-1, max_steps=200, max_time=limit).global_step == 9
    monkeypatch.setattr(fit_loop, "time", task := Clocked())
    own = fit(task, ones(batches), max_epochs=-1, max_steps=20, max_time={"seconds": 5}, min_steps=12)
    assert own.global_step == 12
    monkeypatch.setattr(fit_loop, "time", task := Clocked())
    own = fit(task, ones(batches), max_epochs=-1, max_time={"seconds": 5})
    own.fit(task, ones(batches))  # which has the whole of it too
    assert own.global_step == 10


def test_fast_dev_run(tmp_path):
    for fast, batches in [(True, 1), (2, 2), (1, 1)]:
        task = Watched()
        task.on_validation_batch_start = mock.Mock()
        own = treadle.Trainer(accelerator="cpu", fast_dev_run=fast, max_epochs=9, default_root_dir=tmp_path)
        own.fit(task, ones(5), ones(5))
        assert (own.global_step, own.current_epoch) == (batches, 1)
        assert task.on_validation_batch_start.call_count == batches
    assert list(tmp_path.iterdir()) == []
    assert fit(Line(), ones(5), fast_dev_run=False).global_step == 5


# -- what a step is ---------------------------------------------------------------------------------------------------


def test_accumulation_ends_with_a_group_of_what_is_left():
    task = Line()
    own = fit(task, ones(9), accumulate_grad_batches=4)
    assert task.gradients == [1.0, 1.0, 1.0]  # not 0.25 for the last group, which has one batch
    assert own.global_step == 3
    task = Line()
    fit(task, numbers(1, 2, 3, 4, 5, 6, 7, batch_size=2), accumulate_grad_batches=2)
    assert task.gradients == [2.5, 6.0]  # (1 + 2 + 3 + 4) / 4 and (5 + 6 + 7) / 3: samples weigh alike


class Tokens(Line):
    """Batches of (values, how many count)."""

    def training_step(self, batch, batch_idx):
        values, count = batch
        loss = (self.w * values[0, : int(count)]).mean()
        return {"loss": loss, "weight": float(count)}


def token_batches():
    # Means 1.0 over one token and 4.0 over four: 17 / 5 = 3.4, not (1 + 4) / 2 = 2.5.
    values = torch.tensor([[1.0, 0, 0, 0], [4.0, 4, 4, 4], [2.0, 2, 0, 0], [0.0, 0, 0, 0]])
    return DataLoader(TensorDataset(values, torch.tensor([1, 4, 2, 3])), batch_size=1)


def tokens(accumulate):
    task = Tokens()
    fit(task, token_batches(), accumulate_grad_batches=accumulate)
    return task.gradients


def test_reported_weights():
    assert tokens(2) == pytest.approx([17 / 5, 4 / 5])
    assert tokens(4) == pytest.approx([21 / 10])
    assert tokens(3) == pytest.approx([21 / 7, 0.0])
    assert tokens(1) == pytest.approx([1.0, 4.0, 2.0, 0.0])


def test_a_step_without_any_weight_changes_nothing():
    task = Line()
    task.training_step = lambda batch, index: {"loss": task.loss(batch), "weight": float(index != 2)}
    fit(task, ones(3))
    assert task.w.item() == -2.0


def test_weights_come_in_every_micro_batch_or_in_none():
    task = Line()
    task.training_step = lambda batch, index: {"loss": task.w.sum(), "weight": 5.0} if index % 2 else task.w.sum()
    with pytest.raises(ValueError, match="weight"):
        fit(task, ones(2), accumulate_grad_batches=2)


class Regression(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.cost(batch)

    def cost(self, batch):
        return 50 * nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val", self.cost(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def regression(count=22):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


def by_hand(k, clip, epochs=2, dtype=torch.float32):
    """Final weights of the plain torch loop, with k batches of 4 in a step."""
    task = Regression().to(dtype)
    optimizer = torch.optim.AdamW(task.parameters(), lr=0.1)
    data = [tensor.to(dtype) for tensor in regression().tensors]
    for _ in range(epochs):
        for start in range(0, 22, 4 * k):
            optimizer.zero_grad()
            task.cost([tensor[start : start + 4 * k] for tensor in data]).backward()
            clip(task.parameters())
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in task.parameters()])


def weights(task):
    return torch.cat([p.detach().flatten() for p in task.parameters()])


def test_clipping_once_per_step():
    for algorithm, value, clip in [
        ("norm", 0.5, lambda p: nn.utils.clip_grad_norm_(p, 0.5)),
        (None, 0.5, lambda p: nn.utils.clip_grad_norm_(p, 0.5)),
        ("value", 0.02, lambda p: nn.utils.clip_grad_value_(p, 0.02)),
        ("norm", None, lambda p: None),
    ]:
        for k in (1, 3):
            task, flags = Regression(), {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
            flags |= {"max_epochs": 2, "accumulate_grad_batches": k, "precision": "64-true"}
            fit(task, DataLoader(regression(), 4), **flags)
            assert torch.allclose(weights(task), by_hand(k, clip, dtype=torch.float64), atol=1e-12), (algorithm, k)


# -- precision --------------------------------------------------------------------------------------------------------


def test_storage_formats():
    def note(module, inputs):
        seen.add((inputs[0].dtype, torch.zeros(1).dtype))

    for precision, dtype in [("bf16-true", torch.bfloat16), ("64-true", torch.float64), ("32-true", torch.float32)]:
        task, seen = Regression(), set()
        task.net.register_forward_pre_hook(note)
        own = fit(task, DataLoader(regression(), 4), DataLoader(regression(), 8), precision=precision, max_epochs=2)
        assert seen == {(dtype, dtype)}
        assert {p.dtype for p in task.parameters()} == {dtype} == {task.dtype}
        assert torch.get_default_dtype() == torch.float32
        assert math.isfinite(own.callback_metrics["val"])
    task, kinds = Regression(), set()
    task.net.register_forward_hook(lambda module, inputs, output: kinds.add(output.dtype))
    fit(task, DataLoader(regression(), 4), precision="bf16-mixed")
    assert kinds == {torch.bfloat16}
    assert task.dtype == torch.float32


# -- a loss that is not finite ----------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_may_be_ignored():
    task = Line()
    task.loss = lambda batch: task.w * math.nan
    assert fit(task, ones(2), on_nonfinite="ignore").global_step == 2
    assert math.isnan(task.w.item())


# -- validation -------------------------------------------------------------------------------------------------------


def test_when_validation_runs():
    def when(batches=6, **flags):
        task = Watched()
        fit(task, ones(batches), ones(2), **{"max_epochs": 2, **flags})
        return task.when

    ends = [(0, 6), (1, 6)]
    assert when() == when(val_check_interval=1.0) == when(val_check_interval=6) == ends
    assert when(val_check_interval=2) == [(e, b) for e in (0, 1) for b in (2, 4, 6)]
    assert when(val_check_interval=0.5) == [(e, b) for e in (0, 1) for b in (3, 6)]
    assert when(val_check_interval=0.4) == [(e, b) for e in (0, 1) for b in (2, 4, 6)]
    assert when(val_check_interval=4) == [(e, 4) for e in (0, 1)]
    assert when(val_check_interval=2, accumulate_grad_batches=3) == [(e, b) for e in (0, 1) for b in (3, 6)]
    assert when(check_val_every_n_epoch=2, max_epochs=4) == [(1, 6), (3, 6)]
    assert when(val_check_interval=4, check_val_every_n_epoch=None) == [(0, 4), (1, 2), (1, 6)]
    assert when(val_check_interval=9, check_val_every_n_epoch=None) == [(1, 3)]
    assert when(limit_val_batches=0) == when(limit_val_batches=0.0) == []
    assert when(5, val_check_interval=4, check_val_every_n_epoch=None, accumulate_grad_batches=3, max_epochs=3) == [
        (0, 5),
        (1, 3),
        (2, 3),
    ]
    assert when(val_check_interval="00:00:00:01", check_val_every_n_epoch=None) == []
    assert when(max_steps=8) == [(0, 6)]
    assert when(max_steps=6) == [(0, 6)]
    # Each multiple of the interval is validated at the end of its step.
    for batches, accumulate, interval, expected in [
        (100, 4, 0.5, [52, 100]),
        (20, 3, 0.25, [6, 12, 15, 20]),
        (24, 3, 4, [6, 9, 12, 18, 21, 24]),
        (10, 2, 3, [4, 6, 10]),
        (4, 4, 1, [4]),
    ]:
        found = when(batches, val_check_interval=interval, accumulate_grad_batches=accumulate)
        assert found == [(epoch, batch) for epoch in (0, 1) for batch in expected]


def test_sanity_check_leaves_no_trace(tmp_path):
    class Task(Regression):
        sane = 0

        def validation_step(self, batch, batch_idx):
            torch.rand(5)
            self.log("val", self.cost(batch))
            self.sane += self.trainer.sanity_checking

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + torch.rand(1)[0] * self.net[0].weight.sum()

    results = []
    for steps, batches in [(0, 0), (2, 2), (-1, 6), (99, 6)]:
        torch.manual_seed(5)
        task = Task()
        torch.manual_seed(6)
        flags = {"max_epochs": 2, "num_sanity_val_steps": steps, "logger": CSVLogger(tmp_path, str(steps), 0)}
        own = fit(task, *(DataLoader(regression(), 4, shuffle=True) for _ in range(2)), **flags)
        assert task.sane == batches
        assert own.num_sanity_val_steps == (math.inf if steps == -1 else steps)
        assert own.num_sanity_val_batches == [batches]
        rows = (tmp_path / str(steps) / "version_0" / "metrics.csv").read_text()
        results.append((weights(task).tolist(), torch.rand(1).item(), float(own.callback_metrics["val"]), rows))
    assert results[1:] == [results[0]] * 3
    assert len(results[0][3].splitlines()) == 3  # the names, and one row for each epoch's validation


def test_modes_and_gradients_in_evaluation():
    class Task(Line):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout()).eval()
            self.seen = []

        def look(self, *_):
            modes = (self.training, self.frozen[0].training, torch.is_grad_enabled(), torch.ones(1).is_inference())
            self.seen.append(modes)

        validation_step = test_step = predict_step = look

        def training_step(self, batch, batch_idx):
            self.look()
            return super().training_step(batch, batch_idx)

    for flag in (True, False):
        task, own = Task(), make_trainer(inference_mode=flag, num_sanity_val_steps=1)
        with pytest.warns(UserWarning, match="frozen, frozen.0, frozen.1 will be trained in evaluation mode"):
            own.fit(task, ones(1), ones(1))
        own.test(task, ones(1), verbose=False)
        own.predict(task, ones(1))
        sanity, train, validation, test, predict = task.seen
        assert train == (True, False, True, False)
        assert sanity == validation == (False, False, False, False)
        assert test == predict == (False, False, False, flag)
        assert (task.training, task.frozen[0].training, task.frozen.training) == (True, False, False)


def test_the_parts_of_a_frozen_module_are_frozen_too(recwarn):
    task = Line()
    task.backbone = nn.Sequential(nn.Linear(1, 1), nn.Dropout(), nn.Sequential(nn.Tanh())).eval().requires_grad_(False)
    task.loose = nn.Dropout().eval()
    fit(task, ones(1))
    (message,) = [str(w.message) for w in recwarn if "evaluation mode" in str(w.message)]
    assert message.startswith("loose will be trained in evaluation mode")


def test_detect_anomaly():
    class Task(Line):
        def training_step(self, batch, batch_idx):
            assert torch.is_anomaly_enabled()
            return (self.w * 0).sqrt().sum() * 0 + self.loss(batch)  # 0 * inf in backward

    with pytest.raises(RuntimeError, match="SqrtBackward0"), pytest.warns(UserWarning, match="SqrtBackward0"):
        fit(Task(), ones(1), detect_anomaly=True)
    assert not torch.is_anomaly_enabled()


# -- data -------------------------------------------------------------------------------------------------------------


def test_sources_without_a_length():
    def stream(count, batch_size=1):
        return DataLoader(Stream(numbers(*range(1, count + 1)).dataset), batch_size)

    task = Watched()
    own = fit(task, stream(5, 2), stream(3, 2), max_epochs=2, accumulate_grad_batches=2)
    assert task.gradients == [2.5, 5.0] * 2
    assert task.when == [(0, 3), (1, 3)]
    assert float(own.callback_metrics["val"]) == 2.0
    assert own.num_training_batches == float("inf")
    task = Watched()
    fit(task, stream(5), stream(1), val_check_interval=2, max_epochs=1)
    assert task.when == [(0, 2), (0, 4)]
    task = Watched()
    own = fit(task, stream(5), limit_train_batches=3, max_epochs=2)
    assert (own.global_step, task.gradients) == (6, [1.0, 2.0, 3.0] * 2)
    task = Watched()
    own = fit(task, [[torch.tensor([2.0])], [torch.tensor([4.0])]], [[torch.tensor([3.0])]], max_epochs=2)
    assert task.gradients == [2.0, 4.0] * 2
    assert float(own.callback_metrics["val"]) == 3.0
    task = Watched()
    fit(task, [[torch.tensor([2.0, 4.0])], [torch.tensor([9.0])]], accumulate_grad_batches=2)
    assert task.gradients == [6.0]  # nothing is known of a plain batch, so each weighs the same


def test_leaving_an_epoch_early():
    for skip_at, accumulate, steps in [(3, 1, 3), (3, 2, 1), (0, 1, 0)]:
        task = Watched()
        task.on_train_batch_start = lambda batch, batch_idx, at=skip_at: -1 if batch_idx == at else None
        own = fit(task, ones(6), max_epochs=2, accumulate_grad_batches=accumulate)
        assert (own.global_step, own.current_epoch) == (2 * steps, 2)
        assert task.gradients == [1.0] * 2 * steps  # nothing is left of a group that was begun


class Everything(treadle.DataModule):
    def __init__(self):
        super().__init__()
        self.told = []
        self.train_dataloader = lambda: numbers(1, 2, 3)
        self.val_dataloader = lambda: numbers(1, 2, batch_size=2)
        self.test_dataloader = lambda: [numbers(5), numbers(6)]
        self.predict_dataloader = lambda: numbers(7, 8, 9, batch_size=2)

    def prepare_data(self):
        self.told.append("prepare_data")

    def setup(self, stage):
        self.told.append(f"setup {stage}")
        assert self.trainer is not None

    def teardown(self, stage):
        self.told.append(f"teardown {stage}")

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 10]


class UsesEverything(Line):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("seen", batch[0].mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return batch[0].flatten().tolist()

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        assert device.type == "cpu"
        return [batch[0] * 3 + 1 + dataloader_idx]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2]


def test_a_data_module_in_full():
    data, task = Everything(), UsesEverything()
    own = fit(task, data, num_sanity_val_steps=0)
    # The data module's hook and the task's hooks are all heard, one after the other: ((x + 10) * 3 + 1) * 2.
    assert task.gradients == [68.0, 74.0, 80.0]
    assert float(own.callback_metrics["seen"]) == 71.0
    assert data.told == ["prepare_data", "setup fit", "teardown fit"]
    data.told.clear()
    assert own.test(task, datamodule=data, verbose=False) == [
        {"seen/dataloader_idx_0": 92.0},
        {"seen/dataloader_idx_1": 100.0},
    ]
    assert own.validate(verbose=False) == [{"seen": 71.0}]  # the last stage's task and data
    assert own.predict(task, datamodule=data) == [[104.0, 110.0], [116.0]]
    stages = ("test", "validate", "predict")
    assert data.told == [word for s in stages for word in ("prepare_data", f"setup {s}", f"teardown {s}")]


# -- runs after runs --------------------------------------------------------------------------------------------------


FIT_HOOKS = [
    name
    for name in treadle.callbacks.callback.HOOKS
    if not name.startswith(("on_test", "on_predict", "on_load", "on_save", "on_exception")) and name != "teardown"
]


BEFORE = ("setup", "on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end")  # or after the loop


@pytest.mark.parametrize("where", FIT_HOOKS)
def test_an_error_in_any_hook(where):
    task, told, others, own_hooks = Staged(), [], [], []
    task.on_exception = lambda error: own_hooks.append(repr(error))
    task.teardown = lambda stage: own_hooks.append(stage)
    own = make_trainer(callbacks=[Recorder(where, told), Recorder(None, others)], max_epochs=1)
    with pytest.raises(
        RuntimeError, match=f"^in {where}$" if where in BEFORE else f"(?m)^in {where}\nin fit, epoch [01], "
    ):
        own.fit(task, ones(2), ones(2))
    assert told.count(where) == 1
    assert not task.batches or not where.startswith("on_validation")  # which the sanity check calls first
    for seen in (told, others):
        assert seen[-2:] == ["on_exception", "teardown"]
    assert own_hooks == [f"RuntimeError('in {where}')", "fit"]
    assert "on_fit_end" not in others or where == "on_fit_end"
    assert own.stage is None
    with pytest.warns(UserWarning, match="has no effect here"):
        task.log("x", 1.0)  # no longer connected
    assert own.global_step in (0, 1, 2)


def test_errors_in_evaluation_hooks():
    for stage in ("validate", "test", "predict"):
        name = {"validate": "validation"}.get(stage, stage)
        for moment in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end"):
            task, told = Staged(), []
            own = make_trainer(callbacks=Recorder(f"on_{name}_{moment}", told))
            with pytest.raises(RuntimeError, match=f"in on_{name}_{moment}"):
                getattr(own, stage)(task, ones(2))
            assert told[-2:] == ["on_exception", "teardown"]
            assert task.training
            assert torch.is_grad_enabled()


class Logged(Line):
    def __init__(self, lr=1.0):
        super().__init__(lr)
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        self.log("x", 1.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("method", ["log_metrics", "log_hyperparams", "finalize", "log_graph", "save"])
def test_a_failing_logger_does_not_end_training(tmp_path, method):
    broken = type("Broken", (CSVLogger,), {method: mock.Mock(side_effect=ValueError)})(tmp_path, "broken")
    whole = CSVLogger(tmp_path, "whole", 0)
    own = make_trainer(logger=[broken, whole], log_every_n_steps=1)
    with pytest.warns(UserWarning, match=f"Broken.{method} failed"):
        own.fit(Logged(), ones(3))
    assert own.global_step == 3
    assert len((tmp_path / "whole" / "version_0" / "metrics.csv").read_text().splitlines()) == 4


@pytest.mark.parametrize("method", ["log_metrics", "log_hyperparams", "finalize"])
def test_a_strict_logger_ends_training(tmp_path, method):
    def logger():
        strict = CSVLogger(tmp_path, strict=True)
        setattr(strict, method, mock.Mock(side_effect=OSError("disk full")))
        return strict

    told = []
    own = make_trainer(logger=logger(), log_every_n_steps=1, callbacks=Recorder(None, told))
    with pytest.raises(OSError, match="disk full"):
        own.fit(Logged(), ones(3))
    assert told[-1] == "teardown"
    if method == "finalize":
        failing = Recorder("on_train_batch_end", told, ZeroDivisionError)
        with pytest.raises(ZeroDivisionError) as caught:
            fit(Line(), ones(2), logger=logger(), callbacks=failing)
        assert "the finalize method of a logger raised OSError: disk full" in " ".join(caught.value.__notes__)


# -- two processes ----------------------------------------------------------------------------------------------------


def on_two_processes():
    """Everything that two processes are needed for, in the same two."""
    task = Clocked(seconds=treadle.Accelerator(cpu=True).process_index)
    with mock.patch.object(fit_loop, "time", task):
        own = fit(task, ones(8), max_epochs=-1, max_steps=200, max_time={"seconds": 5})
    assert own.global_step == 5
    assert tokens(1) == pytest.approx([17 / 5, 4 / 5])
    assert tokens(2) == tokens(4) == pytest.approx([21 / 10])
    task = Line()
    fit(task, ones(9), accumulate_grad_batches=2)
    assert task.gradients == [1.0, 1.0, 1.0]
    task = Regression()
    fit(task, DataLoader(regression(), 2), max_epochs=2, gradient_clip_val=0.5, precision="64-true")
    wanted = by_hand(1, lambda p: nn.utils.clip_grad_norm_(p, 0.5), dtype=torch.float64)
    torch.testing.assert_close(weights(task), wanted, rtol=0, atol=1e-12)
    task = UsesEverything()
    predicted = fit(task, Everything()).predict(task, datamodule=Everything())
    assert sorted(value for batch in predicted for value in batch) == [104.0, 110.0, 116.0]


def test_two_processes_stop_at_the_same_step_and_weigh_as_one():
    run(on_two_processes, 2)


@pytest.mark.parametrize(("size", "drop", "left"), [(4, True, 2), (5, True, 0), (4, False, 0)])
def test_what_drop_last_leaves_out_is_said(capsys, size, drop, left):
    fit(Line(), ones(10, batch_size=size, drop_last=drop), max_epochs=1)
    assert (f"drop_last drops {left} samples per epoch" in capsys.readouterr().err) is bool(left)


@pytest.mark.filterwarnings("ignore:training_step returned None, so the batch")
def test_an_epoch_without_a_gradient_is_said():
    task = Regression()
    task.training_step = lambda batch, index: None if task.current_epoch == 1 or index else task.cost(batch)
    with pytest.warns(UserWarning, match="None for all 6 batches of epoch 1, so nothing was trained") as said:
        own = fit(task, DataLoader(regression(), 4), max_epochs=3)
    assert (own.global_step, own.current_epoch) == (18, 3)
    assert sum("so nothing was" in str(entry.message) for entry in said) == 1


def test_a_limit_of_zero_trains_nothing():
    task = Line()
    with pytest.warns(UserWarning, match="limit_train_batches=0, so nothing is trained"):
        own = fit(task, ones(5), max_epochs=3, limit_train_batches=0)
    assert (own.global_step, own.current_epoch) == (0, 0)


def test_a_stop_within_an_epoch_ends_it_without_validation():
    task = Watched()
    own = fit(task, ones(5), ones(2), max_epochs=4, callbacks=StopAt(7))
    assert (own.global_step, own.current_epoch, task.when) == (7, 1, [(0, 5)])
