"""Checks for optional packages, which only some features of Treadle need."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any


def is_installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it.

    A folder of the same name, such as W&B's ``./wandb``, is not a package.

    Args:
        package: Name under which the package is imported.
    """
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def is_config(value: Any) -> bool:
    """Return whether a value is a ``DictConfig`` or ``ListConfig`` of OmegaConf, without importing it."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and omegaconf.OmegaConf.is_config(value)


def require(needed_by: str, *packages: str, extra: str) -> None:
    """Check that packages can be imported, without importing them.

    Args:
        needed_by: Feature that needs the packages, as the user wrote it.
        packages: Names under which the packages are imported.
        extra: Treadle's extra that installs the packages.

    Raises:
        ModuleNotFoundError: If packages are missing.
    """
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        several = len(missing) > 1
        raise ModuleNotFoundError(
            f"{needed_by} needs the package{'s' * several} {' and '.join(map(repr, missing))}, which "
            f"{'are' if several else 'is'} not installed. Run pip install 'treadle[{extra}]', or pip install "
            f"{' '.join(missing)}.",
            name=missing[0],
        )
