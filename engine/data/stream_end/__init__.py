"""Detection of the end of streams that each rank reads separately, by votes that are reduced with the gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .outlook import Outlook
    from .read_ahead import may_read_ahead

__getattr__, __dir__, __all__ = lazy_exports(__name__)
