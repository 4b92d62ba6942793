"""The rich progress bar: what it shows, and where it does without a terminal or a length."""

import re
import sys
from types import SimpleNamespace

import pytest
from support.callback_runs import Tiny, fit, loader, trainer
from support.screens import PAUSE, Screen, Stream, often, screen
from torch.utils.data import DataLoader
from treadle.callbacks import LambdaCallback, RichProgressBar, RichProgressBarTheme


def test_rich(tmp_path, monkeypatch, capsys):
    error = Screen()
    monkeypatch.setattr(sys, "stderr", error)
    monkeypatch.setenv("TERM", "xterm")
    talk = LambdaCallback(
        on_train_batch_end=lambda t, m, o, b, i: t.print("[hello]", i) if (t.current_epoch, i) == (1, 2) else None
    )

    class Mine(RichProgressBar):
        def get_metrics(self, trainer, pl_module):
            return {**super().get_metrics(trainer, pl_module), "[word]": "w"}

    theme = RichProgressBarTheme(metrics_format=".1e", metrics_text_delimiter=" | ")
    bar = often(Mine(theme=theme, console_kwargs={"width": 120}))
    made = fit(tmp_path, talk, bar, task=Tiny([0.5], PAUSE), num_sanity_val_steps=1)
    made.test(made.task, loader(6))
    lines, states = screen(error.getvalue().replace("\n", "\r\n"))
    seen = "\n".join(states)
    assert re.search(r"^sanity check .*\b0/1", seen, re.M)
    numbers = r"2/5 0:00:0\d • 0:00:0\d \d+\.\d\dit/s train_loss: \d\.\de[+-]\d\d \| \[word\]: w$"
    assert re.search(rf"^epoch 1/2 .*\b{numbers}", seen, re.M)
    assert re.search(r"^validation .*\b1/2", seen, re.M)
    bars = [line for line in lines if "━" in line]
    assert re.search(r"^epoch 2/2 .*\b5/5 .*val_loss: 5.0e-01", bars[0]), lines
    assert re.search(r"^test .*\b3/3", bars[1])
    assert len(bars) == 2
    assert not any("hello" in state for state in states)
    assert capsys.readouterr().out.startswith("[hello] 2\n")
    assert error.getvalue().rindex("\x1b[?25h") > error.getvalue().rindex("\x1b[?25l")  # the cursor is there again


def test_rich_leaves_and_does_without_a_length(tmp_path, monkeypatch):
    error = Screen()
    monkeypatch.setattr(sys, "stderr", error)

    class Rounds(RichProgressBar):
        def _get_train_description(self, current_epoch):  # a method of Lightning's that public subclasses override
            return f"round {current_epoch}/{self.trainer.max_epochs}"

    stream = DataLoader(Stream(), batch_size=2)
    bar = Rounds(leave=True, console_kwargs={"force_terminal": True, "width": 120})
    trainer(tmp_path, bar).fit(Tiny(), stream)
    bars = [line for line in screen(error.getvalue().replace("\n", "\r\n"))[0] if "━" in line]
    assert [re.match(r"round \d/2 .*\b3/-- ", line).group()[:7] for line in bars] == ["round 0", "round 1"]
    task = bar.progress.add_task("mine", total=2)  # nothing is drawn after the run
    bar.progress.update(task, advance=1)
    assert bar.progress.disable


def test_rich_without_a_terminal(tmp_path, capsys):
    fit(tmp_path, RichProgressBar(line_every=0.0), max_epochs=1)
    assert "epoch 1/1, batch 3/5, step 3/5" in capsys.readouterr().err
    fit(tmp_path, RichProgressBar(refresh_rate=0, line_every=0.0), max_epochs=1)
    assert "epoch" not in capsys.readouterr().err.replace("per epoch", "")


def test_a_theme_may_be_any_object_with_the_fields():
    theme = SimpleNamespace(**vars(RichProgressBarTheme(metrics_format=".1e")))
    assert RichProgressBar(theme=theme).theme is theme
    del theme.time, theme.metrics
    with pytest.raises(TypeError, match=r"RichProgressBarTheme.* lacks time, metrics\.$"):
        RichProgressBar(theme=theme)
    with pytest.raises(TypeError, match="RichProgressBarTheme"):
        RichProgressBar(theme="dark")


def test_rich_is_an_extra(monkeypatch):
    monkeypatch.setattr("treadle.common.optional.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"RichProgressBar needs the package 'rich'.*treadle\[rich\]"):
        RichProgressBar()
