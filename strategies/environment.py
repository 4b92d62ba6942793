"""What launchers say about a process: the only reader of their environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """What a launcher (torchrun, ours, a Kubernetes job) says about this process.

    Raises:
        ValueError: if only a part of the variables is set, or one holds no valid number. A half-set environment
            would train N separate models that each believe to be alone.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    supervisor: int | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> LaunchEnvironment | None:
        """Read the launch variables; None when no launcher set any. The only place that reads them."""
        env = os.environ if environ is None else environ
        if not any(name in env for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
            return None
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            if name not in env:
                given = ", ".join(f"{n}={env[n]}" for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if n in env)
                raise ValueError(
                    f"{name} is not set, but {given} is: a launch environment is complete or absent. "
                    "Start with torchrun, which sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, "
                    f"or unset {given.split('=')[0]}."
                )
        size = _number(env, "WORLD_SIZE", low=1)
        rank = _number(env, "RANK", low=0, high=size - 1)
        # A pod per process (PyTorchJob) sets no LOCAL_RANK: each process is alone on its node.
        local_size = _number(env, "LOCAL_WORLD_SIZE", low=1, high=size) if "LOCAL_WORLD_SIZE" in env else 1
        local_rank = _number(env, "LOCAL_RANK", low=0) if "LOCAL_RANK" in env else 0
        if local_rank >= local_size:
            said = f"={local_size}" if "LOCAL_WORLD_SIZE" in env else ", which is not set, so it counts as 1"
            raise ValueError(f"LOCAL_RANK={local_rank} must be below LOCAL_WORLD_SIZE{said}.")
        node = _number(env, "GROUP_RANK", low=0) if "GROUP_RANK" in env else rank // local_size
        supervisor = _number(env, "TREADLE_SUPERVISOR", low=1) if "TREADLE_SUPERVISOR" in env else None
        return cls(
            rank=rank,
            world_size=size,
            local_rank=local_rank,
            local_world_size=local_size,
            node_rank=node,
            supervisor=supervisor,
        )


def _number(env: Mapping[str, str], name: str, low: int, high: int | None = None) -> int:
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
    try:
        value = int(env[name])
    except ValueError:
        raise ValueError(f"{name}={env[name]!r} is not a whole number; it must be {bounds}.") from None
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}={value} is out of range; it must be {bounds}.")
    return value
