"""Every way to compute and apply gradients in manual optimization, against the same code in a plain loop."""

import contextlib
import functools
import types

import pytest
import torch
from support.models import gathered
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import ModelCheckpoint
from treadle.loggers import CSVLogger
from treadle.strategies import DDP, FSDP

import treadle

SAMPLES, BATCH, EPOCHS = 15, 4, 2  # the last batch of 3 is uneven over two processes


def data():
    x = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True).sin()


def loader(processes=1):
    return DataLoader(TensorDataset(*data()), BATCH // processes)


class Form(treadle.TaskModule):
    """Its ``norms`` are what a user sees between a backward pass and the step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.norms = []

    def loss(self, batch):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def build(self):
        return torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.5)

    def configure_optimizers(self):
        self.own = self.build()
        return self.own

    def choose(self):
        return self.optimizers()

    def compute(self, batch):
        self.manual_backward(self.loss(batch))

    def training_step(self, batch, batch_idx):
        optimizer = self.choose()
        optimizer.zero_grad()
        self.compute(batch)
        self.note_norm()
        optimizer.step()

    def note_norm(self):
        self.norms.append(torch.stack([p.grad.norm() for p in self.net.parameters()]).norm().item())

    def clip(self):
        self.norms.append(nn.utils.clip_grad_norm_(self.net.parameters(), 0.1).item())


# -- which optimizer steps -------------------------------------------------------------------------------------------


class Attribute(Form):
    def choose(self):
        return self.own


class Unwrapped(Form):
    def choose(self):
        return self.optimizers(use_pl_optimizer=False)


class OfTrainer(Form):
    def choose(self):
        return self.trainer.optimizers[0]


class NotReturned(Attribute):
    def configure_optimizers(self):
        self.own = self.build()


class ReplacedLater(Attribute):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.own = torch.optim.Adam(self.net.parameters(), 0.05)
        super().training_step(batch, batch_idx)


class WithArguments(Form):
    class Optimizer(torch.optim.SGD):
        def step(self, closure=None, *, factor=1.0):
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.mul_(factor)
            return super().step(closure)

    def build(self):
        return self.Optimizer(self.net.parameters(), 0.1)

    def training_step(self, batch, batch_idx):
        self.zero_grad()
        self.compute(batch)
        self.optimizers().step(factor=0.5)


class OutsideParameters(Form):
    """A tensor that is no parameter of the task, such as the temperature of SAC."""

    def __init__(self):
        super().__init__()
        self.temperature = torch.zeros(1, dtype=torch.float64, requires_grad=True)

    def build(self):
        return torch.optim.SGD([*self.net.parameters(), self.temperature], 0.1)

    def loss(self, batch):
        return super().loss(batch) * self.temperature.exp() - (self.temperature * batch[0].mean()).sum()


class LayerOfTheFirstStep(Attribute):
    def loss(self, batch):
        if not hasattr(self, "late"):
            self.late = nn.Linear(3, 1).double()
            nn.init.constant_(self.late.weight, 0.1)
            nn.init.zeros_(self.late.bias)
            self.second = torch.optim.SGD(self.late.parameters(), 0.1)
        return super().loss(batch) + self.late(batch[0]).square().mean()

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.second.step()
        self.second.zero_grad()


class UnfrozenLater(Form):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.net[0].requires_grad_(batch_idx > 1)
        super().training_step(batch, batch_idx)

    def note_norm(self):
        self.norms.append(sum(gathered(p.grad.norm()).item() for p in self.net.parameters() if p.grad is not None))


class StepsInAHook(Form):
    def training_step(self, batch, batch_idx):
        self.zero_grad()
        self.compute(batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.own.step()


class Sam(torch.optim.Optimizer):
    """Two steps per batch, the second by an optimizer inside (Foret et al., 2020)."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, 0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["before"] = parameter.clone()
            parameter.add_(0.05 * parameter.grad / norm)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.state[parameter]["before"])
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        self.first_step()
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss


