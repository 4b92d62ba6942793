"""Whether a series of measurements grows: by a slope and a trend test that outliers and noise do not move."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations

WARM_UP = 0.25  # of the samples: caches fill, allocators reach their size
_MOST = 200  # samples that are compared pairwise
_SURE = 3.0  # standard deviations of Kendall's statistic: one of 740 series without a trend is beyond

# What a quantity may grow by over all samples after the warm-up: absolute, and relative to its median. Both must be
# exceeded. Counts may not grow by one.
TOLERANCES = {
    "allocated MB": (1.0, 0.0),  # a kilobyte per step is 4 MB in five minutes at 17 steps a second; without, 0.15 MB
    "rank MB": (8.0, 0.02),
    "shared MB": (4.0, 0.02),
    "workers MB": (8.0, 0.02),
    "Python blocks": (3000.0, 0.0),
    "CPU ms per step": (math.inf, 0.0),  # shown only: other processes' load moves it
    "CPU of a step by machine": (0.0, 0.20),
}
_OF_COUNTS = (0.9, 0.0)


def measure_growth(values: Sequence[float]) -> float:
    """Return by how much a series grows from the end of its warm-up to its end; 0 where no trend is significant.

    The slope is the median of those between any two samples (Theil and Sen), and the trend Kendall's. A leak of one
    descriptor in every tenth fit is found, a jump that is never repeated is not: it is no growth without end.
    """
    kept = list(values[int(len(values) * WARM_UP) :])
    stride = max(1, math.ceil(len(kept) / _MOST))
    # Means, not every n-th sample: what happens rarely must not fall between.
    kept = [statistics.fmean(kept[start : start + stride]) for start in range(0, len(kept), stride)]
    if len(kept) < 8:
        raise ValueError(f"{len(kept)} samples after the warm-up are too few to judge; run longer.")
    pairs = list(combinations(range(len(kept)), 2))
    trend = sum((kept[b] > kept[a]) - (kept[b] < kept[a]) for a, b in pairs)
    if trend <= _SURE * math.sqrt(_compute_variance(kept)):
        return 0.0
    slope = statistics.median((kept[b] - kept[a]) / (b - a) for a, b in pairs)
    # Of a count that rarely changes the median of slopes is zero: its thirds show that it rose.
    third = len(kept) // 3
    rise = statistics.fmean(kept[-third:]) - statistics.fmean(kept[:third])
    return max(slope * (len(kept) - 1), 1.5 * rise if slope == 0 and _rises_repeatedly(kept) else 0.0)


def _compute_variance(values: Sequence[float]) -> float:
    """Return the variance of Kendall's statistic without a trend, with values that are equal."""
    count = len(values)
    ties = [values.count(value) for value in set(values)]
    total = count * (count - 1) * (2 * count + 5) - sum(tie * (tie - 1) * (2 * tie + 5) for tie in ties)
    return total / 18


def _rises_repeatedly(values: Sequence[float]) -> bool:
    """Tell whether the highest value so far is exceeded at least three times."""
    highest, rises = values[0], 0
    for value in values:
        rises += value > highest
        highest = max(highest, value)
    return rises >= 3


def find_growth(series: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the quantities that grow by more than they may, with their growth."""
    grown = {}
    for name, values in series.items():
        absolute, relative = TOLERANCES.get(name, _OF_COUNTS)
        growth = measure_growth(values)
        if growth > max(absolute, relative * abs(statistics.median(values))):
            grown[name] = growth
    return grown


def format_table(title: str, minutes: Sequence[float], series: Mapping[str, Sequence[float]]) -> str:
    """Return the medians of each minute, a row for each quantity, with its growth after the warm-up."""
    columns = sorted({int(minute) for minute in minutes})
    rows = [["per minute", *map(str, columns), "growth"]]
    for name, values in series.items():
        medians = [
            statistics.median(value for minute, value in zip(minutes, values, strict=True) if int(minute) == column)
            for column in columns
        ]
        rows.append([name, *(f"{median:.6g}" for median in medians), f"{measure_growth(values):+.4g}"])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"{title}: {len(minutes)} samples", *lines])
