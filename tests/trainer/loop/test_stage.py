"""A stage ends on all ranks together."""

import re
from unittest.mock import Mock

import pytest
import torch
from support.callback_runs import Rows
from support.fit_runs import Recorder
from support.models import LoggedLine, loader, optimize
from support.processes import run, script
from support.trainers import make_trainer
from torch.utils.data import DataLoader
from treadle.callbacks import LambdaCallback, ModelCheckpoint, ProgressBar
from treadle.engine.checkpoint import CheckpointStore
from treadle.strategies.distributed.tracebacks import PeerFailed

import treadle


def fail_in_teardown():
    trainer = make_trainer(devices=2, max_steps=1)
    fails = trainer.global_rank == 1
    if fails:
        trainer.callbacks.append(raising("teardown", OSError("no such disk")))
    with pytest.raises(OSError if fails else PeerFailed, match="no such disk") as caught:
        trainer.fit(Simple(), loader())
    return str(caught.value)


@pytest.mark.long
def test_a_teardown_that_fails_on_one_rank_fails_on_all():
    assert run(fail_in_teardown, 2) == ["rank 1 failed: OSError: no such disk", "no such disk"]


# -- errors while a stage fails --------------------------------------------------------------------------------------


class Unreadable(Exception):
    """As some libraries' errors after pickling, or with missing arguments."""

    def __str__(self):
        raise RuntimeError("str fails")


class Simple(LoggedLine):
    def __init__(self, error=None):
        super().__init__()
        self.error = error

    def training_step(self, batch, batch_idx):
        if self.error is not None and batch_idx == 2:
            raise self.error
        return super().training_step(batch, batch_idx)


def raising(hook, error):
    return LambdaCallback(**{hook: Mock(side_effect=error)})


def endings(told):
    return [name for name in told if name in ("on_exception", "teardown")]


def fitted(task, *callbacks, **options):
    bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
    trainer = make_trainer(enable_progress_bar=bar, callbacks=list(callbacks), **options)
    trainer.fit(task, loader(4, 1))
    return trainer


@pytest.mark.guarantee
@pytest.mark.parametrize("hook", ["on_exception", "teardown"])
@pytest.mark.parametrize(
    "second", [KeyError("second"), SystemExit(0), GeneratorExit(), KeyboardInterrupt(), Unreadable()], ids=repr
)
def test_nothing_that_a_handler_raises_replaces_the_first_error(hook, second):
    told = []
    with pytest.raises(ValueError, match="first") as raised:
        fitted(Simple(ValueError("first")), raising(hook, second), Recorder(None, told))
    assert any(type(second).__name__ in note for note in raised.value.__notes__)
    interrupts = isinstance(second, KeyboardInterrupt)  # the user does not want to wait for the others
    assert endings(told) == [name for name in ("on_exception", "teardown") if name != hook or not interrupts]


@pytest.mark.parametrize("error", [SystemExit, IndexError])
def test_an_error_or_exit_in_the_teardown_of_a_stage_that_succeeded_is_one(error):
    told = []
    with pytest.raises(error, match="3"):
        fitted(Simple(), raising("teardown", error(3)), Recorder(None, told))
    assert endings(told) == ["teardown"]


@pytest.mark.guarantee
def test_an_error_whose_text_cannot_be_read_is_raised_and_handled(tmp_path):
    saving = ModelCheckpoint(tmp_path, save_on_exception=True, save_last=True)
    told = []
    with pytest.raises(Unreadable):
        fitted(Simple(Unreadable()), saving, Recorder(None, told), enable_checkpointing=True)
    assert endings(told) == ["on_exception", "teardown"]
    assert CheckpointStore(tmp_path).scan()[0][-1][0].step == 2


@pytest.mark.guarantee
def test_a_logger_or_bar_whose_error_cannot_be_read_is_only_disabled():
    bar, logger = ProgressBar(), Rows()
    bar.on_train_batch_end, logger.log_metrics = Mock(side_effect=Unreadable), Mock(side_effect=Unreadable)
    with pytest.warns(UserWarning, match="is disabled") as said:
        trainer = fitted(Simple(), bar, logger=logger, log_every_n_steps=1)
    assert trainer.global_step == 4
    assert bar.on_train_batch_end.call_count == 1
    texts = [str(one.message) for one in said]
    for start in ("ProgressBar failed and is disabled", "Rows.log_metrics failed, so the logger is disabled"):
        assert texts.count(f"{start}: Unreadable: <its __str__ raised RuntimeError>") == 1


