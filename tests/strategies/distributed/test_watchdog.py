"""A rank that works, however long, is left alone, and a watchdog ends with its run; see also `test_hang_report.py`."""

import os
import sys
import threading
import time
import types

import pytest
import torch
from support.processes import run
from torch.distributed import HashStore
from treadle.strategies.distributed.training_clock import describe_phase
from treadle.strategies.distributed.watchdog import Watchdog, dismiss, watch
from treadle.strategies.distributed.world import World

import treadle

pytestmark = [pytest.mark.guarantee, pytest.mark.skipif(sys.platform != "linux", reason="/proc as on Linux")]


def test_without_a_limit_one_process_has_no_watchdog():
    assert treadle.Accelerator(cpu=True).watchdog is None


def slow_alone():
    """Return the phase after the ranks have worked alone, and then exchanged, for twice the limit each."""
    accelerator = treadle.Accelerator(cpu=True)
    assert accelerator.watchdog is not None
    assert not accelerator.watchdog.clock.strict
    accelerator.gather(torch.ones(1))  # the first one connects the ranks, which takes its time on a busy machine
    accelerator.watchdog.clock.limit = 4  # more than one rank may be behind the other on a busy machine
    time.sleep(5)  # nobody waits
    for _ in range(50):  # exchanges are progress; the ranks make as many, whatever the clock of each says
        accelerator.gather(torch.ones(1))
        time.sleep(0.1)
    return describe_phase(accelerator.watchdog.clock.collect_frames())


@pytest.mark.long
def test_by_default_only_those_that_wait_for_others_are_held_to_the_limit():
    assert run(slow_alone, 2) == ["script", "script"]


def test_a_watchdog_that_has_ended_holds_no_file():
    world, counts = World(), set()
    for _ in range(4):
        watch(world, 5.0)
        dismiss()
        counts.add(len(os.listdir("/proc/self/fd")))
    assert len(counts) == 1


class SlowStore(HashStore):
    """A store in which a question of the watchdog's takes until `go_on` is set."""

    def __init__(self):
        super().__init__()
        self.asked, self.go_on, self.alarms = threading.Event(), threading.Event(), 0

    def check(self, keys):
        if keys == ["alarm 0"]:
            self.asked.set()
            self.go_on.wait(10)
        return super().check(keys)

    def add(self, key, amount):
        self.alarms += key.startswith("alarm")
        return super().add(key, amount)


def test_an_end_while_the_watchdog_asks_is_no_alarm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = SlowStore()
    store.set("1 has ended", "")
    watchdog = Watchdog(types.SimpleNamespace(rank=0, size=2), 30.0, False, store)
    assert store.asked.wait(10)
    leaving = threading.Thread(target=watchdog.stop)
    leaving.start()
    assert watchdog._alarmed.wait(10)  # `stop` wakes the exchange by it
    store.go_on.set()
    leaving.join()
    assert store.alarms == 0
    assert list(tmp_path.iterdir()) == []
