"""Which samples a process gets, in which order, and that a resume goes on with exactly the ones that are left.

The ranks of a world are so many `Loader`s in one process, as a loader asks its world for two numbers only.
"""

import itertools
import random
import re
import warnings

import numpy as np
import pytest
import torch
from support.loader_ranks import LAZY, Lazy, Negated, Ranks, flat, make_alone, plain_list, seed
from support.models import Numbers
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler
from treadle.engine.checkpoint.json_codec import decode, encode
from treadle.engine.rng import random_state


class Uneven(Sampler):
    """A batch sampler with batches of 1, 2, 3, 1, 2, 3, ... in an order drawn from torch."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        order, sizes = iter(torch.randperm(self.n).tolist()), itertools.cycle((1, 2, 3))
        yield from iter(lambda: list(itertools.islice(order, next(sizes))), [])


class Around(Sampler):
    """Hands on what another sampler yields; the two know each other."""

    def __init__(self, n, inner=None):
        self.inner = [inner or RandomSampler(range(n), generator=torch.Generator().manual_seed(5))]
        self.inner[0].outer = self

    def __len__(self):
        return len(self.inner[0])

    def __iter__(self):
        return iter(self.inner[0])


class CountingEpochs(Sampler):
    """Another order in each epoch, which it counts by itself and says to nobody."""

    def __init__(self, n):
        self.n, self.epoch = n, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(range(self.n), self.n))


class SayingEpochs(CountingEpochs):
    """The same, and says it."""

    def __init__(self, n):
        self.n, self.counts = n, {"epoch": 0}

    def __iter__(self):
        self.counts["epoch"] += 1
        return iter(random.Random(self.counts["epoch"]).sample(range(self.n), self.n))

    def state_dict(self):
        return self.counts  # the very dict that changes

    def load_state_dict(self, state):
        self.counts.update(state)


class OwnBatches(BatchSampler):
    """Of a user's own, with a length."""


def configurations():
    generator = random.Random(11)
    for size, batch in itertools.product((1, 2, 3), (1, 2, 3)):
        for n in range(2 * size * batch + 2):
            yield size, batch, n, generator.random() < 0.5, generator.random() < 0.5, generator.choice((1, 2, 3))


# -- order and sharding ----------------------------------------------------------------------------------------------


def test_every_sample_once_in_the_order_of_one_process():
    """Weighed so that the gradient is the mean over the group."""
    for size, batch, n, drop_last, shuffle, k in configurations():
        shuffle &= n > 0  # torch refuses to shuffle nothing

        def make(width=batch, n=n, drop_last=drop_last, shuffle=shuffle):
            return DataLoader(range(n), batch_size=width, shuffle=shuffle, drop_last=drop_last)

        seed(7)
        wanted = make(batch * size)
        ranks = Ranks(make, size, k)
        seed(7)
        for _ in range(3):
            epoch = list(ranks.epoch())
            found = [flat(parts) for parts, _ in epoch]
            assert found == plain_list(wanted), (size, batch, n, drop_last, shuffle)
            assert len(found) == len(ranks.loaders[0])
            if not drop_last:
                assert sorted(flat(found)) == list(range(n))
            for parts, _ in epoch:
                lengths = [len(part) for part in parts]
                assert max(lengths) - min(lengths) <= 1
                assert lengths == sorted(lengths, reverse=True)
            check_groups(epoch, size, k)


def check_groups(epoch, size, k):
    """Each group has at most `k` micro-batches, the last one of the epoch ends one, and its gradient is the mean."""
    group = []
    for parts, facts in epoch:
        group.append((parts, facts))
        assert len({fact.last for fact in facts}) == 1
        assert {fact.everyone for fact in facts} == {sum(len(part) for part in parts)}
        assert [fact.samples for fact in facts] == [len(part) for part in parts]
        if not facts[0].last:
            continue
        assert len(group) <= k
        every = [i for parts, _ in group for part in parts for i in part]
        # What DDP does: each rank adds up its weighed mean losses, the sums are averaged.
        gradient = sum(
            fact.scale * (sum(part) / len(part)) if part else fact.scale
            for parts, facts in group
            for part, fact in zip(parts, facts, strict=True)
        )
        assert gradient / size == pytest.approx(sum(every) / len(every), abs=1e-12)
        assert {fact.group_samples for _, facts in group for fact in facts} == {len(every)}
        group = []
    assert not group


def draw_many():
    generator = torch.Generator().manual_seed(4)
    return {"sampler": RandomSampler(range(9), num_samples=20, generator=generator), "generator": generator}


