"""The tqdm progress bar: what a terminal shows, overrides, and streams that are lost."""

import contextlib
import fcntl
import logging
import os
import re
import struct
import sys
import termios
import threading
import warnings

import pytest
from support.callback_runs import Tiny, fit, loader, trainer
from support.screens import PAUSE, Screen, Stream, often, screen
from torch.utils.data import DataLoader
from tqdm import tqdm
from treadle.callbacks import LambdaCallback, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from treadle.callbacks.progress.tqdm_progress import _fit_postfix
from treadle.common.messages import announce


def on_a_terminal(program, *arguments, columns=100, rows=24, hangs_up=None):
    """Call a function whose streams are a terminal; returns all that was written there.

    The terminal hangs up when ``hangs_up`` has been written.
    """
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    written = bytearray()

    def read():
        with contextlib.suppress(OSError):  # the end of a terminal is an error
            while (hangs_up is None or hangs_up not in written) and (chunk := os.read(master, 65536)):
                written.extend(chunk)
        os.close(master)

    reader = threading.Thread(target=read)
    reader.start()
    stream = open(slave, "w")  # noqa: SIM115  # closing fails where the terminal has hung up
    try:
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            program(*arguments)
    finally:
        with contextlib.suppress(OSError):
            stream.close()
        reader.join()
    return written.decode()


def test_on_a_terminal(tmp_path):
    def say(trainer, task, outputs, batch, index):
        if (trainer.current_epoch, index) == (1, 2):
            trainer.print("hello from print")
            announce("hello from the logger")

    def program():
        talk, bar, task = LambdaCallback(on_train_batch_end=say), often(TQDMProgressBar()), Tiny([0.123456], PAUSE)
        fit(tmp_path, talk, bar, task=task, num_sanity_val_steps=1).test(task, loader(6))

    text = on_a_terminal(program)
    lines, states = screen(text)
    seen = "\n".join(states)
    assert re.search(r"^sanity check: 100%.* 1/1 ", seen, re.M)
    assert re.search(r"^epoch 1/2:  20%.* 1/5 .*train_loss=\S+\]$", seen, re.M)
    assert re.search(r"^validation:  50%.* 1/2 ", seen, re.M)
    assert re.search(r"^epoch 2/2: 100%.* 5/5 .*val_loss=0.1235", seen, re.M)
    bars = [line for line in lines if "%" in line or "it/s" in line or "s/it" in line]
    assert [bar.split(":")[0] for bar in bars] == ["epoch 2/2", "test"], lines
    assert "3/3" in bars[1]
    assert lines.count("hello from print") == lines.count("hello from the logger") == 1


@pytest.mark.parametrize(("columns", "shown"), [(60, 0), (80, 1), (120, 3)])
def test_a_value_is_shown_whole_or_not_at_all(columns, shown):
    def program():
        bar = tqdm(desc="epoch 12", total=4321, dynamic_ncols=True, mininterval=0.0, miniters=1, file=sys.stderr)
        for _ in range(50):
            bar.set_postfix({"val_loss": 0.123456, "train_loss": 0.7654321, "accuracy": 0.5}, refresh=False)
            _fit_postfix(bar)
            bar.update(1)
        bar.close()

    written = on_a_terminal(program, columns=columns)
    frames = [frame for frame in re.split(r"[\r\n]", written) if "it/s" in frame]
    assert len(frames) > 5
    for frame in frames[1:]:
        values = frame.rpartition("it/s")[2].rstrip("]").split(", ")[1:]
        assert set(values) <= {"val_loss=0.123", "train_loss=0.765", "accuracy=0.5", "..."}, frame
        assert frame.endswith("]"), frame
    assert sum("=" in value for value in values) == shown


def test_leave_resume_and_no_length(tmp_path):
    fit(tmp_path, ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1))

    def program():
        bar = often(TQDMProgressBar(leave=True))
        fit(tmp_path, bar, task=Tiny(pause=PAUSE), ckpt_path=tmp_path / "step=3.ckpt", max_epochs=2)
        bar = often(TQDMProgressBar())
        trainer(tmp_path, bar, max_epochs=1).fit(Tiny(pause=PAUSE), DataLoader(Stream(), batch_size=2))

    text = on_a_terminal(program)
    lines, states = screen(text)
    bars = [line for line in lines if re.search("it/s|s/it", line)]
    assert [re.match(r"epoch \d/\d: (100%.* 5/5|3it )", bar) is not None for bar in bars] == [True] * 3, bars
    first = next(state for state in states if state.startswith("epoch 1/2"))
    assert "3/5" in first or "4/5" in first


