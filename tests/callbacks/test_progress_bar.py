"""`TQDMProgressBar`: what a person sees on a terminal, what a log file gets, and that it never ends a run."""

import contextlib
import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios
import time
import warnings
from pathlib import Path

import pytest
from callback_runs import Tiny, fit
from processes import clean_environment
from treadle.callbacks import LambdaCallback, TQDMProgressBar

HEAD = f"""
import logging, os, sys, torch
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parent.parent)!r}]
from callback_runs import Tiny, fit, loader, trainer
from treadle.callbacks import LambdaCallback, ModelCheckpoint, TQDMProgressBar
from treadle.strategies import announce
"""


def on_a_terminal(source, after=lambda process, master: None, columns=100):
    """Run a script whose streams are a terminal; returns its exit status and all that was written there."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = clean_environment({"TERM": "xterm", "CUDA_VISIBLE_DEVICES": ""})
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + source], stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
    )
    os.close(slave)
    written = bytearray()
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while chunk := os.read(master, 65536):
            written += chunk
            if after(process, written):
                break
    os.close(master)
    return process.wait(60), written.decode()


def screen(text):
    """The lines that stand on an endless terminal in the end, and every state that each line was in."""
    lines, states = [""], [[]]
    row = column = 0
    for part in re.findall(r"\x1b\[A|[\r\n]|[^\r\n\x1b]+", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, column
            while len(lines) <= row:
                lines.append("")
                states.append([])
        elif part == "\x1b[A":
            row = max(0, row - 1)
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + part + line[column + len(part) :]
            states[row].append(lines[row].rstrip())
            column += len(part)
    return [line.rstrip() for line in lines], [state for row in states for state in row]


def test_on_a_terminal(tmp_path):
    code, text = on_a_terminal(f"""
talk = LambdaCallback(
    on_train_batch_end=lambda t, m, o, b, i: (t.print("hello from print"), announce("hello from the logger"))
    if t.current_epoch == 1 and i == 2 else None)
made = fit({str(tmp_path)!r}, talk, TQDMProgressBar(), task=Tiny([0.123456], pause=0.12), num_sanity_val_steps=1)
made.test(made.task, loader(6))
""")
    assert code == 0, text
    lines, states = screen(text)
    seen = "\n".join(states)
    assert re.search(r"^sanity check: 100%.* 1/1 ", seen, re.M)
    assert re.search(r"^epoch 0:  20%.* 1/5 .*train_loss=\S+\]$", seen, re.M)
    assert re.search(r"^validation:  50%.* 1/2 ", seen, re.M)
    assert re.search(r"^epoch 1: 100%.* 5/5 .*val_loss=0.1235", seen, re.M)
    bars = [line for line in lines if "%" in line or "it/s" in line or "s/it" in line]
    assert [bar.split(":")[0] for bar in bars] == ["epoch 1", "test"], lines
    assert "3/3" in bars[1]
    assert lines.count("hello from print") == lines.count("hello from the logger") == 1
    clean = (
        "hello",
        "epoch 1: 100%",
        "test: 100%",
        "training on",
        "effective",
        "10 optimizer",
        "3 trainable",
        "test: no",
    )
    assert [line for line in lines if line and not line.startswith(clean)] == []


def test_leave_resume_and_no_length(tmp_path):
    code, text = on_a_terminal(f"""
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.ones(6, 1, 2))
root = {str(tmp_path)!r}
fit(root, ModelCheckpoint(root + "/c", "{{step}}", every_n_train_steps=1, save_top_k=-1))
fit(root, TQDMProgressBar(leave=True), task=Tiny(pause=0.12), ckpt_path=root + "/c/step=3.ckpt", max_epochs=2)
stream = torch.utils.data.DataLoader(Stream(), batch_size=2)
trainer(root, TQDMProgressBar(), max_epochs=1).fit(Tiny(pause=0.12), stream)
""")
    assert code == 0, text
    lines, states = screen(text)
    bars = [line for line in lines if re.search("it/s|s/it", line)]
    assert [re.match(r"epoch \d: (100%.* 5/5|3it )", bar) is not None for bar in bars] == [True] * 3, bars
    first = next(state for state in states if state.startswith("epoch 0"))
    assert "3/5" in first or "4/5" in first


def test_overrides_and_off(tmp_path):
    code, text = on_a_terminal(
        f"""
