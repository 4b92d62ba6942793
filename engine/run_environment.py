"""Environment of a run: command, versions, hardware and git revision."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..common.messages import warn
from ..strategies import launch

if TYPE_CHECKING:
    from ..strategies import World


_PACKAGES = ("torch", "treadle", "numpy", "torchmetrics", "transformers")


def environment() -> dict[str, str]:
    """Return the run's command, working directory, package versions, hardware and git revision as a dict of strings."""
    facts = {"command": shlex.join(sys.argv), "folder": os.getcwd(), "git revision": revision(os.getcwd())}
    facts |= {"Python": platform.python_version(), **{name: _find_version(name) for name in _PACKAGES}}
    facts |= {"system": platform.platform(), "host": platform.node(), "processor": processor()}
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        facts["GPUs"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        facts["CUDA"] = str(torch.version.cuda)
    return {name: value for name, value in facts.items() if value}


def describe_kernels(device: torch.device) -> dict[str, str]:
    """Return what the rounding of torch's kernels on a device depends on, apart from the program: hardware, builds."""
    facts = {"torch": str(torch.__version__), "CPU": _find_model(), "threads": str(torch.get_num_threads())}
    if device.type == "cuda":
        facts |= {"GPU": torch.cuda.get_device_name(device), "CUDA": str(torch.version.cuda)}
    return facts


def warn_if_kernels_differ(world: World, saved: Mapping[str, str] | None = None) -> None:
    """Warn if ranks, or this run and the run of a checkpoint, may round in other ways, for ``step_micro_batches``.

    Args:
        world: The ranks. Without ``saved``, the function must be called on all of them.
        saved: The result of `describe_kernels` in the run that saved the checkpoint. Default: None.
    """
    own = describe_kernels(world.device)
    every = [own, saved] if saved is not None else world.gather_objects(own)
    values = {name: list(dict.fromkeys(facts.get(name, "none") for facts in every)) for name in own}
    different = [f"{name} ({' and '.join(found)})" for name, found in values.items() if len(found) > 1]
    if different and world.is_main:
        between = "this run and that of the checkpoint" if saved is not None else "the ranks"
        warn(
            f"{between} differ in {', '.join(different)}, so step_micro_batches does not lead to the same bits. Use "
            "the same kind of machine and torch build, and set OMP_NUM_THREADS to the same number."
        )


@functools.cache
def _find_version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def processor() -> str:
    """Return the processor's name and the number of cores that this process may use."""
    return f"{_find_model()}, {launch.supervisor.cpus()} cores"


@functools.cache
def _find_model() -> str:
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # exists on Linux only
        match = re.search(r"^model name\s*: *(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = name if match is None else match[1]
    return name


@functools.cache
def revision(folder: str) -> str:
    """Return the git revision checked out in ``folder``, with a note if tracked files have changed; "" if unknown."""
    commit = _run_git(folder, "rev-parse", "HEAD")
    if not commit:
        return ""
    changed = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}, with uncommitted changes" if changed else commit


def _run_git(folder: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments], cwd=folder, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
