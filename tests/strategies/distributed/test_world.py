"""Finding one's place, and every way to be told a wrong one."""

import os
import pickle
import sys

import pytest
import torch
from support.launches import WHOLE
from support.processes import run
from support.trainers import says
from treadle.strategies import LaunchEnvironment, Precision, open_world
from treadle.strategies.distributed import world as world_module
from treadle.strategies.distributed.process_group import let_segments_grow

import treadle

pytestmark = pytest.mark.usefixtures("no_launcher")


def test_a_local_rank_without_a_local_size():
    env = {name: value for name, value in WHOLE.items() if name != "LOCAL_WORLD_SIZE"}
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE, which is not set"):
        LaunchEnvironment.read(env)


def exchanges(placed):
    """Also as on a GPU, in a group that a script made with NCCL alone: no host tensor is exchanged as it is."""
    world = open_world("cpu")
    rank, place, carried = world.rank, world._place, []

    def note(tensor):
        carried.append(place(tensor) is not tensor)
        return place(tensor)

    world._place = note
    if placed:
        world._carried_devices = set()
    found = [world.all_reduce(torch.tensor([rank + 1.0]), op).item() for op in ("sum", "mean", "max", "min")]
    for dtype in (torch.int64, torch.int16, torch.bool, torch.float64):
        found.append([t.tolist() for t in world.all_gather(torch.tensor([rank], dtype=dtype))])
    found += [world.gather_objects({"r": rank}), world.broadcast(f"from {rank}", 1)]
    found += [world.any(rank == 1), world.all(rank == 1)]
    found.append(world.broadcast_tensor(torch.tensor(rank, dtype=torch.int16), 1).item())
    work = world.start_all_reduce(votes := torch.ones(4))
    if not placed:
        work.wait()
    found.append(votes.tolist())
    assert world.reduce_scatter(torch.tensor([[1], [3]]) * (rank + 1)).tolist() == [[3], [9]][rank]
    assert set(carried) == {placed}
    try:
        world.raise_together(KeyError("broken") if rank else None)
    except (KeyError, RuntimeError) as error:
        return found, f"{type(error).__name__}: {error}"


@pytest.mark.guarantee
@pytest.mark.parametrize("placed", [False, True])
def test_two_processes(placed):
    first, second = run(exchanges, 2, placed)
    gathered = [[[0], [1]], [[0], [1]], [[False], [True]], [[0.0], [1.0]]]
    wanted = [3.0, 1.5, 2.0, 1.0, *gathered, [{"r": 0}, {"r": 1}], "from 1", True, False, 1, [2.0] * 4]
    assert first == (wanted, "PeerFailed: rank 1 failed: KeyError: 'broken'")
    assert second == (wanted, "KeyError: 'broken'")


def test_objects_that_go_to_another_device(monkeypatch):
    weight = torch.arange(6.0)
    sent = {"weight": weight, "part": weight[2:4], "more": [torch.zeros(2, dtype=torch.bfloat16), "word", None]}
    arrived = pickle.loads(pickle.dumps(world_module._ForAnyDevice(sent))).value
    assert arrived["weight"].equal(weight)
    assert arrived["more"][1:] == ["word", None]
    assert arrived["more"][0].dtype == torch.bfloat16
    arrived["weight"][2] = 9.0
    assert arrived["part"].tolist() == [9.0, 3.0]  # tensors that share their memory still do

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    found = [world_module._location_here(place) for place in ("cuda:5", "cuda:2", "cuda", "cpu", "meta")]
    assert found == ["cuda:2", "cuda:2", "cuda:2", "cpu", "meta"]


def leave_alone():
    """What each process ends with where rank 1 leaves a joint block in one way or another, or both in two ways."""
    world = open_world("cpu")
    found = []
    for codes in ((None, 0), (None, 3), (None, None), (None, "the disk is full"), (4, 3)):
        own = codes[world.rank]
        try:
            with world.failing_together():
                if world.rank == 1 or own is not None:
                    sys.exit(own)
        except (SystemExit, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_an_exit_within_a_joint_block_is_that_of_all():
    first, second = run(leave_alone, 2)
    assert second == [f"SystemExit: {code}" for code in (0, 3, "", "the disk is full", 3)]
    assert first == [
        "SystemExit: 0",
        "SystemExit: 3",
        "SystemExit: 0",
        "PeerFailed: rank 1 failed: SystemExit: the disk is full",
        "SystemExit: 4",
    ]


@pytest.mark.parametrize(
    ("value", "name"),
    [(None, "32-true"), ("no", "32-true"), (16, "16-mixed"), ("bf16", "bf16-mixed"), (64, "64-true")],
)
def test_precision_names(value, name):
    assert Precision.parse(value).name == name


@pytest.mark.parametrize("value", [True, 8, "bf16-mxed", 32.0])
def test_what_is_no_precision(value):
    with says(ValueError, f"mixed_precision={value!r} is not one of"):
        treadle.Accelerator(cpu=True, mixed_precision=value)


def test_a_gpu_without_bfloat16(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    for name in ("bf16-mixed", "bf16-true"):
        with pytest.warns(UserWarning, match=f"'{name}', but Tesla T4 does not support bfloat16 in hardware"):
            Precision.parse(name).warn_if_emulated(gpu)
        Precision.parse(name).warn_if_emulated(torch.device("cpu"))  # a warning is an error in these tests
    Precision.parse("16-mixed").warn_if_emulated(gpu)


@pytest.mark.parametrize("name", ["bf16-mixed", "16-mixed", "bf16-true", "64-true"])
def test_contexts_may_be_entered_again(name):
    def dtypes():
        return torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype, torch.ones(1).dtype

    context, outside = Precision.parse(name).context(torch.device("cpu")), dtypes()
    for depth in (1, 2, 4):
        for _ in range(depth):
            context.__enter__()
            assert dtypes()[0] != torch.float32
        for _ in range(depth):
            context.__exit__(None, None, None)
        assert dtypes() == outside


def count_lines():
    threads = []
    for number in range(4):
        world = open_world("cpu")
        line = world.background_world()
        assert line.gather_objects((number, line.rank)) == [(number, 0), (number, 1)]
        world.release_background_world()
        threads.append(len(os.listdir("/proc/self/task")))
    # A rank whose stage failed has left its line to nobody: then all make another one.
    world = open_world("cpu")
    world.background_world()
    if world.rank == 0:
        world.release_background_world()
    later = open_world("cpu").background_world()
    return threads, later.gather_objects(later.rank)


def test_a_line_beside_the_training_is_used_again():
    for threads, ranks in run(count_lines, 2):
        assert threads == threads[:1] * 4
        assert ranks == [0, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="torch has it on Linux")
def test_the_allocators_segments_grow_unless_the_user_has_chosen(monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    let_segments_grow()
    assert [os.environ.get(name) for name in names] == ["expandable_segments:True", None]
    monkeypatch.delenv(names[0])
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    let_segments_grow()
    assert [os.environ.get(name) for name in names] == [None, "max_split_size_mb:64"]
