"""Inspection of the machine and environment from one process, as plain data that can be sent as JSON."""

from __future__ import annotations

import importlib.metadata
import math
import multiprocessing
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...common import __version__
from ..launch import supervisor

Facts = dict[str, Any]

# Packages whose version affects what a run computes, reads or writes. A package that is not installed is omitted.
REQUIRED = ("numpy", "safetensors", "xxhash", "omegaconf", "tensorboard", "tqdm")
OPTIONAL = (
    *("torchvision", "torchaudio", "torchdata", "torchmetrics", "torchao", "triton", "flash-attn", "xformers"),
    *("transformers", "datasets", "tokenizers", "peft", "webdataset", "scikit-learn", "pandas"),
    *("psutil", "rich", "wandb", "mlflow", "mlflow-skinny", "onnx", "lightning", "accelerate"),
)
# Variables that launchers, torch, NCCL and OpenMP read. No others are collected, because some contain secrets.
_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|"
    r"SLURM_(PROCID|LOCALID|NODEID|NTASKS|STEP_NUM_TASKS|JOB_ID|STEP_ID|STEP_TASKS_PER_NODE)|"
    r"OMPI_COMM_WORLD_\w+|PMI_(SIZE|RANK)|MPI_LOCAL\w+|(NCCL|GLOO|TORCH_NCCL|OMP|MKL|CUDA)_\w+|TREADLE_DEBUG\w*|"
    r"ACCELERATE_\w+|PYTORCH_\w*ALLOC_CONF|TMPDIR)"
)
_PROBE = b"\0" * 65536  # bytes; a file system without space may still create empty files
_UNLIMITED = 1 << 60  # bytes; version 1 of control groups reports about this much for "no limit"


def inspect_process(run_folder: str | Path = ".") -> Facts:
    """Return the properties of this process that affect a run: versions, hardware, limits, folders and environment."""
    interfaces = [name for _, name in socket.if_nameindex()]
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": read_versions(),
        "system": {"name": platform.system(), "release": platform.release(), "libc": "-".join(platform.libc_ver())},
        "cpu": _inspect_cpus(),
        "memory": _inspect_memory(),
        "devices": _inspect_devices(),
        "backends": _list_backends(),
        "folders": {
            "run folder": inspect_folder(run_folder),
            "temp folder": inspect_folder(tempfile.gettempdir()),
            **({"/dev/shm": inspect_folder("/dev/shm")} if os.path.isdir("/dev/shm") else {}),
        },
        "limits": {
            name: resource.getrlimit(number)[0]
            for name, number in (("open files", resource.RLIMIT_NOFILE), ("locked memory", resource.RLIMIT_MEMLOCK))
        },
        "start method": multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
        "interfaces": interfaces,
        "free port": _find_port(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)},
    }


def read_versions() -> dict[str, str]:
    """Return the versions of Python, torch, Treadle and the relevant installed packages, keyed by name."""
    versions = {"Python": platform.python_version(), "torch": torch.__version__, "treadle": __version__}
    for package in (*REQUIRED, *OPTIONAL):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def name_processor() -> str:
    """Return the processor's name as reported by the system, or its architecture if no name is reported."""
    match = re.search(r"^model name\s*: *(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)  # exists on Linux only
    return match[1] if match else platform.processor() or platform.machine()


def _inspect_cpus() -> Facts:
    return {
        "name": name_processor(),
        "installed": os.cpu_count() or 1,
        "usable": supervisor.cpus(),
        "quota": _read_cpu_quota(),
        "threads": torch.get_num_threads(),
    }


def _inspect_memory() -> Facts:
    page = os.sysconf("SC_PAGE_SIZE")
    available = _read_meminfo("MemAvailable")
    return {
        "total": page * os.sysconf("SC_PHYS_PAGES"),
        "available": available if available is not None else page * os.sysconf("SC_AVPHYS_PAGES"),
        "limit": _read_memory_limit(),
    }


def _read_meminfo(key: str) -> int | None:
    match = re.search(rf"^{key}: +(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _read_cpu_quota() -> float | None:
    """Return the number of CPUs that the control groups of this process allow; None if there is no limit."""
    quotas = []
    for folder in _list_control_groups("cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")  # version 2 of control groups
        if not quota:
            quota, period = (_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _read_memory_limit() -> int | None:
    """Return the memory in bytes that the control groups of this process allow; None if there is no limit."""
    texts = [
        (_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")).strip()
        for folder in _list_control_groups("memory")
    ]
    return min((int(text) for text in texts if text.isdecimal() and int(text) < _UNLIMITED), default=None)


def _list_control_groups(controller: str) -> list[Path]:
    """Return the directories of this process's control group and its ancestors, under cgroup v1 or v2."""
    folders = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup") / controllers
        # A container may see its own group as the root, under the path that it has outside.
        inner = root / path.lstrip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root) and folder.is_dir()]
    return folders


def _inspect_devices() -> Facts:
    if not torch.cuda.is_available():
        return {"cuda": [], "mps": torch.backends.mps.is_available(), "files": os.path.exists("/dev/nvidiactl")}
    cuda = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        cuda.append({"name": torch.cuda.get_device_name(index), "total": total, "free": free})
    pairs = [(a, b) for a in range(len(cuda)) for b in range(len(cuda)) if a != b]
    driver = re.search(r"(?:Kernel Module(?: for \S+)?) +([\d.]+)", _read("/proc/driver/nvidia/version"))
    return {
        "cuda": cuda,
        "runtime": torch.version.cuda or torch.version.hip,
        "driver": driver[1] if driver else None,
        "pairs": len(pairs),
        "peer pairs": sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs),
        "nvlink": _has_nvlink() if pairs else None,
    }


def _has_nvlink() -> bool | None:
    """Return whether any two GPUs of this machine are connected by NVLink; None if nvidia-smi is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return re.search(r"\bNV\d+\b", done.stdout) is not None


def _list_backends() -> dict[str, str]:
    """Return the communication backends that torch was built with, and their versions if known."""
    if not dist.is_available():
        return {}
    backends = {"gloo": ""} if dist.is_gloo_available() else {}
    if dist.is_nccl_available():
        try:
            backends["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        except (RuntimeError, AttributeError):  # built for ROCm, or without NCCL
            backends["nccl"] = ""
    return backends | ({"mpi": ""} if dist.is_mpi_available() else {})


def inspect_folder(folder: str | Path) -> Facts:
    """Return a folder's path, its free and total bytes, and the error that writing a file to it raises, if any.

    If the folder does not exist yet, its nearest existing parent is inspected instead.
    """
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    facts: Facts = {"path": str(path), "error": None, "free": None, "total": None}
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(_PROBE)
            file.flush()
            os.fsync(file.fileno())  # network file systems report a full disk or quota only here
        space = shutil.disk_usage(existing)
        facts |= {"free": space.free, "total": space.total}
    except OSError as error:
        facts["error"] = error.strerror or str(error)
    return facts


def _find_port() -> int | None:
    """Return a port of 127.0.0.1 on which this process can listen; None if there is none."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port: int = server.getsockname()[1]
            return port
    except OSError:
        return None


def _read(path: str | Path) -> str:
    """Return a file's text, or "" if the file cannot be read, for example because the system does not have it."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def format_bytes(size: float) -> str:
    """Format a number of bytes in a short form, such as "7.8 GB"."""
    if size < 1000:
        return f"{size:.0f} B"
    power = min(4, int(math.log(size, 1000)))
    value = size / 1000**power
    return f"{value:.{0 if value >= 100 else 1}f} {['B', 'kB', 'MB', 'GB', 'TB'][power]}"
