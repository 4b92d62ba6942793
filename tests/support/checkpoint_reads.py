"""Counts what is read of checkpoints: files or bytes of a file for their digests, and manifests that are parsed."""

import sys
from collections import Counter
from pathlib import Path

from treadle.engine.checkpoint import filesystem, one_file, parts


class Reads:
    """Counts inside a ``with`` block, in this process.

    Attributes:
        hashed: how often each file of a directory was read for its digest, by ``folder/name``; and each byte of a
            checkpoint that is one file, by ``name:position``.
        parsed: how many manifests were parsed.
    """

    def __init__(self):
        self.hashed = Counter()
        self.parsed = 0

    def __enter__(self):
        self._before = filesystem.describe, parts._parse, one_file.open_file
        describe, parse, open_file = self._before

        def counting_describe(path):
            self.hashed[f"{path.parent.name}/{path.name}"] += 1
            return describe(path)

        def counting_parse(document):
            self.parsed += 1
            return parse(document)

        def counting_open(path):
            of_check = sys._getframe(1).f_code.co_name == "check"  # others read a record's content, for no digest
            return _Counting(open_file(path), self.hashed) if of_check else open_file(path)

        filesystem.describe, parts._parse, one_file.open_file = counting_describe, counting_parse, counting_open
        return self

    def __exit__(self, *_):
        filesystem.describe, parts._parse, one_file.open_file = self._before


class _Counting:
    """Unbuffered file that counts each byte that is read."""

    def __init__(self, file, counts):
        self._file, self._counts = file, counts
        self.seek = file.seek

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def read(self, size):
        start, data = self._file.tell(), self._file.read(size)
        self._counts.update(f"{Path(self._file.name).name}:{start + place}" for place in range(len(data)))
        return data


def once(*checkpoints):
    """What `Reads.hashed` is, over all ranks, where each file of some checkpoints was hashed once."""
    names = []
    for path in checkpoints:
        if path.is_dir():
            names += [f"{path.name}/{file.name}" for file in path.iterdir() if file.name != "manifest.json"]
        else:  # from the manifest's header on, all bytes are read to find the manifest
            names += [f"{path.name}:{place}" for place in range(parts.read_manifest(path).records.end)]
    return Counter(names)
