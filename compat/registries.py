"""Lightning's registries of device types and strategies."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..strategies import register_strategy, strategy_names
from .device_accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator

__all__ = ["AcceleratorRegistry", "StrategyRegistry"]


class _Registry(dict[str, dict[str, Any]]):
    """Classes by name, each with the arguments of its instances.

    A registered strategy can be selected with ``Trainer(strategy=name)``. A registered device type cannot be selected:
    the Trainer supports ``"cpu"``, ``"cuda"`` and ``"mps"``.

    Args:
        kind: ``"accelerator"`` or ``"strategy"``.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def register(
        self, name: str, value: Any = None, description: str = "", override: bool = False, **init_params: Any
    ) -> Any:
        """Register a class under a name and return it; without a class, return a decorator that does so.

        Raises:
            ValueError: If the name is registered and ``override`` is False, or it is one of Treadle's own strategies.
        """
        value = init_params.pop(self.kind, value)
        if value is None:
            return partial(self.register, name, description=description, override=override, **init_params)
        if name in self and not override:
            raise ValueError(f"{self.kind} {name!r} is already registered. Pass override=True to replace it.")
        if self.kind == "strategy" and name not in self:
            register_strategy(name, partial(self.get, name))
        self[name] = {self.kind: value, f"{self.kind}_name": name, "description": description}
        self[name]["init_params"] = init_params
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """Return an instance of the class with this name, or ``default``.

        Raises:
            KeyError: If there is neither.
        """
        if name in self:
            return self[name][self.kind](**self[name]["init_params"])
        if default is None:
            raise KeyError(f"{name!r} is not a registered {self.kind}. Registered are: {', '.join(self)}.")
        return default

    def available_accelerators(self) -> set[str]:
        """Return the names of the device types."""
        return set(self)

    def available_strategies(self) -> list[str]:
        """Return all names that ``Trainer(strategy=...)`` accepts."""
        return strategy_names()


AcceleratorRegistry, StrategyRegistry = _Registry("accelerator"), _Registry("strategy")
for _type in (CPUAccelerator, CUDAAccelerator, MPSAccelerator):
    AcceleratorRegistry.register(_type.kind, _type, description=f"{_type.kind} devices")
