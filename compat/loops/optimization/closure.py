"""Base classes of closures and of their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["AbstractClosure", "OutputResult"]

T = TypeVar("T")


@dataclass
class OutputResult:
    """Base class of a training step's output."""

    def asdict(self) -> dict[str, Any]:
        """Return the output as a dict."""
        raise NotImplementedError


class AbstractClosure(ABC, Generic[T]):
    """Function for an optimizer's ``step`` that stores the result of its last call. Subclasses define `closure`."""

    def __init__(self) -> None:
        self._result: T | None = None

    def consume_result(self) -> T:
        """Return the result of the last call and clear it.

        Raises:
            ValueError: If there is no result.
        """
        result, self._result = self._result, None
        if result is None:
            raise ValueError("the closure was not called. Pass it to optimizer.step, or call it in optimizer_step.")
        return result

    @abstractmethod
    def closure(self, *args: Any, **kwargs: Any) -> T:
        """Run the computation and return the result that `consume_result` will return."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the closure, store its result, and return this object."""
        self._result = self.closure(*args, **kwargs)
        return self
