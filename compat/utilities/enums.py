"""Enums whose members equal their strings, regardless of case."""

from __future__ import annotations

from lightning_utilities.core.enums import StrEnum as LightningEnum

__all__ = ["GradClipAlgorithmType", "LightningEnum"]


class GradClipAlgorithmType(LightningEnum):
    """Values of ``Trainer(gradient_clip_algorithm=...)``."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(val: str) -> bool:
        """Return whether an algorithm with exactly this name exists."""
        return val in GradClipAlgorithmType.supported_types()

    @staticmethod
    def supported_types() -> list[str]:
        """Return the names of the algorithms."""
        return [str(member.value) for member in GradClipAlgorithmType]
