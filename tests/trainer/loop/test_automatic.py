"""Several optimizers that step together after one backward pass, against loops by hand."""

from functools import partial

import pytest
import torch
from support.models import SaveIn, gathered
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import Callback, LambdaCallback, LearningRateMonitor, StochasticWeightAveraging
from treadle.strategies import DDP, FSDP

import treadle

SAMPLES, CLIP = 22, 0.3  # groups of two batches of four: the last batch is smaller, and uneven over two processes


def data():
    return torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loader(batch_size=4):
    return DataLoader(TensorDataset(data()), batch_size)


class Two(treadle.TaskModule):
    """The body is trained by Adam, whose rate falls after each step, the head by SGD, whose rate falls by epoch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.head = nn.Linear(4, 1)
        self.double()

    def loss(self, x):
        return (self.head(self.body(x))[:, 0] - 3 * x.prod(1)).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    def configure_optimizers(self):
        first = torch.optim.Adam(self.body.parameters(), lr=0.05)
        second = torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)
        by_step = torch.optim.lr_scheduler.ExponentialLR(first, 0.9)
        return [first, second], [
            {"scheduler": by_step, "interval": "step"},
            torch.optim.lr_scheduler.ExponentialLR(second, 0.5),
        ]


def fit(task, *callbacks, ckpt_path=None, train=None, **flags):
    settings = {"max_epochs": 3, "precision": "64-true", "accumulate_grad_batches": 2} | flags
    trainer = make_trainer(**settings, callbacks=list(callbacks))
    trainer.fit(task, loader() if train is None else train, ckpt_path=ckpt_path)
    return trainer


def weights(task):
    return {name: gathered(p).clone() for name, p in task.named_parameters()}


def by_hand(clip=CLIP, epochs=3, groups=(slice(8), slice(8, 16), slice(16, None))):
    task = Two()
    optimizers, (by_step, by_epoch) = task.configure_optimizers()
    steps = []
    for _ in range(epochs):
        for group in groups:
            task.loss(data()[group]).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(task.parameters(), clip)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            by_step["scheduler"].step()
            steps.append(weights(task))
        by_epoch.step()
    return steps


def assert_equal(found, right, **tolerance):
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, **tolerance or {"rtol": 1e-10, "atol": 1e-12}, msg=name)


def check_resumed(folder, **flags):
    """A run is the loop by hand, and one that resumed in the middle of its second epoch is the same."""
    first, again = Two(), Two()
    fit(first, SaveIn("on_step_end", 4, folder / "c"), gradient_clip_val=CLIP, **flags)
    assert fit(again, ckpt_path=folder / "c", gradient_clip_val=CLIP, **flags).global_step == 9
    assert_equal(weights(first), by_hand()[-1])
    assert all(map(torch.equal, weights(again).values(), weights(first).values()))


@pytest.mark.guarantee
def test_steps_equal_those_of_a_loop_by_hand_also_resumed(tmp_path):
    check_resumed(tmp_path)


def test_without_clipping_and_with_its_limit_by_value():
    task = Two()
    trainer = fit(task)
    assert_equal(weights(task), by_hand(None)[-1])
    assert [o.param_groups[0]["lr"] for o in trainer.optimizers] == pytest.approx([0.05 * 0.9**9, 0.1 * 0.5**3])
    by_value = Two()
    fit(by_value, gradient_clip_val=1e9, gradient_clip_algorithm="value")
    assert_equal(weights(by_value), weights(task))


# -- forms, hooks and schedules --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["list", "tuple", "dicts", "lists"])
def test_forms(form):
    class Form(Two):
        def configure_optimizers(self):
            both, (by_step, by_epoch) = super().configure_optimizers()
            dicts = [{"optimizer": o, "lr_scheduler": s} for o, s in zip(both, (by_step, by_epoch), strict=True)]
            return {"list": both, "tuple": tuple(both), "dicts": dicts, "lists": (both, [by_step, by_epoch])}[form]

    task = Form()
    trainer = fit(task, max_epochs=1)
    scheduled = form in ("dicts", "lists")
    assert [o.param_groups[0]["lr"] for o in trainer.optimizers] == (
        pytest.approx([0.05 * 0.9**3, 0.05]) if scheduled else [0.05, 0.1]
    )


class Hooked(Two):
    """Clips each optimizer on its own, and steps the head on every second group only."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.calls.append(("clip", type(optimizer).__name__))
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.calls.append(("step", type(optimizer.optimizer).__name__))
        assert optimizer_closure().shape == ()
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.calls.append(("zero", type(optimizer.optimizer).__name__))
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def lr_scheduler_step(self, scheduler, metric):
        self.calls.append(("schedule", type(scheduler.optimizer).__name__))
        scheduler.step()


