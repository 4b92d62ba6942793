"""Base classes of closures that keep what they returned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["AbstractClosure", "OutputResult"]

T = TypeVar("T")


@dataclass
class OutputResult:
    """What a step returned."""

    def asdict(self) -> dict[str, Any]:
        """Return it as a dict."""
        raise NotImplementedError


class AbstractClosure(ABC, Generic[T]):
    """A function for an optimizer's ``step`` that keeps the result of its last call; write `closure`."""

    def __init__(self) -> None:
        self._result: T | None = None

    def consume_result(self) -> T:
        """Return the result of the last call, and forget it.

        Raises:
            ValueError: if it was not called since.
        """
        result, self._result = self._result, None
        if result is None:
            raise ValueError("the closure was not called: pass it to optimizer.step, or call it in optimizer_step.")
        return result

    @abstractmethod
    def closure(self, *args: Any, **kwargs: Any) -> T:
        """Compute the result."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._result = self.closure(*args, **kwargs)
        return self