ORDERS = {
    "shuffle": lambda: {"shuffle": True},
    "replacement": lambda: {"sampler": RandomSampler(range(9), replacement=True, num_samples=40)},
    "many": draw_many,
    **{kind: lambda kind=kind: {"sampler": Lazy(9, kind)} for kind in LAZY},
}


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        pytest.param(
            kind, workers, marks=pytest.mark.exhaustive if workers and kind not in ("shuffle", "torch") else ()
        )
        for kind, workers in itertools.product(ORDERS, (0, 2))
    ],
)
def test_the_plain_loops_order(kind, workers):
    """Over three epochs, with a validation between them, whatever else is drawn from the process's generators."""

    def make():
        return DataLoader(range(9), batch_size=2, num_workers=workers, **ORDERS[kind]())

    seed(7)
    loader, validation = make(), DataLoader(range(5), shuffle=True, batch_size=2)
    wanted = [(plain_list(loader), plain_list(validation)) for _ in range(2 if workers else 3)]
    ranks = Ranks(make, 1)
    other = make_alone(validation, ranks.streams[0])
    for train, val in wanted:
        before = random_state()["torch"]
        assert ranks.ids() == train
        assert torch.equal(before, random_state()["torch"])  # nothing of the process's own was drawn
        torch.rand(5), random.random(), np.random.rand()
        assert plain_list(other) == val
    assert len({str(train) for train, _ in wanted}) == len(wanted)


def test_a_validation_inside_an_epoch_and_dropout_change_nothing():
    for kind in ("torch", "python", "own"):
        quiet, noisy = (Ranks(lambda k=kind: DataLoader(range(12), sampler=Lazy(12, k), batch_size=2), 2) for _ in "ab")
        validation = DataLoader(range(4), shuffle=True)
        other = make_alone(validation, noisy.streams[0])
        wanted = [quiet.ids() for _ in range(3)]
        for epoch in wanted:
            found = []
            for parts, _ in noisy.epoch(noise=True):
                found.append(flat(parts))
                if len(found) < 3:  # what it draws after the epoch's last batch does count, as in a plain loop
                    list(other)
            assert found == epoch


def test_an_epoch_left_early_is_over():
    """The next one draws anew, and not the rest of what this one would have drawn."""
    for kind in LAZY:
        ranks = Ranks(lambda k=kind: DataLoader(range(40), sampler=Lazy(40, k), batch_size=4), 1)
        sampler = ranks.loaders[0].source.sampler
        first, second = ranks.ids(2), ranks.ids(2)
        assert sampler.epochs == [0, 1]
        assert first != second
        assert ranks.ids() not in (first, second)
        assert ranks.loaders[0].epoch == 3


def test_batch_sampler_of_ones_own():
    for size, n in itertools.product((1, 2, 3), (1, 5, 6, 7, 20)):
        seed(7)
        plain = DataLoader(range(n), batch_sampler=Uneven(n))
        ranks = Ranks(lambda n=n: DataLoader(range(n), batch_sampler=Uneven(n)), size, 2)
        for _ in range(2):
            batches = plain_list(plain)
            epoch = list(ranks.epoch())
            rounds = [batches[i : i + size] for i in range(0, len(batches), size)]
            assert [flat(parts) for parts, _ in epoch] == [flat(r) for r in rounds]
            for (parts, _), r in zip(epoch, rounds, strict=True):
                if len(r) == size:
                    assert parts == r  # the user's own batches, untouched


def test_without_batches():
    for size, n, evaluation in itertools.product((1, 2, 3), range(8), (False, True)):
        ranks = Ranks(lambda n=n: DataLoader(range(n), batch_size=None), size, evaluation=evaluation)
        found = ranks.ids()
        assert sorted(flat(found)) == list(range(n))
        assert len(found) == len(ranks.loaders[0])


# -- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.guarantee
def test_evaluation_is_exact_and_no_rank_idles():
    for size, batch, n, _, _, k in configurations():
        for limit in (None, 1, 2):
            ranks = Ranks(lambda b=batch, n=n: DataLoader(range(n), batch_size=b), size, k, True, limit=limit)
            epoch = list(ranks.epoch())
            found = [i for parts, _ in epoch for part in parts for i in part]
            assert found == list(range(min(n, (limit or n) * size * batch)))
            assert len(epoch) == len(ranks.loaders[0]), (size, batch, n, limit)
            for parts, facts in epoch:
                assert all(fact.last for fact in facts)
                assert all(parts) or n < size or (limit and len(found) < size)


def test_evaluation_keeps_small_batches_of_a_batch_sampler():
    batches = [[0], [1], [2], [], [3], [4], [5, 6], [7]]
    for size in (2, 3):
        ranks = Ranks(lambda: DataLoader(range(8), batch_sampler=batches), size, evaluation=True)
        assert flat(ranks.ids()) == list(range(8))


# -- resume ----------------------------------------------------------------------------------------------------------


SAMPLES = 15  # no multiple of a global batch of two or three ranks


