"""What we save we can load: either a run says before its first step that it can't, or it all comes back as it was."""

import dataclasses
import enum
import gc
import math
import pathlib
import random
import warnings
from collections import Counter, OrderedDict, defaultdict
from datetime import date, datetime, timedelta

import numpy as np
import pytest
import torch
from support.models import Line, loader
from support.trainers import make_trainer
from torch import nn
from treadle.callbacks import Callback, ModelCheckpoint
from treadle.engine.checkpoint.json_codec import encode

import treadle


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int = 1


LEAVES = [
    lambda r: r.choice([None, True, False]),
    lambda r: r.randint(-5, 5),
    lambda r: r.choice([-1, 1]) << r.randint(50, 9000),
    lambda r: r.choice([0.1, -0.0, math.nan, math.inf, -math.inf, 5e-324]),
    lambda r: complex(r.choice([0.0, math.nan]), 1.0),
    lambda r: r.choice(["", "text", "$tuple", "ä\udc80\0", "a" * 300]),
    lambda r: r.randbytes(r.randint(0, 9)),
    lambda r: pathlib.Path("a") / "b c",
    lambda r: pathlib.PureWindowsPath("C:\\x"),
    lambda r: timedelta(days=-1, microseconds=7),
    lambda r: r.choice([date(2026, 1, 2), datetime(2026, 1, 2, 3, 4, 5, 6)]),
    lambda r: r.choice([torch.bfloat16, torch.float64]),
    lambda r: torch.device("cpu"),
    lambda r: torch.Size([2, 3]),
    lambda r: np.float32(0.1),
    lambda r: np.int8(-7),
    lambda r: np.bool_(True),
    lambda r: np.str_("n"),
    lambda r: np.arange(6).astype(r.choice(["int16", "float64", "complex64", "bool"])).reshape(2, 3)[:, ::-1],
    lambda r: np.zeros((0, 3)),
    lambda r: torch.arange(6.0).reshape(2, 3).t().to(r.choice([torch.bfloat16, torch.float16, torch.int64])),
    lambda r: torch.tensor([math.nan, math.inf]),
    lambda r: torch.zeros(3, requires_grad=True),
    lambda r: torch.tensor(1 + 2j).conj(),
]
# What no file can hold, or only as something else.
HOPELESS = [
    lambda r: lambda: None,
    lambda r: nn.Linear(1, 1),
    lambda r: Colour.RED,
    lambda r: Point(),
    lambda r: object(),
    lambda r: np.array([object()]),
    lambda r: np.datetime64("2026-01-01"),
    lambda r: torch.eye(2).to_sparse(),
    lambda r: torch.zeros(1, device="meta"),
    lambda r: {torch.zeros(1): 1},
    lambda r: random.Random(1),
    lambda r: iter([1]),
]
CONTAINERS = [
    lambda r, items: items,
    lambda r, items: tuple(items),
    lambda r, items: {f"k{i}": item for i, item in enumerate(items)},
    lambda r, items: {(i, "t"): item for i, item in enumerate(items)},
    lambda r, items: {i if i else "$set": item for i, item in enumerate(items)},
    lambda r, items: OrderedDict(enumerate(items)),
    lambda r, items: defaultdict(list, {"k": items}),
    lambda r, items: {1, "two", (3, None), b"4"},
    lambda r, items: frozenset({pathlib.Path("x"), 2.5}),
    lambda r, items: Counter("hello"),
]


def generate(r, depth=3, hopeless=0.04):
    """A random state; also says nothing of whether it can be stored."""
    if r.random() < hopeless:
        return r.choice(HOPELESS)(r)
    if not depth or r.random() < 0.4:
        return r.choice(LEAVES)(r)
    return r.choice(CONTAINERS)(r, [generate(r, depth - 1, hopeless) for _ in range(r.randint(0, 3))])


def same(one, other):
    """Equal to the bit, of one type. Kinds of dicts count as one, which is what a file can keep."""
    if isinstance(one, dict):
        kind = isinstance(other, dict) and isinstance(one, Counter) == isinstance(other, Counter)
        return kind and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        equal = torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        return one.dtype == other.dtype and one.shape == other.shape and equal
    if isinstance(one, np.ndarray):
        equal = np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
        return one.dtype == other.dtype and one.shape == other.shape and equal
    if isinstance(one, float):
        return repr(one) == repr(other)  # also nan, and the sign of zero
    return repr(one) == repr(other) if isinstance(one, complex) else one == other


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


