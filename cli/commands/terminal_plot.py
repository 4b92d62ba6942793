"""Charts for the terminal, drawn with characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...callbacks.reporting import LARGEST, Chart, Points, choose_ticks, format_number

_MARKS = "*+ox#%@&"  # marks of the curves if only ASCII is available
_COLORS = (34, 33, 32, 31, 35, 36)  # ANSI codes: blue, yellow, green, red, magenta, cyan
# The bit of a dot, by its row and column in a character.
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def plot(
    title: str,
    lines: Mapping[str, Points],
    width: int = 80,
    height: int = 10,
    *,
    ascii: bool = False,
    color: bool = False,
) -> str:
    """Return a text chart of curves over the optimizer steps.

    Values that are not finite or are too large are not drawn. ``width`` is the number of characters per row of the
    chart, at least 24, and ``height`` the number of rows without title, axis and legend.
    """
    chart = Chart(title, lines)
    drawn = {name: points for name, points in chart.lines.items() if points[0]}
    heading = f"{title} (logarithmic)" if chart.logarithmic else title
    if not drawn:
        return (
            f"{heading}: none of {chart.missing:,} values is finite and at most {LARGEST:.0e}"
            if chart.missing
            else f"{heading}: no values"
        )
    values = next(iter(drawn.values()))[1]
    if len(drawn) == 1 and not chart.missing and len(values) > 1 and len(set(values)) == 1:
        return f"{title}: {format_number(values[0])} throughout"
    labels = _place_labels(chart, height)
    margin = max(map(len, labels.values())) + 2
    has_many_lines = len(drawn) > 1
    canvas = Canvas(max(8, width - margin - (1 + min(len(drawn), 4) if has_many_lines else 0)), height, ascii)
    ends: dict[int, str] = {}
    for place, points in enumerate(drawn.values()):
        row = _draw(canvas, chart, points, place)
        ends[row] = ends.get(row, "") + _choose_letter(place)
    rows = [heading]
    corner, side, tick = ("+", "|", "+") if ascii else ("└", "│", "┤")
    for row, text in enumerate(canvas.render_rows(color)):
        label = labels.get(row, "")
        end = f" {ends[row][:4]}" if has_many_lines and row in ends else ""
        rows.append(f"{label:>{margin - 1}}{tick if label else side}{text}{end}".rstrip())
    rows.append(" " * (margin - 1) + corner + ("-" if ascii else "─") * canvas.columns)
    rows.append(" " * margin + _format_steps(chart, canvas.columns))
    for place, (name, (_, values)) in enumerate(drawn.items()):
        mark = (
            f"{_choose_letter(place)} " + (f"{_MARKS[place % len(_MARKS)]} " if ascii else "") if has_many_lines else ""
        )
        line = f"{mark}{name}  {format_number(values[-1])}"
        rows.append(" " * margin + (_color_text(line, place) if color and has_many_lines else line))
    if chart.missing:
        rows.append(" " * margin + f"not drawn, because not finite or above {LARGEST:.0e}: {chart.missing:,}")
    return "\n".join(rows)


class Canvas:
    """Grid of dots, two by four per braille character or one per ASCII character."""

    def __init__(self, columns: int, height: int, ascii: bool) -> None:
        self.columns, self.height, self.ascii = columns, height, ascii
        self.wide, self.high = (1, 1) if ascii else (2, 4)
        self._cells: dict[tuple[int, int], tuple[int, int]] = {}  # by character: its bits, and the curve drawn last

    def set_dot(self, x: int, y: int, line: int) -> None:
        """Draw a dot of a curve. ``x`` and ``y`` are counted in dots from the top left."""
        cell = (y // self.high, x // self.wide)
        bits = 0 if self.ascii else self._cells.get(cell, (0, 0))[0] | _BRAILLE[y % 4][x % 2]
        self._cells[cell] = (bits, line)

    def render_rows(self, color: bool) -> list[str]:
        """Return the drawing as one string per row."""
        return [
            "".join(self._render_letter(row, column, color) for column in range(self.columns))
            for row in range(self.height)
        ]

    def _render_letter(self, row: int, column: int, color: bool) -> str:
        cell = self._cells.get((row, column))
        if cell is None:
            return " "
        bits, line = cell
        letter = _MARKS[line % len(_MARKS)] if self.ascii else chr(0x2800 + bits)
        return _color_text(letter, line) if color else letter


def _draw(canvas: Canvas, chart: Chart, points: tuple[Sequence[float], Sequence[float]], line: int) -> int:
    """Draw one curve and return the row in which it ends."""
    right, bottom = canvas.columns * canvas.wide - 1, canvas.height * canvas.high - 1
    x = y = 0
    before: tuple[int, int] | None = None
    for step, value in zip(*points, strict=True):
        x = min(right, max(0, round(chart.scale_step(step) * right)))
        y = min(bottom, max(0, round((1 - chart.scale_value(value)) * bottom)))
        x0, y0 = before or (x, y)
        most = max(abs(x - x0), abs(y - y0), 1)
        for part in range(most + 1):
            canvas.set_dot(x0 + round((x - x0) * part / most), y0 + round((y - y0) * part / most), line)
        before = (x, y)
    return y // canvas.high


def _place_labels(chart: Chart, height: int) -> dict[int, str]:
    """Return axis labels by row: round values, or the axis limits if no round value fits."""
    labels: dict[int, str] = {}
    for value in choose_ticks(chart.bottom, chart.top, chart.logarithmic):
        row = round((1 - chart.scale_value(value)) * (height - 1))
        if 0 <= row < height:
            labels.setdefault(row, format_number(value))
    if not labels:
        labels = {0: format_number(chart.top), height - 1: format_number(chart.bottom)}
    return labels


def _format_steps(chart: Chart, columns: int) -> str:
    """Return the line below the axis: the first and last step at its ends, or a single step in the middle."""
    steps = [step for steps, _ in chart.lines.values() for step in steps]
    first, last = f"{min(steps):,}", f"{max(steps):,} steps"
    if min(steps) == max(steps):
        return f"{'step ' + first:^{columns}}".rstrip()
    return f"{first}{last:>{max(len(last) + 1, columns - len(first))}}"


def _choose_letter(place: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[place % 26]


def _color_text(text: str, place: int) -> str:
    return f"\x1b[{_COLORS[place % len(_COLORS)]}m{text}\x1b[0m"
