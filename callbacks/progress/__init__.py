"""Progress bars, and the timing of their redraws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .progress_bar import ProgressBar
    from .rich_progress import RichProgressBar
    from .tqdm_progress import TQDMProgressBar

__getattr__, __dir__, __all__ = lazy_exports(__name__)
