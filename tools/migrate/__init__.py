"""Rewriting of projects that use Lightning, Fabric or Accelerate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .counterparts import describe_missing, find_counterpart, find_module, split_peer
    from .differences import Finding
    from .project import Migration, migrate_project

__getattr__, __dir__, __all__ = lazy_exports(__name__)