MAKERS = {
    "shuffle": lambda: DataLoader(range(SAMPLES), 2, shuffle=True),
    "drop_last": lambda: DataLoader(range(SAMPLES), 2, shuffle=True, drop_last=True),
    "uneven": lambda: DataLoader(range(SAMPLES), batch_sampler=Uneven(SAMPLES)),
    "unbatched": lambda: DataLoader(range(11), None, shuffle=True),
    "generator": lambda: DataLoader(range(SAMPLES), 2, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "around": lambda: DataLoader(range(SAMPLES), 2, sampler=Around(SAMPLES)),
    "around-batches": lambda: DataLoader(range(SAMPLES), batch_sampler=OwnBatches(Around(SAMPLES), 2, False)),
    "saying": lambda: DataLoader(range(SAMPLES), 2, sampler=SayingEpochs(SAMPLES)),
    "around-saying": lambda: DataLoader(range(SAMPLES), 2, sampler=Around(SAMPLES, SayingEpochs(SAMPLES))),
    "list": lambda: [[i] for i in range(7)],
    **{kind: lambda kind=kind: DataLoader(range(SAMPLES), 2, sampler=Lazy(SAMPLES, kind)) for kind in LAZY},
}
LIKE_OTHERS = ["generator", "around", "around-batches", "around-saying", "python", "numpy", "own-torch", "own-python"]
SOURCES = [
    pytest.param(name, make, id=name, marks=pytest.mark.exhaustive if name in LIKE_OTHERS else ())
    for name, make in MAKERS.items()
]


def follow(ranks, epochs, noise=False):
    """All batches of `epochs` epochs, with the state after each step, through the codec."""
    found = []
    for epoch in range(epochs):
        found += [
            (epoch, flat(parts), ranks.state() if facts[0].last else None) for parts, facts in ranks.epoch(noise=noise)
        ]
        found.append((epoch, None, ranks.state()))
    return found


def check_resumes(make, size, k, epochs, noise=True, every=1, **options):
    """From each `every`-th state, what is left is read; `noise` is drawn from the process's generators besides.

    One that draws its samples from these draws it in the uninterrupted run too.
    """
    ranks = Ranks(make, size, k, **options)
    whole = follow(ranks, epochs, noise and "process" in options)
    for number, (epoch, batch, state) in list(enumerate(whole))[::every]:
        if state is None:
            continue
        resumed = Ranks(make, size, k, state=decode(*encode(state)), run_seed=99, **options)
        rest = [batch for _ in range(epoch + (batch is None), epochs) for batch in resumed.ids(noise=noise)]
        assert rest == [batch for _, batch, _ in whole[number + 1 :] if batch is not None], (size, k, number)
        assert (resumed.loaders[0].epoch, resumed.loaders[0].length) == (epochs, ranks.loaders[0].length)
    return whole


@pytest.mark.guarantee
@pytest.mark.parametrize(("name", "make"), SOURCES)
def test_resume_at_every_step(name, make):
    for size, k in ((1, 1), (2, 3)):
        check_resumes(make, size, k, 2)


SILENT_OR_NOISY = [pytest.param(False, id="silent", marks=pytest.mark.exhaustive), pytest.param(True, id="noisy")]


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize("noise", SILENT_OR_NOISY)
@pytest.mark.parametrize(("name", "make"), SOURCES)
def test_resume_of_one_process(name, make, noise):
    """Which draws from its own generators, as its model does."""
    check_resumes(make, 1, 2, 3, noise, process=True)


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize(("name", "make"), SOURCES)
def test_resume_in_another_world(name, make):
    for before, after in ((2, 1), (1, 2), (3, 2)):
        steps = [state for _, batch, state in follow(Ranks(make, before), 1) if batch is not None]
        whole = flat(batch for _, batch, _ in follow(Ranks(make, 1), 1) if batch)
        if name == "drop_last":
            whole = plain_list(Ranks(lambda: DataLoader(range(SAMPLES), shuffle=True, batch_size=1), 1).loaders[0])
            whole = flat(whole)
        for state in steps:
            seen = state["loader"]["samples"]
            rest = flat(Ranks(make, after, state=state, run_seed=1).ids())
            if name == "drop_last":
                assert rest == whole[seen : seen + len(rest)]
                assert len(whole) - seen - len(rest) < 2 * after
            else:
                assert rest == whole[seen:]


def with_a_length():
    for n in (9, 10, 11):
        yield f"plain{n}", lambda n=n: DataLoader(range(2 * n), batch_size=2)
        yield f"list{n}", lambda n=n: [[2 * i, 2 * i + 1] for i in range(n)]
        for drop in (False, True):
            own = OwnBatches(torch.utils.data.SequentialSampler(range(2 * n)), 2, drop)
            yield f"batches{n}, {drop}", lambda n=n, own=own: DataLoader(range(2 * n), batch_sampler=own)
        yield f"stream{n}", lambda n=n: DataLoader(Numbers(2 * n), batch_size=2)


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.filterwarnings("ignore:the stream has no state")
@pytest.mark.parametrize(
    "chain", [(1, 2), (2, 1), *(pytest.param(chain, marks=pytest.mark.exhaustive) for chain in ((3, 2), (1, 3, 2)))]
)
def test_the_last_batch_is_known_in_another_world(chain):
    """So that an epoch is closed with it, and not before."""
    for name, make in with_a_length():
        for stops in itertools.product(range(1, 4), repeat=len(chain) - 1):
            state = None
            for size, stop in zip(chain, stops, strict=False):
                ranks = Ranks(make, size, state=state)
                ranks.ids(stop)
                state = ranks.state()
            ranks = Ranks(make, chain[-1], state=state)
            loader = ranks.loaders[0]
            begun, last = loader.batches, [loader.end_of_dataloader for _ in ranks.epoch()]
            assert begun + len(last) == len(loader), (name, stops)
            assert last == [False] * (len(last) - 1) + [True] * bool(last), (name, stops)


def test_a_sampler_that_counts_by_itself_is_said():
    def follow_and_save(sampler, stops):
        ranks = Ranks(lambda: DataLoader(range(6), batch_sampler=OwnBatches(sampler, 2, False)), 1)
        for stop in stops:
            with warnings.catch_warnings(record=True, action="always") as caught:
                ranks.state()
                ranks.ids(stop)
                ranks.state()
                ranks.state()
            yield [str(w.message) for w in caught]

    first, second, third = follow_and_save(CountingEpochs(6), (1, 1, 1))
    assert first == third == []
    assert len(second) == 1
    assert "CountingEpochs.epoch changed from one epoch to the next" in second[0]
    for silent in (SayingEpochs(6), Lazy(6, "torch"), RandomSampler(range(6)), [0, 1, 2]):
        assert list(follow_and_save(silent, (1, None, 1))) == [[], [], []]


def test_an_evaluation_loader_may_get_another_generator():
    def make(generator=None):
        return lambda: DataLoader(range(8), shuffle=True, generator=generator)

    ranks = Ranks(make(), 1, evaluation=True)
    ranks.ids()
    ranks.ids(2)
    again = Ranks(make(torch.Generator()), 1, evaluation=True, state=ranks.state())
    assert again.loaders[0].epoch == 1
    assert sorted(flat(again.ids())) == list(range(8))
    for other in (np.random.default_rng(1), None):  # another kind, and none
        ranks = Ranks(make(torch.Generator()), 1)
        with pytest.raises(ValueError, match=r"(has 0 generators, but .* 1|differ in type from).*same kind"):
            Ranks(make(other), 1, state=ranks.state())


def test_a_state_between_loading_and_the_first_batch_is_the_same():
    make = MAKERS["shuffle"]
    ranks = Ranks(make, 2)
    left = ranks.ids(3)
    again = Ranks(make, 2, state=ranks.state(), run_seed=1)
    rest = Ranks(make, 2, state=again.state(), run_seed=2).ids()
    assert sorted(flat(left + rest)) == list(range(SAMPLES))


def test_going_back_in_a_live_run():
    ranks = Ranks(MAKERS["torch"], 1)
    start, first = ranks.state(), ranks.ids()
    ranks.ids(4)
    for loader, stream in zip(ranks.loaders, ranks.streams, strict=True):
        loader.load_state_dict(start["loader"])
        stream.state = start["stream"]
    assert ranks.ids() == first
    assert ranks.loaders[0].epoch == 1


def test_no_state_inside_a_group():
    ranks = Ranks(lambda: DataLoader(range(8)), 1, 4)
    batches = iter(ranks.loaders[0])
    for number in range(1, 9):
        next(batches)
        if number % 4:
            with pytest.raises(ValueError, match="during gradient accumulation"):
                ranks.state()
        else:
            assert ranks.state()["loader"]["samples"] == number


# -- workers ---------------------------------------------------------------------------------------------------------


class Augmented(Dataset):
    def __init__(self, n):
        self.n = n

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)

    def __len__(self):
        return self.n


