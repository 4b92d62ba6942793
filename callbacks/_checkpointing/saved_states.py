"""What a checkpoint has of callbacks, for those that need it before the rest is restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ...engine.checkpoint import ADDED, STATE, CallbackStates, OpenCheckpoint, check_form, open_registered


def open_callback_states(opened: OpenCheckpoint) -> CallbackStates:
    """Return the callbacks' states and what hooks added, tensors unread; both empty where there are none.

    Raises:
        ValueError: the part is damaged.
    """
    saved = open_registered(opened).get("callbacks", {})
    if isinstance(saved, dict):  # a script without a Trainer may register something else under this name
        saved = {"callbacks": {}, "added": {}} | saved
    return check_form(CallbackStates, saved, opened.path, STATE)


def open_added(opened: OpenCheckpoint) -> Mapping[str, Any]:
    """Return what ``on_save_checkpoint`` hooks added to a checkpoint, of weights only or not, its tensors unread.

    Raises:
        ValueError: the part is damaged.
    """
    if opened.has(ADDED):
        return cast(Mapping[str, Any], opened.open_part(ADDED))
    return open_callback_states(opened)["added"]
