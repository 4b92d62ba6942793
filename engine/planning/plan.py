"""What one process of a run does and needs in one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2

from ...common.validation import check_int
from ...strategies import Precision, Strategy
from .gpus import GPU, GPUS, find_gpu
from .meter import Traffic
from .op_costs import ARITHMETIC, Calibration

WAITING = "waiting for other processes"


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Where and how a model is trained.

    Args:
        world_size: number of processes.
        strategy: how the model lies on them. It is used up by a plan.
        gpu: what each process has, see `gpus.GPUS`.
        micro_batch: samples of one forward.
        accumulate: forwards per optimizer step.
        precision: as for `Trainer`.
        compiled: pointwise operations are fused.
        clip: norm to clip gradients to.
        step: the method of the model that returns the loss, as the Trainer runs ``training_step``.
        rank: the process to look at.
        calibration: how far GPUs are from their sheets.
    """

    world_size: int
    strategy: Strategy
    gpu: GPU = GPUS["h100"]
    micro_batch: int = 1
    accumulate: int = 1
    precision: Precision = field(default_factory=lambda: Precision.parse("bf16-mixed"))
    compiled: bool = False
    clip: float | None = None
    step: str | None = None
    rank: int = 0
    calibration: Calibration = field(default_factory=Calibration)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gpu", find_gpu(self.gpu))
        object.__setattr__(self, "precision", Precision.parse(self.precision))
        for name in ("world_size", "micro_batch", "accumulate"):
            check_int(name, getattr(self, name), 1)
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} is none of {self.world_size} processes, which count from 0.")


@dataclass(frozen=True, kw_only=True)
class Plan(Conditions):
    """What a process does and needs under its `Conditions`.

    Args:
        grid: how the processes are laid out: ``replicate``, ``shard``, ``tensor``.
        parameters: of the whole model.
        trainable: of those.
        shards: the shape of this process's part of each parameter.
        memory: bytes by category when they are most.
        states: bytes that stay from step to step, by category.
        checkpoint: bytes of a checkpoint, all processes together.
        traffic: what it exchanges.
        flops: arithmetic of its matrix products, what is computed again included.
        seconds: how long the device takes for the step, before stragglers.
        spent: of that, by what it goes on; `WAITING` is for what comes from other processes.
        launched: operations that the host sends to the device.
    """

    grid: dict[str, int]
    parameters: int
    trainable: int
    shards: dict[str, tuple[int, ...]]
    memory: dict[str, int]
    states: dict[str, int]
    checkpoint: int
    traffic: Traffic
    flops: int
    seconds: float
    spent: dict[str, float]
    launched: int

    @property
    def samples(self) -> int:
        """The effective batch: samples of one step, of all processes."""
        return self.micro_batch * self.accumulate * self.world_size // self.grid["tensor"]

    @property
    def peak(self) -> int:
        """Bytes that live at most."""
        return sum(self.memory.values())

    @property
    def reserved(self) -> float:
        """Bytes that torch's allocator will hold for them."""
        return self.peak * self.calibration.reserved

    @property
    def fits(self) -> bool:
        """Whether the GPU has as much."""
        return self.reserved <= self.gpu.memory

    @property
    def host(self) -> tuple[float, float, float]:
        """Seconds that the host takes to send the step's operations: at best, most likely, at worst."""
        left = self.calibration.host_compiled if self.compiled else (1.0, 1.0, 1.0)
        least, likely, most = (
            self.launched * operation_seconds * share
            for operation_seconds, share in zip(self.calibration.host, left, strict=True)
        )
        return least, likely, most

    @property
    def checked(self) -> bool:
        """Whether the like was checked: mostly products of big matrices in half precision, on an H100."""
        products = self.spent.get(ARITHMETIC, 0.0)
        halved = self.flops / self.gpu.half / self.calibration.arithmetic >= 0.9 * products
        return self.gpu.name.startswith("h100") and halved and 2 * products > self.seconds

    @property
    def host_bound(self) -> bool:
        """Whether the device most likely waits for the host."""
        return self.host[1] > self.seconds

    @property
    def band(self) -> tuple[float, float, float]:
        """Seconds of a step: at best, most likely, at worst.

        The device or the host, whichever takes longer. Past what was checked it widens with every doubling.
        """
        spread = self.calibration.spread if self.checked else self.calibration.spread_unchecked
        late = (1 + self.calibration.straggler) ** max(0.0, log2(self.world_size / self.calibration.straggler_from))
        device = (self.seconds * (1 - spread), self.seconds * late, self.seconds * late * late * (1 + spread))
        least, likely, most = (max(pair) for pair in zip(device, self.host, strict=True))
        return least, likely, most