def augmented(size, workers, persistent=False, state=None, stop=None, subset=False, generator=False, epochs=2):
    def make():
        data = torch.utils.data.Subset(Augmented(20), list(range(10))) if subset else Augmented(10)
        drawn = {"shuffle": True, "generator": torch.Generator().manual_seed(3) if generator else None}
        return DataLoader(data, 2, num_workers=workers, persistent_workers=persistent, **drawn)

    ranks = Ranks(make, size, state=state, run_seed=7 if state is None else 99)
    found = []
    while ranks.loaders[0].epoch < epochs:
        for pieces in zip(*ranks.loaders, strict=True):
            shares = [p for p, c in zip(pieces, ranks.cursors, strict=True) if c.micro.samples]
            found.append(torch.cat(shares).tolist())
            torch.rand(2)
            if len(found) == stop:
                return found, ranks.state()
    return found


@pytest.mark.long
@pytest.mark.guarantee
def test_workers_augment_alike_whatever_their_number():
    whole = augmented(1, 1)
    assert len({tuple(sample[1:]) for batch in whole for sample in batch}) == 20  # every sample its own numbers
    assert augmented(1, 2, subset=True) == whole
    assert flat(augmented(2, 1, epochs=1)) == flat(whole[:5])
    varied = augmented(1, 1, generator=True)
    assert len({tuple(sample[1:]) for batch in varied for sample in batch}) == 20  # in the second epoch too


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_resume_with_workers(persistent):
    whole = augmented(1, 2, persistent)
    for stop in (2, 7):
        begun, state = augmented(1, 2, persistent, stop=stop)
        assert begun + augmented(1, 1, persistent, state=state) == whole, stop
    _, state = augmented(1, 2, persistent, stop=2, generator=True)
    assert augmented(1, 2, persistent, state=state, generator=True) == augmented(1, 2, persistent, generator=True)[2:]


