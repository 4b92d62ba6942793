"""What all profilers have: errors in them, files of several processes, and names that programs read."""

import time

import pytest
import torch
from support.processes import run
from support.profiled import Net, Notes, loader, trainer_in

import treadle as tl
from treadle.profilers import PyTorchProfiler, SimpleProfiler


@pytest.mark.parametrize("method", ["start", "stop", "step", "summary"])
def test_a_profiler_that_fails_does_not_end_training(method, tmp_path, recwarn):
    def fail(*args):
        raise OSError("disk full")

    broken = Notes()
    setattr(broken, method, fail)
    broken.strict = False
    trainer = trainer_in(tmp_path, profiler=broken)
    trainer.fit(Net(), loader(), loader())
    assert trainer.global_step == 8
    name = "describe" if method == "summary" else method
    warned = [str(w.message) for w in recwarn if "profiler" in str(w.message)]
    assert warned == [f"Notes.{name} failed, so the profiler is disabled: OSError: disk full"]
    broken.strict = True
    with pytest.raises(OSError, match="disk full"):
        trainer_in(tmp_path, profiler=broken).fit(Net(), loader())


@pytest.mark.skipif(torch.cuda.is_available(), reason="is allowed there")
def test_nvtx_needs_a_device(tmp_path):
    with pytest.raises(ValueError, match=r"emit_nvtx=True.*CUDA"):
        trainer_in(tmp_path, profiler=PyTorchProfiler(emit_nvtx=True)).fit(Net(), loader())


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ("simpel", ValueError, "Did you mean 'simple'"),
        ("xla", ValueError, "TPUs are not supported"),
        (SimpleProfiler, TypeError, r"Pass SimpleProfiler\(\)"),
        (3, TypeError, "must be a profiler's name"),
    ],
    ids=["misspelt", "xla", "class", "number"],
)
def test_wrong_profilers(asked, error, words):
    with pytest.raises(error, match=words):
        tl.Trainer(profiler=asked, accelerator="cpu")


def on_two(root):
    tl.seed_everything(0)  # one dataset on both ranks
    trainer = trainer_in(root, devices=2, strategy="ddp", profiler=SimpleProfiler(filename="times"))
    trainer.fit(Net(), loader(), loader())
    trainer_in(root, devices=2, strategy="ddp", profiler="pytorch").fit(Net(), loader(24))
    return trainer.profiler.actions["backward"].calls


@pytest.mark.long
def test_two_processes_write_a_file_each(tmp_path):
    assert run(on_two, 2, str(tmp_path)) == [4, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "fit-0.pt.trace.json", "fit-1.pt.trace.json", "fit-times-0.txt", "fit-times-1.txt",
    ]  # fmt: skip


def test_names_that_programs_read_from_the_profilers():
    profiler = SimpleProfiler()
    with profiler.profile("outer"):
        assert list(profiler.current_actions) == ["outer"]
        for _ in range(3):
            with profiler.profile("inner"):
                pass
    durations = profiler.recorded_durations
    assert {name: len(values) for name, values in durations.items()} == {"outer": 1, "inner": 3}
    assert sum(durations["inner"]) == pytest.approx(profiler.actions["inner"].total)
    assert profiler.current_actions == {}
    assert profiler.start_time <= time.perf_counter() - sum(durations["outer"])
    assert type(tl.Trainer(accelerator="cpu", profiler="Simple", logger=False).profiler) is SimpleProfiler
