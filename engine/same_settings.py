"""Settings that every rank must share, because they decide which collectives it calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..strategies import World
from ..strategies.messages import named_ranks


def check_same_settings(settings: Mapping[str, Any], world: World) -> None:
    """Raise on every rank if the ranks were configured differently. One exchange; all ranks must call it.

    Args:
        settings: by the name that users know, plain values.
        world: the ranks to compare.

    Raises:
        ValueError: names each setting that differs, its values, and the ranks that have them.
    """
    every = world.gather_objects(dict(settings))
    names = dict.fromkeys(name for each in every for name in each)
    lines = []
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(every):
            ranks.setdefault(repr(each.get(name)), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{value} on {named_ranks(who)}" for value, who in ranks.items())
            lines.append(f"  {name}: {values}")
    if lines:
        raise ValueError(
            "the ranks are configured differently, so they would not take the same steps or would wait for each other "
            "without end:\n" + "\n".join(lines) + "\nPass the same values on every rank."
        )
