"""tqdm with the number format of Lightning's progress bar."""

from __future__ import annotations

import math
from typing import Any

from tqdm.auto import tqdm

from ....callbacks import TQDMProgressBar

__all__ = ["TQDMProgressBar", "Tqdm", "convert_inf"]


class Tqdm(tqdm):  # type: ignore[type-arg]
    """Progress bar that pads short floats with zeros, so that the width of the line changes less often."""

    @staticmethod
    def format_num(n: int | float | str) -> str:
        """Format a number as tqdm does, with zeros appended to a short float without an exponent, as in ``0.500``.

        Args:
            n: The number, or its text.
        """
        text = n if isinstance(n, str) else tqdm.format_num(n)
        if isinstance(n, float) and "e" not in text and "." not in text and len(text) < 5:
            text += "."
        return text.ljust(5, "0") if "." in text and "e" not in text else text


def convert_inf(x: Any) -> Any:
    """Return None for an infinite, NaN or missing length, and any other length unchanged."""
    return None if x is None or math.isinf(x) or math.isnan(x) else x
