"""What a checkpoint has of callbacks, for those that need it before the rest is restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..engine.manifest import read_manifest
from ..engine.parts import has_part, open_part


def callback_states(path: Path | str) -> dict[str, Any]:
    """The callbacks' states and what was added to them, under these names, tensors unread; empty without a run."""
    if not has_part(read_manifest(path).files, "state"):
        return {}
    return open_part(path, "state")[0]["registered"].get("callbacks", {})  # type: ignore[no-any-return]
