"""Report of a device map: modules, devices and sizes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..parameter_names import make_view_key
from .memory import Device, format_bytes, get_max_memory
from .module_sizes import Dtypes, measure_tensors
from .module_tensors import group_tied_names, named_tensors


def device_map_plan(
    model: nn.Module,
    device_map: Mapping[str, Device],
    max_memory: Mapping[Device, int | str] | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Dtypes | None = None,
) -> str:
    """Return a device map as text: a row for each entry, the total of each device, and the tied tensors.

    Consecutive numbered modules, such as ``layers.0`` to ``layers.5``, share a row if they are on the same device. The
    size of a tied tensor is counted once.
    """
    tensors, bytes_of = named_tensors(model), measure_tensors(model, dtype, special_dtypes)
    sizes: dict[str, int] = dict.fromkeys(device_map, 0)
    counted_keys = set()
    for name, tensor in tensors.items():
        entry = name
        while entry and entry not in sizes:
            entry = entry.rpartition(".")[0]
        if entry in sizes and (key := make_view_key(tensor)) not in counted_keys:
            counted_keys.add(key)
            sizes[entry] += bytes_of[key]
    rows = [("module", "device", "size")]
    rows += [
        (_format_span(names), str(device_map[names[0]]), format_bytes(sum(sizes[n] for n in names)))
        for names in _group_neighbours(device_map)
    ]
    room = get_max_memory(max_memory)
    totals = [("device", "used", "of")]
    for device in dict.fromkeys(device_map.values()):
        used = sum(size for name, size in sizes.items() if device_map[name] == device)
        totals.append((str(device), format_bytes(used), format_bytes(room[device]) if device in room else "no limit"))
    lines = [*_format_table(rows), "", *_format_table(totals)]
    lines += [f"tied: {' = '.join(names)}" for names in group_tied_names(tensors) if len(names) > 1]
    return "\n".join(lines)


def _group_neighbours(device_map: Mapping[str, Device]) -> list[list[str]]:
    """Return the names of the map in groups: consecutive numbered siblings on one device form a group."""
    runs: list[list[str]] = []
    for name, device in device_map.items():
        parent, _, number = name.rpartition(".")
        if runs and number.isdigit():
            before, _, last = runs[-1][-1].rpartition(".")
            if before == parent and last.isdigit() and device_map[runs[-1][-1]] == device:
                runs[-1].append(name)
                continue
        runs.append([name])
    return runs


def _format_span(names: list[str]) -> str:
    if len(names) > 1:
        return f"{names[0]} ... {names[-1].rpartition('.')[2]}"
    return names[0] or "(the model)"


def _format_table(rows: list[tuple[str, str, str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}" for row in rows]
