"""How processes meet in a store that has outlived others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from treadle.strategies.distributed.process_group import join_attempt

SOON = timedelta(seconds=20)


def meet(store, size, name="groups"):
    """Let every rank join, last rank first, and return what each has."""
    with ThreadPoolExecutor(size) as threads:
        parts = [threads.submit(join_attempt, store, name, rank, size, SOON) for rank in reversed(range(size))]
        return [part.result() for part in reversed(parts)]


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_ranks_killed_while_they_connected_leave_nothing_that_the_next_attempt_reads(killed):
    store = dist.HashStore()
    first = meet(store, 3)
    first[killed].set("address", "of a dead process")
    # In the next attempt one rank is gone before it comes here, and so the others are killed there.
    short = timedelta(seconds=0.3)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(join_attempt, store, "groups", rank, 3, short) for rank in range(3) if rank != killed]
        errors = [future.exception() for future in waiting]
    assert any(isinstance(error, RuntimeError) for error in errors)
    parts = meet(store, 3)
    parts[killed].set("address", "of a living process")
    assert [part.get("address") for part in parts] == [b"of a living process"] * 3


def test_calls_of_one_name_do_not_meet_those_of_another():
    store = dist.HashStore()
    threads = [threading.Thread(target=meet, args=(store, 2, name)) for name in ("groups", "calls")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_a_rank_that_does_not_come_is_named():
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match=r"rank\(s\) 1, 2 of 3 have not connected to rank 0 within 0:00:00\.1"):
        join_attempt(store, "groups", 0, 3, timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match=r"rank 0 has not connected to rank 2 within 0:00:00\.1"):
        join_attempt(dist.HashStore(), "groups", 2, 3, timedelta(seconds=0.1))
