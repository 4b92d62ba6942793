"""What we save we can load: either a run says before its first step that it can't, or it all comes back as it was."""

import dataclasses
import enum
import gc
import math
import pathlib
import warnings
from collections import Counter, OrderedDict, defaultdict
from datetime import datetime, timedelta
from functools import partial

import numpy as np
import pytest
import torch
from support.models import Count, Line, loader
from support.trainers import make_trainer
from treadle.callbacks import Callback, ModelCheckpoint

import treadle


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int = 1


# Every kind of value, and its refusal, is a test of the codec.
STORABLE = {
    "containers": {("i", 1): [1, (2, None)], "$set": {1, "two", (3, None)}, "o": OrderedDict(c={0: b"4"}), "": []},
    "kinds of dicts": [defaultdict(list, {"k": [1]}), Counter("hello"), frozenset({pathlib.Path("x"), 2.5})],
    "numbers": [1 << 9000, -0.0, math.nan, -math.inf, complex(math.nan, 1.0), np.float32(0.1), np.bool_(True)],
    "texts and times": ["ä\udc80\0", np.str_("n"), timedelta(days=-1, microseconds=7), datetime(2026, 1, 2, 3, 4, 5)],
    "of torch": [torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), torch.zeros(3, requires_grad=True)],
    "arrays": [np.arange(6).reshape(2, 3)[:, ::-1], np.zeros((0, 3)), torch.arange(6).reshape(2, 3).t().bfloat16()],
}
HOPELESS = {  # what no file can hold, or only as something else
    "a function in a dict": [1, {"b": lambda: None}],
    "a module": torch.nn.Linear(1, 1),
    "a dataclass": Point(),
    "an array of objects": np.array([object()]),
    "a sparse tensor": torch.eye(2).to_sparse(),
    "a tensor without values": torch.zeros(1, device="meta"),
    "a key": {torch.zeros(1): 1},
    "an iterator": iter([1]),
}


def same(one, other):
    """Equal to the bit, of one type. Kinds of dicts count as one, which is what a file can keep."""
    if isinstance(one, dict):
        kind = isinstance(other, dict) and isinstance(one, Counter) == isinstance(other, Counter)
        return kind and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor | np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    # Also nan, and the sign of zero.
    return repr(one) == repr(other) if isinstance(one, float | complex) else one == other


class Task(Line):
    def __init__(self, setting=None, other=1):
        super().__init__()
        self.save_hyperparameters()


class Stateful:
    steps = 0

    def __init__(self, state=None):
        super().__init__()
        self.held = state

    def state_dict(self):
        return {"held": self.held}

    def load_state_dict(self, state_dict):
        self.held = state_dict["held"]


class Holds(Stateful, Callback):
    def on_train_batch_start(self, *_):
        self.steps += 1


class Data(Stateful, treadle.DataModule):
    def train_dataloader(self):
        return loader()


def made(root, *callbacks, **flags):
    return make_trainer(**{"default_root_dir": root, "enable_checkpointing": None, **flags}, callbacks=list(callbacks))


# -- anything at all -----------------------------------------------------------------------------------------------


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("one", "other"),
    [*zip(STORABLE, reversed(STORABLE), strict=True), *((name, "numbers") for name in HOPELESS), ("numbers", "a key")],
)
def test_a_callbacks_and_a_data_modules_state(tmp_path, one, other):
    states = [(STORABLE | HOPELESS)[name] for name in (one, other)]
    holds, data = Holds(states[0]), Data(states[1])
    if HOPELESS.keys() & {one, other}:
        owner = "Holds" if one in HOPELESS else "Data"
        with pytest.raises((TypeError, ValueError), match=f"{owner} cannot be saved in a checkpoint"):
            made(tmp_path, holds, ModelCheckpoint(tmp_path / "c")).fit(Task(), datamodule=data)
        assert (holds.steps, list((tmp_path / "c").glob("*"))) == (0, [])
        return
    made(tmp_path, holds, ModelCheckpoint(tmp_path / "c")).fit(Task(), datamodule=data)
    again, data = Holds(), Data()
    made(tmp_path, again, ModelCheckpoint(tmp_path / "c"), max_epochs=2).fit(Task(), datamodule=data, ckpt_path="last")
    assert again.steps == 2
    assert same(again.held, states[0])
    assert same(data.held, states[1])


