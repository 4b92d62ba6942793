"""The time limit after a signal: what another thread may do to it."""

import os
import signal

import pytest
from support.processes import script
from treadle.engine.preemption.deadline import Deadline


@pytest.mark.guarantee
def test_a_start_after_the_end_writes_into_no_file_of_others():
    deadline = Deadline(60.0, [signal.SIGTERM])
    deadline.cancel()
    reading, first = os.pipe()
    os.set_blocking(reading, False)
    writing = os.dup2(first, deadline._writing)  # another file has the number that is free again
    try:
        deadline.start()
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
    finally:
        for descriptor in {reading, first, writing}:
            os.close(descriptor)


STARTED = """
import signal, sys, time
from treadle.engine.preemption.deadline import Deadline

deadline = Deadline(2.0, [signal.SIGTERM])
deadline.start()
if sys.argv[1] == "cancel":
    deadline.cancel()
time.sleep(4)
"""


@pytest.mark.long
@pytest.mark.parametrize(("action", "status"), [("cancel", 0), ("wait", 143)])
def test_another_rank_starts_it_and_the_end_of_the_stage_cancels_it(action, status):
    assert script(STARTED, action).returncode == status
