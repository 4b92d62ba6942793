"""What metrics gather, and the module-level exchanges, against values written by hand; 9 samples, batches of 2."""

import os

import pytest
import torch
from support.processes import run
from torch.utils.data import DataLoader

import treadle
from treadle.utils import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    set_seed,
    synchronize_rng_states,
)


def metrics(evaluation, n):
    accelerator = treadle.Accelerator(cpu=True)
    loader = accelerator.prepare_data_loader(DataLoader(torch.arange(n), batch_size=2), evaluation=evaluation)
    found = {
        "samples": [],
        "tokens": [],
        "words": [],
        "mixed": [],
        "pairs": [],
        "weighed": [],
        "records": [],
        "lists": [],
        "boxes": [],
        "state": [],
    }
    for batch in loader:
        found["samples"] += accelerator.gather_for_metrics(batch).tolist()
        found["state"] += accelerator.state.gather_for_metrics(batch).tolist()
        found["tokens"] += accelerator.gather_for_metrics(batch.repeat_interleave(3)).tolist()
        found["words"] += accelerator.gather_for_metrics([f"w{i}" for i in batch.tolist()])
        mixed = accelerator.gather_for_metrics({"id": batch, "word": [f"w{i}" for i in batch.tolist()]})
        found["mixed"] += list(zip(mixed["id"].tolist(), mixed["word"], strict=True))
        ids, squares = accelerator.gather_for_metrics((batch, batch**2))
        found["pairs"] += list(zip(ids.tolist(), squares.tolist(), strict=True))
        # A batch's mean is one entry per process; with the count beside it the mean over the samples is exact.
        means, counts = accelerator.gather_for_metrics((batch.double().mean(), torch.tensor(len(batch))))
        found["weighed"] += list(zip(means.tolist(), counts.tolist(), strict=True))
        found["records"] += accelerator.gather_for_metrics([{"id": i} for i in batch.tolist()])
        words = [f"w{i}" for i in batch.tolist()]
        predictions, references = accelerator.gather_for_metrics((words, [[i] for i in batch.tolist()]))
        found["lists"] += list(zip(predictions, references, strict=True))
        nested = accelerator.gather_for_metrics({"a": words, "b": (words, [words])}, use_gather_object=True)
        assert [*nested] == ["a", "b"]
        assert nested["a"] == nested["b"][0] == predictions
        assert len(nested["b"][1]) == len(accelerator.gather_for_metrics({"loss": 0.5}))
        beside = accelerator.gather_for_metrics({"id": batch, "lists": (words, words)})
        assert beside["lists"] == (predictions, predictions)
        boxes = [torch.full((i % 3, 4), i) for i in batch.tolist()]
        found["boxes"] += accelerator.gather_for_metrics(boxes, use_gather_object=True)
        if accelerator.num_processes > 1:
            with pytest.raises(ValueError, match=r"one tensor for each .* Use .*use_gather_object=True"):
                accelerator.gather_for_metrics({"boxes": boxes, "id": batch})
            with pytest.raises(ValueError, match="the same structure of lists on every process"):
                accelerator.gather_for_metrics((words,) * (1 + accelerator.process_index))
        else:
            assert all(map(torch.equal, accelerator.gather_for_metrics(boxes), boxes))
        text = accelerator.gather_for_metrics("a text")
        assert set(text) == {"a text"}
        assert len(text) == len(means)
    return found


def repeated(evaluation, n, batch_size):
    """Gather each batch's mean as often as a full batch has samples, and rows of the same count that are no means."""
    accelerator = treadle.Accelerator(cpu=True)
    loader = accelerator.prepare_data_loader(
        DataLoader(torch.arange(float(n)), batch_size=batch_size), evaluation=evaluation
    )
    means, tokens, counts, sums = [], [], [], []
    for batch in loader:
        output = {"loss": batch.mean().repeat(batch_size), "ids": batch}
        gathered = accelerator.gather_for_metrics(output)
        assert torch.equal(accelerator.state.gather_for_metrics(output)["loss"], gathered["loss"])
        assert len(gathered["loss"]) == len(gathered["ids"])
        means += gathered["loss"].tolist()
        full = torch.cat((batch, batch.new_full((2 * batch_size,), -1.0)))[:batch_size]
        tokens.append(len(accelerator.gather_for_metrics(full + torch.arange(batch_size))))
        counts.append(len(accelerator.gather_for_metrics(torch.ones(batch_size, dtype=torch.long))))
        sums += accelerator.gather_for_metrics(batch.sum().reshape(1)).tolist()
    return sum(means) / len(means), tokens, counts, sums


REPEATED = ((False, 20, 8), (True, 20, 8), (False, 9, 2), (False, 13, 4), (False, 5, 1), (False, 1, 4))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_mean_repeated_for_a_full_batch_weighs_the_samples_of_a_short_one(found, world):
    for by_rank in found[world]:
        for (_, n, batch_size), (mean, tokens, counts, sums) in zip(REPEATED, by_rank["repeated"], strict=True):
            assert mean == pytest.approx((n - 1) / 2)
            # Other rows are left: all that the ranks with samples have.
            assert tokens == counts
            assert all(count % batch_size == 0 and count for count in tokens)
            assert sum(sums) == sum(range(n))


