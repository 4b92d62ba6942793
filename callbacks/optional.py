"""Packages that one callback needs and nothing else does."""

from __future__ import annotations

from importlib.util import find_spec


def require(package: str, who: str, extra: str) -> None:
    """See that a package can be imported, without importing it.

    Args:
        package: its name.
        who: what needs it.
        extra: which of our extras brings it.

    Raises:
        ModuleNotFoundError: names it, and how to install it.
    """
    if find_spec(package) is None:
        raise ModuleNotFoundError(
            f"{who} needs the package {package!r}, which is not installed: pip install 'treadle[{extra}]', or "
            f"pip install {package}.",
            name=package,
        )
