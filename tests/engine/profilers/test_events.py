"""EventProfiler: what its lines contain, when they are written, and what a run that ends early leaves."""

import itertools
import json
import pickle
import signal
import time
from collections import Counter
from pathlib import Path

import jsonschema
import pytest
from support.processes import run
from support.profiled import Net, loader, trainer_in
from treadle.callbacks import ModelCheckpoint

import treadle as tl
from treadle.profilers import EventProfiler

SCHEMA = json.loads((Path(__file__).parents[3] / "docs/reference/events.json").read_text(encoding="utf-8"))


def read(path):
    """Return the lines of a file, after they were validated."""
    lines = list(map(json.loads, Path(path).read_text().splitlines()))
    for line in lines:
        jsonschema.validate(line, SCHEMA)
    return lines


def of(name, lines):
    return [line for line in lines if line.get("name") == name]


class Clocked(tl.Callback):
    """Notes when each step and validation begins and ends, after all other callbacks; the second step takes 0.3 s."""

    after_task = 4

    def __init__(self):
        self.noted = {"step": [], "validation": []}

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if batch_idx % 2 == 0:  # two micro-batches are a step
            self.begin = time.time()
        if trainer.global_step == 1:
            time.sleep(0.15)

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if batch_idx % 2:
            self.noted["step"].append((self.begin, time.time()))

    def on_validation_start(self, trainer, task):
        self.begin = time.time()

    def on_validation_end(self, trainer, task):
        self.noted["validation"].append((self.begin, time.time()))


def test_a_run_and_its_resume(tmp_path):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)

    def fit(epochs, **resume):
        clocked = Clocked()
        callbacks = [clocked, ModelCheckpoint(tmp_path, save_top_k=-1)]
        trainer = trainer_in(
            tmp_path, max_epochs=epochs, profiler="events", callbacks=callbacks, accumulate_grad_batches=2,
            enable_checkpointing=True, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(Net(), loader(8), loader(4), **resume)
        return clocked, callbacks[1].best_model_path

    clocked, path = fit(2)
    header, *spans = lines = read(tmp_path / "events-0.jsonl")
    assert (header["stage"], header["rank"]) == ("fit", 0)
    for name, noted in clocked.noted.items():
        for span, (begin, end) in zip(of(name, spans), noted, strict=True):
            start = header["time"] + span["start"]
            assert start == pytest.approx(begin, abs=0.1)
            assert start + span["duration"] == pytest.approx(end, abs=0.1)
    assert [(span["step"], span["epoch"]) for span in of("step", spans)] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [span["step"] for span in of("validation", spans)] == [2, 4]
    assert [span["step"] for span in of("checkpoint", spans)] == [2, 4]
    assert max(of("step", spans), key=lambda span: span["duration"])["step"] == 1
    assert Counter(span["name"] for span in spans).keys() == {"data", "step", "validation", "checkpoint", "fit"}
    assert spans[-1]["name"] == "fit"
    assert spans[-1]["step"] == 4

    fit(3, ckpt_path=path)
    continued = read(tmp_path / "events-0.jsonl")
    assert continued[: len(lines)] == lines
    assert continued[len(lines)]["stage"] == "fit"
    assert [span["step"] for span in of("step", continued)] == [0, 1, 2, 3, 4, 5]


class Ends(tl.Callback):
    def __init__(self, error):
        self.error = error

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == 3 and self.error is SystemExit:
            signal.raise_signal(signal.SIGTERM)
        elif trainer.global_step == 3:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_run_that_ends_early_leaves_all_its_spans(error, tmp_path):
    with pytest.raises(error):
        trainer_in(tmp_path, profiler="events", callbacks=[Ends(error)]).fit(Net(), loader())
    lines = read(tmp_path / "events-0.jsonl")
    assert [span["step"] for span in of("step", lines)] == [0, 1, 2]
    assert lines[-1]["name"] == "fit"


def on_two(root):
    tl.seed_everything(0)
    trainer = trainer_in(root, devices=2, strategy="ddp", profiler=EventProfiler(actions=None))
    trainer.fit(Net(), loader(), loader())
    trainer.validate(dataloaders=loader())


@pytest.mark.long
def test_two_processes_write_a_file_each(tmp_path):
    run(on_two, 2, str(tmp_path))
    for rank in (0, 1):
        lines = read(tmp_path / f"events-{rank}.jsonl")
        assert {line["rank"] for line in lines} == {rank}
        assert [line["stage"] for line in lines if "stage" in line] == ["fit", "validate"]
        counts = Counter(line.get("name") for line in lines)
        assert counts["step"] == counts["forward"] == counts["backward"] == counts["optimizer"] == 4
        assert counts["fit"] == counts["validate"] == 1
        assert counts["data of validate"] == counts["validation_step"] - 4 - 2 + 1  # fit has 4, its sanity check 2


def test_the_file_is_written_once_a_second(tmp_path, monkeypatch):
    clock = itertools.count(0.0, 0.25)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    profiler, counts = EventProfiler(tmp_path, "own"), []
    for _ in range(5):
        with profiler.profile("step"), profiler.profile("unknown"):
            pass
        path = tmp_path / "own-0.jsonl"
        counts.append(len(read(path)) if path.exists() else 0)
    assert counts == [0, 3, 3, 5, 5]
    profiler.describe()
    _, first, *rest = read(path)
    assert first == {"name": "step", "start": 0.25, "duration": 0.25, "step": None, "epoch": None, "rank": 0}
    assert len(rest) == 4
    pickle.dumps(profiler)


def test_a_full_disk_ends_the_events_and_not_the_run(tmp_path):
    (tmp_path / "events-0.jsonl").mkdir()  # cannot be opened as a file
    trainer = trainer_in(tmp_path, profiler="events")
    with pytest.warns(UserWarning, match="so the profiler is disabled: IsADirectoryError"):
        trainer.fit(Net(), loader())
    assert trainer.global_step == 8


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"actions='step' must be a list of names. Pass \['step'\]"):
        EventProfiler(actions="step")
    with pytest.raises(TypeError, match="actions=3"):
        EventProfiler(actions=[3])
