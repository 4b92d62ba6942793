"""Settings of a process that launchers and users pass in environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ...common.messages import format_count

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_LAUNCH_VARIABLES = (*_TORCHRUN, "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "FORK_LAUNCHED")
_LAUNCH_PREFIXES = (
    *("GROUP_", "ROLE_", "TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL", "SLURM_STEP_"),
    *("TREADLE_SUPERVISOR", "TREADLE_BOARD"),
)
_STARTS = {
    # By launcher: what sets the processes per machine, and the machines.
    "torchrun": ("torchrun with `--nproc-per-node {}`", "torchrun with `--nnodes {}`"),
    "srun": ("srun with `#SBATCH --ntasks-per-node={}`", "srun with `#SBATCH --nodes={}`"),
    "mpirun": ("mpirun with `--npernode {}`", "mpirun with `--host` and {} hosts"),
    "ray": ("TorchTrainer with `ScalingConfig(num_workers={})`", "TorchTrainer with enough workers for {} machines"),
}
# IDs from here on do not belong to steps of srun, but to a shell of salloc, a batch script, or an adopted process.
_SLURM_SPECIAL_STEPS = 0xFFFFFFFA
_SLURM_PORTS = range(15000, 30000)  # below the ports that the kernel and Kubernetes assign


def is_ray_worker(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether Ray started this process to run tasks, actors, trials or the ranks of a `TorchTrainer`.

    A process that a worker starts is not a worker, but inherits the worker's variables.
    """
    return (os.environ if environ is None else environ).get("RAY_RAYLET_PID") == str(os.getppid())


