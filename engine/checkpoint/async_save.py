"""Asynchronous saves: the state is copied to host memory, and a thread writes it during training."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable, Container, Iterable
from functools import cache
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...common.messages import announce
from .parts import Files, TensorFile


class HostCopies:
    """Copies of tensors in host memory, in buffers that the next save reuses if shapes and dtypes are unchanged."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._guards: WeakKeyDictionary[Optimizer, _Guard] = WeakKeyDictionary()
        self._unpin: Callable[[], Any] | None = None

    def clear(self) -> None:
        """Release the buffers, and unpin their memory."""
        self._buffers = {}
        self._unpin_slab()

    def _unpin_slab(self) -> None:
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            torch.cuda.synchronize()  # a copy into it may still be in progress
            unpin()

    def copy_tensors(
        self, files: Files, later: Container[str], optimizers: Iterable[Optimizer]
    ) -> tuple[Files, Copying]:
        """Return ``files`` with copies of the tensors in host memory, and a `Copying` to wait for the copies.

        ``later`` names the files whose tensors change only in a step of ``optimizers``. These tensors may be copied
        after this call; the next step waits for their copies. Call `Copying.finish` before reading the returned files.
        """
        before, self._buffers = self._buffers, {}
        copied: Files = {}
        copying = Copying(self)
        self._pin(files, before)
        for file, content in files.items():
            if isinstance(content, bytes):
                copied[file] = content
                continue
            tensors = {}
            for name, tensor in content.tensors.items():
                tensor = tensor.detach()
                buffer = before.get((file, name))
                if buffer is None or not _fits(buffer, tensor):
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                if file in later:
                    copying.add(f"{name} in {file}", buffer, tensor)
                else:  # copied by the device into pinned memory; its later computations wait for the copy
                    buffer.copy_(tensor, non_blocking=tensor.is_cuda)
                    copying.record_device(tensor)
                tensors[name] = self._buffers[file, name] = buffer
            copied[file] = TensorFile(tensors, content.notes)
        copying.begin()
        for optimizer in optimizers:
            if optimizer not in self._guards:
                self._guards[optimizer] = _Guard()
                optimizer.register_step_pre_hook(self._guards[optimizer])
            self._guards[optimizer].copying = copying
        return copied, copying

    def _pin(self, files: Files, before: dict[tuple[str, str], Tensor]) -> None:
        """Replace the buffers for GPU tensors by slices of one block of pinned memory, unless all of them still fit.

        ``before`` contains the buffers of the previous save, by file and tensor name, and is changed in place.
        """
        tensors = {
            (file, name): tensor
            for file, content in files.items()
            if not isinstance(content, bytes)
            for name, tensor in content.tensors.items()
            if tensor.is_cuda
        }
        if not all(place in before and _fits(before[place], tensor) for place, tensor in tensors.items()):
            for place in tensors:
                before.pop(place, None)  # the previous slab is freed first, because both may not fit into memory
            self._unpin_slab()
            starts = list(accumulate((_align(tensor.nbytes) for tensor in tensors.values()), initial=0))
            slab = self._make_pinned_slab(starts[-1])
            for (place, tensor), start in zip(tensors.items(), starts, strict=False):
                before[place] = slab[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _make_pinned_slab(self, size: int) -> Tensor:
        """Return ``size`` bytes of pinned memory; torch's own allocator would round the size up to a power of two.

        If the system refuses to pin more memory, the result is plain memory.
        """
        slab = torch.empty(size, dtype=torch.uint8, device="cpu")
        address, cudart = slab.data_ptr(), torch.cuda.cudart()
        error = int(cudart.cudaHostRegister(address, size, 0)) if size else 0
        if error:
            reason = cudart.cudaGetErrorString(cudart.cudaError(error))
            announce(
                f"an asynchronous save copies {size / 2**30:.1f} GiB through host memory that could not be pinned "
                f"({reason}, CUDA error {error}), so training waits for the copy."
            )
        elif size:
            self._unpin = unpin = finalize(self, cudart.cudaHostUnregister, address)
            unpin.atexit = False  # the end of the process frees it
        return slab


def _fits(buffer: Tensor, tensor: Tensor) -> bool:
    return buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Copying:
    """Copies of tensors to host memory that are scheduled or in progress.

    A reference to ``owner`` is kept, because its memory is unpinned when it is garbage-collected.
    """

    def __init__(self, owner: HostCopies) -> None:
        self._owner = owner
        self._device: torch.device | None = None  # the device that some of the copies come from
        self._on_device: torch.cuda.Event | None = None
        self._on_stream: list[tuple[str, Tensor, Tensor, int]] = []
        self._on_host: list[tuple[str, Tensor, Tensor, int]] = []
        self._changed = ""
        self._lock = threading.Lock()

    def add(self, place: str, buffer: Tensor, tensor: Tensor) -> None:
        """Schedule a copy of ``tensor`` to ``buffer``, and record the tensor's version to detect a change.

        ``place`` names the tensor in errors.
        """
        self.record_device(tensor)
        (self._on_stream if tensor.is_cuda else self._on_host).append((place, buffer, tensor, tensor._version))

    def record_device(self, tensor: Tensor) -> None:
        """Record the device of a tensor that is being copied, if it is a GPU."""
        self._device = tensor.device if tensor.is_cuda else self._device

    def begin(self) -> None:
        """Start the scheduled copies from a GPU."""
        if self._device is None:
            return
        stream = torch.cuda.current_stream(self._device)
        if self._on_stream:
            before, stream = stream, _get_stream(self._device)
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                for _, buffer, tensor, _ in self._on_stream:
                    buffer.copy_(tensor, non_blocking=True)
                    tensor.record_stream(stream)
        self._on_device = torch.cuda.Event(blocking=True)
        self._on_device.record(stream)

    def hold_back_step(self) -> None:
        """Make the next optimizer step wait for the copies."""
        self.make()
        if self._on_device is not None:
            torch.cuda.current_stream(self._device).wait_event(self._on_device)
        for place, _, tensor, version in self._on_stream:  # it is unknown whether the copy or a change came first
            if tensor._version != version:
                self._changed = self._changed or place
        self._on_stream = []

    def make(self) -> None:
        """Perform the scheduled copies of tensors in host memory, once; a second caller waits for the first."""
        with self._lock:
            for place, buffer, tensor, version in self._on_host:
                # Not with torch's threads, which the training needs. Only a tensor in host memory has an address there.
                if tensor.device.type == "cpu" and tensor.is_contiguous():
                    ctypes.memmove(buffer.data_ptr(), tensor.data_ptr(), tensor.nbytes)
                else:
                    buffer.copy_(tensor)
                if tensor._version != version:
                    self._changed = self._changed or place
            self._on_host = []

    def finish(self) -> None:
        """Perform the remaining copies, and wait until all copies are complete.

        Raises:
            RuntimeError: If a tensor was changed other than by an optimizer's step.
        """
        self.make()
        if self._on_device is not None:
            # Otherwise the thread would use the first device, and open a context on it.
            torch.cuda.set_device(self._device)
            self._on_device.synchronize()
        if self._changed:
            raise RuntimeError(
                f"during an asynchronous save, {self._changed} was changed by something other than the optimizer's "
                "step. Change an optimizer's state before save_state(blocking=False), or after finish_saving()."
            )


class _Guard:
    """Hook that makes an optimizer's step wait until its state is copied."""

    def __init__(self) -> None:
        self.copying: Copying | None = None

    def __call__(self, *_: Any) -> None:
        if self.copying is not None:
            self.copying.hold_back_step()
            self.copying = None


_ALIGNMENT = 256  # bytes

_get_stream = cache(torch.cuda.Stream)  # one stream per device


class Job:
    """Work that runs in a thread alongside training.

    The interpreter does not exit before the work has ended. It exits with status 1 if the work's error was never
    raised.

    Args:
        work: The function to run in a thread.

    Attributes:
        error: The error that the work failed with, or None.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self._is_reported = False
        self._work = work
        # If Ctrl-C interrupts the `join` of a thread, the thread counts as ended although it still runs (Python 3.11).
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
        """True once the work has ended, with or without an error."""
        return self._ended.is_set()

    def finish(self) -> None:
        """Wait until the work has ended.

        Raises:
            BaseException: The error of the work, if it failed. Only the first call raises it.
        """
        self._ended.wait()
        atexit.unregister(self._finish_at_exit)
        was_reported, self._is_reported = self._is_reported, True
        if self.error is not None and not was_reported:
            raise self.error

    def _finish_at_exit(self) -> None:
        self._ended.wait()
        if self.error is not None:
            traceback.print_exception(self.error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an exception would only be printed here, and then ignored
