"""Checkpoints written beside the training: the state is copied to host memory, and a thread does the rest."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable, Container, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from .parts import Files, TensorFile


class HostCopies:
    """Copies of tensors in host memory, in buffers that are kept from one save to the next.

    Fresh memory costs ten times as much as the copy itself: the system has to clear each page of it first.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._guards: WeakKeyDictionary[Optimizer, _Guard] = WeakKeyDictionary()

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers = {}

    def copy_tensors(
        self, files: Files, later: Container[str], optimizers: Iterable[Optimizer]
    ) -> tuple[Files, Copying]:
        """Copy the tensors in ``files``, or begin to.

        Args:
            files: what is to be written.
            later: the files whose tensors nothing but a step of ``optimizers`` changes. Those in host memory are copied
                by a thread while forward and backward go on; a step that comes too early waits for that.
            optimizers: all that are in use.

        Returns:
            The files with the copies in the tensors' place, and what is to be finished before they are read.
        """
        before, self._buffers = self._buffers, {}
        copied: Files = {}
        copying = Copying()
        for file, content in files.items():
            if isinstance(content, bytes):
                copied[file] = content
                continue
            tensors = {}
            for name, tensor in content.tensors.items():
                tensor = tensor.detach()
                buffer = before.get((file, name))
                if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
                if tensor.device.type == "cpu" and file in later:
                    copying.add(f"{name} in {file}", buffer, tensor)
                else:  # from pinned memory the device copies by itself; what is computed after it waits for it there
                    buffer.copy_(tensor, non_blocking=tensor.is_cuda)
                    copying.device = tensor.device if tensor.is_cuda else copying.device
                tensors[name] = self._buffers[file, name] = buffer
            copied[file] = TensorFile(tensors, content.notes)
        copying.begin()
        for optimizer in optimizers:
            if optimizer not in self._guards:
                self._guards[optimizer] = _Guard()
                optimizer.register_step_pre_hook(self._guards[optimizer])
            self._guards[optimizer].copying = copying
        return copied, copying


class Copying:
    """Copies that are under way or still to be made.

    Attributes:
        device: the accelerator that some are made from.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self._on_device: torch.cuda.Event | None = None
        self._pairs: list[tuple[str, Tensor, Tensor, int]] = []
        self._changed = ""
        self._lock = threading.Lock()

    def add(self, place: str, buffer: Tensor, tensor: Tensor) -> None:
        """Make ``buffer`` a copy of ``tensor`` as it is now, but later."""
        self._pairs.append((place, buffer, tensor, tensor._version))

    def begin(self) -> None:
        """Everything is added."""
        if self.device is not None:
            self._on_device = torch.cuda.Event()
            self._on_device.record(torch.cuda.current_stream(self.device))

    def make(self) -> None:
        """Make the copies, unless that is done; whoever comes while they are made waits."""
        with self._lock:
            for place, buffer, tensor, version in self._pairs:
                if tensor.is_contiguous():  # not by torch, whose threads have the training to do
                    ctypes.memmove(buffer.data_ptr(), tensor.data_ptr(), tensor.nbytes)
                else:
                    buffer.copy_(tensor)
                if tensor._version != version:
                    self._changed = self._changed or place
            self._pairs = []

    def finish(self) -> None:
        """Return when all copies are complete.

        Raises:
            RuntimeError: if something else than an optimizer's step changed a tensor in the meantime.
        """
        self.make()
        if self._on_device is not None:
            self._on_device.synchronize()
        if self._changed:
            raise RuntimeError(
                f"{self._changed} was changed while it was saved, and not by the optimizer's step. Change an "
                "optimizer's state before save_state(blocking=False), or after finish_saving()."
            )


class _Guard:
    """Lets an optimizer's step wait until its state is copied."""

    def __init__(self) -> None:
        self.copying: Copying | None = None

    def __call__(self, *_: Any) -> None:
        if self.copying is not None:
            self.copying.make()
            self.copying = None


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
        threading.Thread(target=self._run, name="treadle-save").start()
        atexit.register(self._finish_at_exit)

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
        atexit.unregister(self._finish_at_exit)
        heard, self._heard = self._heard, True
        if self.error is not None and not heard:
            raise self.error

    def _finish_at_exit(self) -> None:
        self._ended.wait()
        if self.error is not None:
            traceback.print_exception(self.error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exception would be printed and forgotten here
