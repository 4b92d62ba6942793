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


class Job:
    """A piece of work that runs beside the training.

    The interpreter does not end before it has, nor with status 0 if it failed and nobody has heard of that.

    Args:
        work: what to do, in a thread.

    Attributes:
        error: what it failed with.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self._heard = False
        self._work = work
        # A thread that Ctrl-C interrupted the `join` of counts as ended, though it runs (Python 3.11).
        self._ended = threading.Event()
        atexit.register(self._at_exit)
        threading.Thread(target=self._run, name="treadle-save").start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def finish(self) -> None:
        """Wait until it has ended; raise what it failed with, the first time it is asked."""
        self._ended.wait()
        atexit.unregister(self._at_exit)
        heard, self._heard = self._heard, True
        if self.error is not None and not heard:
            raise self.error

    def _at_exit(self) -> None:
        self._ended.wait()
        if self.error is not None:
            traceback.print_exception(self.error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exception would be printed and forgotten here