class SamInTwoSteps(Form):
    def build(self):
        return Sam(self.net.parameters())

    def training_step(self, batch, batch_idx):
        self.compute(batch)
        self.choose().first_step()
        self.compute(batch)
        self.note_norm()
        self.choose().second_step()


def owned(kind):
    """The form whose optimizer is an attribute of the task's."""
    return type(f"Own{kind.__name__}", (kind,), {"choose": Attribute.choose})


OwnSamInTwoSteps = owned(SamInTwoSteps)


class SamWithClosure(SamInTwoSteps):
    def training_step(self, batch, batch_idx):
        self.compute(batch)
        self.choose().step(lambda: self.compute(batch))


class Closure(Form):
    def training_step(self, batch, batch_idx):
        optimizer = self.choose()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


OwnClosure = owned(Closure)


class Lbfgs(Closure):
    """Its line search reads the loss, which differs between the ranks."""

    def build(self):
        return torch.optim.LBFGS(self.net.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")


OwnLbfgs = owned(Lbfgs)


class ByHand(Form):
    def configure_optimizers(self):
        return None

    def training_step(self, batch, batch_idx):
        self.zero_grad()
        self.compute(batch)
        self.update()

    @torch.no_grad()
    def update(self):
        for parameter in self.net.parameters():
            parameter -= 0.1 * parameter.grad


class ByHandOnData(ByHand):
    def update(self):
        for parameter in self.net.parameters():
            parameter.data -= 0.1 * parameter.grad


# -- what happens to gradients before the step -----------------------------------------------------------------------


class Clipped(Form):
    note_norm = Form.clip


class ScaledInHook(Form):
    def on_after_backward(self):
        self.note_norm()
        for parameter in self.net.parameters():
            parameter.grad.div_(self.norms[-1])


class SeveralPasses(Form):
    def compute(self, batch):
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.note_norm()
        for parameter in self.net.parameters():
            parameter.grad.mul_(0.7)
        self.manual_backward(0.3 * loss)
        self.loss(batch).backward()
        self.manual_backward(self.net[2].weight.square().sum())  # of one parameter only


class AssignedGradients(Form):
    def compute(self, batch):
        parameters = list(self.net.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(self.loss(batch), parameters), strict=True):
            parameter.grad = gradient

    def note_norm(self):
        """Until the step, these gradients are each rank's own."""


class CombinedGradients(Form):
    """Gradients of several losses are combined, as in gradient surgery."""

    def compute(self, batch):
        parameters = list(self.net.parameters())
        self.manual_backward(self.loss(batch))
        first = [parameter.grad for parameter in parameters]
        self.zero_grad()
        self.manual_backward(self.net(batch[0]).square().mean())
        for parameter, gradient in zip(parameters, first, strict=True):
            parameter.grad = gradient + 0.5 * parameter.grad


class Recomputed(Form):
    def loss(self, batch):
        inputs = batch[0].clone().requires_grad_()
        return (checkpoint(self.net, inputs, use_reentrant=True) - batch[1]).square().mean()


class Accumulated(Form):
    """The layer ``extra`` is used in the first micro-batch only, whose gradients may not be averaged yet."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(3, 1).double()

    def build(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)

    def training_step(self, batch, batch_idx):
        last = batch_idx % 2 == 1
        with self.context(last):
            self.manual_backward(self.loss(batch) + (0 if last else self.extra(batch[0]).square().mean()))
        if last:
            self.norms.append(nn.utils.clip_grad_norm_(self.parameters(), 0.1).item())
            self.step()
            self.zero_grad()

    def context(self, last):
        return contextlib.nullcontext()

    def step(self):
        self.optimizers().step()


class AccumulatedByOptimizer(Accumulated):
    def context(self, last):
        return self.optimizers().toggle_model(sync_grad=last)


class AccumulatedByModel(Accumulated):
    def context(self, last):
        model = self.trainer.model
        return contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


class AccumulatedToTheStep(Accumulated):
    def training_step(self, batch, batch_idx):
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss(batch))
        if batch_idx:
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.clamp_(-0.4, 0.4)  # the same on all ranks
        if batch_idx % 2:
            self.own.step()
            self.own.zero_grad()


class TwoNetworks(Form):
    """One network steps in each batch, the other in every third; without toggling, both get all gradients."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Linear(1, 1).double()

    def configure_optimizers(self):
        self.own = [torch.optim.Adam(self.net.parameters(), 0.05), torch.optim.SGD(self.critic.parameters(), 0.1)]
        return self.own

    def training_step(self, batch, batch_idx):
        first, second = self.choose()
        output = self.net(batch[0])
        second.zero_grad()
        self.manual_backward((self.critic(batch[1]) - 1).square().mean() + self.critic(output.detach()).square().mean())
        self.norms.append(self.critic.weight.grad.norm().item())
        second.step()
        self.manual_backward((self.critic(output) - 1).square().mean())
        if batch_idx % 3 == 2:
            self.clip()
            first.step()
            first.zero_grad()


OwnTwoNetworks = owned(TwoNetworks)


class GradientPenalty(TwoNetworks):
    def training_step(self, batch, batch_idx):
        inputs = batch[1].clone().requires_grad_()
        score = self.critic(inputs).tanh()
        (slope,) = torch.autograd.grad(score.sum(), inputs, create_graph=True)
        self.zero_grad()
        self.manual_backward(score.mean() + (slope.square() - 1).square().mean())
        self.optimizers()[1].step()
        with torch.no_grad():
            for parameter in self.critic.parameters():
                parameter.clamp_(-0.5, 0.5)


class PenaltyAlone(GradientPenalty):
    """The backward pass of the penalty does not reach the critic's results."""

    def training_step(self, batch, batch_idx):
        inputs = batch[1].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(inputs).sum(), inputs, create_graph=True)
        self.manual_backward((slope.square() - 1).square().mean())
        self.optimizers()[1].step()
        self.zero_grad()
        if batch_idx == 1:  # a graph that no pass uses
            torch.autograd.grad(self.critic(inputs).sum(), inputs, create_graph=True)


