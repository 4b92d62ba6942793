"""In which ranks a stage of a Trainer runs, as their supervisor knows it: to leave within one is a failure."""

from __future__ import annotations

import os


class Stages:
    """In which ranks of this machine a stage runs, as they have told by `mark_stage`, whatever then became of them.

    Args:
        nproc: how many ranks there are.

    Attributes:
        path: where they tell it; "" where there are no files without a name.
    """

    def __init__(self, nproc: int) -> None:
        self._nproc = nproc
        self._descriptor: int | None = None
        self.path = ""
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("treadle stages")
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            self.clear()

    def clear(self) -> None:
        """The ranks start, or start again."""
        if self._descriptor is not None:
            os.pwrite(self._descriptor, bytes(self._nproc), 0)

    def is_running(self, local_rank: int) -> bool:
        """Tell whether a rank has begun a stage and not ended it."""
        return self._descriptor is not None and os.pread(self._descriptor, 1, local_rank) in (b"\1", b"\2")

    def is_leaving(self, local_rank: int) -> bool:
        """Tell whether a rank has noted a signal, and leaves by itself."""
        return self._descriptor is not None and os.pread(self._descriptor, 1, local_rank) == b"\2"

    def close(self) -> None:
        """The ranks have ended."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
