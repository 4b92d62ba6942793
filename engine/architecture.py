"""What tells one model from another beside the names and shapes of its weights: the kinds of its parts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import nn
from xxhash import xxh3_64

from ..strategies import warn
from ..strategies.shards import own_class
from .export import own_name

_NOTE = "modules"
_SHOWN = 10


def _kinds(model: nn.Module) -> dict[str, str]:
    """The class of each part by the part's name; of the model itself it is "", which scripts may rename."""
    # Of a part that is compiled it is the class inside, which comes second.
    names = ((own_name(f"{name}.").removesuffix("."), part) for name, part in model.named_modules())
    return {name: own_class(part).__qualname__ for name, part in names if name}


def notes(model: nn.Module) -> dict[str, str]:
    """What a checkpoint notes of a model, for `compare`."""
    return {_NOTE: json.dumps(_kinds(model), separators=(",", ":"))}


def fingerprint(model: nn.Module) -> str:
    """A short mark of a model's parts and its parameters' names, shapes and formats; other values leave it the same."""
    forms = [(own_name(name), tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    return xxh3_64(repr((sorted(_kinds(model).items()), forms)).encode()).hexdigest()


def compare(model: nn.Module, noted: Mapping[str, str], path: Path) -> None:
    """Warn if weights were saved by a model that computes something else with weights of the same names and shapes.

    Args:
        model: the one that is about to load them.
        noted: what `notes` returned when they were saved.
        path: where they are.
    """
    try:
        then = json.loads(noted.get(_NOTE, "{}"))
    except ValueError:
        then = {}
    now = _kinds(model)
    if not isinstance(then, dict) or not then:
        return
    other = [f"{name}: {then[name]} there, {now[name]} here" for name in now if then.get(name, now[name]) != now[name]]
    if other:
        more = f"\n  and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
        warn(f"{path} was saved by a model with other parts:\n  " + "\n  ".join(other[:_SHOWN]) + more)