FORMS = {
    kind.__name__: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Form) and kind is not Sam
}


def by_hand(kind):
    """The task's code in a plain loop on the joint batches, where what belongs to the Trainer does the obvious."""
    task = kind()
    task.configure_optimizers()
    optimizers = task.own if isinstance(getattr(task, "own", None), list) else [getattr(task, "own", None)]
    for optimizer in filter(None, optimizers):
        optimizer.toggle_model = lambda sync_grad: contextlib.nullcontext()
    strategy = types.SimpleNamespace(block_backward_sync=contextlib.nullcontext)
    task.__class__ = type(
        kind.__name__,
        (kind,),
        {
            "trainer": types.SimpleNamespace(optimizers=optimizers, strategy=strategy, model=task),
            "optimizers": lambda _, use_pl_optimizer=True: optimizers if len(optimizers) > 1 else optimizers[0],
            "manual_backward": lambda task, loss, **kwargs: (loss.backward(**kwargs), task.on_after_backward()),
        },
    )
    x, y = data()
    for _ in range(EPOCHS):
        for index, batch in enumerate(zip(x.split(BATCH), y.split(BATCH), strict=True)):
            task.training_step(batch, index)
            task.on_train_batch_end(None, batch, index)
    return [p.detach() for p in task.parameters()], task.norms


def fit(kind, processes=1, **flags):
    task = kind()
    done = make_trainer(max_epochs=EPOCHS, precision="64-true", **flags)
    done.fit(task, loader(processes))
    return list(map(gathered, task.parameters())), task.norms, done.global_step


def check(found, kind):
    (weights, norms, steps), (right, right_norms) = found, by_hand(kind)
    for weight, expected in zip(weights, right, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-12)
    assert norms == pytest.approx(right_norms, rel=1e-9)
    assert steps == (4 if issubclass(kind, Accumulated) else 8)


