"""Helpers for the loggers of tracking services: a base class, argument checks, and pending uploads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .arguments import check_arguments, check_names, check_options
    from .service_logger import ServiceLogger
    from .side_effects import undisturbed
    from .uploads import Uploads

__getattr__, __dir__, __all__ = lazy_exports(__name__)
