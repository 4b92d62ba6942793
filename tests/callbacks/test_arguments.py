"""Arguments of the wrong kind: an error in the line that is wrong, which names the value and the rule."""

import os
import re

import pytest
from treadle.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    Timer,
    TQDMProgressBar,
)

NAN = float("nan")
SAVER = [
    ({"save_top_k": 3}, ValueError, "needs monitor"),
    ({"save_top_k": -2}, ValueError, "integer of at least -1 (-1 keeps all)"),
    ({"every_n_train_steps": True}, ValueError, "integer of at least 0 (0 means never)"),
    ({"every_n_epochs": 1.5}, ValueError, "integer"),
    ({"monitor": 3}, TypeError, "name of a logged value"),
    ({"filename": 3}, TypeError, "a string such as '{epoch}-{val_loss:.2f}', not an int"),
    ({"filename": "../x"}, ValueError, "must be a relative path without"),
    ({"filename": ""}, ValueError, "must not be empty or end with '/'"),
    ({"filename": "sub/"}, ValueError, "must not be empty or end with '/'"),
    ({"filename": ".hidden"}, ValueError, "may begin with a dot"),
    ({"filename": "{epoch"}, ValueError, "brace"),
    ({"filename": "epoch}"}, ValueError, "Write a field as {epoch} or {val_loss:.2f}"),
    ({"dirpath": 3}, TypeError, "path of a directory"),
    ({"save_last": "lnk"}, ValueError, "Did you mean 'link'"),
    ({"save_last": 1}, ValueError, "True, False or 'link'"),
    ({"mode": "mim"}, ValueError, "Did you mean 'min'"),
    ({"train_time_interval": 5}, TypeError, "datetime.timedelta"),
    *(
        ({name: "no"}, TypeError, "True or False")
        for name in (
            "verbose",
            "save_on_exception",
            "save_weights_only",
            "auto_insert_metric_name",
            "save_on_train_epoch_end",
            "enable_version_counter",
            "async_save",
        )
    ),
]
STOPPER = [
    ({"monitor": None}, TypeError, "name of a logged value"),
    ({"patience": -1}, ValueError, "integer of at least 0"),
    ({"mode": "maxi"}, ValueError, "Did you mean 'max'"),
    ({"min_delta": NAN}, ValueError, "a number"),
    ({"stopping_threshold": "x"}, TypeError, "a number"),
    ({"divergence_threshold": NAN}, ValueError, "a number"),
    *(
        ({name: 1}, TypeError, "True or False")
        for name in ("verbose", "strict", "check_finite", "check_on_train_epoch_end", "log_rank_zero_only")
    ),
]
OTHERS = [
    (Timer, {"duration": 5}, TypeError, "DD:HH:MM:SS"),
    (Timer, {"interval": 1}, ValueError, "step, epoch"),
    (Timer, {"verbose": "no"}, TypeError, "True or False"),
    (LearningRateMonitor, {"logging_interval": 1}, ValueError, "step, epoch"),
    (LearningRateMonitor, {"log_momentum": "no"}, TypeError, "True or False"),
    (LearningRateMonitor, {"log_weight_decay": 1}, TypeError, "True or False"),
    (TQDMProgressBar, {"refresh_rate": -1}, ValueError, "integer of at least 0 (0 draws nothing)"),
    (TQDMProgressBar, {"process_position": "1"}, ValueError, "integer"),
    (TQDMProgressBar, {"leave": 1}, TypeError, "True or False"),
    (TQDMProgressBar, {"line_every": -1.0}, ValueError, "at least 0"),
    (ModelSummary, {"max_depth": True}, ValueError, "integer of at least -1 (-1 shows all)"),
]
CASES = [
    *((ModelCheckpoint, *case) for case in SAVER),
    *((EarlyStopping, {"monitor": "x"} | arguments, *rest) for arguments, *rest in STOPPER),
    *OTHERS,
]


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "words"), CASES, ids=[f"{kind.__name__}-{given}" for kind, given, *_ in CASES]
)
def test_an_argument_of_the_wrong_kind(kind, arguments, error, words):
    name, value = list(arguments.items())[-1 if kind is EarlyStopping else 0]
    with pytest.raises(error, match=re.escape(f"{name}={value!r}")) as raised:
        kind(**arguments)
    assert words in str(raised.value)


def test_arguments_that_contradict_each_other_or_can_not_be_honoured():
    with pytest.raises(ValueError, match="can't be combined"):
        ModelCheckpoint(every_n_train_steps=2, every_n_epochs=1)
    with pytest.raises(ValueError, match="https:// URLs are read-only"):
        ModelCheckpoint("https://host/x")


def test_what_is_right_is_taken():
    assert ModelCheckpoint("a", "{epoch}/{val/acc:.1f}", "x", save_top_k=3).dirpath == os.path.abspath("a")
    assert ModelCheckpoint(filename="val_{step:05d}", save_last="link").save_last is True
    stopper = EarlyStopping("x", min_delta=1, stopping_threshold=1, divergence_threshold=float("inf"))
    assert stopper.min_delta == -1  # signed by the mode, as Lightning's
    assert TQDMProgressBar(refresh_rate=0, line_every=0).refresh_rate == 0
    assert Timer({"hours": 1}).time_remaining() == 3600
