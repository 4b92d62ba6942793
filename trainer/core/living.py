"""Objects that checkpoints cannot store, for loads in the process that saved them.

A checkpoint holds only data. If a module or another object is missing in it, the checkpoint names the task or data
module that it was made of. While that exists, a load in the same process gets copies of its objects.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

_LIVING: WeakValueDictionary[tuple[str, str], Any] = WeakValueDictionary()


def remember(owner: Any, part: str, origin: str) -> None:
    """Remember a task or data module for `copy_objects`, as long as it exists.

    Args:
        owner: The task or data module.
        part: Name of the part of a checkpoint that contains its hyperparameters.
        origin: Name of the stage that it takes part in, the same on all processes.
    """
    _LIVING[origin, part] = owner


def copy_objects(info: Any, part: str, lost: dict[str, str], added: bool = False) -> dict[str, Any]:
    """Return copies of objects that a checkpoint lacks, and remove their names from ``lost``.

    Args:
        info: The manifest's entries, of which ``origin`` names the stage that saved the checkpoint.
        part: See `remember`.
        lost: For each missing object, by name, the reason why it was not stored.
        added: Whether ``on_save_checkpoint`` hooks added the objects; otherwise, they are hyperparameters.
    """
    owner = _LIVING.get((str(info.get("origin")), part))
    objects = {} if owner is None else vars(owner).get("_added_objects", {}) if added else owner.hparams
    found = {name: objects[name] for name in lost if name in objects}
    try:
        found = copy.deepcopy(found)
    except Exception as error:  # whatever the __deepcopy__ of a user's class raises
        lost |= {name: f"{lost[name]}, which cannot be copied: {error}" for name in found}
        return {}
    for name in found:
        del lost[name]
    return found


def read_left_out(info: Mapping[str, Any], part: str) -> dict[str, str]:
    """Return what a checkpoint lacks of a part: the reasons by name."""
    parts = info.get("left_out")
    left_out = parts.get(part) if isinstance(parts, dict) else None
    return {str(name): str(words) for name, words in left_out.items()} if isinstance(left_out, dict) else {}