class Mine(TQDMProgressBar):
    def get_metrics(self, trainer, pl_module):
        return {{"steps": trainer.global_step, **super().get_metrics(trainer, pl_module), "word": "w"}}
    def init_validation_tqdm(self):
        bar = super().init_validation_tqdm()
        bar.set_description("checking")
        return bar
class Bad(TQDMProgressBar):
    def get_metrics(self, trainer, pl_module):
        raise KeyError("mistake")
logging.getLogger("treadle").setLevel(logging.WARNING)
fit({str(tmp_path)!r}, Mine(), task=Tiny([1.0], pause=0.12), max_epochs=1, logger=None)
print("-- bad")
assert fit({str(tmp_path)!r}, Bad(), task=Tiny([1.0], pause=0.05), max_epochs=2).global_step == 10
print("-- off")
fit({str(tmp_path)!r}, TQDMProgressBar(refresh_rate=0), task=Tiny([1.0], pause=0.12))
""",
        columns=160,
    )
    assert code == 0, text
    mine, bad = text.split("-- bad")
    bad, off = bad.split("-- off")
    assert re.search(r"v_num=0", mine)
    assert re.search(r"steps=5, .*word=w", mine)
    assert "checking" in mine
    assert bad.count("the progress bar failed and is off from now on: KeyError: 'mistake'") == 1
    assert off.strip() == ""


class Screen(io.StringIO):
    """Says it is a terminal; can break like one whose reader has gone."""

    broken = False

    def isatty(self):
        return True

    def write(self, text):
        if self.broken:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


@pytest.mark.parametrize("loss", ["broken", "closed", "none"])
def test_a_lost_stream_does_not_end_the_run(tmp_path, monkeypatch, loss):
    error = Screen()
    monkeypatch.setattr(sys, "stderr", error)

    def lose(trainer, task, batch, index):
        if trainer.global_step == 2:
            if loss == "broken":
                error.broken = True
            elif loss == "closed":
                error.close()
            else:
                monkeypatch.setattr(sys, "stderr", None)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        note = LambdaCallback(on_train_batch_start=lose)
        made = fit(tmp_path, note, TQDMProgressBar(), task=Tiny([1.0], pause=0.05), max_epochs=2)
    assert made.global_step == 10
    # A closed stream tqdm passes over by itself.
    assert sum("the progress bar failed" in str(w.message) for w in caught) == (loss != "closed")


def test_a_terminal_that_hangs_up_does_not_end_the_run(tmp_path):
    code, _ = on_a_terminal(
        f"""
import signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
made = fit({str(tmp_path)!r}, TQDMProgressBar(), task=Tiny([1.0], pause=0.1), max_epochs=2)
open({str(tmp_path / "steps")!r}, "w").write(str(made.global_step))
os._exit(0)
""",
        after=lambda process, written: b"epoch 0:  40%" in written,
    )
    assert code == 0
    assert (tmp_path / "steps").read_text() == "10"


def test_without_a_terminal_there_are_plain_lines(tmp_path, capsys):
    fit(tmp_path, TQDMProgressBar(line_every=0.1), task=Tiny([0.5], pause=0.04), max_epochs=2)
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if re.match("epoch|validation", line)]
    assert 3 <= len(lines) <= 7
    assert all(re.fullmatch(r"epoch \d, batch \d/5(, \w+_loss = \S+){1,2}|validation, batch \d/2", x) for x in lines)
    assert "\r" not in error
    fit(tmp_path, TQDMProgressBar(), max_epochs=2)
    assert not re.search("^epoch", capsys.readouterr().err, re.M)
    fit(tmp_path, TQDMProgressBar(refresh_rate=0, line_every=0.0), max_epochs=1)
    assert not re.search("^epoch", capsys.readouterr().err, re.M)


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