def test_overrides_and_off(tmp_path, caplog):
    class Mine(TQDMProgressBar):
        def get_metrics(self, trainer, pl_module):
            return {"steps": trainer.global_step, **super().get_metrics(trainer, pl_module), "word": "w"}

        def init_validation_tqdm(self):
            bar = super().init_validation_tqdm()
            bar.set_description("checking")
            return bar

    class Bad(TQDMProgressBar):
        def get_metrics(self, trainer, pl_module):
            raise KeyError("mistake")

    def train(bar, **flags):
        return fit(tmp_path, often(bar), task=Tiny([1.0], PAUSE), **flags).global_step

    caplog.set_level(logging.WARNING, logger="treadle")
    mine = on_a_terminal(lambda: train(Mine(), max_epochs=1, logger=None), columns=160)
    assert re.search(r"v_num=0", mine)
    assert re.search(r"steps=5, .*word=w", mine)
    assert "checking" in mine
    with pytest.warns(UserWarning, match="the progress bar failed and is disabled: KeyError: 'mistake'") as caught:
        on_a_terminal(lambda: train(Bad()))
    assert sum("progress bar failed" in str(warning.message) for warning in caught) == 1
    assert on_a_terminal(lambda: train(TQDMProgressBar(refresh_rate=0))) == ""


LOSSES = {"broken": BrokenPipeError(32, "Broken pipe"), "blocking": BlockingIOError(11, "it is full"), "closed": None}


@pytest.mark.parametrize("kind", [pytest.param(TQDMProgressBar, marks=pytest.mark.exhaustive), RichProgressBar])
@pytest.mark.parametrize("loss", [*LOSSES, "none"])
def test_a_lost_stream_does_not_end_the_run(tmp_path, monkeypatch, loss, kind):
    error = Screen()
    monkeypatch.setattr(sys, "stderr", error)

    def lose(trainer, task, batch, index):
        if trainer.global_step == 2:
            if LOSSES.get(loss) is not None:
                error.broken = LOSSES[loss]
            elif loss == "closed":
                error.close()
            else:
                monkeypatch.setattr(sys, "stderr", None)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        note = LambdaCallback(on_train_batch_start=lose)
        made = fit(tmp_path, note, often(kind()), task=Tiny([1.0], PAUSE), max_epochs=2)
    assert made.global_step == 10
    # A closed stream tqdm passes over by itself; rich goes on writing to the one that it began with.
    passed_over = (loss, kind) in (("closed", TQDMProgressBar), ("none", RichProgressBar))
    assert sum("the progress bar failed" in str(w.message) for w in caught) == (not passed_over)


def test_a_terminal_that_hangs_up_does_not_end_the_run(tmp_path):
    steps = []

    def program():
        bar = often(TQDMProgressBar())
        steps.append(fit(tmp_path, bar, task=Tiny([1.0], PAUSE), max_epochs=2).global_step)

    with pytest.warns(UserWarning, match="the progress bar failed"):
        assert "epoch 2/2" not in on_a_terminal(program, hangs_up=b"epoch 1/2:  40%")
    assert steps == [10]


class Unlogged(Tiny):
    """Logs nothing in training, so that a person would not see the loss."""

    def training_step(self, batch, batch_idx):
        self._wait()
        return self.net(batch[0]).pow(2).mean()


def test_the_loss_is_shown_if_no_other_one_is(tmp_path, capsys):
    losses = []
    notes = LambdaCallback(on_train_batch_end=lambda t, m, outputs, *_: losses.append(outputs["loss"].item()))
    fit(tmp_path, notes, TQDMProgressBar(line_every=0.0), task=Unlogged([0.5]), max_epochs=2)
    error = capsys.readouterr().err
    steps = dict(re.findall(r"^epoch ./2, batch ./5, step (\d+)/10, .*?\bloss = ([\d.e-]+)", error, re.M))
    assert steps == {str(step): f"{loss:.4g}" for step, loss in enumerate(losses, 1)}
    ends = re.findall(r"^epoch ./2  loss (\S+)  val_loss 0.5  \d+ ms$", error, re.M)
    assert ends == [f"{losses[4]:.4g}", f"{losses[9]:.4g}"]


def test_a_terminal_shows_the_loss_and_lines_on_request(tmp_path):
    bar = often(TQDMProgressBar(epoch_lines=True))
    text = on_a_terminal(lambda: fit(tmp_path, bar, task=Unlogged([0.5], PAUSE), max_epochs=3))
    lines, states = screen(text)
    assert re.search(r"^epoch 2/3: .* 5/5 .*, loss=\d\S+, val_loss=0.5\]$", "\n".join(states), re.M)
    found = [line for line in lines if re.fullmatch(r"epoch \d/3  loss \S+  val_loss 0.5  \d+ ms", line)]
    assert [line[:9] for line in found] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]


def test_a_terminal_without_a_size_shows_the_bar(tmp_path):
    text = on_a_terminal(lambda: fit(tmp_path, TQDMProgressBar(), task=Tiny([0.5], PAUSE)), columns=0, rows=0)
    assert re.search(r"^epoch 2/2: 100%.* 5/5 .*, val_loss=0.5", "\n".join(screen(text)[1]), re.M)


def test_tqdms_variable(monkeypatch):
    monkeypatch.setenv("TQDM_MINITERS", "7")
    assert [TQDMProgressBar(*given).refresh_rate for given in ((), (20,), (0,))] == [7, 20, 0]
