"""Predicted time, memory and communication of one optimizer step of one process."""

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
    """Settings of the run to plan: hardware, strategy, batch sizes and precision.

    Args:
        world_size: Number of processes.
        strategy: The strategy. Create a new strategy object for each plan.
        gpu: The GPU of each process, as a `GPU` or a key of `gpus.GPUS`. Default: ``"h100"``.
        micro_batch: Number of samples per forward pass. Default: 1.
        accumulate: Number of forward passes per optimizer step. Default: 1.
        partial_sums: Number of copies of the full gradients that are held between the passes of a step. Default: 0.
        precision: The precision, as for `Trainer`. Default: ``"bf16-mixed"``.
        compiled: Whether the model is compiled. Default: False.
        clip: Maximum norm to which gradients are clipped. Default: no clipping.
        step: Name of the method of the model that the loss calls. Default: ``forward``.
        rank: The rank of the process to plan. Default: 0.
        calibration: Corrections to the GPU's data sheet.
    """

    world_size: int
    strategy: Strategy
    gpu: GPU = GPUS["h100"]
    micro_batch: int = 1
    accumulate: int = 1
    partial_sums: int = 0
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
            raise ValueError(f"rank={self.rank} must be at least 0 and less than world_size={self.world_size}.")


@dataclass(frozen=True, kw_only=True)
class Plan(Conditions):
    """Predicted time, memory and communication of one optimizer step of a process under its `Conditions`.

    Args:
        grid: The numbers of replicas (``"replicate"``), of shards of each replica (``"shard"``) and of processes per
            sample (``"tensor"``).
        parameters: Number of parameters of the whole model.
        trainable: Number of trainable parameters.
        shards: The shape of this process's shard of each parameter, by name.
        memory: Bytes in use at the peak, by category.
        states: Bytes that remain in use between steps, for ``"parameters"`` (including buffers) and ``"optimizer"``.
        checkpoint: Bytes of a checkpoint with the full model and optimizer state.
        traffic: Number and size of the process's collectives, by kind.
        flops: FLOPs of the process's matrix products, convolutions and attention, including recomputation.
        seconds: Device time of the step, without delays by slower processes.
        spent: Device time in seconds, by cause, such as ``"arithmetic"`` or `WAITING`.
        launched: Number of operations that the host launches on the device.
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
        """Number of samples of one step over all processes."""
        return self.micro_batch * self.accumulate * self.world_size // self.grid["tensor"]

    @property
    def peak(self) -> int:
        """Bytes that the process uses at the memory peak of the step."""
        return sum(self.memory.values())

    @property
    def reserved(self) -> float:
        """Estimate of the bytes that torch's allocator reserves at the peak."""
        return self.peak * self.calibration.reserved

    @property
    def fits(self) -> bool:
        """True if the GPU has enough memory for ``reserved`` bytes."""
        return self.reserved <= self.gpu.memory

    @property
    def host(self) -> tuple[float, float, float]:
        """Seconds that the host takes to launch the step's operations: at best, most likely, at worst."""
        left = self.calibration.host_compiled if self.compiled else (1.0, 1.0, 1.0)
        least, likely, most = (
            self.launched * operation_seconds * share
            for operation_seconds, share in zip(self.calibration.host, left, strict=True)
        )
        return least, likely, most

    @property
    def checked(self) -> bool:
        """True if predictions for similar steps were compared with measurements."""
        products = self.spent.get(ARITHMETIC, 0.0)
        halved = self.flops / self.gpu.half / self.calibration.arithmetic >= 0.9 * products
        return self.gpu.name.startswith("h100") and halved and 2 * products > self.seconds

    @property
    def host_bound(self) -> bool:
        """True if the device most likely waits for the host."""
        return self.host[1] > self.seconds

    @property
    def band(self) -> tuple[float, float, float]:
        """Step time in seconds: at best, most likely, at worst."""
        spread = self.calibration.spread if self.checked else self.calibration.spread_unchecked
        late = (1 + self.calibration.straggler) ** max(0.0, log2(self.world_size / self.calibration.straggler_from))
        device = (self.seconds * (1 - spread), self.seconds * late, self.seconds * late * late * (1 + spread))
        least, likely, most = (max(pair) for pair in zip(device, self.host, strict=True))
        return least, likely, most
