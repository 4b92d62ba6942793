"""Several loaders read as one: the modes, the order of a plain loop, sharing out, and going on from any step.

As in `test_loader`, the ranks of a world are so many loaders in one process.
"""

import functools
import itertools
from collections import Counter, namedtuple

import pytest
import torch
from support import loader_ranks
from support.loader_ranks import Lazy, make_alone
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset
from treadle.engine import CombinedLoader, JointLoader
from treadle.engine.rng import RandomStream, random_state

import treadle

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")
Pair = namedtuple("Pair", "left right")


plain = functools.partial(tree_map_only, torch.Tensor, torch.Tensor.tolist)


def by_hand(mode, lists):
    """What lists of batches become in a mode: written down, not computed from ours."""
    if mode == "sequential":
        return list(itertools.chain(*lists))
    if mode == "min_size":
        return [list(row) for row in zip(*lists, strict=False)]
    if mode == "max_size":
        return [list(row) for row in itertools.zip_longest(*lists)]
    longest = max(map(len, lists))
    return [[each[n % len(each)] for each in lists] for n in range(longest)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [(2, 5, 3), (4, 4), (3,)], ids=str)
def test_the_modes(mode, lengths):
    lists = [[f"{name}{n}" for n in range(count)] for name, count in zip("abc", lengths, strict=False)]
    combined = CombinedLoader(lists, mode)
    expected = by_hand(mode, lists)
    assert len(combined) == len(expected)
    for _ in range(2):
        found = list(combined)
        assert [batch for batch, _, _ in found] == expected
    if mode == "sequential":
        assert [(i, n) for _, i, n in found] == [(i, n) for n, count in enumerate(lengths) for i in range(count)]
    else:
        assert [(i, n) for _, i, n in found] == [(i, 0) for i in range(len(expected))]


def test_any_form_and_its_parts():
    a, b, c = (DataLoader(range(n), batch_size=2) for n in (4, 6, 8))
    combined = CombinedLoader({"x": a, "y": [b, Pair(c, c)]}, "min_size")
    assert combined.flattened == [a, b, c, c]
    assert len(combined) == 2
    batch, _, _ = next(iter(combined))
    assert plain(batch["x"]) == [0, 1]
    assert isinstance(batch["y"][1], Pair)
    assert combined.sampler["y"][1].left is c.sampler
    assert combined.batch_sampler["x"] is a.batch_sampler
    combined.flattened = [b, b, b, b]
    assert combined.iterables["y"][1].right is b
    combined.limits = 1
    assert len(combined) == 1
    assert len(list(combined)) == 1
    combined.reset()
    with pytest.raises(ValueError, match=r"limits has length 2, but the CombinedLoader has 4 iterables"):
        combined.limits = [1, 2]
    with pytest.raises(ValueError, match="flattened has length 1, but the CombinedLoader has 4 iterables"):
        combined.flattened = [a]


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"mode='min'.*min_size"):
        CombinedLoader([[1]], "min")
    with pytest.raises(ValueError, match="contains no dataloader"):
        CombinedLoader({})
    with pytest.raises(TypeError, match=r"got 5 \(an int\), which is not a dataloader"):
        CombinedLoader({"a": 5})
    with pytest.raises(TypeError, match="has none"):
        len(CombinedLoader([iter([1]), iter([2])], "max_size"))
    with pytest.raises(ValueError, match="iterable 1 of the CombinedLoader yields no batches in pass 2"):
        list(CombinedLoader([[1, 2, 3], iter([1])], "max_size_cycle"))
    with pytest.raises(TypeError, match="prepared"):
        Ranks(lambda: [Ranks(lambda: [[1]], "min_size").loaders[0]], "min_size")


class Ranks(loader_ranks.Ranks):
    """One `JointLoader` per rank."""

    kind = JointLoader

    def __init__(self, make, mode, size=1, accumulate=1, **options):
        options |= {"run_seed": 5, "process": size == 1}
        super().__init__(lambda: CombinedLoader(make(), mode), size, accumulate, **options)

    def epoch(self):
        """Of each micro-batch, each rank's (batch, facts)."""
        for batches in zip(*map(iter, self.loaders), strict=True):
            yield [(plain(b), c.micro) for b, c in zip(batches, self.cursors, strict=True)]


