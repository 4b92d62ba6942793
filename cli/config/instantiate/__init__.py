"""Construction of objects from a configuration, after all names are resolved and all arguments are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import catalog
    from .annotations import describe_annotation
    from .build import CheckedConfig, check, locate_error
    from .buildable import Opaque, make_default_value

__getattr__, __dir__, __all__ = lazy_exports(__name__)
