"""`TQDMProgressBar`: what a person sees on a terminal, what a log file gets, and that it never ends a run."""

import contextlib
import fcntl
import io
import logging
import os
import re
import struct
import sys
import termios
import threading
import time
import warnings

import pytest
import torch
from support.callback_runs import Tiny, fit, loader, trainer
from support.processes import run
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm
from treadle.callbacks import (
    LambdaCallback,
    ModelCheckpoint,
    ProgressBar,
    RichProgressBar,
    RichProgressBarTheme,
    TQDMProgressBar,
)
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


def often(bar):
    """The bar, redrawn so often that a test of it is short."""
    bar._every = 0.02
    return bar


PAUSE = 0.025  # seconds of a batch: each is drawn


def screen(text):
    """The lines that stand on an endless terminal in the end, and every state that each line was in."""
    lines, states = [""], [[]]
    row = column = 0
    for part in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|[\r\n]|[^\r\n\x1b]+", text):
        if part == "\x1b[2K":
            lines[row] = ""
        elif part.startswith("\x1b") and not part.endswith("A"):
            pass  # a color, or the cursor's look
        elif part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, column
            while len(lines) <= row:
                lines.append("")
                states.append([])
        elif part in ("\x1b[A", "\x1b[1A"):
            row = max(0, row - 1)
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + part + line[column + len(part) :]
            states[row].append(lines[row].rstrip())
            column += len(part)
    return [line.rstrip() for line in lines], [state for row in states for state in row]


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
    clean = (
        "hello",
        "epoch 2/2: 100%",
        "test: 100%",
        "training on",
        "effective",
        "10 optimizer",
        "3 trainable",
        "last metrics",
        "test: no",
    )
    assert [line for line in lines if line and not line.startswith(clean)] == []


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


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(6, 1, 2))


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


class Screen(io.StringIO):
    """Says it is a terminal; can break like one whose reader has gone, or does not read."""

    broken = None

    def isatty(self):
        return True

    def write(self, text):
        if self.broken is not None:
            raise self.broken
        return super().write(text)


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


def test_without_a_terminal_there_are_plain_lines(tmp_path, capsys):
    losses, counts, bar = [], [], TQDMProgressBar(line_every=0.1)
    bar.train_progress_bar.set_postfix(loss=1.0)  # before a run

    def record(trainer, task, outputs, *_):
        losses.append(float(outputs["loss"]))
        drawn = bar.train_progress_bar  # disabled, with the numbers of the epoch
        drawn.set_postfix(loss=1.0)
        drawn.set_description("training")
        drawn.update(1)
        bar.val_progress_bar.refresh()
        counts.append((drawn.n, drawn.total))

    fit(tmp_path, LambdaCallback(on_train_batch_end=record), bar, task=Tiny([0.5], pause=0.04), max_epochs=2)
    bar.train_progress_bar.set_postfix(loss=1.0)
    assert (counts, bar.train_progress_bar.total) == ([(batch, 5) for batch in (1, 2, 3, 4, 5)] * 2, 5)
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if re.match("epoch|validation", line)]
    epochs = [line for line in lines if re.match(r"epoch \d/2  ", line)]
    assert [re.sub(r"\d+ ms$", "ms", line) for line in epochs] == [
        f"epoch {epoch}/2  train_loss {losses[5 * epoch - 1]:.4g}  val_loss 0.5  ms" for epoch in (1, 2)
    ]
    lines = [line for line in lines if line not in epochs]
    assert 3 <= len(lines) <= 7
    pace = r"\d+\.\d (batches/s|s/batch), \d:\d\d:\d\d left"
    training = rf"epoch \d/2, batch \d/5, step \d+/10, {pace} in the epoch(, \w+_loss = \S+){{1,2}}"
    assert all(re.fullmatch(rf"{training}|validation, batch \d/2, {pace}", line) for line in lines), lines
    assert "\r" not in error
    fit(tmp_path, TQDMProgressBar(epoch_lines=False), max_epochs=2)
    assert not re.search("^epoch", capsys.readouterr().err, re.M)
    fit(tmp_path, TQDMProgressBar(refresh_rate=0, line_every=0.0, epoch_lines=True), max_epochs=1)
    assert not re.search("^epoch", capsys.readouterr().err, re.M)


