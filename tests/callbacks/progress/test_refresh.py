"""How often a bar is drawn, and the lines that stand in a log."""

import re
import time
import timeit

import pytest
from support.callback_runs import fit
from treadle.callbacks import LambdaCallback, TQDMProgressBar


@pytest.mark.parametrize("limit", [{"max_epochs": 100}, {"max_epochs": -1, "max_steps": 100}])
def test_short_epochs_do_not_flood_a_log(tmp_path, capsys, limit):
    began = time.monotonic()
    fit(tmp_path, TQDMProgressBar(), samples=2, validate=False, **limit)
    seconds = time.monotonic() - began
    found = re.findall(r"^epoch (\d+)(?:/100)?  ", capsys.readouterr().err, re.M)
    assert found[:10] == [str(epoch) for epoch in range(1, 11)]
    assert found[-1] == "100"
    assert 11 <= len(found) <= 12 + seconds


def test_a_limit_within_an_epoch_and_an_error_leave_a_line(tmp_path, capsys):
    fit(tmp_path, TQDMProgressBar(), max_steps=8, max_epochs=5, validate=False)
    assert re.search(r"^epoch 2/5, batch 3/5  train_loss \S+  \d+ ms$", capsys.readouterr().err, re.M)

    def fail(trainer, *_):
        if trainer.current_epoch == 30:
            raise KeyError("a mistake")

    with pytest.raises(KeyError, match="a mistake"):
        fit(tmp_path, TQDMProgressBar(), LambdaCallback(on_train_epoch_start=fail), samples=2, max_epochs=999)
    assert re.findall(r"^epoch (\d+)/999  ", capsys.readouterr().err, re.M)[-1] == "30"


def test_a_step_costs_next_to_nothing():
    bar = TQDMProgressBar()
    durations = timeit.repeat(lambda: bar.on_step_end(None, None), repeat=50, number=1000)
    assert min(durations) / 1000 < 2e-6  # 0.1 µs, in a part in which no other process had the core
