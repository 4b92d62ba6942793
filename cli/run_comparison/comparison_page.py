"""Self-contained HTML page that compares runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from ...callbacks.reporting import (
    Chart,
    choose_styles,
    escape,
    make_chart_script,
    render_charts,
    render_document,
    render_section,
)
from ...common.messages import format_count
from .comparison import Comparison, Rows

_MARK = "<!-- written by treadle runs compare -->"
_STYLE = """
.compared { overflow-x: auto; } .compared .numbers td, .compared th { white-space: pre-wrap; }
.compared th { font-weight: 600; color: var(--ink); } .compared .key { margin-left: 6px; }
"""


def write_page(comparison: Comparison, path: Path) -> None:
    """Write the HTML page of a comparison to a file atomically. An earlier comparison is replaced.

    Raises:
        ValueError: If a folder, or a file that is not a comparison, exists at the path.
    """
    if path.exists() and not _is_comparison(path):
        raise ValueError(
            f"{path} exists and is not a comparison of runs, so it is not replaced. Pass --output with another file."
        )
    part = path.with_name(f".{path.name}.tmp")
    try:
        part.write_text(render_page(comparison), encoding="utf-8", errors="replace")
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _is_comparison(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MARK)) == _MARK.encode()


def render_page(comparison: Comparison) -> str:
    """Return a comparison as an HTML page with metadata, curves, last values, and the settings that differ."""
    line_styles = dict(zip(comparison.labels, choose_styles(comparison.labels), strict=True))
    charts = [Chart(metric, lines, line_styles) for metric, lines in comparison.charts.items()]
    title = " and ".join(comparison.labels) if len(comparison.labels) == 2 else f"{len(comparison.labels)} runs"
    sections = {
        "Last values": comparison.metrics,
        "Configuration: differences": comparison.config,
        "Hyperparameters: differences": comparison.hyperparameters,
        "Environment: differences": comparison.environment,
    }
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>written {time.strftime('%Y-%m-%d %H:%M:%S')}</p>",
        *(f'<p class="error">{escape(problem)}</p>' for problem in comparison.problems),
        _render_rows(comparison.facts, line_styles),
        *render_charts(charts),
    ]
    for name, rows in sections.items():
        body.append(render_section(name, _render_rows(rows, line_styles) if rows else "<p>None.</p>"))
    shared = format_count(comparison.shared_config, "configuration value")
    body.append(f"<p>The same in all runs: {shared}.</p>")
    return f"{_MARK}\n{render_document(title, body, make_chart_script(charts), _STYLE)}"


def _render_rows(rows: Rows, line_styles: dict[str, str]) -> str:
    return f'<div class="compared"><table class="numbers">{"".join(_iterate_rows(rows, line_styles))}</table></div>'


def _iterate_rows(rows: Rows, line_styles: dict[str, str]) -> Iterator[str]:
    heads = (
        f'<th>{escape(label)}<svg class="key" viewBox="0 0 18 4"><line x2="18" y1="2" y2="2" {style}/></svg></th>'
        for label, style in line_styles.items()
    )
    yield f"<tr><th></th>{''.join(heads)}</tr>"
    for name, cells in rows.items():
        yield f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
