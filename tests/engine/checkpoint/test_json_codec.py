"""What goes into a checkpoint's document comes out again, bit for bit, and nothing else goes in or comes out."""

import enum
import json
import math
import pathlib
import random
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import make_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from treadle.engine.checkpoint.filesystem import CODES
from treadle.engine.checkpoint.json_codec import MAX_DEPTH, Record, decode, encode


def round_trip(state):
    document, tensors = encode(state)
    return decode(json.loads(json.dumps(document, allow_nan=False)), tensors)


def same(a, b):
    """Equal in type, content and order, with nan equal to nan and -0.0 not equal to 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, np.ndarray) and a.dtype == object:
        return a.shape == b.shape and same(a.ravel().tolist(), b.ravel().tolist())
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return a == b


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


LIMIT = 2**256
"""Integers below it are numbers in the document."""
PLAIN = [
    *(None, True, False, 0, -1, 2**63, -(2**64), 2**256, -(2**257), 10**5000, "", "a", "é\n\0", "\ud800", "$tuple"),
    *(0.0, -0.0, 0.1, 1e308, 5e-324, math.inf, -math.inf, math.nan, 1j, complex(math.nan, -0.0), b"", b"\0\xff"),
    *(torch.float32, torch.bfloat16, torch.quint8, torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")),
    *(torch.Size(()), torch.Size((2, 0)), timedelta(0), timedelta(-3, 5, 7)),
    *(date(2026, 2, 28), datetime(2026, 1, 2, 3, 4, 5, 6), datetime(2026, 1, 2, tzinfo=UTC), time(1, 2, fold=1)),
    *(datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-3, minutes=7))), time(23, 59, 59, 999999)),
    *(Record("enum", "a:B", "RED"), Record("x", "", {"k": (1, np.int8(2))}), Record("x", "", Record("y", "", [1]))),
    *(pathlib.Path("/a/b c"), pathlib.Path("."), pathlib.PurePosixPath("x/y"), pathlib.PureWindowsPath(r"C:\x")),
    *(np.float16(0.1), np.float32(0.1), np.float64("nan"), np.int8(-5), np.uint64(2**64 - 1), np.bool_(True)),
    *(np.complex64(1 + 2j), np.complex128(1j), np.str_("s")),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda v: type(v).__name__)
def test_a_single_value_comes_back_as_it_was(value):
    assert same(round_trip(value), value)
    assert same(round_trip({"k": [value]}), {"k": [value]})


@pytest.mark.parametrize(
    "value",
    [
        *([], {}, (), set(), frozenset(), [[]], ((),), [()]),
        *({1: "int", "1": "text"}, {None: 0, True: 1, 2.5: 2, (1, ("a", None)): 3, math.inf: 4}),
        *({"$tuple": [1]}, {"$dict": []}, {"$tensor": "x"}, {"$": {"$tensor": 1}}, {"a": 1, "$b": 2}),
        *({1, 2, 3}, {"a", "b"}, frozenset({(1, frozenset({2}))}), {b"x": 1, torch.float32: 2}),
        *(Counter({2: 1, 5: 0}), Counter("aab")),
        *([1, -1, LIMIT - 1, 1 - LIMIT], [1, LIMIT], (-LIMIT, 1), [1, True], [True], [1, 2.0], (1, None)),
    ],
    ids=lambda v: type(v).__name__,  # a set of strings is written in another order by each worker
)
def test_containers_come_back_with_their_type_keys_and_order(value):
    assert same(round_trip(value), value)


def test_ordered_and_default_dicts_come_back_as_dicts():
    state: Any = defaultdict(dict, {"a": OrderedDict(b=1)})
    assert same(round_trip(state), {"a": {"b": 1}})


def test_containers_of_omegaconf_come_back_as_plain_ones():
    config = OmegaConf.create({"betas": [0.9, 0.98], "lr": 0.1, "inner": {"again": "${lr}", "later": "???"}})
    state = {"cfg": config, "betas": config.betas, "all": (config.inner,)}
    plain = {"betas": [0.9, 0.98], "lr": 0.1, "inner": {"again": 0.1, "later": "???"}}
    assert same(round_trip(state), {"cfg": plain, "betas": plain["betas"], "all": (plain["inner"],)})
    with pytest.raises(TypeError, match=r"^opt\.cfg: a DictConfig \(Interpolation key 'nowhere'.*set the value"):
        encode({"cfg": OmegaConf.create({"a": "${nowhere}"})}, "opt")


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_every_tensor_dtype_and_shape(dtype):
    base = torch.arange(24, dtype=torch.uint8).remainder(2)  # 0 and 1 exist in every dtype
    shapes = [base.to(dtype).reshape(4, 6), base[1].to(dtype), torch.empty(0, 3, dtype=dtype)]
    state = {"all": shapes, "strided": shapes[0].t(), "part": shapes[0][:, 2:4]}
    assert same(round_trip(state), state)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "uint32", "uint64", "float16", "float64", "complex64"])
def test_numpy_arrays_keep_their_dtype_and_shape(dtype):
    array = np.arange(6).astype(dtype)
    read_only = array.copy()
    read_only.flags.writeable = False
    state = [array, array.reshape(2, 3).T, array[::-1], np.array(1, dtype), np.empty((0, 2), dtype), read_only]
    state += [np.empty(0, kind) for kind in (dtype, "float32", "int64") for _ in range(20)]
    assert same(round_trip(state), state)


def test_numpy_arrays_of_text_and_objects_keep_their_dtype_and_shape():
    text = np.array([["b", "längere"], ["", "c"]])
    mixed = np.empty((2, 2), object)
    mixed[:] = [["gene", None], [1.5, np.int8(2)]]
    lists = np.empty(2, object)
    lists[:] = [[1, 2], [np.array(["x"], object), torch.ones(1)]]
    state = [text, text.T, text[::-1], np.array("a"), np.empty((0, 2), "<U3"), text.astype(">U9"), mixed, mixed[0, :1]]
    assert same(round_trip([*state, lists]), [*state, lists])


def test_states_of_generators_stay_small_and_come_back():
    numpy = np.random.RandomState(3).get_state(), np.random.default_rng(3).bit_generator.state
    state = {"python": random.Random(3).getstate(), "numpy": numpy}
    assert len(json.dumps(encode(state)[0])) < 10_000
    assert same(round_trip(state), state)


def random_state(rng, depth=0):
    kind = rng.randrange(9 if depth < 4 else 3)
    if kind == 0:
        return rng.choice(PLAIN)
    if kind == 1:
        dtype = rng.choice(list(CODES))
        return torch.tensor(rng.random()).mul(torch.ones(rng.randrange(4), 2)).to(dtype)
    if kind == 2:
        return np.array(
            [rng.randrange(100) for _ in range(rng.randrange(4))], rng.choice(["uint32", "float16", "int64"])
        )
    items = [random_state(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind in (3, 4):
        return items if kind == 3 else tuple(items)
    keys = ["a", "a.b", "b", "$int", "", "0"] if kind < 8 else [0, "0", (1, "x"), None, 2.5, "$dict", True]
    return dict(zip(rng.sample(keys, len(items)), items, strict=True))


def test_random_nested_states_come_back():
    rng = random.Random(20)
    for _ in range(300):
        state = random_state(rng)
        assert same(round_trip(state), state)


def test_tensor_names_are_readable_and_unique():
    one, two, three = (torch.full((2,), float(i)) for i in range(3))
    document, tensors = encode({"a": {"b": one}, "a.b": two, "__metadata__": three})
    assert list(tensors) == ["a.b", "a.b~2", "__metadata__~2"]
    assert same(decode(document, tensors), {"a": {"b": one}, "a.b": two, "__metadata__": three})
    assert list(encode({"model": [one], 0: {"exp_avg": two}}, "run")[1]) == ["run.model.0", "run.0.exp_avg"]
    assert list(encode(one)[1]) == ["tensor"]


def test_tied_tensors_are_stored_once_and_come_back_as_one_object():
    weight = nn.Parameter(torch.randn(4, 4))
    state = {"encoder": weight, "decoder": weight.data, "view": weight.data[:2], "twisted": weight.data.t()}
    document, tensors = encode(state)
    assert list(tensors) == ["encoder", "view", "twisted"]
    back = decode(document, {name: tensor.clone() for name, tensor in tensors.items()})
    assert back["encoder"] is back["decoder"]
    assert type(back["encoder"]) is torch.Tensor
    assert not back["encoder"].requires_grad
    back["encoder"].zero_()
    assert torch.equal(back["view"], weight.data[:2])
    assert torch.equal(back["twisted"], weight.data.t())
    z = torch.tensor([1 + 2j], dtype=torch.complex64)
    assert list(encode({"z": z, "conj": z.conj()})[1]) == ["z", "conj"]


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        (enum.IntEnum("Colour", "RED").RED, r"\.name or \.value"),
        (namedtuple("Pair", "a")(1), r"_asdict"),
        (make_dataclass("Point", ["x"])(1), r"dataclasses\.asdict"),
        (nn.Linear(1, 1), r"\.state_dict\(\)"),
        (len, r"store its name"),
        (type("MyDict", (dict,), {})(), r"fields as a dict"),
        (object(), r"fields as a dict"),
        (bytearray(b"x"), r"fields as a dict"),
        (torch.ones(2, dtype=torch.complex128), r"Convert it"),
        (torch.ones(2).to_sparse(), r"to_dense"),
        (torch.ones(2, device="meta"), r"Materialize"),
        (torch.ones(2).as_subclass(type("MyTensor", (torch.Tensor,), {})), r"Unwrap"),
        (np.array([b"a"]), r"tolist"),
        (np.array([object()]), r"fields as a dict"),
        (np.ones(2, np.dtype(">f4")), r"astype"),
        (np.longdouble(1), r"Python number"),
        (datetime(2026, 1, 2, tzinfo=ZoneInfo("Europe/Berlin")), r"isoformat"),
        ({torch.ones(1)}, r"name or a number"),
        ({(1, torch.ones(1)): 1}, r"name or a number"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_is_not_data_is_refused_with_place_type_and_fix(value, fix):
    tensors = r"can be stored|safetensors files can't contain this dtype"
    rule = rf"({tensors})" if isinstance(value, torch.Tensor) else "can't be stored.*only data"
    with pytest.raises(TypeError, match=rf"(?s)state\.1\.x.* {rule}.*{fix}"):
        encode({"state": [0, {"x": value}]})


def test_a_state_without_an_end_is_refused():
    cycle: list = [1]
    cycle.append({"again": cycle})
    with pytest.raises(ValueError, match=r"s\.1\.again: the state contains itself"):
        encode({"s": cycle})
    twice = [1]
    assert round_trip([twice, twice]) == [[1], [1]]


@pytest.mark.parametrize(
    "wrap",
    [
        *(lambda s: [s], lambda s: {"k": s}, lambda s: {0: s}, lambda s: (s,), lambda s: Record("", "", s)),
        lambda s: np.fromiter([s], object, 1),
    ],
)
def test_depth_is_bounded(wrap):
    state: Any = math.nan  # itself an object in the document
    for _ in range(MAX_DEPTH):
        state = wrap(state)
    assert same(round_trip(state), state)
    state = wrap(state)
    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        encode(state)


@pytest.mark.parametrize(
    "document",
    [
        *({"$unknown": 1}, {"$tuple": [1], "x": 1}, {"$tuple": 5}, {"$tuple": "ab"}, {"x": 1, "$y": 2}),
        *({"$dict": 3}, {"$dict": [1]}, {"$dict": [[1]]}, {"$dict": [[[], 1]]}, {"$dict": [[1, 1], [1, 2]]}),
        *({"$set": [[]]}, {"$set": [1, 1]}, {"$set": {}}, {"$frozenset": 1}, {"$counter": [[1]]}),
        *({"$tensor": "nope"}, {"$tensor": 1}, {"$tensor": ["t"]}, {"$array": "nope"}, {"$array": "half"}),
        *({"$int": "ff"}, {"$int": 1}, {"$int": "0x"}, {"$float": "1"}, {"$float": []}, {"$complex": [1]}),
        *({"$complex": [1, 2]}, {"$bytes": "***"}, {"$bytes": 1}, {"$dtype": "load"}, {"$dtype": "nn"}),
        *({"$device": "bogus:1"}, {"$device": 0}, {"$size": [1.5]}, {"$size": [True]}, {"$size": 3}),
        *({"$date": 1}, {"$date": "2026"}, {"$datetime": ["x", 0]}, {"$datetime": ["2026-01-02", 2]}, {"$time": "1:2"}),
        *({"$record": 1}, {"$record": ["a", "b"]}, {"$record": [1, "b", 2]}, {"$record": ["a", "b", {"$x": 1}]}),
        *({"$path": 1}, {"$path": None}, {"$timedelta": [10**12]}, {"$timedelta": ["1"]}),
        *({"$numpy": ["uint8", 300]}, {"$numpy": ["uint8", -1]}, {"$numpy": ["object", 1]}, {"$numpy": ["int8", 1.5]}),
        *({"$object_array": ["V", [1], "a"]}, {"$object_array": ["<U1", [2], "a"]}, {"$object_array": ["O", 2, 1]}),
        *({"$object_array": [["O"], [1], "a"]}, {"$object_array": ["O", [1]]}, {"$object_array": ["<i8", [1], 1]}),
        *({"$numpy": ["float32"]}, {"$numpy": [[], 1]}, {"$numpy": ["bool", 1]}, {"$numpy": ["str", 1]}),
        *((1,), {1: 2}, object(), {"a": {1, 2}}, b"x"),
    ],
    ids=lambda v: "an object" if type(v) is object else f"{v!r:.40}",  # no address: workers collect the same names
)
def test_a_malformed_document_is_refused_by_its_place(document):
    tensors = {"t": torch.ones(1), "half": torch.ones(1, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=r"^run\.0"):
        decode({"run": [document]}, tensors)


def test_a_document_cannot_ask_for_memory_by_the_width_of_its_texts():
    texts = decode({"a": {"$object_array": ["<U500000000", [2, 1], "ab", ""]}}, {})["a"]  # 4 GB
    assert (texts.tolist(), texts.dtype) == ([["ab"], [""]], np.dtype("U2"))


@pytest.mark.parametrize("tag", [None, "$tuple", "$dict"])
def test_a_bottomless_document_is_refused(tag):
    document: object = []
    for _ in range(5000):
        document = [document] if tag is None else {tag: [document] if tag == "$tuple" else [[1, document]]}
    with pytest.raises(ValueError, match="nested more than"):
        decode(document, {})


def test_lists_of_integers_alone_are_not_encoded_item_by_item():
    assert encode([1, LIMIT])[0] == [1, {"$int": hex(LIMIT)}]
    assert encode([-LIMIT, 1])[0] == [{"$int": hex(-LIMIT)}, 1]
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    state = random.getstate()
    sys.setprofile(count)
    try:
        encode(state)
    finally:
        sys.setprofile(None)
    assert calls < 30  # of 625 integers
