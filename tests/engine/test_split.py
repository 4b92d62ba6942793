"""Shares of inputs against slices written by hand, and the way back, on one to three processes."""

import collections

import numpy as np
import pytest
import torch
from support.processes import run
from torch.utils.data import Dataset, IterableDataset, Subset
from treadle.engine.collectives import split

import treadle

Point = collections.namedtuple("Point", "x y")


class Squares(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return index**2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Selectable:
    """What Hugging Face's datasets look like to a split."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitems__(self, indices):
        return [self.rows[i] for i in indices]

    def select(self, indices):
        return Selectable([self.rows[i] for i in indices])


class Table:
    columns = ("a", "b")

    def __len__(self):
        return 2

    def __iter__(self):
        return iter(self.columns)


class Frame:
    """What pandas' frames look like to a split: by position only through `iloc`."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, name):
        raise KeyError(name)

    @property
    def iloc(self):
        return type("Rows", (), {"__getitem__": lambda _, which: Frame(self.rows[which])})()


FORMS = {
    "list": lambda: [0, 1, 4, 9, 16],
    "tuple": lambda: (0, 1, 4, 9, 16),
    "tensor": lambda: torch.tensor([0, 1, 4, 9, 16]),
    "array": lambda: np.array([0, 1, 4, 9, 16]),
    "deque": lambda: collections.deque([0, 1, 4, 9, 16]),
    "generator": lambda: (i**2 for i in range(5)),
    "torch dataset": Squares,
    "selectable": lambda: Selectable([0, 1, 4, 9, 16]),
    "dict view": lambda: {0: 0, 1: 1, 4: 4, 9: 9, 16: 16}.values(),
}


def listed(value):
    if isinstance(value, Selectable):
        return value.rows
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
    if form in ("list", "tuple", "tensor", "array", "selectable"):
        assert {type(share) for share in shares} == {type(FORMS[form]())}


def test_ranges_stay_ranges_and_frames_are_cut_by_rows():
    assert split(range(10, 20), 1, 3) == range(14, 17)
    assert split(range(3), 1, 2, True) == [2, 2]
    assert split(Stream(), 0, 2) == [0, 1, 2]
    assert split(Frame(np.array([[1, 2], [3, 4], [5, 6]])), 1, 2).rows.tolist() == [[5, 6]]
    assert split(Frame(np.arange(5)), 1, 2, True).rows.tolist() == [3, 4, 4]


@pytest.mark.parametrize(
    "empty",
    [[], (), torch.zeros(0, 2), {}, {"a": []}, range(0), iter(())],
    ids=["list", "tuple", "tensor", "dict", "columns", "range", "iterator"],
)
@pytest.mark.parametrize("padded", [False, True])
def test_nothing_to_share(empty, padded):
    for rank in range(3):
        share = split(empty, rank, 3, padded)
        assert len(share.get("a", ()) if isinstance(share, dict) else share) == 0


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
        ("a prompt", TypeError, r"got 'a prompt' \(a str\), .*Pass a list"),
        (b"bytes", TypeError, r"got b'bytes' \(a bytes object\)"),
        ({"b", "a"}, TypeError, r"Pass sorted\(inputs\)"),
        (5, TypeError, "got an int"),
        (torch.tensor(5), TypeError, "a Tensor without dimensions"),
        ({"a": [1], "n": 5}, TypeError, "'n' can't be split: .*got an int"),
        ({"a": [1], "b": [1, 2]}, ValueError, "'a': 1, 'b': 2"),
        (Table(), TypeError, "rows as a list"),
    ],
    ids=["str", "bytes", "set", "int", "0-d", "number in a dict", "lengths", "table"],
)
def test_what_can_not_be_split(bad, error, says):
    with pytest.raises(error, match=says):
        split(bad, 0, 2)


def there_and_back():
    from treadle.engine import PartialState

    state = PartialState(cpu=True)
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


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_back_in_the_order_of_the_inputs(world):
    shares = {1: [["a", "b", "c"]], 2: [["a", "b"], ["c"]], 3: [["a"], ["b"], ["c"]]}
    assert run(there_and_back, world) == shares[world]
