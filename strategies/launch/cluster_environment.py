"""Ranks and address from the user's own class, for a cluster whose launcher Treadle does not know."""

from __future__ import annotations

import os

from ..distributed import Devices, LaunchEnvironment, device_type, parse_devices


class ClusterEnvironment:
    """Ranks that a cluster's launcher gives to its processes, as a plugin for `Trainer` or `Fabric`.

    Subclass it for a launcher that Treadle does not detect. What a subclass does not define is that of a launcher that
    Treadle detects (torchrun, `treadle launch`, srun, mpirun), so that an instance of this class changes nothing.
    Equivalent to Lightning's class.

    Attributes:
        creates_processes_externally: Whether the launcher starts every process. If False, Treadle starts the processes
            of this machine and ignores the other attributes and methods. Default: True.

    Examples:
        >>> from treadle.strategies import ClusterEnvironment
        >>> class Jsrun(ClusterEnvironment):
        ...     main_address, main_port = "node1", 29500
        ...     def world_size(self): return int(os.environ["JSM_NAMESPACE_SIZE"])
        ...     def global_rank(self): return int(os.environ["JSM_NAMESPACE_RANK"])
        ...     def local_rank(self): return int(os.environ["JSM_NAMESPACE_LOCAL_RANK"])
        ...     def node_rank(self): return self.global_rank() // 6
        >>> plugins = [Jsrun()]  # for Trainer(plugins=plugins, devices=6, num_nodes=2)
    """

    creates_processes_externally: bool = True

    @staticmethod
    def detect() -> bool:
        """Return whether a launcher that Treadle detects has started this process."""
        return LaunchEnvironment.read() is not None

    @property
    def main_address(self) -> str:
        """Host on which rank 0 listens."""
        address = self._detected("main_address").address
        return os.environ["MASTER_ADDR"] if address is None else address[0]

    @property
    def main_port(self) -> int:
        """Port on which rank 0 listens."""
        address = self._detected("main_port").address
        return int(os.environ["MASTER_PORT"]) if address is None else address[1]

    def world_size(self) -> int:
        """Return the number of processes."""
        return self._detected("world_size").world_size

    def global_rank(self) -> int:
        """Return the rank of this process."""
        return self._detected("global_rank").rank

    def local_rank(self) -> int:
        """Return the rank of this process on its machine."""
        return self._detected("local_rank").local_rank

    def node_rank(self) -> int:
        """Return the index of this machine."""
        return self._detected("node_rank").node_rank

    def set_world_size(self, size: int) -> None:
        """Receive the number of processes that ``devices`` and ``num_nodes`` request, if ``devices`` is a number.

        Args:
            size: ``devices * num_nodes``.
        """

    def set_global_rank(self, rank: int) -> None:
        """Receive the rank of this process, if ``devices`` is a number.

        Args:
            rank: ``node_rank() * devices + local_rank()``.
        """

    def export(self, accelerator: str = "auto", devices: Devices = "auto", num_nodes: int = 1) -> None:
        """Set torchrun's environment variables, unless a detected launcher gives the same ranks and address.

        Args:
            accelerator: The flag of the Trainer. Default: ``"auto"``.
            devices: The flag of the Trainer, the processes per machine. With ``"auto"``, each machine has the same
                number of processes. Default: ``"auto"``.
            num_nodes: Number of machines. Default: 1.

        Raises:
            RuntimeError: If a method is neither defined nor answered by a detected launcher.
        """
        if not self.creates_processes_externally:
            return
        count = len(parse_devices(device_type(accelerator), devices) or ())
        if count:
            self.set_world_size(num_nodes * count)
            self.set_global_rank(self.node_rank() * count + self.local_rank())
        size, rank, host, port = self.world_size(), self.global_rank(), str(self.main_address), self.main_port
        found = LaunchEnvironment.read()
        if found is not None and (found.world_size, found.rank) == (size, rank):
            address = found.address or (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            if address == (host, port):
                return  # it also knows the GPU and the number of machines
        values = {"WORLD_SIZE": size, "RANK": rank, "MASTER_ADDR": host, "MASTER_PORT": port}
        values |= {"LOCAL_RANK": self.local_rank(), "GROUP_RANK": self.node_rank()}
        values["LOCAL_WORLD_SIZE"] = count or max(size // num_nodes, 1)
        os.environ.update({name: str(value) for name, value in values.items()})

    def _detected(self, name: str) -> LaunchEnvironment:
        launched = LaunchEnvironment.read()
        if launched is None:
            raise RuntimeError(
                f"plugins={type(self).__name__}() asks for {name}, but no launcher that Treadle detects has started "
                f"this process. Define {name} in a subclass, start the program with torchrun, or remove the plugin."
            )
        return launched
