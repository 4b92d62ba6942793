"""Sharded tensors and their random numbers."""


def test_each_gpu_goes_on_from_its_own_random_numbers(monkeypatch):
    from torch.distributed.tensor import _random
    from treadle.strategies.distributed import keep_random_state

    made = []
    monkeypatch.setattr(_random, "OffsetBasedRNGTracker", lambda mesh, run_state_sync: made.append(run_state_sync) or 1)
    monkeypatch.setattr(_random, "_rng_tracker", None)
    keep_random_state("mesh")
    keep_random_state("mesh")
    assert made == [False]  # torch's default is True: all ranks would go on from rank zero's