@pytest.mark.filterwarnings("ignore:.*returned no optimizer")
@pytest.mark.parametrize("name", FORMS)
def test_on_one_process(name):
    check(fit(FORMS[name]), FORMS[name])


def fit_each(strategies):
    found = {}
    for strategy in strategies:
        options = {"ddp": "ddp", "zero": DDP(zero=True)}.get(strategy) or FSDP()
        found |= {(name, strategy): fit(FORMS[name], 2, devices=2, strategy=options) for name in TRAINED[strategy]}
    for name, words in NOT_SHARDED.items():
        with pytest.raises(ValueError, match=words):
            fit(FORMS[name], 2, devices=2, strategy=FSDP())
    return found


NOT_SHARDED = {
    "OutsideParameters": "does not belong to a prepared model",
    "LayerOfTheFirstStep": "has not sharded, so its gradient is that of one rank",
    "Lbfgs": "LBFGS needs full parameters",
    "OwnLbfgs": "LBFGS needs full parameters",
    "SeveralPasses": "used outside of the forward pass of its submodule",
    "AssignedGradients": "torch.autograd.grad can't compute gradients with respect to parameters",
}


# What differs with shards: who holds the optimizer, how many there are, and steps that evaluate the loss again.
SHARDED = ("Form", "Attribute", "OwnTwoNetworks", "SamInTwoSteps", "OwnClosure", "Accumulated", "Clipped")
TRAINED = {"ddp": [*FORMS], "zero": ["Form", "Attribute", "OwnTwoNetworks"], "fsdp": SHARDED}
TRAINED["more fsdp"] = [name for name in FORMS if name not in (*NOT_SHARDED, *SHARDED)]


@functools.cache
def fit_on_two_processes(*strategies):
    return run(fit_each, 2, strategies)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*returned no optimizer")
@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        pytest.param(strategy, name, marks=pytest.mark.exhaustive if strategy == "more fsdp" else ())
        for strategy, names in TRAINED.items()
        for name in names
    ],
)
def test_on_two_processes(strategy, name):
    together = ("more fsdp",) if strategy == "more fsdp" else ("ddp", "zero", "fsdp")
    first, second = (ranks[name, strategy] for ranks in fit_on_two_processes(*together))
    assert all(map(torch.equal, first[0], second[0]))
    check(first, FORMS[name])


# -- what the loop does with any step --------------------------------------------------------------------------------

GUARDED = [Form, Attribute, Unwrapped, NotReturned, Closure, OwnClosure]
STEPS = [*GUARDED, OfTrainer, SamInTwoSteps, OwnSamInTwoSteps, ByHand]


@pytest.mark.filterwarnings("ignore:.*returned no optimizer")
@pytest.mark.parametrize("kind", STEPS)
def test_steps_are_counted_saved_and_logged(kind, tmp_path):
    class Logged(kind):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            self.log("loss", self.loss(batch))

    saving = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=2, save_top_k=-1)
    flags = {"max_epochs": 9, "max_steps": 7, "precision": "64-true", "log_every_n_steps": 1}
    logged = {"enable_checkpointing": True, "callbacks": [saving], "logger": CSVLogger(tmp_path / "logs")}
    first, done = Logged(), make_trainer(**flags, **logged)
    done.fit(first, loader())
    assert done.global_step == 7
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [f"step={n}.ckpt" for n in (2, 4, 6)]
    (rows,) = (tmp_path / "logs").rglob("metrics.csv")
    assert len(rows.read_text().splitlines()) == 1 + 7

    if kind in (OfTrainer, *GUARDED) and kind is not NotReturned:  # whose optimizer state is saved
        again = Logged()
        make_trainer(**flags).fit(again, loader(), ckpt_path=tmp_path / "saved" / "step=2.ckpt")
        assert all(map(torch.equal, first.parameters(), again.parameters()))


def spoil(kind, spoilt):
    """Returns a task whose loss is not finite in batch ``spoilt`` on rank zero."""

    class Spoilt(kind):
        def loss(self, batch):
            is_bad = self.trainer.fit_loop.batch_idx == spoilt and self.global_rank == 0
            return super().loss(batch) * (float("nan") if is_bad else 1.0)

    return Spoilt()


