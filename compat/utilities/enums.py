"""Words as enums that equal their strings, whatever their case."""

from __future__ import annotations

from lightning_utilities.core.enums import StrEnum as LightningEnum

__all__ = ["GradClipAlgorithmType", "LightningEnum"]


class GradClipAlgorithmType(LightningEnum):
    """What ``Trainer(gradient_clip_algorithm=...)`` takes."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(val: str) -> bool:
        """Return whether there is such an algorithm."""
        return val in GradClipAlgorithmType.supported_types()

    @staticmethod
    def supported_types() -> list[str]:
        """Return the names of the algorithms."""
        return [str(member.value) for member in GradClipAlgorithmType]