def use_the_dataset(_):
    torch.utils.data.get_worker_info().dataset.opened = 5.0


class Opened(Augmented):
    opened = 0.0

    def __getitem__(self, index):
        return self.opened


def test_what_a_worker_init_fn_sets_reaches_the_dataset():
    loader = DataLoader(Opened(2), num_workers=1, worker_init_fn=use_the_dataset)
    assert Ranks(lambda: loader, 1).ids() == [[5], [5]]


# -- streams ---------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Numbers in a shuffled order, drawn from the generators of the process."""

    def __init__(self, n, shuffle=True):
        self.n, self.shuffle = n, shuffle

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        numbers = range(info.id, self.n, info.num_workers) if info else range(self.n)
        left = list(numbers)
        while left:
            yield left.pop(random.randrange(len(left)) if self.shuffle else 0)


class Counting(Stream):
    """Knows where it is."""

    def __init__(self, n):
        super().__init__(n)
        self.left = list(range(n))
        self.reads = 0

    def __iter__(self):
        while self.left:
            self.reads += 1
            yield self.left.pop(random.randrange(len(self.left)))
        self.left = list(range(self.n))

    def state_dict(self):
        return {"left": list(self.left)}

    def load_state_dict(self, state):
        self.left = list(state["left"])


@pytest.mark.parametrize("workers", [0, 2])
def test_streams(workers):
    cases = [(1, 7, 1), (2, 7, 3)] if workers else itertools.product((1, 2), (0, 1, 3, 7, 8), (1, 3))
    for size, n, k in cases:
        ranks = Ranks(lambda n=n: DataLoader(Stream(n), batch_size=2, num_workers=workers), size, k)
        for _ in range(2):
            epoch = list(ranks.epoch(noise=True))
            check_groups(epoch, size, k)
            assert sorted(i for parts, _ in epoch for i in flat(parts)) == list(range(n))
        assert ranks.loaders[0].length is None


def test_a_streams_order_is_the_plain_loops_and_differs_between_epochs():
    seed(7)
    plain = DataLoader(Stream(12), batch_size=2)
    wanted = [plain_list(plain) for _ in range(3)]
    one, two = (Ranks(lambda b=b: DataLoader(Stream(12), batch_size=b), 1 if b == 2 else 2) for b in (2, 1))
    for epoch in wanted:
        assert one.ids(noise=True) == epoch
        assert flat(two.ids(noise=True)) == flat(epoch)
    assert len({str(epoch) for epoch in wanted}) == 3


class Knowing(DataLoader):
    """Knows where it is, with workers too, as torchdata's StatefulDataLoader does."""

    begun = read = 0

    def _get_iterator(self):
        iterator = super()._get_iterator()
        begun, self.begun = self.begun, 0
        for _ in range(begun):
            next(iterator)
        return self.follow(iterator, begun)

    def follow(self, iterator, begun):
        for self.read, batch in enumerate(iterator, begun + 1):
            yield batch
        self.read = 0

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.begun = state["read"]


RESUMED_ON = {
    "batches": ((1, 1), (2, 2)),
    "workers": ((1, 1), (2, 1), (1, 2)),
    "knowing-workers": ((1, 1), (3, 2)),
}


def make_stream(kind):
    if kind == "batches":
        return Batches()
    loader = Knowing if "knowing" in kind else Negated if "subclass" in kind else DataLoader
    data = Counting(11) if "counting" in kind else Stream(11, shuffle="workers" not in kind)
    return loader(data, batch_size=2, num_workers=2 if "workers" in kind else 0)