def test_hooks_are_called_for_each_optimizer():
    task = Hooked()
    task.calls = calls = []
    callback = LambdaCallback(
        on_before_backward=lambda *_: calls.append("backward"),
        on_before_optimizer_step=lambda *args: calls.append(("before_step", type(args[-1]).__name__)),
        on_before_zero_grad=lambda *args: calls.append(("before_zero", type(args[-1]).__name__)),
    )
    fit(task, callback, max_steps=1, gradient_clip_val=CLIP)
    each = [(name, kind) for name in ("before_step", "clip", "step") for kind in ("Adam", "SGD")]
    zeroed = [(name, kind) for kind in ("Adam", "SGD") for name in ("before_zero", "zero")]
    assert calls == ["backward", "backward", *each, *zeroed, ("schedule", "Adam")]

    right = Two()
    optimizers, _ = right.configure_optimizers()
    right.loss(data()[:8]).backward()
    for part, optimizer in zip((right.body, right.head), optimizers, strict=True):
        nn.utils.clip_grad_norm_(part.parameters(), CLIP)
        optimizer.step()
    assert_equal(weights(task), weights(right))


def test_a_plateau_scheduler_for_each_optimizer_and_the_rates_that_the_monitor_logs(tmp_path):
    class Plateaus(Two):
        def training_step(self, batch, batch_idx):
            self.log("flat", 1.0, on_epoch=True)
            self.log("falling", -float(self.global_step), on_epoch=True)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            both, _ = super().configure_optimizers()
            plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.1)
            return [
                {"optimizer": o, "lr_scheduler": {"scheduler": plateau(o), "monitor": name}}
                for o, name in zip(both, ("flat", "falling"), strict=True)
            ]

    monitor = LearningRateMonitor()
    logger = treadle.loggers.CSVLogger(tmp_path)
    fit(Plateaus(), monitor, max_epochs=3, logger=logger)
    assert {name: pytest.approx(rates) for name, rates in monitor.lrs.items()} == {
        "lr-Adam": [0.05, 0.05, 0.005],
        "lr-SGD": [0.1, 0.1, 0.1],
    }


def stochastic():
    return StochasticWeightAveraging([0.01, 0.02], swa_epoch_start=2, annealing_epochs=2, annealing_strategy="linear")


def stochastic_by_hand():
    """The mean of the weights after the last three epochs, with torch's scheduler for the rate of each optimizer."""
    task = Two()
    optimizers, (by_step, by_epoch) = task.configure_optimizers()
    schedules, mean, annealed = [by_step["scheduler"]], AveragedModel(task), []
    for epoch in range(4):
        if epoch == 1:
            schedules = []
            annealed = [SWALR(o, rate, 2, "linear") for o, rate in zip(optimizers, (0.01, 0.02), strict=True)]
        for x in (data()[:8], data()[8:16], data()[16:]):
            task.loss(x).backward()
            for schedule in (*optimizers, *schedules):
                schedule.step()
            task.zero_grad()
        for schedule in annealed or [by_epoch]:
            schedule.step()
        if annealed:
            mean.update_parameters(task)
    return weights(mean.module)


def check_average(folder, **flags):
    """A run is the loop by hand, and one that resumed while the rates are annealed is the same."""
    first, again = Two(), Two()
    fit(first, stochastic(), SaveIn("on_step_end", 8, folder / "swa"), max_epochs=4, **flags)
    fit(again, stochastic(), max_epochs=4, ckpt_path=folder / "swa", **flags)
    assert_equal(weights(first), stochastic_by_hand())
    assert all(map(torch.equal, weights(again).values(), weights(first).values()))


@pytest.mark.guarantee
def test_a_stochastic_average_anneals_the_rates_of_both(tmp_path):
    check_average(tmp_path)


# -- steps that are skipped ------------------------------------------------------------------------------------------


class Spoiled(Two):
    """In the second step, the gradient of the head's bias alone is not finite."""

    spoil = float("nan")

    def on_after_backward(self):
        last = self.trainer.accelerator.sync_gradients  # FSDP has gradients only then
        if self.global_step == 1 and last and not self.trainer.progress.skipped:
            self.head.bias.grad.fill_(self.spoil)


