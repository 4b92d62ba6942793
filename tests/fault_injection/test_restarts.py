"""Ranks killed again and again under launchers that restart them: the run ends with the undisturbed run's weights."""

import functools
import math
import sys

import pytest
from support.restarts import COMMANDS, Kill, draw_kills, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc as on Linux")

SHORT = {"epochs": 1, "samples": 16, "pause": 0.0}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights that the job ends with when nobody kills, by its settings."""

    @functools.cache
    def get(**settings):
        outcome = run(tmp_path_factory.mktemp("undisturbed"), "treadle launch", [], **settings)
        assert outcome.status == 0, outcome.output
        return outcome.done

    return get


def describe(outcome, equal):
    """A row of the table that the tests print."""
    latencies = ", ".join("-" if math.isnan(seconds) else f"{seconds:.1f}" for seconds in outcome.latencies)
    status = "HUNG" if outcome.status is None else outcome.status
    weights = "equal" if equal else "DIFFERS"
    return f"{len(outcome.killed)} kills | {status} | {outcome.seconds:.1f} s | {weights} | {latencies}"


def check(outcome, expected):
    words = f"{describe(outcome, outcome.done == expected)}\n{list(map(str, outcome.killed))}\n{outcome.output}"
    assert outcome.status == 0, words
    assert outcome.done == expected, words
    assert outcome.orphans == [], words


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize("launcher", [pytest.param("treadle launch", marks=pytest.mark.slow), "torchrun"])
def test_a_rank_killed_while_the_others_connect(launcher, tmp_path, undisturbed):
    """Rank 0 has left what it does to connect in the store; the launcher keeps that, or does not."""
    outcome = run(tmp_path, launcher, [Kill(1, "connect", delay=0.3)], **SHORT, late=0.6)
    assert len(outcome.killed) == 1
    check(outcome, undisturbed(**SHORT))


@pytest.mark.guarantee
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("launcher", COMMANDS)
def test_ranks_killed_at_random_moments(launcher, async_save, strategy, seed, tmp_path, undisturbed, record_property):
    settings = {"strategy": strategy, "async_save": async_save}
    outcome = run(tmp_path, launcher, draw_kills(seed, 3), **settings)
    expected = undisturbed(strategy=strategy, async_save=False)
    print(f"\n| {launcher} | {strategy} | {'async' if async_save else 'sync'} | {seed} |", end=" ")
    print(describe(outcome, outcome.done == expected), "|", "; ".join(map(str, outcome.killed)))
    check(outcome, expected)


@pytest.mark.guarantee
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["treadle launch", "torchrun"])
def test_restarts_used_up(launcher, tmp_path):
    kills = [Kill(0, "step", 2), Kill(1, "step", 1)]
    outcome = run(tmp_path, launcher, kills, max_restarts=1)
    assert outcome.killed == kills
    assert outcome.status == (1 if launcher == "torchrun" else 137), outcome.output
    assert outcome.orphans == []
    if launcher == "treadle launch":
        assert outcome.output.count("failed first") == 2
        for words in ("rank 0 of 2 failed first: killed by SIGKILL", "rank 1 of 2 failed first: killed by SIGKILL"):
            assert outcome.output.count(words) == 1
        assert "restart 1 of 1" in outcome.output
