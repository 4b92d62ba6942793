"""Checkpoints written beside the training: the state is copied to host memory, and a thread does the rest."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .parts import Files, TensorFile


class HostCopies:
    """Copies of tensors in host memory, in buffers that are kept from one save to the next.

    Fresh memory costs ten times as much as the copy itself: the system has to clear each page of it first.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Tensor] = {}

    def of(self, files: Files) -> tuple[Files, Callable[[], None]]:
        """Copy all tensors in ``files``.

        Returns:
            The files with the copies in the tensors' place, and what to call before they are read.
        """
        before, self._kept = self._kept, {}
        copied: Files = {}
        device: torch.device | None = None
        for file, content in files.items():
            if isinstance(content, bytes):
                copied[file] = content
                continue
            tensors = {}
            for name, tensor in content.tensors.items():
                tensor = tensor.detach()
                device = tensor.device if tensor.is_cuda else device
                kept = before.get((file, name))
                if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                # From pinned memory the device copies by itself; what is computed after it waits for it there.
                tensors[name] = self._kept[file, name] = kept.copy_(tensor, non_blocking=tensor.is_cuda)
            copied[file] = TensorFile(tensors, content.notes)
        if device is None:
            return copied, lambda: None
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
        return copied, done.synchronize


class Background:
    """At most one piece of work that runs beside the training."""

    def __init__(self) -> None:
        self.copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], Any]) -> None:
        """Run ``work`` in a thread. The interpreter does not end before it has, nor with status 0 if it failed."""
        assert self._thread is None

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=run, name="treadle-save")
        self._thread.start()

    def finish(self) -> None:
        """Wait for the work to end; raise what it raised."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        atexit.unregister(self._at_exit)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def poll(self) -> bool:
        """Whether there is nothing under way; raise what ended work has raised."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self.finish()
        return True

    def _at_exit(self) -> None:
        """Nobody has asked how the last save ended: the program must not seem to have succeeded if it failed."""
        if self._error is not None:
            traceback.print_exception(self._error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exception would be printed and forgotten here
