"""SimpleProfiler: own and total times, files, and the devices' clock."""

import itertools
import time

import pytest
from support.profiled import action
from treadle.engine.profilers.simple import DeviceClock, verdict

from treadle.profilers import AdvancedProfiler, EventProfiler, PyTorchProfiler, SimpleProfiler


def test_own_time_is_without_what_lies_within(monkeypatch):
    clock = itertools.chain([0.0, 1.0, 3.0, 6.0, 10.0])  # made; a start; b start; b stop; a stop
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    profiler = SimpleProfiler()
    profiler.start("a")
    profiler.start("b")
    profiler.stop("b")
    profiler.stop("a")
    a, b = profiler.actions["a"], profiler.actions["b"]
    assert (a.total, a.exclusive, b.total, b.exclusive) == (9.0, 6.0, 3.0, 3.0)


def test_an_action_within_itself_counts_once_in_the_total(monkeypatch):
    clock = itertools.chain([0.0, 1.0, 2.0, 4.0, 7.0, 10.0])  # made; a, b, a start; a, b stop
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    profiler = SimpleProfiler()
    for name in ("a", "b", "a"):
        profiler.start(name)
    profiler.stop("a")
    profiler.stop("b")
    monkeypatch.setattr(time, "perf_counter", lambda: 20.0)
    profiler.stop("a")
    a, b = profiler.actions["a"], profiler.actions["b"]
    assert (a.calls, a.total, a.exclusive, b.total, b.exclusive) == (2, 19.0, 14.0, 8.0, 5.0)


def test_wrong_calls_are_errors():
    for other in (SimpleProfiler(), AdvancedProfiler(), PyTorchProfiler(), EventProfiler()):
        with pytest.raises(ValueError, match=r"stop\('step'\) was called, but no action"):
            other.stop("step")


def test_by_hand_and_into_a_file(tmp_path):
    profiler = SimpleProfiler(tmp_path, "times")
    assert list(profiler.profile_iterable([1, 2], "items")) == [1, 2]
    with profiler.profile("block"):
        pass
    profiler.describe()
    text = (tmp_path / "times.txt").read_text()
    assert profiler.actions["items"].calls == 3
    assert "block" in text
    assert "longest" in text
    assert "longest" not in SimpleProfiler(extended=False).summary() + "".join(profiler.summary().split("longest")[:1])


class Mark:
    """A device's event as CUDA's are: reached once the work before it is done; the test tells the time."""

    now = 0.0
    done = 0.0

    def record(self):
        self.at = Mark.now

    def query(self):
        return self.at <= Mark.done

    def synchronize(self):
        Mark.done = max(Mark.done, self.at)

    def elapsed_time(self, other):
        return other.at - self.at


def test_the_devices_clock_is_read_late_and_never_waited_for():
    taken = []
    clock = DeviceClock(Mark, lambda *what: taken.append(what))
    outer = clock.start("step", None)
    Mark.now = 10.0
    inner = clock.start("forward", outer)
    Mark.now = 40.0
    clock.stop(inner)
    Mark.now = 100.0
    clock.stop(outer)
    clock.read(wait=False)
    assert taken == []  # the device is behind
    Mark.done = 50.0
    clock.read(wait=False)
    assert taken == [("forward", 0.03, 0.03)]
    clock.read(wait=True)
    assert taken[1] == ("step", 0.1, 0.07)
    outer = clock.start("step", None)
    inner = clock.start("step", outer)
    Mark.now = 120.0
    clock.stop(inner)
    clock.stop(outer)
    clock.read(wait=True)
    assert taken[2:] == [("step", 0.0, 0.02), ("step", 0.02, 0.0)]  # the whole is counted once


def test_the_verdict_leaves_out_what_only_happens_once():
    actions = {"data": action(5.0, first=4.9), "forward": action(1.0)}
    assert verdict(actions, {}, False).startswith("Verdict: this run computes 91 % of the time and waits for data 9 %")
    actions["data"] = action(3.0)
    waits = "Verdict: this run waits for data 75 % of the time. Do this."
    assert verdict(actions, {"data": "Do this."}, False) == waits
    on_device = {"data": action(3.0, device=0.1), "forward": action(0.1, device=0.9)}
    assert verdict(on_device, {}, True).startswith("Verdict: the device computes 90 % of the time")
    assert verdict({"block": action(1.0)}, {}, False) == ""