def test_no_optimizer_steps_if_one_has_a_gradient_that_is_not_finite():
    task = Spoiled()
    trainer = fit(task, on_nonfinite="skip", max_epochs=1)
    assert (trainer.global_step, trainer.progress.skipped) == (2, 1)
    assert_equal(weights(task), by_hand(None, epochs=1, groups=(slice(8), slice(16, None)))[-1])
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**2)
    with pytest.raises(ValueError, match=r"the gradient of head\.bias is not.*in optimizer step 2"):
        fit(Spoiled(), max_epochs=1)


class Half(Spoiled):
    spoil = float("inf")

    def __init__(self):
        super().__init__()
        self.float()

    def loss(self, x):
        return super().loss(x.float())


class Record(Callback):
    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, pl_module):
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def on_step_end(self, trainer, pl_module):
        progress, rates = trainer.progress, [o.param_groups[0]["lr"] for o in trainer.optimizers]
        state = str([o.state_dict()["state"] for o in trainer.optimizers])
        scale = trainer.accelerator.scaler.get_scale()
        self.seen.append(((progress.step, progress.skipped), weights(pl_module), (state, rates), scale))


def check_overflow(**flags):
    """Of three steps, the second overflows."""
    record = Record()
    fit(Half(), record, precision="16-mixed", max_epochs=1, gradient_clip_val=CLIP, **flags)
    counts, values, states, scales = zip(*record.seen, strict=True)
    assert counts == ((1, 0), (1, 1), (2, 1))
    assert all(torch.equal(values[0][name], value) for name, value in values[1].items())
    assert states[0] == states[1]
    assert not any(torch.equal(values[1][name], value) for name, value in values[2].items())
    assert scales[2] == scales[0] / 2


def test_an_overflow_of_one_skips_the_steps_of_all():
    check_overflow()


# -- two processes ---------------------------------------------------------------------------------------------------

STRATEGIES = {"ddp": DDP, "zero": partial(DDP, zero=True), "fsdp": FSDP}


def check_on_two(folder):
    for name, make in STRATEGIES.items():
        check_resumed(folder / name, strategy=make(), train=loader(2))
        check_average(folder / name, strategy=make(), train=loader(2))
        check_overflow(strategy=make(), train=loader(2))


@pytest.mark.guarantee
def test_two_processes(tmp_path):
    for name in STRATEGIES:
        (tmp_path / name).mkdir()
    run(check_on_two, 2, tmp_path)


# -- errors ----------------------------------------------------------------------------------------------------------


def test_a_parameter_in_two_optimizers_is_named():
    task = Two()
    both = torch.optim.SGD(task.parameters(), lr=0.1), torch.optim.Adam(task.head.parameters())
    task.configure_optimizers = lambda: both
    with pytest.raises(
        ValueError, match=r"head\.weight is in two optimizers.*\(SGD and Adam\).*automatic_optimization"
    ):
        fit(task)
    task.configure_optimizers = lambda: both[:1] * 2
    with pytest.raises(ValueError, match=r"body\.0\.weight is in two optimizers"):
        fit(task)


@pytest.mark.parametrize("first", [True, False])
def test_an_optimizer_with_a_closure_must_be_alone(first):
    task = Two()
    both = [torch.optim.LBFGS(task.body.parameters()), torch.optim.SGD(task.head.parameters(), lr=0.1)]
    task.configure_optimizers = lambda: both if first else both[::-1]
    with pytest.raises(ValueError, match=r"LBFGS steps with a closure and cannot run with other optimizers \(SGD\)"):
        fit(task)


def test_optimizers_that_take_turns_are_sent_to_manual_optimization(capsys):
    task = Two()
    task.training_step = lambda batch, batch_idx, optimizer_idx: task.loss(batch[0])
    with pytest.raises(ValueError, match=r"optimizer_idx.*take turns, as in a GAN.*automatic_optimization = False"):
        fit(task)
    task.training_step = lambda batch, batch_idx: task.toggle_optimizer(task.optimizers()[0])
    with pytest.raises(RuntimeError, match=r"take turns.*all 2 optimizers step together.*automatic_optimization = Fa"):
        fit(task)
    capsys.readouterr()
    fit(Two(), max_steps=1)
    assert "2 optimizers (Adam, SGD) step together after one backward pass" in capsys.readouterr().err