class Noise(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        for number in range(self.n):
            yield number * 1000 + int(torch.randint(1000, ()))


def shuffled(n, **more):
    return DataLoader(range(n), batch_size=2, shuffle=True, **more)


SOURCES = {
    "shuffled": lambda: {"a": shuffled(5), "b": shuffled(11), "c": DataLoader(range(6), batch_size=2)},
    "own generators": lambda: {
        "a": shuffled(5, generator=torch.Generator().manual_seed(1)),
        "b": shuffled(11, generator=torch.Generator().manual_seed(2)),
    },
    "one generator": lambda: [shuffled(n, generator=g) for g in [torch.Generator().manual_seed(1)] for n in (5, 9)],
    "lazy": lambda: (DataLoader(range(5), 2, sampler=Lazy(5)), shuffled(9), DataLoader(range(7), 2, sampler=Lazy(7))),
    "streams": lambda: [shuffled(5), DataLoader(Noise(9), batch_size=2), [10, 20, 30]],
}


@pytest.mark.filterwarnings("ignore:.*are read again")
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        # Each kind of data, and each mode, once by default.
        pytest.param(kind, mode, marks=() if mode == MODES[n % len(MODES)] else pytest.mark.exhaustive)
        for n, kind in enumerate(SOURCES)
        for mode in MODES
    ],
)
def test_going_on_from_any_step(kind, mode):
    for accumulate in (1, 2, 3):
        run = Ranks(SOURCES[kind], mode, accumulate=accumulate)
        whole, states = [], []
        for _ in range(2):
            for [(batch, micro)] in run.epoch():
                whole.append((batch, micro))
                if micro.last:
                    states.append((len(whole), run.state()))
        states.append((len(whole), run.state()))
        for done, state in states:
            again = Ranks(SOURCES[kind], mode, accumulate=accumulate, state=state)
            found = [each for _ in range(again.loaders[0].epoch, 2) for [each] in again.epoch()]
            assert found == whole[done:], (accumulate, done)
            assert again.loaders[0].epoch == 2


@pytest.mark.long
def test_with_workers():
    def make():
        return {"a": shuffled(5, num_workers=1), "b": shuffled(9, num_workers=1, persistent_workers=True)}

    run = Ranks(make, "max_size_cycle")
    epoch = run.epoch()
    whole = [next(epoch)[0] for _ in range(4)]
    state = run.state()
    whole += [each for [each] in epoch]
    again = Ranks(make, "max_size_cycle", state=state)
    assert [each for [each] in again.epoch()] == whole[4:]
    for ranks in (run, again):
        ranks.loaders[0].close()


def test_the_order_of_a_plain_loop():
    def make():
        return [shuffled(7), shuffled(11)]

    torch.manual_seed(5)
    pair = make()
    expected = [plain([*row]) for _ in range(3) for row in zip(*pair, strict=False)]
    run = Ranks(make, "min_size")
    assert [batch for _ in range(3) for [(batch, _)] in run.epoch()] == expected
    # Lightning's cycle: both begin, and the one that ends begins anew when its turn comes.
    torch.manual_seed(5)
    pair, expected = make(), []
    for _ in range(2):
        short, long = map(iter, pair)
        for _ in range(6):
            first = next(short, None)
            if first is None:
                short = iter(pair[0])
                first = next(short)
            expected.append([plain(first), plain(next(long))])
    run = Ranks(make, "max_size_cycle")
    assert [batch for _ in range(2) for [(batch, _)] in run.epoch()] == expected


def test_a_cycled_loader_is_shuffled_anew_beside_a_stream():
    """A stream that sets the common random state back would repeat the others' permutations."""
    run = Ranks(lambda: [shuffled(8), (n for n in range(40))], "max_size_cycle")
    orders = [batch[0] for [(batch, _)] in itertools.islice(run.epoch(), 40)]
    passes = [tuple(itertools.chain(*orders[n : n + 4])) for n in range(0, 40, 4)]
    assert len(set(passes)) == 10
    assert all(sorted(each) == list(range(8)) for each in passes)


def test_facts_of_groups():
    """The gradient of a group, from each micro-batch's mean times its scale, is the mean over all its samples."""
    for size, accumulate, mode in itertools.product((1, 2, 3), (1, 2, 3), MODES):
        run = Ranks(lambda: {"a": shuffled(13), "b": shuffled(7)}, mode, size, accumulate)
        group = []
        for row in run.epoch():
            group.append(row)
            assert len({micro.last for _, micro in row}) == 1
            if not row[0][1].last:
                continue
            own = [[count(batch) for batch, _ in each] for each in group]
            total = sum(map(sum, own))
            assert {m.group_samples for each in group for _, m in each} == {total}
            for each, counts in zip(group, own, strict=True):
                assert [micro.samples for _, micro in each] == counts
                assert [micro.scale for _, micro in each] == [size * n / total for n in counts]
            group = []
        assert not group


def count(batch):
    parts = batch.values() if isinstance(batch, dict) else [batch]
    return sum(len(part) for part in parts if part is not None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "change",
    [(1, 2), *(pytest.param(change, marks=pytest.mark.exhaustive) for change in ((2, 1), (2, 2))), (3, 2)],
    ids=str,
)
def test_another_number_of_processes(mode, change):
    """Each loader goes on with the samples that are left of its pass, and each pass has every sample once."""

    def make():
        return {"a": shuffled(14), "b": shuffled(30)}

    before, after = change
    for stop in range(1, Ranks(make, mode, before).loaders[0].length):
        run = Ranks(make, mode, before)
        read = {"a": [], "b": []}
        epoch = run.epoch()
        note(read, itertools.islice(epoch, stop), mode)
        again = Ranks(make, mode, after, state=run.state())
        loader = again.loaders[0]
        done = loader.batches
        rows = list(again.epoch())
        note(read, rows, mode)
        assert done + len(rows) == loader.length
        sizes = {"a": 14, "b": 30}
        if mode in ("max_size", "sequential"):
            assert {name: sorted(ids) for name, ids in read.items()} == {n: list(range(s)) for n, s in sizes.items()}
        elif mode == "max_size_cycle":
            assert sorted(read["b"]) == list(range(30))
        for name, size in sizes.items():  # passes, one after the other
            for first in range(0, len(read[name]), size):
                assert max(Counter(read[name][first : first + size]).values()) == 1


