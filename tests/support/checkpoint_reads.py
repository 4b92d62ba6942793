"""Counts what is read of checkpoints: whole files for their digests, and manifests that are parsed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from treadle.engine.checkpoint import filesystem, manifest


class Reads:
    """Counts inside a ``with`` block, in this process.

    Attributes:
        hashed: how often each file was read for its digest, by ``folder/name``.
        parsed: how many manifests were parsed.
    """

    def __init__(self) -> None:
        self.hashed: Counter[str] = Counter()
        self.parsed = 0

    def __enter__(self) -> Reads:
        self._before = filesystem.describe, manifest._parse
        describe, parse = self._before

        def counting_describe(path: Path) -> Any:
            self.hashed[f"{path.parent.name}/{path.name}"] += 1
            return describe(path)

        def counting_parse(document: Any) -> Any:
            self.parsed += 1
            return parse(document)

        filesystem.describe, manifest._parse = counting_describe, counting_parse
        return self

    def __exit__(self, *_: object) -> None:
        filesystem.describe, manifest._parse = self._before


def once(*checkpoints: Path) -> Counter[str]:
    """What `Reads.hashed` is, over all ranks, where each file of some checkpoints was hashed once."""
    names = [f"{path.name}/{file.name}" for path in checkpoints for file in path.iterdir()]
    return Counter(name for name in names if not name.endswith("manifest.json"))
