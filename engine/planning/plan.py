"""Plan of one optimizer step of one process: its time, memory and communication."""

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
    """Conditions under which a model is trained.

    Args:
        world_size: Number of processes.
        strategy: The layout of the model over them. A strategy object can be used by one plan only.
        gpu: The GPU of each process; see `gpus.GPUS`.
        micro_batch: Samples of one forward pass.
        accumulate: Forward passes per optimizer step.
        precision: As for `Trainer`.
        compiled: Whether pointwise operations are fused.
        clip: Norm to clip gradients to; None for no clipping.
        step: The method of the model that returns the loss, as the Trainer calls ``training_step``; None for
            ``forward``.
        rank: The process to plan.
        calibration: Corrections of the GPU's data sheet.

    Raises:
        ValueError: If a value is out of range or unknown.
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
            raise ValueError(
                f"rank={self.rank} must be from 0 to {self.world_size - 1}, because world_size={self.world_size}."
            )


@dataclass(frozen=True, kw_only=True)
class Plan(Conditions):
    """Time, memory and communication of a process under its `Conditions`.

    Args:
        grid: The numbers of processes by dimension: ``replicate``, ``shard``, ``tensor``.
        parameters: Parameters of the whole model.
        trainable: Trainable parameters.
        shards: The shape of this process's shard of each parameter.
        memory: Bytes by category at the peak.
        states: Bytes that stay from step to step, by category.
        checkpoint: Bytes of a checkpoint, over all processes.
        traffic: Communication.
        flops: Arithmetic of its matrix products, including recomputation.
        seconds: Device time of the step, without stragglers.
        spent: The same by category; `WAITING` is the time spent waiting for other processes.
        launched: Operations that the host sends to the device.
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
        """Effective batch size: samples of one step over all processes."""
        return self.micro_batch * self.accumulate * self.world_size // self.grid["tensor"]

    @property
    def peak(self) -> int:
        """Bytes in use at the peak."""
        return sum(self.memory.values())

    @property
    def reserved(self) -> float:
        """Bytes that torch's allocator reserves at the peak."""
        return self.peak * self.calibration.reserved

    @property
    def fits(self) -> bool:
        """True if the GPU has enough memory."""
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
        """True if similar plans were checked: large matrix products in half precision, on an H100."""
        products = self.spent.get(ARITHMETIC, 0.0)
        halved = self.flops / self.gpu.half / self.calibration.arithmetic >= 0.9 * products
        return self.gpu.name.startswith("h100") and halved and 2 * products > self.seconds

    @property
    def host_bound(self) -> bool:
        """True if the device most likely waits for the host."""
        return self.host[1] > self.seconds

    @property
    def band(self) -> tuple[float, float, float]:
        """Seconds of a step: at best, most likely, at worst.

        The slower of the device and the host determines the time. Beyond the checked world sizes the band widens with
        every doubling.
        """
        spread = self.calibration.spread if self.checked else self.calibration.spread_unchecked
        late = (1 + self.calibration.straggler) ** max(0.0, log2(self.world_size / self.calibration.straggler_from))
        device = (self.seconds * (1 - spread), self.seconds * late, self.seconds * late * late * (1 + spread))
        least, likely, most = (max(pair) for pair in zip(device, self.host, strict=True))
        return least, likely, most
