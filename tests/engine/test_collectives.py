"""What metrics gather, and the module-level exchanges, against values written by hand; 9 samples, batches of 2."""

import collections
import contextlib
import io
import os

import datasets
import numpy as np
import pandas
import pytest
import torch
from support.models import Numbers, SGDTask, Stream
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Subset, TensorDataset
from treadle.engine.collectives import split

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


def metrics(evaluation, n, make=torch.arange):
    accelerator = treadle.Accelerator(cpu=True)
    loader = accelerator.prepare_data_loader(DataLoader(make(n), batch_size=2), evaluation=evaluation)
    found = collections.defaultdict(list)
    for batch in loader:
        found["samples"] += accelerator.gather_for_metrics(batch).tolist()
        found["tokens"] += accelerator.gather_for_metrics(batch.repeat_interleave(3)).tolist()
        words = [f"w{i}" for i in batch.tolist()]
        found["words"] += accelerator.gather_for_metrics(words)
        # A batch's mean is one entry per process; with the count beside it the mean over the samples is exact.
        means, counts = accelerator.gather_for_metrics((batch.double().mean(), torch.tensor(len(batch))))
        found["weighed"] += list(zip(means.tolist(), counts.tolist(), strict=True))
        found["records"] += accelerator.gather_for_metrics([{"id": i} for i in batch.tolist()])
        predictions, references = accelerator.gather_for_metrics((words, [[i] for i in batch.tolist()]))
        found["lists"] += list(zip(predictions, references, strict=True))
        nested = accelerator.gather_for_metrics({"a": words, "b": (words, [words])}, use_gather_object=True)
        assert [*nested] == ["a", "b"]
        assert nested["a"] == nested["b"][0] == predictions
        assert len(nested["b"][1]) == len(accelerator.gather_for_metrics({"loss": 0.5}))
        mixed = accelerator.gather_for_metrics({"id": batch, "lists": (words, words)})
        assert mixed["lists"] == (predictions, predictions)
        found["mixed"] += mixed["id"].tolist()
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


class OwnBatches(BatchSampler):
    """A user's batch sampler, as those of sentence-transformers."""


def repeated(evaluation, n, batch_size, own=False):
    """Gather each batch's mean as often as a full batch has samples, and rows of the same count that are no means."""
    accelerator = treadle.Accelerator(cpu=True)
    samples = torch.arange(float(n))
    batches = {"batch_sampler": OwnBatches(range(n), batch_size, False)} if own else {"batch_size": batch_size}
    loader = accelerator.prepare_data_loader(DataLoader(samples, **batches), evaluation=evaluation)
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


REPEATED = (
    *((False, 20, 8), (True, 20, 8), (False, 9, 2), (False, 13, 4), (False, 5, 1), (False, 1, 4)),
    *((True, 20, 8, True), (False, 13, 4, True)),
)


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_mean_repeated_for_a_full_batch_weighs_the_samples_of_a_short_one(found, world):
    for by_rank in found[world]:
        for (_, n, batch_size, *_), (mean, tokens, counts, sums) in zip(REPEATED, by_rank["repeated"], strict=True):
            assert mean == pytest.approx((n - 1) / 2)
            # Other rows are left: all that the ranks with samples have.
            assert tokens == counts
            assert all(count % batch_size == 0 and count for count in tokens)
            assert sum(sums) == sum(range(n))


CASES = ((True, 9), (False, 9), (False, 1), (False, 9, lambda n: Stream(range(n))), (False, 9, Numbers))


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sample_once_and_in_order(found, world):
    for by_rank in found[world]:
        for (_, n, *_), seen in zip(CASES, by_rank["metrics"], strict=True):
            assert seen["samples"] == seen["mixed"] == list(range(n))
            assert seen["tokens"] == [i for i in range(n) for _ in range(3)]
            assert seen["words"] == [f"w{i}" for i in range(n)]
            assert seen["lists"] == [(f"w{i}", [i]) for i in range(n)]
            assert [tuple(boxes.shape) for boxes in seen["boxes"]] == [(i % 3, 4) for i in range(n)]
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
    assert padded["a"].tolist() == [[1, 1]] * (rank + 1) + [[-1, -1]] * (last - rank)
    assert padded["b"].shape == (1, rank + 1)
    assert pad_across_processes(torch.ones(1, rank + 1), dim=-1, pad_first=True)[0, 0].item() == (rank == last)
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
UNCOMMON += [torch.bfloat16, torch.float16, torch.uint8]


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


