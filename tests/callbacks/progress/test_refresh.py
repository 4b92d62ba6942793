"""How often a bar is drawn, and the lines that stand in a log."""

import re
import time

import pytest
from support.callback_runs import fit
from treadle.callbacks import LambdaCallback, TQDMProgressBar


@pytest.mark.parametrize("limit", [{"max_epochs": 300}, {"max_epochs": -1, "max_steps": 900}])
def test_short_epochs_do_not_flood_a_log(tmp_path, capsys, limit):
    began = time.monotonic()
    fit(tmp_path, TQDMProgressBar(), samples=2, validate=False, **limit)
    seconds = time.monotonic() - began
    found = re.findall(r"^epoch (\d+)(?:/300)?  ", capsys.readouterr().err, re.M)
    assert found[:10] == [str(epoch) for epoch in range(1, 11)]
    assert found[-1] == str(limit.get("max_steps", 300))
    assert 11 <= len(found) <= 12 + seconds


def test_a_limit_within_an_epoch_and_an_error_leave_a_line(tmp_path, capsys):
    fit(tmp_path, TQDMProgressBar(), max_steps=8, max_epochs=5, validate=False)
    assert re.search(r"^epoch 2/5, batch 3/5  train_loss \S+  \d+ ms$", capsys.readouterr().err, re.M)

    def fail(trainer, *_):
        if trainer.current_epoch == 200:
            raise KeyError("a mistake")

    with pytest.raises(KeyError, match="a mistake"):
        fit(
            tmp_path,
            TQDMProgressBar(),
            LambdaCallback(on_train_epoch_start=fail),
            samples=2,
            validate=False,
            max_epochs=999,
        )
    assert re.findall(r"^epoch (\d+)/999  ", capsys.readouterr().err, re.M)[-1] == "200"


def test_a_step_costs_next_to_nothing():
    bar = TQDMProgressBar()
    began = time.perf_counter()
    for _ in range(100_000):
        bar.on_step_end(None, None)
    assert (time.perf_counter() - began) / 100_000 < 2e-6  # 0.1 µs on a free core