@pytest.mark.guarantee
@pytest.mark.parametrize("name", [*STORABLE, *HOPELESS, "an enum's member"])
def test_hyperparameters(tmp_path, name):
    """`hparams` holds what was passed. What can't be stored is dropped, with one warning that names it; the rest comes
    back as it was."""
    setting = (STORABLE | HOPELESS | {"an enum's member": Colour.RED})[name]
    task = Task(setting, other=2)
    assert list(task.hparams) == ["setting", "other"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made(tmp_path, ModelCheckpoint(tmp_path / "c")).fit(task, loader())
        named = [str(w.message) for w in caught if "checkpoints cannot store setting" in str(w.message)]
        del task, caught[:]
        gc.collect()  # as in another process, which does not have the task's objects
        again = Task.load_from_checkpoint(tmp_path / "c" / "epoch=0-step=2.ckpt")
    assert len(named) == (name in HOPELESS)
    assert len(caught) == len(named) == sum("does not contain setting" in str(w.message) for w in caught)
    assert list(again.hparams) == ["setting", "other"]  # one that was dropped has its default
    assert again.hparams["other"] == 2
    assert again.hparams["setting"] is None if named else same(again.hparams["setting"], setting)


# -- what the error says -------------------------------------------------------------------------------------------


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": [1, {"b": lambda: None}]}, [r"Holds", r"held\.a\.1\.b", "function", "store its name"]),
        ({"m": torch.nn.Linear(1, 1)}, ["Holds", r"held\.m", "Linear", r"store its \.state_dict"]),
        (Colour.RED, ["Holds", "held", "Colour", r"\.name or \.value"]),
        (Point(), ["Holds", "held", "Point", r"dataclasses\.asdict"]),
    ],
)
def test_the_error_names_owner_place_type_and_fix(tmp_path, state, words):
    holds = Holds(state)
    with pytest.raises(TypeError, match=".*".join(words)):
        made(tmp_path, holds, ModelCheckpoint(tmp_path / "c")).fit(Task(), loader())
    assert holds.steps == 0


class Scheduler(torch.optim.lr_scheduler.StepLR):
    def state_dict(self):
        return super().state_dict() | {"own": object()}


class Schedules(Task):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [Scheduler(optimizer, 1)]


class Functions(Task):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scheduler.get_lr = partial(scheduler.get_lr)
        return [optimizer], [scheduler]


def test_a_function_of_a_scheduler_is_left_out(tmp_path):
    with pytest.warns(UserWarning, match="StepLR contains functions, which are not saved: get_lr") as warned:
        made(tmp_path, ModelCheckpoint(tmp_path / "c")).fit(Functions(), loader())
    assert sum("contains functions" in str(w.message) for w in warned) == 1
    made(tmp_path, max_epochs=2).fit(Functions(), loader(), ckpt_path=tmp_path / "c" / "epoch=0-step=2.ckpt")


class Groups(Task):
    def configure_optimizers(self):
        return torch.optim.SGD([{"params": self.net.parameters(), "what": object()}], lr=0.1)


class Extra(Task):
    def get_extra_state(self):
        return {"own": object()}


def test_a_hyperparameter_that_was_added_later_is_dropped_too(tmp_path):
    task = Task()
    task.hparams["late"] = object()
    with pytest.warns(UserWarning, match=r"Task\.hparams: checkpoints cannot store late \(object\)\. Pass late=\.\.\."):
        made(tmp_path, ModelCheckpoint(tmp_path / "c")).fit(task, loader())
    again = Task.load_from_checkpoint(tmp_path / "c" / "epoch=0-step=2.ckpt")
    assert (again.hparams.setting, again.hparams.other) == (None, 1)


class Registers(Task):
    def on_fit_start(self):
        self.trainer.accelerator.register_for_checkpointing(mine=Count(object()))


@pytest.mark.parametrize(
    ("task", "owner"),
    [(Schedules, "Scheduler"), (Groups, "SGD.param_groups"), (Extra, "get_extra_state"), (Registers, "'mine'")],
)
def test_everything_that_is_saved_is_looked_at(tmp_path, task, owner):
    holds = Holds()
    with pytest.raises(TypeError, match=f"{owner}.*can't (go into|be stored in) a checkpoint"):
        made(tmp_path, holds, ModelCheckpoint(tmp_path / "c")).fit(task(), loader())
    assert holds.steps == 0


class Adds(Callback):
    """`on_save_checkpoint` may count or write something, so it is called when there is a checkpoint to make."""

    def __init__(self, added):
        self.added = added
        self.calls = []

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.calls.append(trainer.global_step)
        checkpoint["added"] = self.added


def test_what_hooks_add_is_looked_at_in_the_first_save(tmp_path):
    adds = Adds(1)
    made(tmp_path, adds, ModelCheckpoint(tmp_path / "c")).fit(Task(), loader())
    assert adds.calls == [2]
    adds = Adds(torch.ones(2).to_sparse())  # data would be lost
    with pytest.raises(TypeError, match=r"added is a torch.sparse_coo tensor"):
        made(tmp_path, adds, ModelCheckpoint(tmp_path / "c")).fit(Task(), loader())
    assert adds.calls == [2]
    adds, saver = Adds(object()), ModelCheckpoint(tmp_path / "d", save_top_k=-1, every_n_train_steps=1)
    with pytest.warns(UserWarning, match=r"adds added \(object\), which checkpoints cannot store") as said:
        made(tmp_path, adds, saver).fit(Task(), loader())
    assert adds.calls == [1, 2]
    assert sum("adds added" in str(one.message) for one in said) == 1


def test_a_run_that_saves_nothing_may_hold_anything(tmp_path):
    holds = Holds(object())
    made(tmp_path, holds, enable_checkpointing=False).fit(Task(), loader())
    made(tmp_path, holds, ModelCheckpoint(tmp_path / "c", save_top_k=0)).fit(Task(), loader())
    assert holds.steps == 4
