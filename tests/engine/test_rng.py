"""Who draws which random numbers."""

import random

import numpy as np
import pytest
import torch
from support.processes import run
from torch.utils.data import DataLoader, TensorDataset
from treadle.compat.operations import set_seed
from treadle.strategies import FSDP

import treadle


def drawn(strategy="auto"):
    treadle.seed_everything(3)
    accelerator = treadle.Accelerator(cpu=True, strategy=strategy)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=True))
    order = accelerator.gather_for_metrics(torch.cat([x for (x,) in loader])).tolist()
    return sorted(order), torch.rand(4).tolist(), np.random.rand(), random.random()


def draw_in_turn():
    return drawn(), drawn(), drawn(FSDP(tensor_parallel_size=2))


def drawn_after_a_seed_of_the_rank():
    """What TRL does before its Trainer prepares the DataLoader."""
    set_seed(3, device_specific=True)
    expected = torch.rand(4).tolist(), np.random.rand(), random.random()
    set_seed(3, device_specific=True)
    accelerator = treadle.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8)), 2, shuffle=True))
    before = torch.rand(4).tolist(), np.random.rand(), random.random()
    order = accelerator.gather_for_metrics(torch.cat([x for (x,) in loader])).tolist()
    return before == expected, torch.rand(4).tolist(), sorted(order)


def test_numbers_of_ranks_that_a_script_has_seeded_stay_theirs():
    (kept, zero, order), (other_kept, one, other_order) = run(drawn_after_a_seed_of_the_rank, 2)
    assert kept
    assert other_kept
    assert zero != one
    assert order == other_order == list(range(8))


def test_each_process_draws_numbers_of_its_own_and_the_same_ones_again():
    """One seed everywhere would drop the same units of different samples, and crop them alike."""
    (zero, again, part), (one, one_again, other_part) = run(draw_in_turn, 2)
    assert zero == again
    assert one == one_again
    assert all(mine != other for mine, other in zip(zero[1:], one[1:], strict=True))
    assert zero[0] == one[0] == list(range(8))
    assert part[1:] == other_part[1:]  # processes that share a sample draw alike


@pytest.mark.parametrize("text", ["²", "٣", "-1", "1.5", "", "9" * 5000])
def test_a_seed_from_the_environment_that_is_not_a_number(text, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", text)
    with pytest.raises(ValueError, match=r"PL_GLOBAL_SEED=.* must be an integer from 0 to 2\*\*32 - 1"):
        treadle.seed_everything()