def skip_by_hand(kind):
    class Skips(kind):
        def training_step(self, batch, batch_idx):
            if batch_idx != 2:
                super().training_step(batch, batch_idx)

    return by_hand(Skips)[0]


def fit_spoilt(processes, **flags):
    """By kind: what is left of a run that skips the step, whose weights stay finite where it raises instead."""
    found = []
    flags = {"max_epochs": EPOCHS, "precision": "64-true", "devices": processes, **flags}
    for kind in GUARDED:
        task, done = spoil(kind, 2), make_trainer(on_nonfinite="raise", **flags)
        with pytest.raises(ValueError, match=r"not finite on rank 0 in optimizer step 3"):
            done.fit(task, loader(processes))
        assert done.global_step == 2
        assert all(gathered(weight).isfinite().all() for weight in task.parameters())
        task, done = spoil(kind, 2), make_trainer(on_nonfinite="skip", **flags)
        done.fit(task, loader(processes))
        found.append((list(map(gathered, task.parameters())), done.global_step, done.progress.skipped))
    return found


def fit_spoilt_on_two():
    """Rank one's last layer has no element of the bias, and its loss is finite, unlike rank zero's."""
    float16 = [fit_float16(Float16, devices=2, strategy=make()) for make in (DDP, FSDP)]
    return fit_spoilt(2), fit_spoilt(2, strategy=FSDP()), float16


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*returned no optimizer")
@pytest.mark.parametrize("processes", [1, 2])
def test_the_step_of_a_loss_that_is_not_finite_is_an_error_or_skipped(processes):
    if processes == 1:
        runs = [fit_spoilt(1), fit_spoilt(1, strategy=FSDP())]
    else:
        *runs, float16 = run(fit_spoilt_on_two, 2)[1]
        for weights in float16:
            torch.testing.assert_close(weights, float16_by_hand(processes=2))
    for found in runs:
        for kind, (weights, steps, skipped) in zip(GUARDED, found, strict=True):
            assert (kind, steps, skipped) == (kind, 6, 2)
            for weight, expected in zip(weights, skip_by_hand(kind), strict=True):
                torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*returned no optimizer")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OwnLbfgs, r"LBFGS steps with a closure and cannot run with on_nonfinite='skip'"),
        (ByHand, r"updated parameters without an optimizer in step 2.* not finite any more"),
        (owned(SamWithClosure), r"gradients of Sam are not finite.* Step that optimizer"),  # through the wrapper
    ],
)
def test_a_step_that_cannot_be_skipped_is_an_error(kind, words):
    with pytest.raises(ValueError, match=words):
        make_trainer(precision="64-true", on_nonfinite="skip").fit(spoil(kind, 1), loader())


class Float16(Form):
    """In float16, the gradients of the third batch overflow with any scale."""

    def __init__(self):
        super().__init__()
        self.net.float()

    def loss(self, batch):
        output = self.net(batch[0].float())
        return (output - batch[1].float()).square().mean() * (1e38 if self.trainer.fit_loop.batch_idx == 2 else 1.0)

    def note_norm(self):
        """The gradients are scaled here."""


class ClippedFloat16(Float16):
    """The optimizer inside the returned one steps on gradients that were unscaled for the returned one."""

    def build(self):
        return Sam(self.net.parameters())

    def training_step(self, batch, batch_idx):
        self.zero_grad()
        self.compute(batch)
        self.clip_gradients(self.optimizers(), 0.1)
        self.find_inner().step()

    def find_inner(self):
        return self.own.base


class BothClippedFloat16(ClippedFloat16):
    def build(self):
        return torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)

    def find_inner(self):
        return self.optimizers()


def fit_float16(kind, devices=1, **flags):
    task = kind()
    done = make_trainer(max_epochs=EPOCHS, precision="16-mixed", devices=devices, **flags)
    done.fit(task, loader(devices))
    assert (done.global_step, done.progress.skipped) == (5, 3)  # the first batch overflows with the first scale
    assert done.scaler.get_scale() == 2.0**13
    return list(map(gathered, task.parameters()))


