"""Lightning's accelerator classes, such as `CUDAAccelerator`, and queries about devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import engine
from ..callbacks.device_stats_monitor import read_cpu_stats as get_cpu_stats
from ..callbacks.device_stats_monitor import read_device_stats as read_device_stats
from ..strategies.distributed import Devices, LaunchEnvironment, device_of, device_type, parse_devices
from ..strategies.launch import supervisor

__all__ = [
    "Accelerator",
    "AcceleratorConnector",
    "CPUAccelerator",
    "CUDAAccelerator",
    "MPSAccelerator",
    "XLAAccelerator",
    "find_usable_cuda_devices",
    "get_cpu_stats",
]


class _Kind(type):
    """Metaclass that lets ``isinstance(trainer.accelerator, CUDAAccelerator)`` check the type of the device."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if isinstance(instance, engine.Accelerator):
            return cls is Accelerator or cls.kind == instance.device.type  # type: ignore[attr-defined]
        return super().__instancecheck__(instance)


class Accelerator(str, metaclass=_Kind):
    """Base class of device types. An instance is a string for ``Trainer(accelerator=...)``, such as ``"cpu"``."""

    kind = ""

    def __new__(cls) -> Accelerator:
        """Return the device type's name as an instance of this class."""
        name: Any = super().__new__(cls).name  # subclasses may define a property
        return super().__new__(cls, name() if callable(name) else name)

    @classmethod
    def name(cls) -> str:
        """Return the device type's name, which ``Trainer(accelerator=...)`` accepts."""
        return cls.kind

    def setup_device(self, device: torch.device) -> None:
        """Raise a ValueError if a device is of another type."""
        if device.type != self.kind:
            raise ValueError(f"device={str(device)!r} must be of type {self.kind!r} for {type(self).__name__}.")

    def setup(self, trainer: Any) -> None:
        """Do nothing, because the Trainer sets up its device."""

    def teardown(self) -> None:
        """Do nothing, because the Trainer releases its device."""

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """Return the statistics of a device's allocator by name, in bytes and counts."""
        return dict(read_device_stats(torch.device(device)))

    @classmethod
    def parse_devices(cls, devices: Devices) -> list[int]:
        """Return the indices of the devices that a value of ``Trainer(devices=...)`` selects.

        Raises:
            ValueError, TypeError: If the value is invalid.
        """
        indices = parse_devices(cls.kind, devices)
        return list(range(cls.auto_device_count())) if indices is None else indices

    @classmethod
    def get_parallel_devices(cls, devices: int | str | Sequence[int]) -> list[torch.device]:
        """Return the devices with these indices, or the first ``devices`` devices."""
        if isinstance(devices, str):
            devices = cls.parse_devices(devices)
        return [device_of(cls.kind, index) for index in (range(devices) if isinstance(devices, int) else devices)]

    @classmethod
    def auto_device_count(cls) -> int:
        """Return the number of devices of this type on this machine; 1 for the CPU."""
        return int(cls.is_available())

    @classmethod
    def is_available(cls) -> bool:
        """Return whether torch can use a device of this type on this machine."""
        try:
            return device_type(cls.kind) == cls.kind
        except ValueError:
            return False


class CPUAccelerator(Accelerator):
    """Device type of the CPU."""

    kind = "cpu"

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """Return the utilization of CPU, memory and swap in percent, by name. Requires ``psutil``."""
        return get_cpu_stats()

    @classmethod
    def parse_devices(cls, devices: Devices) -> int:  # type: ignore[override]
        """Return the number of processes that a value of ``Trainer(devices=...)`` requests; 1 for -1 and ``"auto"``."""
        return len(super().parse_devices(devices))


class CUDAAccelerator(Accelerator):
    """Device type of CUDA GPUs."""

    kind = "cuda"

    def setup_device(self, device: torch.device) -> None:
        """Make a device the current one; see `Accelerator.setup_device`."""
        super().setup_device(device)
        torch.cuda.set_device(device)

    @classmethod
    def auto_device_count(cls) -> int:
        """Return the number of visible CUDA devices."""
        return torch.cuda.device_count()


class MPSAccelerator(Accelerator):
    """Device type of Apple's GPU."""

    kind = "mps"


class XLAAccelerator(Accelerator):
    """Device type of TPUs, which Treadle does not support: `is_available` returns False."""

    kind = "tpu"


class AcceleratorConnector:
    """Selection of ``Trainer(accelerator=..., devices=...)``, for libraries that ask without a Trainer.

    Attributes:
        accelerator: The device type.
        _accelerator_flag: Its name, such as ``"cuda"``.
        _devices_flag: The number of processes for the CPU, otherwise the indices of the devices.
        _parallel_devices: The device of each process of this machine.
    """

    def __init__(self, *, devices: Devices = "auto", accelerator: str = "auto") -> None:
        """Parse both arguments as the Trainer does.

        Raises:
            ValueError, TypeError: If an argument is invalid, or contradicts the machine.
        """
        self._accelerator_flag = device_type(accelerator)
        self.accelerator = _CLASSES[self._accelerator_flag]()
        if devices == "auto" and LaunchEnvironment.read() is None and not supervisor.has_script():
            devices = 1  # nothing could start more processes
        self._devices_flag = self.accelerator.parse_devices(devices)
        self._parallel_devices = self.accelerator.get_parallel_devices(self._devices_flag)


_CLASSES: dict[str, type[Accelerator]] = {kind.kind: kind for kind in (CPUAccelerator, CUDAAccelerator, MPSAccelerator)}


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Return the indices of the first CUDA devices on which a tensor can be created.

    Args:
        num_devices: The number of devices; -1 (default) for all usable devices, possibly none.

    Raises:
        ValueError, RuntimeError: If torch detects or can use too few devices.
    """
    count = torch.cuda.device_count()
    if num_devices == 0:
        return []
    if not count:
        raise ValueError(
            f"num_devices={num_devices} needs CUDA devices, but torch detects none. Check the driver and "
            "CUDA_VISIBLE_DEVICES."
        )
    if num_devices > count:
        raise ValueError(
            f"num_devices={num_devices} exceeds the number of CUDA devices that torch detects, {count}. Pass at most "
            f"{count}."
        )
    usable: list[int] = []
    reason: RuntimeError | None = None
    for index in range(count):
        if len(usable) == num_devices:
            break
        try:
            torch.zeros((), device=torch.device("cuda", index))
        except RuntimeError as error:  # for example, another process uses the device exclusively
            reason = error
            continue
        usable.append(index)
    if len(usable) < num_devices:
        raise RuntimeError(
            f"num_devices={num_devices} exceeds the number of usable CUDA devices, {len(usable)} of {count}. No tensor "
            f"could be allocated on the others: {reason}. Free these devices, or use fewer."
        )
    return usable
