"""Random trainings, interrupted at random steps and resumed: no difference to the uninterrupted run, in anything.

A seed is a trial: it draws the set-up, the steps and the seeds of the runs (see `resume_trials.draw`). To see one that
failed: ``pytest tests/trainer/checkpointing/test_resume_trials.py -k "few and 12"``, or ``-m slow -k "many and 7"``
for a part of the long test, whose failure names its seeds. ``TREADLE_TRIALS`` is the number of seeds of the long test.
"""

import os

import pytest
import torch
from support.processes import run
from support.resume_trials import trial

FEW = (100, 103, 107, 110, 111, 117, 118, 121)
PART = 10  # seeds in one part of the long test; each is resumed in two chains of one to three interruptions
PARTS = -(-int(os.environ.get("TREADLE_TRIALS", "500")) // PART)

quiet = pytest.mark.filterwarnings("ignore")  # torch's of schedulers, ours of streams that are read again


def report(found):
    return "\n".join(f"seed {seed}: {own}\n  " + "\n  ".join(texts[:10]) for seed, own, texts in found)


@quiet
@pytest.mark.guarantee
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.exhaustive if n % 2 else ()) for n, seed in enumerate(FEW)]
)
def test_few(tmp_path, seed):
    own, found, count = trial(seed, tmp_path)
    assert not found, report([(seed, own, found)])
    assert count == 2


@quiet
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_many(tmp_path, part):
    found = trials_here(range(1000 + part * PART, 1000 + (part + 1) * PART), tmp_path)
    assert not found, report(found)


def trials_here(seeds, root, door=None):
    """Trials in each of these processes; all of them share the checkpoints."""
    torch.set_num_threads(1)
    found = []
    for seed in seeds:
        own, texts, _ = trial(seed, root / str(seed), door, int(os.environ.get("WORLD_SIZE", "1")))
        if texts:
            found.append((seed, own, texts))
    return found


@quiet
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("door", ["trainer", "loop"])
@pytest.mark.parametrize("part", range(3))
def test_many_on_two_processes(tmp_path, door, part):
    seeds = range(100 + 10 * part, 110 + 10 * part)
    for found in run(trials_here, 2, seeds, tmp_path, door, timeout=1000):
        assert not found, report(found)