def refusal(work):
    """What ``work`` raises, in words; "" if it goes through."""
    try:
        work()
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


# -- anything at all -----------------------------------------------------------------------------------------------


@pytest.mark.guarantee
@pytest.mark.parametrize("seed", range(25))
def test_a_callbacks_and_a_data_modules_state(tmp_path, seed):
    r = random.Random(seed)
    states = generate(r), generate(r)
    kept = ModelCheckpoint(tmp_path / "c")
    holds = Holds(states[0])
    text = refusal(lambda: made(tmp_path, holds, kept).fit(Task(), datamodule=Data(states[1])))
    if text:
        assert "cannot be saved in a checkpoint" in text
        assert "Holds" in text or "Data" in text
        assert (holds.steps, list((tmp_path / "c").glob("*"))) == (0, [])
        return
    again, data = Holds(), Data()
    made(tmp_path, again, ModelCheckpoint(tmp_path / "c"), max_epochs=2).fit(Task(), datamodule=data, ckpt_path="last")
    assert again.steps == 2
    assert same(again.held, states[0])
    assert same(data.held, states[1])


@pytest.mark.guarantee
@pytest.mark.parametrize("seed", range(100, 125))
def test_hyperparameters(tmp_path, seed):
    """`hparams` holds what was passed. What can't be stored is dropped, with one warning that names it; the rest comes
    back as it was."""
    setting = generate(random.Random(seed), hopeless=0.1)
    task = Task(setting, other=2)
    assert list(task.hparams) == ["setting", "other"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made(tmp_path, ModelCheckpoint(tmp_path / "c")).fit(task, loader())
    named = [str(w.message) for w in caught if "checkpoints cannot store setting" in str(w.message)]
    refused = refusal(lambda: encode(setting))  # of all that is generated, only enum members are stored nevertheless
    assert len(named) == (refused != "" and "Colour" not in refused)
    del task
    gc.collect()  # as in another process, which does not have the task's objects
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = Task.load_from_checkpoint(tmp_path / "c" / "epoch=0-step=2.ckpt")
    assert len(caught) == len(named) == sum("does not contain setting" in str(w.message) for w in caught)
    assert list(again.hparams) == ["setting", "other"]  # one that was dropped has its default
    assert again.hparams["other"] == 2
    assert again.hparams["setting"] is None if named else same(again.hparams["setting"], setting)


def test_the_generator_makes_both_kinds():
    """Else the tests above say nothing."""
    made_of = []
    for seed in range(25):
        state = generate(random.Random(seed))
        made_of.append(not refusal(lambda state=state: encode(state)))
    assert 5 < sum(made_of) < 25


# -- what the error says -------------------------------------------------------------------------------------------


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": [1, {"b": lambda: None}]}, [r"Holds", r"held\.a\.1\.b", "function", "store its name"]),
        ({"m": nn.Linear(1, 1)}, ["Holds", r"held\.m", "Linear", r"store its \.state_dict"]),
        (Colour.RED, ["Holds", "held", "Colour", r"\.name or \.value"]),
        (Point(), ["Holds", "held", "Point", r"dataclasses\.asdict"]),
    ],
    ids=["function", "module", "enum", "dataclass"],
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


class Groups(Task):
    def configure_optimizers(self):
        return torch.optim.SGD([{"params": self.net.parameters(), "what": object()}], lr=0.1)


class Extra(Task):
    def get_extra_state(self):
        return {"own": object()}

    def set_extra_state(self, state):
        pass


class Late(Task):
    def __init__(self):
        super().__init__()
        self.hparams["late"] = object()


def test_a_hyperparameter_that_was_added_later_is_dropped_too(tmp_path):
    with pytest.warns(UserWarning, match=r"Late\.hparams: checkpoints cannot store late \(object\)\. Pass late=\.\.\."):
        made(tmp_path, ModelCheckpoint(tmp_path / "c")).fit(Late(), loader())
    again = Late.load_from_checkpoint(tmp_path / "c" / "epoch=0-step=2.ckpt")
    assert (again.hparams.setting, again.hparams.other) == (None, 1)


class Registers(Task):
    def on_fit_start(self):
        class Own:
            def state_dict(self):
                return {"own": object()}

            def load_state_dict(self, state_dict):
                pass

        self.trainer.accelerator.register_for_checkpointing(mine=Own())


@pytest.mark.parametrize(
    ("task", "owner"),
    [
        (Schedules, "Scheduler"),
        (Groups, "SGD.param_groups"),
        (Extra, "get_extra_state"),
        (Registers, "'mine'"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
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