CASES = ((True, 9), (False, 9), (False, 1))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sample_once_and_in_order(found, world):
    for by_rank in found[world]:
        for (_, n), seen in zip(CASES, by_rank["metrics"], strict=True):
            assert seen["samples"] == list(range(n))
            assert seen["state"] == list(range(n))
            assert seen["tokens"] == [i for i in range(n) for _ in range(3)]
            assert seen["words"] == [f"w{i}" for i in range(n)]
            assert seen["mixed"] == [(i, f"w{i}") for i in range(n)]
            assert seen["lists"] == [(f"w{i}", [i]) for i in range(n)]
            assert [tuple(boxes.shape) for boxes in seen["boxes"]] == [(i % 3, 4) for i in range(n)]
            assert seen["pairs"] == [(i, i * i) for i in range(n)]
            assert seen["records"] == [{"id": i} for i in range(n)]
            assert sum(count for _, count in seen["weighed"]) == n
            mean = sum(mean * count for mean, count in seen["weighed"]) / n
            assert mean == pytest.approx((n - 1) / 2)


def functions():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # No Accelerator: the first of them connects.
    assert gather(torch.tensor([rank])).tolist() == list(range(size))
    assert gather_object([rank, "x"]) == [item for r in range(size) for item in (r, "x")]
    assert gather_object("text") == ["text"] * size
    assert gather_object({"a": rank}) == [{"a": r} for r in range(size)]
    assert gather_object([]) == []
    last = size - 1
    given = {"x": torch.tensor([rank, rank]), "name": "kept"}
    assert broadcast(given, from_process=last)["x"].tolist() == [last, last]
    assert given["x"].tolist() == [rank, rank]
    objects = [rank, {"of": rank}]
    assert broadcast_object_list(objects, from_process=last) is objects
    assert objects == [last, {"of": last}]
    with pytest.raises(ValueError, match=f"from_process={size} must be .*, because the world size is {size}"):
        broadcast(given, from_process=size)
    with pytest.raises(TypeError, match="object_list is a tuple, but must be a list"):
        broadcast_object_list((1, 2))
    assert reduce(torch.tensor([2.0 * rank])).item() == last
    assert reduce(torch.tensor([2.0 * rank]), "sum", scale=0.5).item() == last * size / 2
    padded = pad_across_processes({"a": torch.ones(rank + 1, 2), "b": torch.ones(1, rank + 1)}, pad_index=-1)
    assert padded["a"].shape == (size, 2)
    assert padded["a"].sum().item() == 2 * (rank + 1) - 2 * (size - rank - 1)
    assert padded["b"].shape == (1, rank + 1)
    assert pad_across_processes(torch.ones(1, rank + 1), dim=-1, pad_first=True)[0, 0].item() == (rank == last)
    if size > 1:
        with pytest.raises(ValueError, match=r"rank 0: \(1,\); rank 1: \(1,\), \(1,\)"):
            pad_across_processes([torch.ones(1)] * (rank + 1))
    set_seed(5, device_specific=True)
    own = torch.rand(()).item()
    torch.manual_seed(5 + rank)
    assert torch.rand(()).item() == own
    generator = torch.Generator().manual_seed(rank)
    synchronize_rng_states(["torch", "generator"], generator)
    drawn = gather(torch.stack([torch.rand(()), torch.rand((), generator=generator)]).view(1, 2))
    assert (drawn == drawn[0]).all()
    with pytest.raises(ValueError, match="Did you mean 'torch'"):
        synchronize_rng_states(["torhc"])


def test_a_seed_with_deterministic_algorithms(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        set_seed(5, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"  # without it the first matmul on a GPU raises
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


UNCOMMON = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.bool, torch.complex64]


def exchange_uncommon():
    accelerator = treadle.Accelerator(cpu=True)
    found = []
    for dtype in UNCOMMON:
        values = torch.tensor([[0.0, 1.0], [2.0, 3.0]]) + accelerator.process_index
        gathered = gather(values.to(dtype).t())  # not in one piece
        sent = broadcast(torch.tensor(accelerator.process_index + 1).to(dtype), 1)
        found.append((gathered.dtype, gathered.to(torch.complex64).real.tolist(), sent.dtype, bool(sent == 2)))
    mean = accelerator.reduce(torch.tensor([1 + 2j]) * (1 + accelerator.process_index), "mean")
    assert mean.tolist() == [1.5 + 3j]
    assert accelerator.world.all_reduce(mean * (2 - accelerator.process_index), "mean").tolist() == [2.25 + 4.5j]
    return found


def everything():
    functions()
    found = {
        "metrics": [metrics(evaluation, n) for evaluation, n in CASES],
        "repeated": [repeated(*case) for case in REPEATED],
    }
    return found | ({"uncommon": exchange_uncommon()} if os.environ["WORLD_SIZE"] == "2" else {})


@pytest.fixture(scope="module")
def found():
    """What each rank found, by the number of processes."""
    return {world: run(everything, world) for world in (1, 2, 3)}


def test_types_that_no_backend_knows_are_exchanged_too(found):
    first, second = (by_rank["uncommon"] for by_rank in found[2])
    assert first == second
    for dtype, (gathered, values, sent, _) in zip(UNCOMMON, first, strict=True):
        assert gathered == sent == dtype
        exact = [[0.0, 2.0], [1.0, 3.0], [1.0, 3.0], [2.0, 4.0]]
        assert values == ([[float(v > 0) for v in row] for row in exact] if dtype is torch.bool else exact)
    assert [equal for *_, equal in first[2:4]] == [True, True]
