"""What each launcher says, and every way it can say too little. With SLURM itself: `tests/slurm`."""

import os
import shutil
import subprocess
import sys

import pytest
from support.processes import clean_environment
from support.trainers import says
from treadle.compat.environment import get_free_port
from treadle.strategies import LaunchEnvironment
from treadle.strategies.distributed.launch_environment import first_host, read_debug_interval, task_counts

# As slurm 22.05 sets them for the third of `srun -N2 -n3`.
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NAME": "interactive",  # that of every srun under salloc
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "2",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_TASKS_PER_NODE": "8(x4)",
    "SLURM_JOB_NODELIST": "n[05-08]",
}
# A batch script's: no step, and a rank all the same.
BATCH = {
    "SLURM_JOB_ID": "17",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
TORCHRUN |= {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1234",
}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
MPICH |= {"MASTER_ADDR": "host", "MASTER_PORT": "1234"}
G01 = {"SLURM_GTIDS": "0,1"}


def without(env, *names):
    return {name: value for name, value in env.items() if name not in names}


def test_a_task_of_srun():
    place = LaunchEnvironment.read(SLURM)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (2, 3, 0, 1)
    assert (place.node_rank, place.node_count, place.launcher, place.run_id) == (1, 2, "srun", "17.2")
    assert place.address == ("n07", 15000 + 172)
    first = LaunchEnvironment.read({**SLURM, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"} | G01)
    assert (first.local_rank, first.local_world_size) == (1, 2)
    mine = LaunchEnvironment.read({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert mine.address == ("10.0.0.1", 4000)


def test_ports_differ_for_the_steps_of_a_job_and_stay_in_their_range():
    ports = [
        LaunchEnvironment.read({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).address[1]
        for job in (1, 1499, 1500, 123456789)
        for step in range(10)
    ]
    assert all(15000 <= port < 30000 for port in ports)
    assert len(set(ports[:20])) == 20


@pytest.mark.parametrize(
    "env",
    [
        {},
        BATCH,
        without(BATCH, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),  # a shell of salloc
        {**SLURM, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "4"},  # salloc's interactive step
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},  # srun -n1: may start more itself
        {**SLURM, **BATCH, "SLURM_NODEID": "0"},  # a batch script that a task submitted
    ],
    ids=["nothing", "batch", "salloc", "interactive", "one-task", "batch-from-a-task"],
)
def test_no_launch(env):
    assert LaunchEnvironment.read(env) is None


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"])
def test_half_of_slurms_variables_names_what_is_missing(name):
    with pytest.raises(ValueError, match=rf"^{name} is not set, but SLURM_STEP_NUM_TASKS=3 is"):
        LaunchEnvironment.read(without(SLURM, name))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID=3 must be an integer from 0 to 2"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID=1 must be an integer from 0 to 0"),
        ({"SLURM_NODEID": "x"}, "SLURM_NODEID='x' must be an integer"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, r"SLURM_STEP_TASKS_PER_NODE=2\(x2\) contradicts"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2;1"}, "SLURM_STEP_TASKS_PER_NODE='2;1' must have the form"),
        ({"SLURM_STEP_NODELIST": "n[7"}, r"SLURM_STEP_NODELIST='n\[7' must have the form"),
        ({"SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE=2 is not supported, because each component of a heterogeneous job"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 must be an integer from 1 to 65535"),
    ],
)
def test_bad_values_of_slurm(change, says):
    with pytest.raises(ValueError, match=says):
        LaunchEnvironment.read({**SLURM, **change})


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("n[1-3,07-09],m5", "n1"),
        ("host-1.example", "host-1.example"),
        ("m5,n[1-3]", "m5"),
        ("r[1-2]n[01,10]", "r1n01"),
        ("a[098-101]", "a098"),
    ],
)
def test_the_first_host(text, host):
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", "n[1-3", "n[a-b]", ",n2", "n[1-]x]", "n 1"])
def test_what_is_no_list_of_hosts(text):
    with pytest.raises(ValueError, match="SLURM_STEP_NODELIST"):
        first_host(text)


def test_task_counts():
    assert task_counts("2(x3),1") == [2, 2, 2, 1]
    assert task_counts("4") == [4]


@pytest.mark.parametrize("env", [MPI, MPICH], ids=["openmpi", "mpich"])
def test_mpi(env):
    place = LaunchEnvironment.read(env)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)
    assert (place.node_rank, place.node_count, place.address) == (1, 2, ("host", 1234))
    for name in env.keys() - {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS"}:
        with pytest.raises(ValueError, match=f"^{name} is not set, but"):
            LaunchEnvironment.read(without(env, name))


def test_torchrun_counts_before_mpi_and_mpi_before_slurm():
    assert LaunchEnvironment.read({**TORCHRUN, **MPI, **SLURM}).launcher == "torchrun"
    assert LaunchEnvironment.read({**MPI, **SLURM}).launcher == "mpirun"
    assert LaunchEnvironment.read(TORCHRUN).node_count == 2


def test_a_pod_per_process():
    """PyTorchJob sets no local variables."""
    pod = LaunchEnvironment.read({"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-0", "MASTER_PORT": "23456"})
    assert (pod.rank, pod.local_rank, pod.local_world_size, pod.node_rank, pod.node_count) == (2, 0, 1, 2, 3)


RAY = {"RAY_RAYLET_PID": str(os.getppid()), "NODE_RANK": "2", "ACCELERATE_TORCH_DEVICE": "cuda:3"}
RAY |= {name: TORCHRUN[name] for name in TORCHRUN if not name.startswith("GROUP_")}


def test_a_worker_of_ray_train():
    """Ray sets all of torchrun's variables but those of the group; the script that connects to it may have more."""
    outer = {"TREADLE_SUPERVISOR": "1", "TORCHELASTIC_RUN_ID": "outer", "GROUP_RANK": "0"}
    for env in (RAY, {**RAY, **outer}, {**RAY, **SLURM}):
        worker = LaunchEnvironment.read(env)
        assert (worker.rank, worker.local_rank, worker.local_world_size, worker.node_rank) == (3, 1, 2, 2)
        assert (worker.launcher, worker.supervisor, worker.node_count) == ("ray", None, 2)
        assert worker.device_index([0, 1], 1) == 3  # Ray's choice, whatever the rank on the machine is
    assert LaunchEnvironment.read({**RAY, "ACCELERATE_TORCH_DEVICE": "cpu"}).gpu is None
    with pytest.raises(ValueError, match=r"or start TorchTrainer with `ScalingConfig\(num_workers=4\)`"):
        LaunchEnvironment.read(RAY).check(4, 4, 1)


def test_a_trial_of_ray_tune_is_no_task_of_the_cluster_that_srun_started():
    trial = {**SLURM, "RAY_RAYLET_PID": str(os.getppid())}
    assert LaunchEnvironment.read(trial) is None
    program_of_a_worker = LaunchEnvironment.read({**SLURM, "RAY_RAYLET_PID": str(os.getpid())})
    assert program_of_a_worker.launcher == "srun"


def test_flags_are_held_against_the_job():
    place = LaunchEnvironment.read(SLURM)
    place.check("auto", 1, 2)
    with pytest.raises(ValueError, match=r"devices=2 asks for 2 .* `#SBATCH --ntasks-per-node=2`"):
        place.check(2, 2, 1)
    with says(ValueError, "num_nodes=4, but the launcher started processes on 2 machines", "`#SBATCH --nodes=4`"):
        place.check("auto", 1, 4)


def test_a_task_that_sees_its_own_gpu_only_uses_that():
    place = LaunchEnvironment.read({**SLURM, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"} | G01)
    assert place.device_index([0, 1], 1) == 0  # --gpus-per-task=1
    assert place.device_index([0, 1], 8) == 1
    with pytest.raises(ValueError, match="LOCAL_RANK=1 needs CUDA device 5, but torch sees only 2 devices"):
        place.device_index([4, 5], 2)
    with pytest.raises(ValueError, match=r"LOCAL_RANK=1 needs CUDA device 1, but torch sees only 1 device\."):
        LaunchEnvironment.read(TORCHRUN).device_index([0, 1], 1)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun: apt-get install openmpi-bin")
def test_mpirun_itself(tmp_path):
    (tmp_path / "train.py").write_text(
        "import torch\nfrom treadle.strategies import open_world\nworld = open_world('cpu')\n"
        "total = world.all_reduce(torch.tensor([world.rank + 1]))\n"
        "import os; os.write(1, f'{(world.rank, world.local_rank, world.size, int(total))}\\n'.encode())\n"
    )
    env = clean_environment({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())})
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", *root, "--oversubscribe", "-n", "2", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == ["(0, 0, 2, 3)", "(1, 1, 2, 3)"]


def test_the_variables_of_debug_mode():
    debug = {"TREADLE_DEBUG": "1"}
    for disabled in ({}, {"TREADLE_DEBUG": "0"}, {"TREADLE_DEBUG": ""}):
        assert read_debug_interval(disabled) is None
    assert read_debug_interval(debug) == 100
    assert read_debug_interval({**debug, "TREADLE_DEBUG_REPLICAS": "0"}) == 0
    for name, value in (("TREADLE_DEBUG", "yes"), ("TREADLE_DEBUG_REPLICAS", "-1")):
        with pytest.raises(ValueError, match=f"{name}="):
            read_debug_interval({**debug, name: value})
