"""What counts as a fault, on what a real process has inspected with one thing changed."""

import copy

import pytest
from treadle.strategies import LaunchEnvironment
from treadle.strategies.diagnosis.findings import judge
from treadle.strategies.diagnosis.machine import inspect_process

GPU = {"name": "H100", "total": 80e9, "free": 79e9}
GPUS = {"cuda": [GPU] * 2, "runtime": "12.8", "driver": "570.1", "pairs": 2, "peer pairs": 2, "nvlink": True}


@pytest.fixture(scope="module")
def inspected():
    facts = inspect_process() | {"rank": 0}
    backends = {name: version for name, version in facts["backends"].items() if name == "gloo"}  # as of a CPU build
    return facts | {"environment": {}, "backends": backends}


def change(facts, path, value):
    changed = copy.deepcopy(facts)
    *keys, last = path.split(".")
    inner = changed
    for key in keys:
        inner = inner[key]
    inner[last] = value
    return changed


def find(facts, subject, launched=None, **more):
    ranks = facts if isinstance(facts, list) else [facts]
    arguments = {"size": len(ranks), "missing": [], "errors": [], "measured": {}, **more}
    found = [item for item in judge(ranks, launched=launched, **arguments) if item.subject == subject]
    assert found
    return [(item.mark, item.text) for item in found]


SHM = "folders./dev/shm"


@pytest.mark.parametrize(
    ("path", "value", "subject", "mark", "says"),
    [
        (f"{SHM}.free", 64e6, "/dev/shm", "fault", "docker run --shm-size"),
        (f"{SHM}.free", 500e6, "/dev/shm", "note", "500 MB"),
        ("folders.run folder.free", 5e6, "run folder", "fault", "too little for checkpoints"),
        ("folders.temp folder.error", "Read-only file system", "temp folder", "fault", "Read-only file system"),
        ("folders.temp folder.path", "/scratch/users/someone/jobs/1234567/tmp", "temp folder", "note", "TMPDIR"),
        ("system", {"name": "Linux", "release": "5.4.0-99-generic"}, "system", "note", "older than 5.5"),
        ("system", {"name": "Linux", "release": "5.15.0"}, "system", "good", "5.15.0"),
        ("limits.open files", 256, "limits", "note", "ulimit -n"),
        ("limits.open files", -1, "limits", "good", "open files unlimited"),
        ("free port", None, "ports", "fault", "no free port"),
        ("backends", {}, "backends", "fault", "without gloo"),
        ("memory.available", 1e8, "memory", "note", "100 MB"),
        ("devices", GPUS, "devices", "good", "2 x H100, at least 79.0 GB of 80.0 GB free, CUDA 12.8, driver 570.1"),
        ("devices", GPUS, "backends", "fault", "without nccl"),
        ("devices", GPUS | {"cuda": [GPU | {"free": 1e9}]}, "devices", "note", "another program"),
        ("devices", {"cuda": [], "mps": False, "files": True}, "devices", "fault", "driver"),
        ("environment.GLOO_SOCKET_IFNAME", "eth99", "environment", "fault", "no interface eth99"),
        ("environment.ACCELERATE_MIXED_PRECISION", "bf16", "environment", "note", "not read"),
        ("environment.ACCELERATE_MIXED_PRECISION", "no", "environment", "good", "no variables"),
        ("environment.LOCAL_WORLD_SIZE", "4000", "CPUs", "note", "4,000 ranks"),
    ],
)
def test_one_thing_at_fault(inspected, path, value, subject, mark, says):
    ((found_mark, text),) = find(change(inspected, path, value), subject)
    assert (found_mark, says in text) == (mark, True), text


def test_a_fault_of_some_ranks_names_them(inspected):
    ranks = [change(inspected, f"{SHM}.free", 1e6 if rank else 8e9) | {"rank": rank} for rank in range(3)]
    ((mark, text),) = find(ranks, "/dev/shm")
    assert (mark, text.startswith("ranks 1, 2: 1.0 MB of ")) == ("fault", True), text


def test_a_library_that_a_rank_lacks(inspected):
    other = copy.deepcopy(inspected) | {"rank": 1}
    version = other["versions"].pop("safetensors")
    ((mark, text),) = find([inspected, other], "libraries")
    assert (mark, text) == (
        "fault",
        f"safetensors {version} on rank 0, none on rank 1. Install the same versions on all machines.",
    )


def test_launchers_that_contradict_each_other(inspected):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}
    ((mark, text),) = find(inspected | {"environment": environment}, "environment")
    assert (mark, "SLURM_PROCID=3" in text) == ("fault", True)
    by_torchrun = environment | {"TORCHELASTIC_RUN_ID": "x"}  # srun may start torchrun
    ((mark, _),) = find(inspected | {"environment": by_torchrun}, "environment")
    assert mark == "good"


def test_an_address_that_is_each_machines_own(inspected):
    launched = LaunchEnvironment(rank=0, world_size=2, local_rank=0, local_world_size=1, node_rank=0, nodes=2)
    facts = inspected | {"environment": {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}}
    ((mark, text),) = find(facts, "environment", launched)
    assert (mark, "2 machines" in text) == ("fault", True)


def test_clocks_and_bandwidth(inspected):
    measured = {"all-reduce": {"backend": "gloo", "latency": 1e-4, "bandwidth": 1.5e9, "bytes": 2**25}}
    assert find(inspected, "all-reduce", measured=measured) == [
        ("good", "gloo, latency 100 us, bus bandwidth 1.5 GB/s for 32 MiB")
    ]
    for offsets, mark in (([0.0, 0.02], "good"), ([0.0, -0.3], "note"), ([0.0, 0.1, -2.0], "fault")):
        ((found, _),) = find(inspected, "clocks", measured={"clocks": offsets})
        assert found == mark
