"""Tasks that drive their optimizers themselves, and optimizers that need a closure, against loops by hand."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from support.models import Line, SaveIn, gathered, with_step
from support.processes import run
from support.trainers import make_trainer, says
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import EMAWeightAveraging, LambdaCallback
from treadle.strategies import DDP, FSDP, SingleDevice

import treadle

SAMPLES, BATCH = 22, 4  # the last batch is smaller, and uneven over two processes


def data():
    return torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loader(batch_size=BATCH):
    return DataLoader(TensorDataset(data()), batch_size)


def trained(task, *callbacks, train=None, val=None, ckpt_path=None, **flags):
    trainer = make_trainer(**{"max_epochs": 2, "precision": "64-true", **flags}, callbacks=list(callbacks))
    trainer.fit(task, loader() if train is None else train, val, ckpt_path=ckpt_path)
    return trainer


def weights(task):
    return [gathered(p).clone() for p in task.parameters()]


# -- two optimizers --------------------------------------------------------------------------------------------------


class Gan(treadle.TaskModule):
    """The discriminator steps on every batch, the generator on every second one, with gradients of both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        self.critic = nn.Linear(3, 1)
        self.double()

    def critic_loss(self, x):
        return (self.critic(x) - 1).square().mean() + self.critic(self.generator(x * 0.5).detach()).square().mean()

    def generator_loss(self, x):
        return (self.critic(self.generator(x * 0.5)) - 1).square().mean()

    def training_step(self, batch, batch_idx):
        (x,) = batch
        first, second = self.optimizers()
        self.toggle_optimizer(second)
        loss = self.critic_loss(x)
        second.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(second, 0.5, "norm")
        second.step()
        self.untoggle_optimizer(second)
        with self.toggle(first, batch_idx):
            self.manual_backward(self.generator_loss(x))  # added up over two batches
            if batch_idx % 2:
                first.step()
                first.zero_grad()
                self.lr_schedulers().step()
        self.log("critic", loss)

    def toggle(self, optimizer, batch_idx):
        return self.toggled_optimizer(optimizer)

    def configure_optimizers(self):
        first = torch.optim.Adam(self.generator.parameters(), lr=0.1)
        second = torch.optim.AdamW(self.critic.parameters(), lr=0.1)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 2)]


class ToggledByOptimizer(Gan):
    """The form of Lightning's own examples, which leave the reduction out until the step."""

    def toggle(self, optimizer, batch_idx):
        return optimizer.toggle_model(sync_grad=bool(batch_idx % 2))


def gan_by_hand():
    task = Gan()
    (first, second), (schedule,) = task.configure_optimizers()
    for _ in range(2):
        for index, (x,) in enumerate(loader()):
            second.zero_grad()
            task.critic_loss(x).backward()
            nn.utils.clip_grad_norm_(task.critic.parameters(), 0.5)
            second.step()
            for one, gradient in zip(
                task.generator.parameters(),
                torch.autograd.grad(task.generator_loss(x), task.generator.parameters()),
                strict=True,
            ):
                one.grad = gradient if one.grad is None else one.grad + gradient
            if index % 2:
                first.step()
                first.zero_grad()
                schedule.step()
    return weights(task)


@pytest.mark.parametrize("kind", [Gan, ToggledByOptimizer])
def test_two_optimizers(kind):
    task = kind()
    trainer = trained(task)
    assert trainer.global_step == 12
    assert [p.tolist() for p in task.parameters()] == [p.tolist() for p in gan_by_hand()]
    assert all(p.requires_grad for p in task.parameters())


class Validated(Gan):
    """Measures the generator's score, and its gradient, in each validation."""

    def validation_step(self, batch, batch_idx):
        self.log("score", self.critic(self(batch[0])).mean())

    def forward(self, x):
        return self.generator(x * 0.5)


def averaged(task, *callbacks, data, ckpt_path=None, make=lambda: "auto"):
    """The scores before a fit that averages weights, and within it."""
    before = make_trainer(precision="64-true", strategy=make())
    (first,) = before.validate(task, data, verbose=False)
    average = EMAWeightAveraging(decay=0.5)
    trainer = trained(task, average, *callbacks, train=data, val=data, ckpt_path=ckpt_path, strategy=make())
    return first["score"], trainer.callback_metrics["score"].item()


