"""Kind of distributed training, in Accelerate's terms."""

from __future__ import annotations

from enum import StrEnum

from .world import World


class DistributedType(StrEnum):
    """Kind of distributed training. Treadle uses ``NO``, ``MULTI_CPU``, ``MULTI_GPU`` or ``FSDP``.

    The other values exist only for comparisons in scripts.

    Example:
        >>> import treadle as tl
        >>> from treadle.utils import DistributedType
        >>> tl.Accelerator(cpu=True).distributed_type == DistributedType.NO
        True
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


def distributed_type(world: World, sharded: bool) -> DistributedType:
    """Return the `DistributedType` of a run."""
    if sharded:
        return DistributedType.FSDP
    if world.size == 1:
        return DistributedType.NO
    return DistributedType.MULTI_GPU if world.device.type == "cuda" else DistributedType.MULTI_CPU
