"""What holds for every test."""

import pytest
from treadle.strategies.current import disconnect


@pytest.fixture(autouse=True)
def no_process_group_is_left():
    """A run in the test's own process may connect it (sharding does so even alone), and the next test starts anew."""
    yield
    disconnect()
