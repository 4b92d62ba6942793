"""How processes are laid out on a grid: replicas, shards, and groups that share the work on one sample."""

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
    """The sizes of a grid of processes.

    Args:
        data: processes that the data is shared out to, or ``"auto"`` for all that ``tensor`` leaves.
        replicate: into how many replicas those fall; each is sharded over the rest.
        tensor: processes that work on one sample together.
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
        """The grid for ``world_size`` processes, by the names of its dimensions.

        Raises:
            ValueError: if they can not be laid out so.
        """
        data, left = divmod(world_size, self.tensor)
        if left:
            raise ValueError(f"tensor_parallel_size={self.tensor} does not divide the {world_size} processes.")
        if self.data not in ("auto", data):
            raise ValueError(
                f"data_parallel_size={self.data} times tensor_parallel_size={self.tensor} is not the number of "
                f"processes, {world_size}. Leave data_parallel_size at 'auto'."
            )
        shard, left = divmod(data, self.replicate)
        if left:
            raise ValueError(
                f"data_parallel_replicate={self.replicate} does not divide the {data} processes that share the data."
            )
        sizes = {REPLICATE: self.replicate, SHARD: shard, TENSOR: self.tensor}
        return {name: size for name, size in sizes.items() if name == SHARD or size > 1}

    def mesh(self, world: World) -> DeviceMesh:
        """The grid of all processes."""
        return world.mesh(**self.sizes(world.size))

    def data_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The part of the grid over which one process's parameters are sharded (and replicated)."""
        if self.tensor == 1:
            return mesh
        return mesh[REPLICATE, SHARD] if self.replicate > 1 else mesh[SHARD]

    def data_world(self, world: World) -> World:
        """The processes that get different data, of which this one is one."""
        if self.tensor == 1:
            return world
        return world.part(world.mesh(data=world.size // self.tensor, tensor=self.tensor)["data"])
