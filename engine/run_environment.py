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
from pathlib import Path

import torch

from ..strategies.launch import supervisor

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


@functools.cache
def _find_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def processor() -> str:
    """Return the processor's name and the number of cores that this process may use."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # exists on Linux only
        match = re.search(r"^model name\s*: *(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = name if match is None else match[1]
    return f"{name}, {supervisor.cpus()} cores"


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