def methods():
    accelerator = treadle.Accelerator(cpu=True)
    rank, size = accelerator.process_index, accelerator.num_processes
    everyone, rows = range(size), torch.arange(3 - rank) + 10 * rank
    gathered = [10 * r + i for r in everyone for i in range(3 - r)]
    assert accelerator.gather(torch.tensor(float(rank))).tolist() == [*everyone]
    mixed = {"ids": rows, "words": ["a", "b"][: rank + 1], "pair": (rows.view(-1, 1).float(), rank), "loss": 0.5}
    mixed = accelerator.gather_for_metrics(mixed)
    assert mixed["ids"].tolist() == accelerator.gather(rows).tolist() == gathered
    assert mixed["words"] == [word for r in everyone for word in ["a", "b"][: r + 1]]
    assert mixed["pair"][0].tolist() == [[i] for i in gathered]
    assert (mixed["pair"][1], mixed["loss"]) == ([*everyone], [0.5] * size)
    assert accelerator.gather_for_metrics({"rank": rank}) == [{"rank": r} for r in everyone]
    forced = accelerator.gather_for_metrics([rows], use_gather_object=True)
    assert [len(part) for part in forced] == [3 - r for r in everyone]
    if size > 1:
        calls = [(accelerator.gather, torch.zeros(2, 2 + rank)), (accelerator.gather, [rows] * (1 + rank))]
        calls += [(accelerator.gather, torch.zeros(2, dtype=(torch.int, torch.long, torch.long)[rank]))]
        for call, uneven in (*calls, (pad_across_processes, [torch.ones(1)] * (rank + 1))):
            with pytest.raises(ValueError, match=r"rank 0: .*; rank 1: "):
                call(uneven)
    with pytest.raises(TypeError, match="got a str"):
        accelerator.gather("text")
    reduced = {"sum": 5 * size * (size + 1), "mean": 5 * (size + 1), "max": 10 * size, "min": 10, "none": rank + 1}
    for reduction, expected in reduced.items():
        tensor = torch.tensor([rank + 1.0])
        assert accelerator.reduce({"x": tensor}, reduction, scale=10.0)["x"].item() == expected
        assert tensor.item() == rank + 1.0
    assert accelerator.reduce(torch.tensor(rank), "mean").item() == (size - 1) / 2
    with pytest.raises(ValueError, match="Did you mean 'mean'"):
        accelerator.reduce(rows, "maen")
    assert accelerator.pad_across_processes(rows, pad_index=-1).tolist() == [*rows.tolist(), *[-1] * rank]
    triggers = [accelerator.check_trigger()]
    if rank == size - 1:
        accelerator.set_trigger()
    assert [*triggers, accelerator.check_trigger(), accelerator.check_trigger()] == [False, True, False]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        accelerator.print("spoken on", rank)
    assert printed.getvalue() == ("" if rank else "spoken on 0\n")


def everything():
    functions()
    methods()
    found = {
        "metrics": [metrics(*case) for case in CASES],
        "repeated": [repeated(*case) for case in REPEATED],
        "shares": there_and_back(),
    }
    if os.environ["WORLD_SIZE"] == "2":
        found |= {
            "uncommon": exchange_uncommon(),
            "trained": [by_trainer(2, *case) for case in GATHERED],
            "gathers": gathers(),
        }
    return found


@pytest.fixture(scope="module")
def found():
    """What each rank found, by the number of processes."""
    return {world: run(everything, world) for world in (1, 2, 3)}


@pytest.mark.long
def test_types_that_no_backend_knows_are_exchanged_too(found):
    first, second = (by_rank["uncommon"] for by_rank in found[2])
    assert first == second
    for dtype, (gathered, values, sent, _) in zip(UNCOMMON, first, strict=True):
        assert gathered == sent == dtype
        exact = [[0.0, 2.0], [1.0, 3.0], [1.0, 3.0], [2.0, 4.0]]
        assert values == ([[float(v > 0) for v in row] for row in exact] if dtype is torch.bool else exact)
    assert [equal for *_, equal in first[2:4]] == [True, True]


Point = collections.namedtuple("Point", "x y")


class Table:
    columns = ("a", "b")

    def __len__(self):
        return 2

    def __iter__(self):
        return iter(self.columns)


FORMS = {
    "list": lambda: [0, 1, 4, 9, 16],
    "tuple": lambda: (0, 1, 4, 9, 16),
    "tensor": lambda: torch.tensor([0, 1, 4, 9, 16]),
    "array": lambda: np.array([0, 1, 4, 9, 16]),
    "deque": lambda: collections.deque([0, 1, 4, 9, 16]),
    "generator": lambda: (i**2 for i in range(5)),
    "torch dataset": lambda: ConcatDataset([[0, 1, 4, 9, 16]]),
    "table": lambda: datasets.Dataset.from_dict({"x": [0, 1, 4, 9, 16]}),
    "dict view": lambda: {0: 0, 1: 1, 4: 4, 9: 9, 16: 16}.values(),
}


