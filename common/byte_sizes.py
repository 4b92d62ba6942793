"""Sizes in the forms that users write: a number of bytes, or text such as ``"1.5GiB"``."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGTP", 1)
    for suffix, base in (("B", 1000), ("IB", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str, argument: str = "size", minimum: int = 0, lowercase_b: bool = False) -> int:
    """Parse a size such as ``"1GB"`` (10**9 bytes) or ``"1.5GiB"`` (1.5 * 2**30 bytes), and return it in bytes.

    Args:
        size: An integer number of bytes, or text such as ``"512"`` or ``"20 MB"``. The unit is B, KB to PB (powers of
            1000) or KiB to PiB (powers of 1024), with a capital ``B`` at the end.
        argument: The name of the argument, for the error. Default: ``"size"``.
        minimum: The smallest valid size in bytes. Default: 0.
        lowercase_b: Accept a final ``b`` in lower case as bytes. Default: False, because some read it as bits.

    Raises:
        ValueError: If the size is invalid.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        count: int | None = size
    else:
        match = _SIZE.fullmatch(size) if isinstance(size, str) else None
        known = match is not None and match[2].upper() in _UNITS and (lowercase_b or not match[2].endswith("b"))
        count = int(float(match[1]) * _UNITS[match[2].upper()]) if match is not None and known else None
    if count is None or count < minimum:
        least = f" of at least {minimum} B" if minimum else ""
        raise ValueError(
            f"{argument}={size!r} is not a size{least}. Pass a number of bytes, or a number with a unit from KB to PB "
            "or KiB to PiB, such as '1.5GiB'."
        )
    return count
