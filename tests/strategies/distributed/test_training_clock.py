"""The clock of the watchdog: limits, phases and the thread that trains."""

import re
import sys

import pytest
from support.processes import script
from treadle.strategies.distributed.watchdog import dismiss, watch
from treadle.strategies.distributed.world import World

import treadle

pytestmark = [pytest.mark.guarantee, pytest.mark.skipif(sys.platform != "linux", reason="/proc as on Linux")]


def test_a_new_limit_applies_to_the_running_watchdog_in_full():
    world = World()
    try:
        watchdog = watch(world, 100.0)
        assert (watchdog.clock.limit, watchdog.clock.period, watchdog.exit.awaits_others) == (100.0, 1.0, True)
        assert watch(world, 2.5) is watchdog
        assert (watchdog.clock.limit, watchdog.clock.period, watchdog.exit.awaits_others) == (2.5, 0.5, True)
        assert watch(world, None) is watchdog
        assert (watchdog.clock.strict, watchdog.exit.awaits_others) == (False, False)
    finally:
        dismiss()


SCRIPT = """
import sys, threading, time, torch, treadle
from torch.utils.data import DataLoader
def train(hangs):
    accelerator = treadle.Accelerator(cpu=True, timeout={"seconds": 1})
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.ones(4, 1)))
    for batch in loader:
        accelerator.backward(model(batch).sum())
        time.sleep(0.6)  # twice as long as the limit over all, and progress in between
    print("worked", flush=True)
    time.sleep(60 * hangs)
if sys.argv[1] == "main":
    train(True)
for hangs in (False, True):
    thread = threading.Thread(target=train, args=(hangs,))
    thread.start()
    time.sleep(5)  # also with nothing that trains
    print("alive", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("trains", "said"), [("main", "worked\n"), pytest.param("other", "worked\nalive\nworked\n", marks=pytest.mark.long)]
)
def test_the_thread_that_trains_is_watched(trains, said):
    """Under Ray it is not the main thread, which Ray keeps for itself."""
    done = script(SCRIPT, trains, timeout=40)
    assert done.returncode == 124, done.stderr
    assert done.stdout == said
    assert re.search(r"treadle: no progress for 1 s: in script, optimizer step 1, .*train.py:11; stacks", done.stderr)


def test_a_limit_is_a_duration():
    with pytest.raises(TypeError, match="timeout=5 must be a string of the form DD:HH:MM:SS"):
        treadle.Trainer(accelerator="cpu", timeout=5)
