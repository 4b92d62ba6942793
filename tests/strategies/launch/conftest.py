"""What tests of this folder share."""

import time

import pytest
from support.launches import Start


@pytest.fixture
def start():
    start = Start()
    yield start
    for process in start.started:
        while process.poll() is None:  # only after a failed test; a second signal kills the ranks at once
            process.terminate()
            time.sleep(0.2)