def without_launch_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without launch variables, for a process that is not a rank."""
    return {
        name: value
        for name, value in env.items()
        if name not in _LAUNCH_VARIABLES and not name.startswith(_LAUNCH_PREFIXES)
    }


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """Settings that this process received from its launcher.

    Supported launchers are torchrun, `treadle launch`, Kubernetes, SLURM's srun, mpirun and Ray.

    Attributes:
        rank: Rank of this process.
        world_size: Number of processes.
        local_rank: Rank of this process on its machine.
        local_world_size: Number of processes on this machine.
        node_rank: Index of this machine.
        nodes: Number of machines; None if the launcher does not report it.
        supervisor: Process ID of Treadle's supervisor or of the notebook session, or None.
        relaunched: Whether the script itself started the processes, by a Trainer with several devices.
        launcher: ``"torchrun"`` (also for launchers that set its variables), ``"ray"``, ``"srun"`` or ``"mpirun"``.
        gpu: Index of the GPU that the launcher has assigned, or None.
        address: Host and port on which rank 0 listens. None means that torch reads them from MASTER_ADDR and
            MASTER_PORT.
        run_id: Identifier that distinguishes this run from others that might use the same address, or "".

    Examples:
        >>> from treadle.strategies import LaunchEnvironment
        >>> variables = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
        >>> launched = LaunchEnvironment.read(variables)
        >>> launched.rank, launched.world_size, launched.launcher
        (1, 4, 'torchrun')
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int | None = None
    supervisor: int | None = None
    relaunched: bool = False
    launcher: str = "torchrun"
    gpu: int | None = None
    address: tuple[str, int] | None = None
    run_id: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> LaunchEnvironment | None:
        """Read the launch variables. Return None if no launcher has started this process as a rank.

        torchrun's variables have priority over MPI's, and MPI's have priority over SLURM's. Ray sets torchrun's
        variables.

        Args:
            environ: The environment. Default: that of this process.

        Raises:
            ValueError: If variables are missing, invalid or contradictory, or if the SLURM job is heterogeneous.
        """
        env = os.environ if environ is None else environ
        if any(name in env for name in _TORCHRUN):
            return _read_torchrun(env)
        # In a Ray cluster that srun may have started, its tasks are the machines.
        return None if is_ray_worker(env) else _read_mpi(env) or _read_slurm(env)

    @property
    def node_count(self) -> int:
        """Number of machines.

        If the launcher does not report it, each machine is assumed to have as many processes as this one.
        """
        return self.nodes or -(-self.world_size // self.local_world_size)

    def check(self, devices: object, device_count: int, num_nodes: int) -> None:
        """Check that the arguments in the user's code match the processes that were started.

        Args:
            devices: The ``devices`` argument as the user wrote it, for the error message.
            device_count: Number of processes per machine that ``devices`` requests.
            num_nodes: Number of machines that the user's code requests; 1 matches any number.

        Raises:
            ValueError: If a number differs from the launcher's.
        """
        per_node, machines = _STARTS[self.launcher]
        if device_count != self.local_world_size:
            raise ValueError(
                f"devices={devices!r} asks for {format_count(device_count, 'process')} on each machine, but "
                f"the launcher started {self.local_world_size} (LOCAL_WORLD_SIZE) on machine {self.node_rank}. Use "
                f"devices='auto', or start {per_node.format(device_count)}."
            )
        if num_nodes not in (1, self.node_count):
            raise ValueError(
                f"num_nodes={num_nodes}, but the launcher started processes on "
                f"{format_count(self.node_count, 'machine')}. Remove num_nodes, or start {machines.format(num_nodes)}."
            )

    def device_index(self, device_indices: list[int], visible_count: int | None) -> int:
        """Return the index of this process's device.

        Args:
            device_indices: Device index of each process on this machine, in the order of local ranks.
            visible_count: The number of devices that torch sees; None for no limit.

        Raises:
            ValueError: If too few devices are visible.
        """
        if self.gpu is not None:
            return self.gpu
        index = device_indices[self.local_rank]
        if visible_count == 1 and self.local_world_size > 1 and self.launcher == "srun":
            return 0  # --gpus-per-task: SLURM shows each task only its own GPUs
        if visible_count is not None and index >= visible_count:
            raise ValueError(
                f"the process with LOCAL_RANK={self.local_rank} needs CUDA device {index}, but torch sees only "
                f"{format_count(visible_count, 'device')}. Start fewer processes per machine, or make more "
                "devices visible."
            )
        return index


def _read_torchrun(env: Mapping[str, str]) -> LaunchEnvironment:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in env:
            present = [n for n in _TORCHRUN if n in env]
            assignments = " and ".join(f"{n}={env[n]}" for n in present)
            raise ValueError(
                f"{name} is not set, but {assignments} {'is' if len(present) == 1 else 'are'}. Either all required "
                "variables of a launcher must be set, or none. Start with torchrun, which sets RANK, WORLD_SIZE, "
                f"LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or unset {' and '.join(present)}."
            )
    size = _parse_number(env, "WORLD_SIZE", low=1)
    rank = _parse_number(env, "RANK", low=0, high=size - 1)
    # A setup with a pod per process (PyTorchJob) sets no LOCAL_RANK: each process is the only one on its node.
    local_size = _parse_number(env, "LOCAL_WORLD_SIZE", low=1, high=size) if "LOCAL_WORLD_SIZE" in env else 1
    local_rank = _parse_number(env, "LOCAL_RANK", low=0) if "LOCAL_RANK" in env else 0
    if local_rank >= local_size:
        size_text = f"={local_size}" if "LOCAL_WORLD_SIZE" in env else ", which is not set and defaults to 1"
        raise ValueError(
            f"LOCAL_RANK={local_rank} must be below LOCAL_WORLD_SIZE{size_text}. Set both, as torchrun does."
        )
    node = "NODE_RANK" if is_ray_worker(env) else "GROUP_RANK"
    launched = LaunchEnvironment(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=_parse_number(env, node, low=0) if node in env else rank // local_size,
    )
    if is_ray_worker(env):
        # The variables of torchrun and of Treadle's supervisor may belong to the script that connected to Ray.
        device, _, index = env.get("ACCELERATE_TORCH_DEVICE", "").partition(":")
        return replace(launched, launcher="ray", gpu=int(index or 0) if device == "cuda" else None)
    return replace(
        launched,
        nodes=_parse_number(env, "GROUP_WORLD_SIZE", low=1, high=size) if "GROUP_WORLD_SIZE" in env else None,
        supervisor=_parse_number(env, "TREADLE_SUPERVISOR", low=1) if "TREADLE_SUPERVISOR" in env else None,
        relaunched="TREADLE_SUPERVISOR_RELAUNCHES" in env,
    )


def _read_mpi(env: Mapping[str, str]) -> LaunchEnvironment | None:
    """Read the variables of Open MPI, or those that mpirun sets in MPICH and Intel MPI; return None without them."""
    if "OMPI_COMM_WORLD_SIZE" in env:
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")]
    elif "PMI_SIZE" in env and "MPI_LOCALNRANKS" in env:  # srun --mpi=pmi2 also sets the first, but not the second
        names = ["PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"]
    else:
        return None
    _check_all_set(
        env,
        (*names, "MASTER_ADDR", "MASTER_PORT"),
        f"{names[0]}={env[names[0]]}",
        "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT",
    )
    size = _parse_number(env, names[0], low=1)
    local_size = _parse_number(env, names[2], low=1, high=size)
    rank = _parse_number(env, names[1], low=0, high=size - 1)
    return LaunchEnvironment(
        rank=rank,
        world_size=size,
        local_rank=_parse_number(env, names[3], low=0, high=local_size - 1),
        local_world_size=local_size,
        node_rank=rank // local_size,  # MPI does not number machines
        launcher="mpirun",
        address=(env["MASTER_ADDR"], _parse_number(env, "MASTER_PORT", low=1, high=65535)),
    )


def _read_slurm(env: Mapping[str, str]) -> LaunchEnvironment | None:
    """Read the variables of one of several tasks that srun started. Return None for any other process."""
    if not _is_slurm_task(env):
        return None
    tasks = _find_set_name(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    size = _parse_number(env, tasks, low=1)
    if size == 1:
        return None  # it may start more processes on its machine
    if "SLURM_HET_SIZE" in env:
        raise ValueError(
            f"SLURM_HET_SIZE={env['SLURM_HET_SIZE']} is not supported, because each component of a heterogeneous job "
            "numbers its tasks from 0. Start torchrun in each component, or submit a job with one component."
        )
    shares, nodes, hosts = (
        _find_set_name(env, f"SLURM_STEP_{name}", f"SLURM_{name}")
        for name in ("TASKS_PER_NODE", "NUM_NODES", "NODELIST")
    )
    nodes = nodes if nodes in env else _find_set_name(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", shares, nodes, hosts, "SLURM_JOB_ID")
    _check_all_set(env, needed, f"{tasks}={size}", "srun")
    per_node = task_counts(env[shares], shares)
    count = _parse_number(env, nodes, low=1)
    if len(per_node) != count or sum(per_node) != size:
        raise ValueError(
            f"{shares}={env[shares]} contradicts {nodes}={count} and {tasks}={size}. Start the processes with srun, "
            "which sets these variables consistently."
        )
    node = _parse_number(env, "SLURM_NODEID", low=0, high=count - 1)
    if _is_slurm_batch(env, per_node[node]):
        return None
    job, step = _parse_number(env, "SLURM_JOB_ID", low=0), _parse_number(env, "SLURM_STEP_ID", low=0)
    # Steps share a port if 10 x job + step are equal modulo 15000, which is rare for steps that run at the same time on
    # one machine.
    port = _SLURM_PORTS[(10 * job + step) % len(_SLURM_PORTS)]
    return LaunchEnvironment(
        rank=_parse_number(env, "SLURM_PROCID", low=0, high=size - 1),
        world_size=size,
        local_rank=_parse_number(env, "SLURM_LOCALID", low=0, high=per_node[node] - 1),
        local_world_size=per_node[node],
        node_rank=node,
        nodes=count,
        launcher="srun",
        address=(
            env.get("MASTER_ADDR") or first_host(env[hosts], hosts),
            _parse_number(env, "MASTER_PORT", low=1, high=65535) if "MASTER_PORT" in env else port,
        ),
        run_id=f"{job}.{step}",
    )


def _is_slurm_task(env: Mapping[str, str]) -> bool:
    """Return whether srun seems to have started this process as a task."""
    if "SLURM_STEP_ID" not in env or _parse_number(env, "SLURM_STEP_ID", low=0) >= _SLURM_SPECIAL_STEPS:
        return False
    # In `srun --pty -n 4 bash` four shells start and three end immediately; commands typed into the first are not
    # tasks. Only the three signs together show this, because the name belongs to the allocation: salloc's srun has it
    # too, and processes started from such a shell inherit the port.
    shell = env.get("SLURM_JOB_NAME", "") in ("bash", "sh", "zsh", "fish", "tcsh", "interactive")
    return not (shell and "SLURM_PTY_PORT" in env and os.isatty(0))


def _is_slurm_batch(env: Mapping[str, str], task_count: int) -> bool:
    """Return whether this is a batch script that inherited the step variables of the task that submitted it."""
    return "SLURM_GTIDS" in env and len(env["SLURM_GTIDS"].split(",")) != task_count  # it is "0" in a batch script


def task_counts(text: str, name: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Return the number of tasks on each machine from SLURM's short form: ``"2(x3),1"`` becomes ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{name}={text!r} must have the form '2(x3),1'.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(text: str, name: str = "SLURM_STEP_NODELIST") -> str:
    """Return the name of the first machine in SLURM's short form: ``"n[01-03,7],m5"`` becomes ``"n01"``."""
    host = re.sub(r"\[(\d+)[\d,-]*\]", r"\1", text).partition(",")[0]
    if re.fullmatch(r"[\w.:-]+", host) is None:
        raise ValueError(f"{name}={text!r} must have the form 'n[1-3,07-09],m5'.")
    return host


def _find_set_name(env: Mapping[str, str], *names: str) -> str:
    """Return the first of ``names`` that is set, or the last if none is set."""
    return next((name for name in names if name in env), names[-1])


def _check_all_set(env: Mapping[str, str], names: tuple[str, ...], assignment: str, start: str) -> None:
    for name in names:
        if name not in env:
            raise ValueError(
                f"{name} is not set, but {assignment} is. Either all required variables of a launcher must be set, or "
                f"none. Start with `{start}`, export {name}, or unset {assignment.split('=')[0]}."
            )


def read_debug_interval(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the number of optimizer steps between two comparisons of the replicas with ``TREADLE_DEBUG=1``.

    The default is 100. TREADLE_DEBUG_REPLICAS changes it, and 0 stands for no comparisons. None means that debugging is
    disabled.
    """
    env = os.environ if environ is None else environ
    if not env.get("TREADLE_DEBUG") or not _parse_number(env, "TREADLE_DEBUG", low=0, high=1):
        return None
    name = "TREADLE_DEBUG_REPLICAS"
    return _parse_number(env, name, low=0) if name in env else 100


def _parse_number(env: Mapping[str, str], name: str, low: int, high: int | None = None) -> int:
    valid = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    try:
        value = int(env[name])
    except ValueError:
        raise ValueError(f"{name}={env[name]!r} must be {valid}.") from None
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}={value} must be {valid}.")
    return value


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context. Earlier values are restored afterwards.

    Args:
        variables: Values of the variables, keyed by name.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
