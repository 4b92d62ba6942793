"""Reports of a run: a page with its curves, and a record of its state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .html import (
        COLORS,
        LARGEST,
        LEARNING_RATE,
        THROUGHPUT,
        Chart,
        Points,
        choose_styles,
        escape,
        format_duration,
        format_number,
        group_names,
        make_chart_script,
        render_charts,
        render_document,
        render_fold,
        render_section,
        thin_points,
    )
    from .run_record import RunRecord, describe_error

__getattr__, __dir__, __all__ = lazy_exports(__name__)