@pytest.mark.guarantee
def test_a_bar_of_the_users_own_ends_the_run_only_if_it_is_strict():
    bar = ProgressBar()
    bar.setup = Mock(side_effect=RuntimeError("terminal lost"))
    with pytest.warns(UserWarning, match="ProgressBar failed and is disabled: RuntimeError: terminal lost"):
        assert fitted(Simple(), bar).global_step == 4
    bar.strict = True
    with pytest.raises(RuntimeError, match="terminal lost"):
        fitted(Simple(), bar)


EXITS = """
import sys, treadle
from treadle.compat.demos.boring_classes import BoringModel

class Task(BoringModel):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank in {ranks}:
            sys.exit({status})

treadle.Trainer(
    devices=2, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, timeout={{"seconds": 30}},
).fit(Task())
"""


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("ranks", "status", "returned", "said"),
    [
        ([1], 3, 3, ["rank 1 of 2 failed first: exit status 3"]),
        ([1], 0, 1, ["rank 1 of 2 failed first: exit status 0 before its stage had ended"]),
        ([0, 1], 0, 0, []),  # no failure
    ],
)
def test_an_exit_on_one_rank_is_no_hang(ranks, status, returned, said):
    ended = script(EXITS.format(ranks=ranks, status=status))
    assert ended.returncode == returned, ended.stderr
    assert re.findall(r"rank \d of 2 failed first: .*", ended.stderr) == said
    assert "no progress" not in ended.stderr


# -- gradients disabled around a stage -------------------------------------------------------------------------------


class Leaky(torch.utils.data.IterableDataset):
    """Samples from a generator that is suspended within ``no_grad``, which disables gradients for its caller."""

    def __iter__(self):
        for _ in range(6):
            with torch.no_grad():
                yield torch.ones(1)


class Modes(treadle.TaskModule):
    """Trains y = 2x by hand or not, and notes the grad mode of its hooks."""

    def __init__(self, manual, build):
        super().__init__()
        self.automatic_optimization = not manual
        self.build, self.modes = build, {}
        self.net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.net.weight)

    def training_step(self, batch, batch_idx):
        return optimize(self, (self.net(batch) - 2).square().mean())

    def validation_step(self, batch, batch_idx):
        self.modes["validation_step"] = torch.is_grad_enabled()

    def configure_optimizers(self):
        self.modes["configure_optimizers"] = torch.is_grad_enabled()
        return self.build(self.parameters())

    def on_train_start(self):
        self.modes["on_train_start"] = torch.is_grad_enabled()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(
    ("manual", "build"),
    [
        (False, lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
        (False, lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=1)),
        (True, lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    ],
)
@pytest.mark.parametrize("data", [torch.ones(6, 1), Leaky()])
def test_fit_trains_although_its_caller_or_its_data_disabled_gradients(around, manual, build, data):
    # Outside of the caller's mode: tensors made within inference_mode never take part in autograd.
    task, batches = Modes(manual, build), DataLoader(data, batch_size=2)
    with around():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        make_trainer().fit(task, batches, batches)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    plain = torch.zeros(1, requires_grad=True)
    optimizer = build([plain])

    def closure():
        optimizer.zero_grad()
        loss = (plain - 2).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert task.net.weight.item() == pytest.approx(plain.item())
    assert plain.item() > 0.1
    assert task.modes == {"configure_optimizers": True, "on_train_start": True, "validation_step": False}


class CountingLayer(torch.nn.Linear, treadle.Callback):
    """A layer of the task that counts the steps itself."""

    steps = 0

    def on_step_end(self, trainer, pl_module):
        self.steps += 1
        self.log("counted", float(self.steps))


def test_a_callback_may_be_a_module_of_the_task():
    task = Simple()
    task.net = CountingLayer(2, 1)
    names = [name for name, _ in task.named_modules()]
    task.configure_callbacks = lambda: [task.net]
    trainer = make_trainer(max_steps=2)
    trainer.fit(task, loader())
    assert (task.net.steps, trainer.logged_metrics["counted"]) == (2, 2)
    assert [name for name, _ in task.named_modules()] == names
