"""Device maps: what is planned, what a user's own may say, and what can not be followed."""

import copy
import itertools

import pytest
from support.language_model import EMBED, LAYER, MASK, POSITIONS, LanguageModel, empty, write
from torch import nn
from treadle.engine.big_models import (
    clean_device_map,
    device_map_plan,
    dispatch_model,
    get_balanced_memory,
    infer_auto_device_map,
    load_checkpoint_and_dispatch,
)


def test_devices_are_filled_in_order_and_tied_modules_stay_together():
    first = POSITIONS + MASK + EMBED
    two = {"meta:0": first + LAYER, "meta:1": 2 * LAYER}
    assert infer_auto_device_map(empty(), two, ["Block"]) == {
        **{"positions": "meta:0", "mask": "meta:0", "embed": "meta:0", "layers.0": "meta:0"},
        **{"layers.1": "meta:1", "layers.2": "meta:1", "head": "meta:0"},
    }
    assert infer_auto_device_map(empty(), {"meta:0": "1GB"}) == {"": "meta:0"}
    assert infer_auto_device_map(LanguageModel(), {"cpu": "1GB"}) == {"": "cpu"}
    cut = infer_auto_device_map(empty(), {"meta:0": first + 256, "meta:1": "1GB"}, clean_result=False)
    assert (cut["layers.0.scale"], cut["layers.0.norm"], cut["layers.0.up"]) == ("meta:0", "meta:1", "meta:1")
    assert set(cut.values()) == {"meta:0", "meta:1"}


def test_entries_on_one_device_become_one():
    assert clean_device_map({"a.x": 0, "a.y": 0, "b": 1}) == {"a": 0, "b": 1}
    nested = {"a": "cpu", "a.b": "disk", "a.c.d": "cpu", "a.c.e": "cpu"}
    assert clean_device_map(nested) == {"a": "cpu", "a.b": "disk", "a.c": "cpu"}
    assert clean_device_map(nested, "a.c") == {"a.c": "cpu"}


def test_room_is_kept_to_run_what_is_offloaded():
    parameters = LAYER - 128
    first = POSITIONS + MASK + EMBED
    # What is kept: the parameters of the largest layer, and the buffers of both layers that are offloaded.
    enough = first + LAYER + parameters + 2 * 128
    kept = infer_auto_device_map(empty(), {"meta:0": enough, "cpu": "1GB"}, ["Block"])
    assert [name for name, device in kept.items() if device == "cpu"] == ["layers.1", "layers.2"]
    less = infer_auto_device_map(empty(), {"meta:0": enough - 1, "cpu": "1GB"}, ["Block"])
    assert less["layers"] == "cpu"
    away = infer_auto_device_map(empty(), {"meta:0": enough - 256, "cpu": "1GB"}, ["Block"], offload_buffers=True)
    assert away["layers.0"] == "meta:0"
    # A device that can't run the largest layer is of no use, nor is one that has no room at all.
    assert infer_auto_device_map(empty(), {"meta:0": LAYER // 2, "cpu": "1GB"}, ["Block"]) == {"": "cpu"}
    assert infer_auto_device_map(empty(), {"meta:0": 0, "meta:1": "1GB"}) == {"": "meta:1"}
    with pytest.raises(ValueError, match=r"within max_memory: .* of its tensors, starting with 'layers.0.up'"):
        infer_auto_device_map(empty(), {"cpu": first + 400, "disk": 50})


def test_fallback_takes_what_fits():
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(10, 10), nn.Linear(20, 20), nn.Linear(100, 100))
    room = {"meta:0": 2000, "meta:1": "1GB"}
    assert infer_auto_device_map(model, room) == {"": "meta:1"}
    assert infer_auto_device_map(model, room, fallback_allocation=True)["2"] == "meta:0"


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_balanced_is_the_best_cut(devices):
    widths = [30, 5, 60, 20, 20, 45, 10, 33]
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for width in widths))
    sizes = [4 * width * width for width in widths]
    cuts = itertools.combinations(range(1, len(sizes)), devices - 1)
    bounds = ([0, *cut, len(sizes)] for cut in cuts)
    best = min(max(sum(sizes[a:b]) for a, b in itertools.pairwise(bound)) for bound in bounds)
    room = {f"meta:{n}": "1MB" for n in range(devices)}
    limits = get_balanced_memory(model, room)
    assert limits == dict.fromkeys(list(room)[:-1], best) | {f"meta:{devices - 1}": 10**6}
    placed = infer_auto_device_map(model, limits)
    loads = [sum(s for s, d in zip(sizes, placed.values(), strict=True) if d == device) for device in room]
    assert max(loads) == best
    assert get_balanced_memory(model, room, low_zero=True)["meta:0"] == 0
    assert get_balanced_memory(model, {"meta:0": 50, "meta:1": 60, "cpu": 7}) == {"meta:0": 50, "meta:1": 60, "cpu": 7}


def test_the_plan_in_words():
    rest = POSITIONS + MASK + EMBED  # the embedding is tied to the head
    device_map = {"": "cpu", "layers.0": "meta:0", "layers.1": "meta:0", "layers.2": "disk"}
    assert device_map_plan(empty(), device_map, {"meta:0": rest, "cpu": "1MB"}).splitlines() == [
        f"cpu: {rest / 1000:.2f} kB of 1.00 MB for (the model)",
        f"meta:0: {2 * LAYER / 1000:.2f} kB of {rest / 1000:.2f} kB for layers.0, layers.1",
        f"disk: {LAYER / 1000:.2f} kB for layers.2",
    ]


@pytest.mark.parametrize(
    ("device_map", "words"),
    [
        ({"": "cpu", "layer.0": "disk"}, r"'layer\.0', but the model has no such module.*Did you mean 'layers"),
        ({"embed": "cpu", "head": "cpu", "mask": "cpu"}, r"no device for positions, layers\.0\."),
        ({"": "cpu", "head": "disk"}, r"'embed\.weight' to 'cpu' and 'head\.weight' to 'disk', but they are one"),
        ({"": "cpu", "layers": "dsk"}, "'dsk' is not a valid device.*Did you mean 'disk'"),
        ({"": 99}, "=99 does not exist on this machine"),
        ("balance", "device_map='balance' is not one of auto"),
    ],
    ids=["unknown", "missed", "tied", "device", "absent", "word"],
)
def test_a_map_that_can_not_be_followed(plain, tmp_path, device_map, words):
    with pytest.raises(ValueError, match=words):
        load_checkpoint_and_dispatch(empty(), write(plain, tmp_path, "file"), device_map)


def test_a_disk_that_can_not_be_used(plain, tmp_path):
    with pytest.raises(ValueError, match=r"positions.* to 'disk', but offload_dir is not set"):
        dispatch_model(copy.deepcopy(plain), {"": "disk"})
    with pytest.raises(ValueError, match="main_device='disk' can't compute anything, because it only"):
        dispatch_model(copy.deepcopy(plain), {"": "disk"}, main_device="disk", offload_dir=tmp_path)
    with pytest.raises(ValueError, match="are used together by MultiheadAttention"):
        dispatch_model(nn.MultiheadAttention(4, 2), {"": "cpu", "out_proj": "disk"}, offload_dir=tmp_path)