KINDS = ["stream", "counting", "subclass", "counting-subclass", "knowing", "workers", "knowing-workers", "batches"]
STREAMS = [pytest.param(kind, marks=pytest.mark.exhaustive if "workers" in kind else ()) for kind in KINDS]


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize("noise", SILENT_OR_NOISY)
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.filterwarnings("ignore:.*read again:UserWarning")
def test_streams_of_one_process_resume(kind, noise):
    check_resumes(lambda: make_stream(kind), 1, 1, 3, noise, every=3 if "workers" in kind else 1, process=True)


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize("kind", STREAMS)
def test_streams_resume(kind):
    def make():
        return make_stream(kind)

    for before, after in RESUMED_ON.get(kind, ((1, 1), (2, 1), (1, 2), (3, 2))):
        whole = follow(Ranks(make, before, 1), 2)
        wanted = [i for _, batch, _ in whole if batch is not None for i in batch]
        for number, (epoch, _, state) in list(enumerate(whole))[:: 3 if kind == "workers" else 1]:
            resumed = Ranks(make, after, state=state, run_seed=3)
            left = epoch + (whole[number][1] is None)
            with warnings.catch_warnings(record=True, action="always") as caught:
                rest = [i for _ in range(left, 2) for batch in resumed.ids(noise=True) for i in batch]
            done = sum(len(b) for _, b, _ in whole[: number + 1] if b is not None)
            assert rest == wanted[done:], (before, after, number)
            said = [w for w in caught if "read again" in str(w.message)]
            knows = "counting" in kind or "knowing" in kind
            assert len(said) == (0 if knows or not state["loader"]["samples"] else after)
            if "counting" in kind:
                assert resumed.loaders[0].source.dataset.reads == len(rest)


class Batches:
    """An iterable of batches that draws from the process."""

    def __iter__(self):
        for _ in range(5):
            yield random.sample(range(100), 3)


