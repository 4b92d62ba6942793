"""Diagnosis of the machines and processes that a run would use. They are inspected, compared and measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .examination import Report, examine, examine_without_ranks
    from .findings import FAULT
    from .machine import name_processor
    from .own_ranks import choose_ranks, examine_own_ranks

__getattr__, __dir__, __all__ = lazy_exports(__name__)
