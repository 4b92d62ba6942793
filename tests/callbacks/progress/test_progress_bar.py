"""`TQDMProgressBar`: what a person sees on a terminal, what a log file gets, and that it never ends a run."""

import re

import pytest
from support.callback_runs import Tiny, fit, loader, trainer
from support.processes import run
from treadle.callbacks import LambdaCallback, ProgressBar, TQDMProgressBar


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


def test_print_without_a_bar(tmp_path, capsys):
    talk = LambdaCallback(on_train_start=lambda t, _: t.print("a", 1, sep="-", end="!\n", flush=True))
    fit(tmp_path, talk, TQDMProgressBar(), max_epochs=1)
    assert "a-1!\n" in capsys.readouterr().out
