"""The time limit after a signal: what another thread may do to it."""

import os
import signal
import time

import pytest
from treadle.engine.preemption.deadline import Deadline


@pytest.mark.guarantee
def test_a_start_after_the_end_writes_into_no_file_of_others():
    deadline = Deadline(60.0, [signal.SIGTERM])
    deadline.cancel()
    reading, writing = os.pipe()  # takes the numbers that are free again
    os.set_blocking(reading, False)
    assert writing == deadline._writing
    try:
        deadline.start()
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
    finally:
        os.close(reading)
        os.close(writing)


def test_another_rank_starts_it_and_the_end_of_the_stage_cancels_it():
    deadline = Deadline(0.5, [signal.SIGTERM])
    deadline.start()
    time.sleep(0.1)
    deadline.cancel()
    time.sleep(0.6)  # otherwise this process would be gone