def note(read, rows, mode):
    for row in rows:
        for batch, _ in row:
            if mode == "sequential":
                batch = {"ab"[len(read["a"]) >= 14]: batch}
            for name, part in batch.items():
                read[name].extend(part or [])


def test_no_process_without_a_part():
    """A last batch of fewer samples than processes joins the one before, so no stand-in is in a batch that counts."""
    run = Ranks(lambda: {"a": DataLoader(range(9), 2), "b": DataLoader(range(9), 2)}, "min_size", 2)
    rows = [[batch["a"] for batch, _ in row] for row in run.epoch()]
    assert rows == [[[0, 1], [2, 3]], [[4, 5, 6], [7, 8]]]


def test_lengths():
    def make():
        return [shuffled(5), iter([1]), shuffled(11)]

    lengths = {mode: Ranks(make, mode).loaders[0].length for mode in MODES}
    assert lengths == {"min_size": 3, "max_size_cycle": None, "max_size": None, "sequential": None}
    loader = Ranks(lambda: [shuffled(5), shuffled(11)], "max_size_cycle").loaders[0]
    assert (len(loader), loader.total_batch_size, loader.left_out) == (6, 4, {})
    loader.limit = 4
    assert len(loader) == len(list(loader)) == 4
    assert loader.epoch == 1
    assert Ranks(lambda: [shuffled(5), shuffled(11)], "sequential").loaders[0].total_batch_size == 2


def test_states_that_do_not_fit():
    two = Ranks(lambda: [shuffled(5), shuffled(7)], "min_size")
    state = two.state()["loader"]
    single = make_alone(shuffled(5), RandomStream(random_state()))
    with pytest.raises(ValueError, match="2 combined dataloaders, but this run has a single dataloader"):
        single.load_state_dict(state)
    with pytest.raises(ValueError, match="with 1 training dataloader, but this run combines 2"):
        two.loaders[0].load_state_dict(single.state_dict())
    with pytest.raises(ValueError, match=r"mode='min_size'\), but this run uses mode='max_size'"):
        Ranks(lambda: [shuffled(5), shuffled(7)], "max_size").loaders[0].load_state_dict(state)
    run = Ranks(lambda: [shuffled(5), shuffled(7)], "min_size", accumulate=2)
    next(run.epoch())
    with pytest.raises(ValueError, match="during gradient accumulation"):
        run.state()
    shared = torch.Generator()
    lazy = Lazy(5)
    lazy.generator = shared
    with pytest.raises(ValueError, match="two combined dataloaders share a generator"):
        Ranks(lambda: [DataLoader(range(5), sampler=lazy), shuffled(5, generator=shared)], "min_size")


def test_an_evaluation_with_other_generators_restores_only_its_epoch():
    def make(generator):
        return {"a": shuffled(5, generator=generator), "b": shuffled(11)}

    saved = Ranks(lambda: make(torch.Generator().manual_seed(1)), "min_size", evaluation=True)
    for _ in range(2):
        list(saved.epoch())
    [loader] = Ranks(lambda: make(None), "min_size", evaluation=True, state=saved.state()).loaders
    assert (loader.epoch, loader.batches) == (2, 0)
    with pytest.raises(ValueError, match="0 generators, but the checkpoint has 1"):
        Ranks(lambda: make(None), "min_size", state=saved.state())


def prepared(length):
    accelerator = treadle.Accelerator(cpu=True)
    return accelerator, accelerator.prepare(CombinedLoader([DataLoader(range(length), 2), DataLoader(range(8), 2)]))


def test_an_epoch_after_a_resume_at_the_end_of_one_can_be_passed_over(tmp_path):
    accelerator, loader = prepared(4)
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    accelerator.save_state(tmp_path / "saved")
    accelerator, loader = prepared(4)
    accelerator.load_state(tmp_path / "saved")
    assert loader.epoch == 1
    assert len(list(loader)) == len(loader)
    assert list(accelerator.skip_first_batches(loader, len(loader))) == []
    assert loader.epoch == 3


def test_another_length_of_the_data_within_an_epoch_is_said(tmp_path):
    accelerator, loader = prepared(8)
    next(iter(loader))
    accelerator.save_state(tmp_path / "saved")
    accelerator, _ = prepared(12)
    with pytest.warns(UserWarning, match="within an epoch of 8 samples, but the dataset now has 12"):
        accelerator.load_state(tmp_path / "saved")
