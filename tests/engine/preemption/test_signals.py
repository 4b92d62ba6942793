"""`Accelerator.preemptible`: a loop of one's own that a signal ends, on all ranks after the same step."""

import signal

import pytest
from support.signaled_loops import check, train

pytestmark = pytest.mark.long


@pytest.mark.guarantee
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.exhaustive), 4])
def test_a_signal_ends_the_loop_after_the_step(accumulate, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    whole, _ = train(tmp_path / "whole", accumulate=accumulate)
    first, _ = train(tmp_path / "a", signal.SIGTERM, accumulate=accumulate)
    assert len(first["losses"]) == max(3, accumulate)
    assert signal.getsignal(signal.SIGTERM) is before
    check(first, train(tmp_path / "a", accumulate=accumulate)[0], whole)


def test_ctrl_c_too_where_that_is_asked_for(tmp_path):
    whole, _ = train(tmp_path / "whole")
    first, _ = train(tmp_path / "a", signal.SIGINT, interrupts=True)
    check(first, train(tmp_path / "a")[0], whole, 130)
    found, _ = train(tmp_path / "b", signal.SIGINT)
    assert (found["status"], len(found["losses"]), (tmp_path / "b").exists()) == (130, 3, False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_loop_that_never_asks_ends_behind_the_block(number, tmp_path):
    called = []
    before = signal.signal(number, lambda *_: called.append(1))
    try:
        found, _ = train(tmp_path / "a", number, watches=False, interrupts=number == signal.SIGINT)
    finally:
        signal.signal(number, before)
    assert (found["status"], called) == (None, [1])