def listed(value):
    if isinstance(value, datasets.Dataset):
        return list(value["x"])
    return [int(item) for item in ([value[i] for i in range(len(value))] if isinstance(value, Subset) else value)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("padded", "size", "expected"),
    [
        (False, 1, [[0, 1, 4, 9, 16]]),
        (False, 2, [[0, 1, 4], [9, 16]]),
        (False, 3, [[0, 1], [4, 9], [16]]),
        (False, 7, [[0], [1], [4], [9], [16], [], []]),
        (True, 2, [[0, 1, 4], [9, 16, 16]]),
        (True, 3, [[0, 1], [4, 9], [16, 16]]),
        (True, 4, [[0, 1], [4, 9], [16, 16], [16, 16]]),
    ],
)
def test_shares(form, padded, size, expected):
    shares = [split(FORMS[form](), rank, size, padded) for rank in range(size)]
    assert [listed(share) for share in shares] == expected
    if form in ("list", "tuple", "tensor", "array", "table"):
        assert {type(share) for share in shares} == {type(FORMS[form]())}


def test_ranges_stay_ranges_and_frames_are_cut_by_rows():
    assert split(range(10, 20), 1, 3) == range(14, 17)
    assert split(range(3), 1, 2, True) == [2, 2]
    assert split(Stream(range(5)), 0, 2) == [0, 1, 2]
    assert split(pandas.DataFrame([[1, 2], [3, 4], [5, 6]]), 1, 2).to_numpy().tolist() == [[5, 6]]
    assert split(pandas.DataFrame(np.arange(5)), 1, 2, True)[0].tolist() == [3, 4, 4]


@pytest.mark.parametrize("padded", [False, True])
def test_nothing_to_share(padded):
    for empty in ([], (), torch.zeros(0, 2), {}, {"a": []}, range(0), iter(())):
        for rank in range(3):
            share = split(empty, rank, 3, padded)
            assert len(share.get("a", ()) if isinstance(share, dict) else share) == 0, empty


def test_dicts_are_split_by_their_values_and_left_as_they_are():
    given = {"ids": torch.arange(5), "words": ["a", "b", "c", "d", "e"], "inner": {"x": range(5)}}
    before = dict(given)
    share = split(given, 1, 2, True)
    assert share["ids"].tolist() == [3, 4, 4]
    assert share["words"] == ["d", "e", "e"]
    assert share["inner"] == {"x": [3, 4, 4]}
    assert given.keys() == before.keys()
    assert all(given[key] is before[key] for key in given)
    encoding = collections.UserDict(given)
    assert type(split(encoding, 0, 2)) is collections.UserDict
    assert split(encoding, 0, 2)["words"] == ["a", "b", "c"]
    assert len(encoding["words"]) == 5
    assert split(Point([1, 2, 3], (4, 5, 6)), 1, 2) == Point([3], (6,))


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        ("a prompt", TypeError, r"can't split 'a prompt' \(a str\): it has no rows .*Pass a list"),
        (b"bytes", TypeError, r"can't split b'bytes' \(a bytes\): it has no rows"),
        ({"b", "a"}, TypeError, r"\(a set\): it has no rows in an order that is the same on all processes"),
        (5, TypeError, r"can't split 5 \(an int\): 'int' object is not iterable"),
        (torch.tensor(5), TypeError, r"\(a Tensor\): iteration over a 0-d tensor"),
        ({"a": [1], "n": 5}, TypeError, r"can't split 5 \(an int\)"),
        ({"a": [1], "b": [1, 2]}, ValueError, "'a': 1, 'b': 2"),
        (Table(), TypeError, "it has no rows"),
    ],
    ids=["str", "bytes", "set", "int", "0-d", "number in a dict", "lengths", "table"],
)
def test_what_can_not_be_split(bad, error, says):
    with pytest.raises(error, match=says):
        split(bad, 0, 2)


def there_and_back():
    state = treadle.PartialState(cpu=True)
    for n in range(10):
        for padded in (False, True):
            with state.split_between_processes([f"p{i}" for i in range(n)], apply_padding=padded) as mine:
                results = [prompt.upper() for prompt in mine]
            everything = state.gather_object(results)
            assert everything[:n] == [f"P{i}" for i in range(n)]
            assert padded or len(everything) == n
            with state.split_between_processes(torch.arange(n), apply_padding=padded) as rows:
                assert state.gather(rows * 2)[:n].tolist() == [2 * i for i in range(n)]
            with state.split_between_processes((i for i in range(n)), apply_padding=padded) as items:
                assert state.gather_for_metrics(items)[:n] == list(range(n))
    with treadle.Accelerator(cpu=True).split_between_processes(["a", "b", "c"]) as mine:
        return mine


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_back_in_the_order_of_the_inputs(found, world):
    shares = {1: [["a", "b", "c"]], 2: [["a", "b"], ["c"]], 3: [["a"], ["b"], ["c"]]}
    assert [by_rank["shares"] for by_rank in found[world]] == shares[world]