class Unlogged(Tiny):
    """Logs nothing in training, so that a person would not see the loss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses = []

    def log(self, name, *args, **kwargs):
        if name.startswith("val"):
            super().log(name, *args, **kwargs)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss


def test_the_loss_is_shown_if_no_other_one_is(tmp_path, capsys):
    task = Unlogged([0.5])
    fit(tmp_path, TQDMProgressBar(line_every=0.0), task=task, max_epochs=2)
    error = capsys.readouterr().err
    steps = dict(re.findall(r"^epoch ./2, batch ./5, step (\d+)/10, .*?\bloss = ([\d.e-]+)", error, re.M))
    assert steps == {str(step): f"{loss:.4g}" for step, loss in enumerate(task.losses, 1)}
    ends = re.findall(r"^epoch ./2  loss (\S+)  val_loss 0.5  \d+ ms$", error, re.M)
    assert ends == [f"{task.losses[4]:.4g}", f"{task.losses[9]:.4g}"]


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

    stream = DataLoader(Stream(), batch_size=2)
    bar = RichProgressBar(leave=True, console_kwargs={"force_terminal": True, "width": 120})
    trainer(tmp_path, bar).fit(Tiny(), stream)
    bars = [line for line in screen(error.getvalue().replace("\n", "\r\n"))[0] if "━" in line]
    assert [re.match(r"epoch \d/2 .*\b3/-- ", line).group()[:7] for line in bars] == ["epoch 1", "epoch 2"]
    task = bar.progress.add_task("mine", total=2)  # nothing is drawn after the run
    bar.progress.update(task, advance=1)
    assert bar.progress.disable


def test_rich_without_a_terminal(tmp_path, capsys):
    fit(tmp_path, RichProgressBar(line_every=0.0), max_epochs=1)
    assert "epoch 1/1, batch 3/5, step 3/5" in capsys.readouterr().err
    fit(tmp_path, RichProgressBar(refresh_rate=0, line_every=0.0), max_epochs=1)
    assert "epoch" not in capsys.readouterr().err.replace("per epoch", "")
    with pytest.raises(TypeError, match="RichProgressBarTheme"):
        RichProgressBar(theme="dark")


def test_rich_is_an_extra(monkeypatch):
    monkeypatch.setattr("treadle.common.optional.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"RichProgressBar needs the package 'rich'.*treadle\[rich\]"):
        RichProgressBar()


class Own(ProgressBar):
    """What a user writes: Lightning's own example, and all that a bar can ask."""

    def __init__(self):
        super().__init__()
        self.on, self.seen = True, []

    def disable(self):
        self.on = False

    def enable(self):
        self.on = True

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append((batch_idx + 1, self.total_train_batches, self.total_val_batches))

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if self.has_dataloader_changed(dataloader_idx):
            self.seen.append((self.validation_description, self.total_val_batches_current_dataloader))

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if self.has_dataloader_changed(dataloader_idx):
            self.seen.append((self.test_description, self.total_test_batches_current_dataloader))

    def print(self, *args, **kwargs):
        self.seen.append(args)


class Several(Tiny):
    def validation_step(self, batch, batch_idx, dataloader_idx):
        pass


def test_a_bar_of_ones_own(tmp_path):
    bar = Own()
    with pytest.raises(TypeError, match="before a stage begins"):
        _ = bar.trainer
    talk = LambdaCallback(on_train_end=lambda t, _: t.print("over"))
    made = trainer(tmp_path, bar, talk, enable_progress_bar=True, max_epochs=2, check_val_every_n_epoch=2)
    assert made.progress_bar_callback is bar
    assert sum(isinstance(callback, ProgressBar) for callback in made.callbacks) == 1
    made.fit(Several(), loader(4), [loader(4), loader(6)])
    assert bar.seen == [(1, 2, 0), (2, 2, 0), (1, 2, 5), (2, 2, 5), ("validation", 2), ("validation", 3), ("over",)]
    bar.seen.clear()
    bar.reset_dataloader_idx_tracker()
    made.test(Tiny(), loader(6), verbose=False)
    assert bar.seen == [("test", 3)]
    with pytest.raises(NotImplementedError, match="disable"):
        ProgressBar().disable()


def two_bars(root):
    bar = TQDMProgressBar(line_every=0.0)
    fit(root, bar, max_epochs=1)
    return bar.is_enabled


def test_only_rank_zero_draws(tmp_path, capfd):
    assert run(two_bars, 2, str(tmp_path)) == [True, False]


def test_tqdms_variable(monkeypatch):
    monkeypatch.setenv("TQDM_MINITERS", "7")
    assert (TQDMProgressBar().refresh_rate, TQDMProgressBar(20).refresh_rate, TQDMProgressBar(0).refresh_rate) == (
        7,
        20,
        0,
    )


def test_print_without_a_bar(tmp_path, capsys):
    talk = LambdaCallback(on_train_start=lambda t, _: t.print("a", 1, sep="-", end="!\n", flush=True))
    fit(tmp_path, talk, TQDMProgressBar(), max_epochs=1)
    assert "a-1!\n" in capsys.readouterr().out


def test_a_step_costs_next_to_nothing():
    bar = TQDMProgressBar()
    began = time.perf_counter()
    for _ in range(100_000):
        bar.on_step_end(None, None)
    assert (time.perf_counter() - began) / 100_000 < 2e-6  # 0.1 µs on a free core
