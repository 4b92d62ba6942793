"""From a configuration to objects: names resolved, arguments checked against signatures, then built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import catalog
    from .annotation_words import words_for
    from .build import Checked, check, located
    from .recipes import Opaque, default_value

__getattr__, __dir__, __all__ = lazy_exports(__name__)