def float16_by_hand(processes):
    """Loop of torch alone, in which each process has a share of the batch, and the mean over it as its loss."""
    net = Form().net.float()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(EPOCHS):
        for index, batch in enumerate(zip(*(values.float().split(BATCH) for values in data()), strict=True)):
            for x, y in zip(*(values.chunk(processes) for values in batch), strict=True):
                with torch.autocast("cpu", torch.float16):
                    loss = (net(x) - y).square().mean() * (1e38 if index == 2 else 1.0)
                scaler.scale(loss * processes * len(x) / len(batch[0])).backward()
            for parameter in net.parameters():
                parameter.grad /= processes
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [p.detach() for p in net.parameters()]


def test_float16_with_any_optimizer():
    results = [fit_float16(kind) for kind in (Float16, owned(Float16), BothClippedFloat16, ClippedFloat16)]
    torch.testing.assert_close(results[0], float16_by_hand(processes=1), rtol=0, atol=0)
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[2], results[3]))


class SamInBfloat16(SamInTwoSteps):
    def __init__(self):
        super().__init__()
        self.net.float()

    def loss(self, batch):
        output = self.net(batch[0].float())
        assert output.dtype == torch.bfloat16
        self.norms.append(output.detach().float().norm().item())
        return (output - batch[1].float()).square().mean()

    def note_norm(self):
        assert self.norms[-1] != self.norms[-2]  # the second pass is at other weights


def test_weights_that_autocast_has_cast_are_not_used_after_an_update():
    task = SamInBfloat16()
    make_trainer(max_epochs=1, precision="bf16-mixed").fit(task, loader())
    assert len(task.norms) == 2 * len(loader())  # of two passes in each step, which `note_norm` compares


class ReplacedInTrainer(Form):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.trainer.optimizers = [torch.optim.Adam(self.net.parameters(), 0.05)]
        super().training_step(batch, batch_idx)


def test_the_trainers_optimizers_can_be_replaced():
    for weight, expected in zip(fit(ReplacedInTrainer)[0], fit(ReplacedLater)[0], strict=True):
        assert torch.equal(weight, expected)


class BetweenBatches(Form):
    def training_step(self, batch, batch_idx):
        self.batch = batch

    def on_train_epoch_end(self):
        for _ in range(3):
            super().training_step(self.batch, 0)


def test_steps_between_batches_count():
    assert fit(BetweenBatches)[2] == 3 * EPOCHS


def test_hooks_run_once_per_step():
    for kind, calls in ((Form, 8), (Attribute, 8), (SamWithClosure, 8), (OwnTwoNetworks, 10)):
        seen = []

        class Seen(kind):
            def on_before_optimizer_step(self, optimizer, seen=seen):
                seen.append(optimizer)

        fit(Seen)
        assert len(seen) == calls
        assert not any(isinstance(optimizer, treadle.engine.optim.PreparedOptimizer) for optimizer in seen)


def test_hooks_of_an_earlier_run_are_gone():
    task, seen = Form(), []
    kept = task.build()
    task.configure_optimizers = lambda: kept
    task.on_before_optimizer_step = lambda optimizer: seen.append(optimizer)
    for runs in (1, 2, 3):
        make_trainer(precision="64-true").fit(task, loader())
        assert len(seen) == 4 * runs
    assert not kept._optimizer_step_pre_hooks


class StepsACopy(Form):
    """An optimizer of other parameters, as of a model that is adapted to the batch, is left alone."""

    def training_step(self, batch, batch_idx):
        other = nn.Linear(3, 1).double()
        torch.optim.SGD(other.parameters(), 0.1).step()
        if batch_idx == 1:
            super().training_step(batch, batch_idx)


def test_an_optimizer_of_other_parameters_does_not_count():
    assert fit(StepsACopy)[2] == EPOCHS
