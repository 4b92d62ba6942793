"""Layout of processes on a mesh of replicas, shards, and groups that share the work on one sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...common.validation import check_int
from .world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICATE, SHARD, TENSOR = "data_replicate", "data_parallel", "tensor_parallel"


@dataclass(frozen=True)
class Layout:
    """Sizes of a mesh of processes.

    Args:
        data: Number of processes over which the data is sharded; ``"auto"`` means the world size divided by ``tensor``.
        replicate: Number of replicas.
        tensor: Number of processes that share the work on one sample.
    """

    data: int | str = "auto"
    replicate: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        flags = {"data_parallel_replicate": self.replicate, "tensor_parallel_size": self.tensor}
        if self.data != "auto":
            flags["data_parallel_size"] = self.data  # type: ignore[assignment]
        for flag, value in flags.items():
            check_int(flag, value, 1)

    def sizes(self, world_size: int) -> dict[str, int]:
        """Return the sizes of the mesh by dimension. Dimensions of size 1, except ``"data_parallel"``, are omitted."""
        data, left = divmod(world_size, self.tensor)
        if left:
            raise ValueError(
                f"tensor_parallel_size={self.tensor} must divide the world size, {world_size}. Change "
                "tensor_parallel_size or the number of processes."
            )
        if self.data not in ("auto", data):
            raise ValueError(
                f"data_parallel_size={self.data} times tensor_parallel_size={self.tensor} must be the world size, "
                f"{world_size}. Use data_parallel_size='auto'."
            )
        shard, left = divmod(data, self.replicate)
        if left:
            divisor = "" if self.tensor == 1 else f" divided by tensor_parallel_size={self.tensor}"
            raise ValueError(
                f"data_parallel_replicate={self.replicate} must divide {data}, the world size{divisor}. Change "
                "data_parallel_replicate or the number of processes."
            )
        sizes = {REPLICATE: self.replicate, SHARD: shard, TENSOR: self.tensor}
        return {name: size for name, size in sizes.items() if name == SHARD or size > 1}

    def mesh(self, world: World) -> DeviceMesh:
        """Return the mesh of all processes."""
        return world.mesh(**self.sizes(world.size))

    def data_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the submesh over which this process's parameters are sharded and replicated."""
        if self.tensor == 1:
            return mesh
        return mesh[REPLICATE, SHARD] if self.replicate > 1 else mesh[SHARD]

    def data_world(self, world: World) -> World:
        """Return the `World` over which the data is sharded: this process and one process for each other share."""
        if self.tensor == 1:
            return world
        return world.part(world.mesh(data=world.size // self.tensor, tensor=self.tensor)["data"])