def batches(samples, batch_size, **options):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size, **options)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def contrast(rows, columns, first=0):
    """CLIP's loss of some rows, of which the first belongs to column ``first``, and a term of the rows alone."""
    similar = nn.functional.normalize(rows, dim=1) @ nn.functional.normalize(columns, dim=1).T / 0.1
    positives = torch.arange(first, first + len(rows))
    return nn.functional.cross_entropy(similar, positives) + rows.pow(2).mean()


def loss_of(accelerator, all_gather, form, net, x, y):
    rows, columns = net(x), net(y)
    if form == "own rows":
        counts = accelerator.gather(torch.tensor([len(x)])).tolist()
        first = sum(counts[: accelerator.process_index])
        return contrast(rows, accelerator.gather({"columns": columns}, sync_grads=True)["columns"], first)
    if form == "stacked":
        rows, columns = all_gather([rows, columns], sync_grads=True)
        return contrast(rows.reshape(-1, 4), columns.reshape(-1, 4))
    return contrast(*accelerator.gather((rows, columns), sync_grads=True))


class Contrastive(SGDTask):
    lr = 0.5

    def __init__(self, form):
        super().__init__()
        self.net, self.form = network(), form

    def training_step(self, batch, batch_idx):
        return loss_of(self.trainer.accelerator, self.all_gather, self.form, self.net, *batch)


def flat(model):
    return torch.cat([getattr(p.detach(), "full_tensor", p.detach)().reshape(-1) for p in model.parameters()]).tolist()


def by_trainer(world, strategy, form, samples, accumulate):
    task = Contrastive(form)
    trainer = make_trainer(strategy=strategy, precision="64-true", accumulate_grad_batches=accumulate)
    trainer.fit(task, batches(samples, 8 // world))
    return flat(task)


GATHERED = [
    ("ddp", "whole", 16, 1),
    ("ddp", "whole", 16, 2),
    ("ddp", "whole", 19, 1),  # the last batch: two samples and one
    ("ddp", "whole", 17, 1),  # the last batch: one sample, and none on the other process
    ("ddp", "own rows", 19, 1),
    ("ddp", "stacked", 16, 1),
    ("fsdp", "whole", 16, 2),
    ("fsdp", "whole", 17, 1),
    ("fsdp", "own rows", 19, 1),
]


@pytest.mark.long
def test_two_processes_train_as_one(found):
    expected = [by_trainer(1, "auto", *case[1:]) for case in GATHERED]
    assert all(abs(a - b) > 1e-3 for a, b in zip(expected[0], flat(network()), strict=True))
    for rank in (by_rank["trained"] for by_rank in found[2]):
        for case, ours, theirs in zip(GATHERED, rank, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-13), case


class Gathers(SGDTask):
    """Notes what all_gather returns."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        rank = self.global_rank
        found = self.all_gather({"x": [torch.full((2,), rank), rank + 0.5], "name": "kept"})
        self.found = {"x": [part.tolist() for part in found["x"]], "name": found["name"]}
        self.cut = not self.all_gather(self.weight * 2).requires_grad
        if self.trainer.world_size > 1:
            group = [torch.distributed.new_group([one]) for one in (0, 1)]
            alone = self.all_gather(self.weight * rank, group=group[rank], sync_grads=True)
            assert alone.tolist() == [float(rank)]
            shapes = r"the same shapes.*rank 0: \(1,\) torch.float32; rank 1: \(2,\) torch.float32"
            with pytest.raises(ValueError, match=shapes):
                self.all_gather(torch.ones(rank + 1))
            with pytest.raises(ValueError, match=f"rank {rank} is not in the given process group"):
                self.all_gather(torch.ones(1), group=group[1 - rank])
            gradients = r"rank 0: \(1,\) torch.float32 without gradient; rank 1: \(1,\) torch.float32\."
            with pytest.raises(ValueError, match=gradients):
                self.all_gather(self.weight * 1 if rank else torch.ones(1), sync_grads=True)
        return self.weight.sum()


def gathers():
    task = Gathers()
    make_trainer(max_steps=1).fit(task, batches(2, 1))
    return task.found, task.cut


@pytest.mark.long
def test_forms_of_all_gather(found):
    assert gathers() == ({"x": [[0, 0], 0.5], "name": "kept"}, False)
    for by_rank in found[2]:
        assert by_rank["gathers"] == ({"x": [[[0, 0], [1, 1]], [0.5, 1.5]], "name": "kept"}, True)