def test_iterables_of_batches():
    for size in (1, 2):
        ranks = Ranks(lambda: [[0, 1], [2, 3], [4, 5]], size, 2)
        assert flat(ranks.ids()) == list(range(6))
        assert len(ranks.loaders[0]) == -(-3 // size)
        weights = [[fact.scale for fact in facts] for _, facts in ranks.epoch()]
        total = sum(map(sum, weights)) / size
        assert total == pytest.approx(2 if size == 1 else 1)  # so many groups
        assert flat(Ranks(lambda: iter([[0], [1]]), size).ids()) == [0, 1]
    with pytest.raises(TypeError, match="int"):
        Ranks(lambda: 3, 1)


class Noisy(IterableDataset):
    """(number, what it drew): from the generators of the process, and from the seed that torch gives the worker."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        own = random.Random(info.seed)
        for number in range(info.id, 8, info.num_workers):
            drawn = torch.rand(()).item(), np.random.rand(), random.random(), own.random()
            yield torch.tensor([number, *drawn], dtype=torch.float64)


def read_noise(state=None, stop=None):
    options = {"num_workers": 2, "persistent_workers": True, "generator": torch.Generator().manual_seed(3)}
    ranks = Ranks(lambda: DataLoader(Noisy(), 2, **options), 1, state=state, run_seed=7 if stop else 99)
    [loader], found = ranks.loaders, []
    while loader.epoch < 3 and len(found) != stop:
        for piece in loader:
            found.append(piece.tolist())
            torch.rand(2)
            if len(found) == stop:
                break
    state = ranks.state()
    loader.close()
    return found, state


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.filterwarnings("ignore:the stream has no state")
def test_persistent_workers_of_a_stream_that_draws():
    whole, _ = read_noise(stop=12)
    assert len({tuple(sample[1:4]) for sample in flat(whole)}) == 24  # other numbers in each epoch
    for stop in (5, 8):
        begun, state = read_noise(stop=stop)
        assert begun == whole[:stop]
        assert begun + read_noise(state=decode(*encode(state)))[0] == whole, stop


def test_why_a_stream_is_read_again():
    for data, workers, text in ((Stream(6), 0, "no state_dict"), (Counting(6), 1, "Counting is in its workers")):
        ranks = Ranks(lambda d=data, w=workers: DataLoader(d, num_workers=w), 1)
        ranks.ids(2)
        with pytest.warns(UserWarning, match=f"{text}.*2 samples must be read again"):
            Ranks(lambda d=data, w=workers: DataLoader(d, num_workers=w), 1, state=ranks.state()).ids(1)


def test_a_limit_on_a_stream():
    for size, k, limit in itertools.product((1, 2), (1, 3), (0, 1, 2, 4)):
        ranks = Ranks(lambda: DataLoader(Stream(100, False), batch_size=2), size, k, limit=limit)
        assert ranks.loaders[0].length == limit
        epoch = list(ranks.epoch())
        assert flat((flat(parts) for parts, _ in epoch)) == list(range(2 * limit * size))
        assert not epoch or epoch[-1][1][0].last


# -- loaders of one's own --------------------------------------------------------------------------------------------


class Deaf(DataLoader):
    def __iter__(self):
        return iter([torch.tensor([0]), torch.tensor([1])])


class Choosy(DataLoader):
    def __iter__(self):
        return itertools.islice(super().__iter__(), 0, None, 2)


def test_subclasses_keep_their_class_and_stay_as_they_are():
    seed(7)
    wanted = [plain_list(Negated(range(9), batch_size=4, shuffle=True)) for _ in range(2)]
    seed(7)
    source = Negated(range(9), batch_size=2, shuffle=True)
    before = dict(vars(source))
    ranks = Ranks(lambda: source, 2)
    assert type(ranks.loaders[0]._view) is Negated
    for epoch in wanted:
        state = random_state()["torch"]
        assert ranks.ids() == epoch
        assert torch.equal(state, random_state()["torch"])
    after = vars(source)
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    begun = Ranks(lambda: Negated(range(9), batch_size=2, shuffle=True), 2)
    whole = begun.ids(1)
    resumed = Ranks(lambda: Negated(range(9), batch_size=2, shuffle=True), 2, state=begun.state(), run_seed=5)
    assert whole + resumed.ids() == wanted[0]


@pytest.mark.parametrize("data", [range(4), Stream(4)], ids=["map", "stream"])
@pytest.mark.parametrize("kind", [Deaf, Choosy])
def test_a_loader_that_can_not_be_sharded(kind, data):
    with pytest.raises(ValueError, match=f"{kind.__name__} does not yield one batch for each.*iter"):
        Ranks(lambda: kind(data), 2).ids()


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_a_subclass_over_a_stream_sees_its_batches(workers):
    options = {"batch_size": 2, "num_workers": workers, "persistent_workers": bool(workers)}
    for size in (1, 2):
        ranks = Ranks(lambda: Negated(Stream(7, shuffle=False), **options), size)
        for _ in range(2):  # the second epoch with the first one's workers
            assert sorted(flat(ranks.ids())) == list(range(-6, 1))
        assert type(ranks.loaders[0]._view) is Negated
        for loader in ranks.loaders:
            loader.close()


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize("kind", LAZY)
def test_resume_where_a_limit_ends_the_epoch(kind):
    for size, k in ((1, 1), (1, 2), (2, 1)):
        whole = check_resumes(MAKERS[kind], size, k, 3, limit=3)
        orders = {str([batch for at, batch, _ in whole if at == epoch]) for epoch in range(3)}
        assert len(orders) == 3


@pytest.mark.long
@pytest.mark.parametrize("data", [range(6), Stream(6, shuffle=False)], ids=["map", "stream"])
def test_closed_workers_end_at_once(data):
    ranks = Ranks(lambda: DataLoader(data, batch_size=2, num_workers=2, persistent_workers=True), 1)
    first = ranks.ids()
    workers = ranks.loaders[0]._view._iterator._workers
    assert all(worker.is_alive() for worker in workers)
    ranks.loaders[0].close()
    assert not any(worker.is_alive() for worker in workers)
    assert ranks.ids() == first  # and another epoch starts others
    ranks.loaders[0].close()


def test_out_of_order_loaders_are_refused():
    with pytest.raises(ValueError, match="in_order=True"):
        Ranks(lambda: DataLoader(range(4), in_order=False), 1)


@pytest.mark.parametrize("inside", [False, True])
def test_the_users_distributed_sampler_is_respected(inside):
    def make(rank):
        sampler = torch.utils.data.DistributedSampler(range(8), 2, rank, shuffle=True, seed=3)
        if inside:
            return DataLoader(range(8), batch_sampler=torch.utils.data.BatchSampler(sampler, 2, False))
        return DataLoader(range(8), sampler=sampler, batch_size=2)

    ranks = iter((0, 1))
    both = Ranks(lambda: make(next(ranks)), 2)
    for epoch in range(2):
        wanted = []
        for rank in (0, 1):
            sampler = torch.utils.data.DistributedSampler(range(8), 2, rank, shuffle=True, seed=3)
            sampler.set_epoch(epoch)
            wanted.append(list(sampler))
        pieces = [parts for parts, _ in both.epoch()]
        assert [flat(p[rank] for p in pieces) for rank in (0, 1)] == wanted


def test_the_cursor_comes_back_to_the_outer_loop():
    ranks = Ranks(lambda: DataLoader(range(4)), 1)
    cursor = ranks.cursors[0]
    inner = make_alone(DataLoader(range(3)), ranks.streams[0], cursor)
    for _ in ranks.loaders[0]:
        here = cursor.micro
        for _ in inner:
            assert cursor.micro is not here
            break
        assert cursor.micro is here
        list(inner)
        assert cursor.micro is here
    assert cursor.micro is None


def test_groups():
    for n, k in ((7, 3), (6, 3), (1, 4)):
        ranks = Ranks(lambda n=n: DataLoader(range(n)), 1, k)
        groups = [[int(batch) for batch in group] for group in ranks.loaders[0].groups()]
        assert groups == [list(range(n))[i : i + k] for i in range(0, n, k)]


def test_another_length_within_an_epoch_is_said(recwarn):
    def make(samples):
        return lambda: DataLoader(range(samples), batch_size=2, shuffle=True)

    begun = Ranks(make(12), 1)
    batches = iter(begun.loaders[0])
    next(batches)
    for samples, said in ((12, 0), (14, 1)):
        Ranks(make(samples), 1, state=begun.state())
        assert sum("within an epoch of 12 samples" in str(one.message) for one in recwarn) == said
    *_, _ = batches
    Ranks(make(14), 1, state=begun.state())  # at the epoch's end
    assert sum("within an epoch of 12 samples" in str(one.message) for one in recwarn) == 1


# -- seeds in workers ------------------------------------------------------------------------------------------------


class Rare(Dataset):
    """Draws from one generator, for some of its samples; the first batches draw nothing. Counts the reads of each."""

    def __init__(self, kind, where):
        self.kind, self.where = kind, where
        self.reads = torch.zeros(24, dtype=torch.int64).share_memory_()

    def __len__(self):
        return 24

    def draw(self):
        return {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(()).item()}[self.kind]()

    def __getitem__(self, index):
        self.reads[index] += 1
        return [index, self.draw() if self.where == "always" or (self.where == "rarely" and index % 7 == 6) else -1.0]


class RareInBulk(Rare):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def read_drawn(data, workers, size=1, batch_size=3, state=None, stop=None):
    def collate(samples):
        samples = samples if batch_size else [samples]
        if data.where == "collate" and samples[0][0] % 9 == 6:
            samples = [[index, data.draw()] for index, _ in samples]
        return torch.tensor(samples, dtype=torch.float64)

    ranks = Ranks(lambda: DataLoader(data, batch_size, num_workers=workers, collate_fn=collate), size, state=state)
    found = []
    for pieces in itertools.islice(zip(*ranks.loaders, strict=True), stop):
        found += flat(p.tolist() for p, c in zip(pieces, ranks.cursors, strict=True) if c.micro.samples)
    return (found, ranks.state()) if stop else found


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_a_generator_that_is_drawn_from_rarely_is_seeded(kind):
    always = dict(read_drawn(Rare(kind, "always"), 1))
    assert len(set(always.values())) == 24
    wanted = [[index, always[index] if index % 7 == 6 else -1.0] for index in range(24)]
    assert read_drawn(Rare(kind, "rarely"), 2) == wanted
    assert read_drawn(Rare(kind, "rarely"), 1, size=2, batch_size=None) == wanted
    if kind != "numpy":  # what follows does not depend on the kind of the generator
        return
    begun, state = read_drawn(Rare(kind, "rarely"), 1, stop=3)
    assert begun + read_drawn(Rare(kind, "rarely"), 2, state=state) == wanted
    for make in (lambda: Rare(kind, "collate"), lambda: RareInBulk(kind, "rarely")):
        assert read_drawn(make(), 2) == (drawn := read_drawn(make(), 1))
        assert len({value for _, value in drawn}) > 3


def test_only_a_batch_with_an_unexpected_draw_is_read_twice():
    for where, twice in (("always", []), ("never", []), ("rarely", [6, 7, 8])):
        data = Rare("numpy", where)
        read_drawn(data, 1)
        assert [index for index in range(24) if data.reads[index] != 1] == twice, where
        assert data.reads.max() <= 2


# -- a resume with another order -------------------------------------------------------------------------------------


class Rotated(BatchSampler):
    def __init__(self, first):
        self.first = first

    def __len__(self):
        return 5

    def __iter__(self):
        yield from ([(self.first + 2 * number + part) % 10 for part in (0, 1)] for number in range(5))


def order(**options):
    return lambda: DataLoader(range(10), **{"batch_size": 2, **options})


def own_batches(first):
    return lambda: DataLoader(range(10), batch_sampler=Rotated(first))


def picked(seed_of_sampler):
    return order(sampler=torch.utils.data.DistributedSampler(range(10), 1, 0, seed=seed_of_sampler))


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("saved", "now", "text"),
    [
        (order(shuffle=True), order(), "epoch of RandomSampler, but the dataloader now has SequentialSampler"),
        (order(), order(shuffle=True), "epoch of SequentialSampler, but the dataloader now has RandomSampler"),
        (order(), lambda: DataLoader(Stream(10, False), batch_size=2), "SequentialSampler, but .* has a stream"),
        (own_batches(0), own_batches(4), "the first indices of Rotated differ"),
        (picked(1), picked(2), "the first indices of DistributedSampler differ"),
        (order(), order(), ""),
        (order(shuffle=True), order(shuffle=True, num_workers=1), ""),
        (own_batches(4), own_batches(4), ""),
    ],
)
def test_a_resume_within_an_epoch_of_another_order_is_said(saved, now, text):
    for size in (1, 2):
        ranks = Ranks(saved, size)
        ranks.ids(2)
        state = ranks.state()
        with warnings.catch_warnings(record=True, action="always") as caught:
            Ranks(now, size, state=state).ids()
        found = [str(w.message) for w in caught if "The rest of the epoch differs" in str(w.message)]
        # Ranks with samplers of their own are compared by the states of the ranks.
        is_compared = text and not (size > 1 and "Distributed" in text)
        assert len(found) == (size if is_compared else 0), found
        assert all(re.search(text, message) for message in found)
    ranks = Ranks(saved, 1)
    ranks.ids()
    with warnings.catch_warnings(action="error"):
        Ranks(now, 1, state=ranks.state()).ids(1)  # the next epoch may have any order
