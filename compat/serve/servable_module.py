"""Interface of a model that a server runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["ServableModule"]


class ServableModule(ABC, nn.Module):
    """Base class of models with an example request and with conversions between requests, tensors and responses."""

    @abstractmethod
    def configure_payload(self) -> dict[str, Any]:
        """Return an example request: ``{"body": {name: value}}``."""

    @abstractmethod
    def configure_serialization(self) -> tuple[dict[str, Callable[..., Any]], dict[str, Callable[..., Any]]]:
        """Return two dicts of functions by name: deserializers of a request's values, and serializers of results."""

    @abstractmethod
    def serve_step(self, *args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
        """Return the results of a request, keyed by name."""

    @abstractmethod
    def configure_response(self) -> dict[str, Any]:
        """Return the expected response to the request of `configure_payload`."""