def resumed_on_two(folder, make):
    """Evaluation before and within a fit, an average of weights, and a run that resumes in the middle."""
    task, again, flags = Validated(), Validated(), {"data": loader(BATCH // 2), "make": make}
    scores = averaged(task, SaveIn("on_step_end", 6, folder / "c"), **flags)
    averaged(again, ckpt_path=folder / "c", **flags)
    return scores, weights(task), all(map(torch.equal, weights(task), weights(again)))


STRATEGIES = {"ddp": DDP, "zero": partial(DDP, zero=True), "fsdp": FSDP}


def on_two_processes(folder):
    trained_by_a_third_party()
    return {
        "resumed": {name: resumed_on_two(folder / name, make) for name, make in STRATEGIES.items()},
        "closure": {search: closure_on_two(search) for search in (None, "strong_wolfe")},
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for name in STRATEGIES:
        (folder / name).mkdir()
    return run(on_two_processes, 2, folder)


@pytest.mark.long
@pytest.mark.guarantee
def test_evaluated_averaged_and_resumed_on_two_processes(two_ranks):
    task = Validated()
    scores = averaged(task, data=loader())
    for name in STRATEGIES:
        (scores_on_two, first, is_resumed), other = (found["resumed"][name] for found in two_ranks)
        assert scores_on_two == other[0] == pytest.approx(scores, rel=1e-9)
        for one, second, right in zip(first, other[1], weights(task), strict=True):
            assert torch.equal(one, second)
            torch.testing.assert_close(one, right, rtol=1e-10, atol=1e-12)
        assert is_resumed
        assert other[2]


@pytest.mark.guarantee
@pytest.mark.parametrize("step", [2, 6, 8])  # odd ones leave a generator's gradient half added up
def test_a_resumed_run_is_the_whole_one(tmp_path, step):
    whole = Gan()
    trained(whole, SaveIn("on_step_end", step, tmp_path / "c"))
    again = Gan()
    assert trained(again, ckpt_path=tmp_path / "c").global_step == 12
    assert [p.tolist() for p in again.parameters()] == [p.tolist() for p in whole.parameters()]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_while_an_optimizer_is_toggled(error):
    task, trainer = Gan(), make_trainer(precision="64-true")
    task.critic_loss = Mock(side_effect=error)
    with pytest.raises(error):
        trainer.fit(task, loader())
    assert all(parameter.requires_grad for parameter in task.parameters())
    del task.critic_loss
    trainer.fit(task, loader())


def test_hooks():
    seen, names = [], ("before_backward", "after_backward", "before_optimizer_step", "train_batch_end")
    calls = LambdaCallback(**{f"on_{name}": lambda *_, name=name: seen.append(name) for name in names})
    trained(Gan(), calls, max_steps=2)
    backward = ["before_backward", "after_backward"]
    first = [*backward, "before_optimizer_step", *backward, "train_batch_end"]
    assert seen == [*first, *first[:-1], "before_optimizer_step", "train_batch_end"]


@pytest.mark.parametrize(
    ("flag", "value", "advice"),
    [
        ("gradient_clip_val", 1.0, "self.clip_gradients(optimizer, 1.0) before optimizer.step"),
        ("accumulate_grad_batches", 2, "self.manual_backward(loss / 2) for each batch, and step"),
    ],
)
def test_flags_that_would_do_nothing(flag, value, advice):
    with says(ValueError, f"{flag}={value} has no effect", advice):
        trained(Gan(), **{flag: value})


class Third(SingleDevice):
    """Somebody's, of several processes, that knows nothing of gradients reduced by hand."""

    distributed = True


def trained_by_a_third_party():
    with pytest.raises(ValueError, match=r"strategy='single' can't run a task with automatic_optimization=False"):
        trained(Gan(), strategy=Third())


def test_the_two_ways_are_not_mixed():
    with pytest.raises(RuntimeError, match="automatic_optimization = False"):
        trained(with_step(lambda task: task.manual_backward(task.net.weight.mean())))


class BackwardTwice(Line):
    """Passes ``gradient`` and ``retain_graph`` by position, as `Tensor.backward` permits."""

    features, automatic_optimization = 3, False

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).mean()
        self.manual_backward(loss, torch.tensor(2.0, dtype=torch.float64), True)
        self.manual_backward(loss)
        self.gradient = self.net.bias.grad.item()
        self.optimizers().step()


class BackwardTwiceByHook(BackwardTwice):
    def backward(self, loss, *args, **kwargs):
        loss.backward(*args, **kwargs)


@pytest.mark.parametrize("task", [BackwardTwice, BackwardTwiceByHook])
def test_positional_arguments_reach_backward(task):
    task = task()
    trained(task, max_steps=1)
    assert task.gradient == 3.0  # of the bias: 2 from the first call, 1 from the second


# -- an optimizer that needs a closure -------------------------------------------------------------------------------


class Fit(treadle.TaskModule):
    def __init__(self, search="strong_wolfe"):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        self.search = search
        self.calls = 0

    def loss(self, x):
        return (self.net(x)[:, 0] - x.prod(1)).square().mean()

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return self.loss(batch[0])

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn=self.search)


def fit_by_hand(search, clip=None):
    task = Fit(search)
    optimizer = task.configure_optimizers()
    for _ in range(2):
        for x in (data()[:8], data()[8:16], data()[16:]):

            def closure(x=x):
                optimizer.zero_grad()
                loss = task.loss(x)
                loss.backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(task.parameters(), clip)
                return loss

            optimizer.step(closure)
    return weights(task)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize(("batch_size", "accumulate", "clip"), [(8, 1, None), (4, 2, None), (8, 1, 0.1)])
def test_a_closure(search, batch_size, accumulate, clip):
    task = Fit(search)
    flags = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    assert trained(task, train=loader(batch_size), **flags).global_step == 6
    assert task.calls > 12
    for one, right in zip(weights(task), fit_by_hand(search, clip), strict=True):
        torch.testing.assert_close(one, right, rtol=1e-7, atol=1e-9)


def closure_on_two(search):
    task = Fit(search)
    trained(task, strategy="ddp", train=loader(4))
    return weights(task)


@pytest.mark.long
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_a_closure_on_two_processes(two_ranks, search):
    first, second = (found["closure"][search] for found in two_ranks)
    for one, other, right in zip(first, second, fit_by_hand(search), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, right, rtol=1e-7, atol=1e-9)


@pytest.mark.guarantee
def test_a_closure_resumed(tmp_path):
    first, again = Fit(), Fit()
    trained(first, SaveIn("on_step_end", 2, tmp_path / "c"), train=loader(8))
    trained(again, train=loader(8), ckpt_path=tmp_path / "c")
    assert all(map(torch.equal, again.parameters(), first.parameters()))


@pytest.mark.parametrize(
    ("flags", "words"),
    [({"on_nonfinite": "skip"}, "on_nonfinite='skip'"), ({"precision": "16-mixed"}, "precision='16-mixed'")],
)
def test_what_a_closure_can_not_do(flags, words):
    with pytest.raises(ValueError, match=f"LBFGS steps with a closure and cannot run with {words}"):
        trained(Fit(), **flags)


def test_a_closure_without_a_loss():
    task = Fit()
    task.training_step = lambda batch, batch_idx: None
    with pytest.raises(ValueError, match=r"returned None.*an optimizer that calls training_step itself \(L-BFGS\)"):
        trained(task)


# -- steps of one's own ----------------------------------------------------------------------------------------------


class Own(Fit):
    """Warms up by hand, steps every second batch only, and scales its backward."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (batch_idx + 1)
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)

    def backward(self, loss, *args, **kwargs):
        (2 * loss).backward(*args, **kwargs)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.zeroed = batch_idx
        optimizer.zero_grad(set_to_none=False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_steps_of_ones_own():
    task = Own()
    assert trained(task, train=loader(4)).global_step == 6
    assert task.zeroed == 5
    right = Fit()
    optimizer = torch.optim.SGD(right.parameters(), lr=0.1)
    for _ in range(2):
        for index, (x,) in enumerate(loader(4)):
            if index % 2 == 0:
                optimizer.zero_grad()
                (2 * right.loss(x)).backward()
                optimizer.param_groups[0]["lr"] = 0.1 * (index + 1)
                optimizer.step()
    assert [p.tolist() for p in task.parameters()] == [p.tolist() for p in right.parameters()]


class LeavesOut(Own):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx == 0:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


def test_a_step_that_is_left_out_after_an_overflow_is_no_second_overflow():
    task = LeavesOut()
    task.loss = lambda x: (task.net(x.float())[:, 0] * 1e30).square().mean()
    trainer = trained(task.float(), train=loader(8), precision="16-mixed", max_epochs=1, on_nonfinite="ignore")
    assert (trainer.progress.skipped, trainer.global_step) == (1, 0)
