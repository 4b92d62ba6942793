"""All ranks leave after the same step."""

import signal

import pytest
from support.processes import run
from support.signaled_loops import EPOCHS, SAMPLES, check, train


def on_two(folder, strategy, rank):
    whole, exchanges = train(f"{folder}/whole", strategy=strategy)
    _, without = train(f"{folder}/not", strategy=strategy, watches=False)
    assert exchanges == without
    first, _ = train(f"{folder}/a", signal.SIGTERM, rank, strategy, pause=0.02 * (1 + 0.2 * rank))
    second, _ = train(f"{folder}/a", strategy=strategy)
    check(first, second, whole)
    return len(first["losses"])


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 1), pytest.param("fsdp", 0, marks=pytest.mark.exhaustive)])
def test_all_ranks_leave_after_the_same_step(strategy, rank, tmp_path):
    steps, other = run(on_two, 2, str(tmp_path), strategy, rank)
    assert steps == other
    assert 3 <= steps < EPOCHS * SAMPLES // 4
