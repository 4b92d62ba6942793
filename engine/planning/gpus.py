"""What a GPU and the wires around it can do, by their makers' sheets."""

from __future__ import annotations

from dataclasses import dataclass

from ...strategies.messages import choose


@dataclass(frozen=True, kw_only=True)
class GPU:
    """A kind of accelerator in a machine of its usual kind.

    Args:
        name: as it is asked for.
        half: operations per second in bfloat16 matrix products, without sparsity.
        single: the same in float32, in the tensor cores' TF32 where there is one.
        bandwidth: bytes per second from its memory.
        memory: bytes of it.
        link: bytes per second that a ring within a machine carries, each way (bus bandwidth as NCCL counts it).
        network: bytes per second of its share of the machine's network, each way.
        per_machine: of them in a machine.
        age: index into NCCL's tables: 0 Volta, 1 Ampere, 2 Hopper, 3 Blackwell.
    """

    name: str
    half: float
    single: float
    bandwidth: float
    memory: float
    link: float
    network: float
    per_machine: int = 8
    age: int = 2


_T, _G = 1e12, 1e9
_GIB = float(2**30)

# Peaks and memory: NVIDIA's data sheets. `link`: what NCCL's topo.h counts per GPU. `network`: one port per GPU, as in
# the usual machines (DGX, HGX): 200 Gb/s beside A100, 400 Gb/s since.
_TABLE = (
    GPU(name="v100", half=125 * _T, single=15.7 * _T, bandwidth=0.9 * _T, memory=32 * _GIB, link=120 * _G,
        network=12.5 * _G, age=0),
    GPU(name="a100-40gb", half=312 * _T, single=156 * _T, bandwidth=1.555 * _T, memory=40 * _GIB, link=240 * _G,
        network=25 * _G, age=1),
    GPU(name="a100", half=312 * _T, single=156 * _T, bandwidth=2.039 * _T, memory=80 * _GIB, link=240 * _G,
        network=25 * _G, age=1),
    GPU(name="l40s", half=362 * _T, single=183 * _T, bandwidth=0.864 * _T, memory=48 * _GIB, link=24 * _G,
        network=12.5 * _G, age=1),
    GPU(name="a10g", half=70 * _T, single=35 * _T, bandwidth=0.6 * _T, memory=24 * _GIB, link=12 * _G,
        network=6.25 * _G, age=1),
    GPU(name="rtx4090", half=165 * _T, single=82.6 * _T, bandwidth=1.008 * _T, memory=24 * _GIB, link=12 * _G,
        network=3 * _G, age=1),
    GPU(name="h100", half=989 * _T, single=494 * _T, bandwidth=3.35 * _T, memory=80 * _GIB, link=370 * _G,
        network=50 * _G),
    # The one of torchtitan's published runs: HBM2e, 500 W.
    GPU(name="h100-96gb", half=989 * _T, single=494 * _T, bandwidth=2.4 * _T, memory=96 * _GIB, link=370 * _G,
        network=50 * _G),
    GPU(name="h200", half=989 * _T, single=494 * _T, bandwidth=4.8 * _T, memory=141e9, link=370 * _G,
        network=50 * _G),
    GPU(name="b200", half=2250 * _T, single=1100 * _T, bandwidth=8 * _T, memory=180e9, link=720 * _G,
        network=50 * _G, age=3),
)  # fmt: skip
GPUS = {gpu.name: gpu for gpu in _TABLE}


def gpu_called(name: str | GPU) -> GPU:
    """The kind called ``name``.

    Raises:
        ValueError: for an unknown one, with the nearest known.
    """
    if isinstance(name, GPU):
        return name
    return GPUS[choose("gpu", name.lower().replace("_", "-"), GPUS)]
