"""tqdm as Lightning's progress bar draws it."""

from __future__ import annotations

import math
from typing import Any

from tqdm.auto import tqdm

from ....callbacks import TQDMProgressBar

__all__ = ["TQDMProgressBar", "Tqdm", "convert_inf"]


class Tqdm(tqdm):  # type: ignore[type-arg]
    """A bar whose metrics are all equally wide, so that the line doesn't jump."""

    @staticmethod
    def format_num(n: int | float | str) -> str:
        """Return a number with at least five characters: ``0.500``, ``10.00``."""
        text = n if isinstance(n, str) else tqdm.format_num(n)
        if isinstance(n, float) and "e" not in text and "." not in text and len(text) < 5:
            text += "."
        return text.ljust(5, "0") if "." in text and "e" not in text else text


def convert_inf(x: Any) -> Any:
    """Return None for an infinite or missing length, which tqdm shows without a total, and others as they are."""
    return None if x is None or math.isinf(x) or math.isnan(x) else x
