"""Base class of strategies for several processes."""

from __future__ import annotations

from typing import Any

from ...strategies import Strategy

__all__ = ["ParallelStrategy"]


class _Distributed(type):
    """Metaclass that lets ``isinstance(trainer.strategy, ParallelStrategy)`` check ``distributed``."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if cls is ParallelStrategy:
            return isinstance(instance, Strategy) and instance.distributed
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if cls is ParallelStrategy:
            return issubclass(subclass, Strategy) and subclass.distributed
        return super().__subclasscheck__(subclass)


class ParallelStrategy(Strategy, metaclass=_Distributed):
    """Base class of strategies for several processes. Each `Strategy` with ``distributed = True`` is an instance."""

    distributed = True
