"""The largest batch that fits into memory, found by trying, the same on all processes."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from ...common.messages import announce
from ...common.validation import check_int
from ...strategies.distributed import DONE, RETRY, Attempts

# Where memory runs out without a type of its own for it.
_WORDS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's word for a workspace that it could not get, among others
)
_ACCUMULATION = "gradient_accumulation_steps"


class NoBatchSizeFits(MemoryError, RuntimeError):
    """Not even the smallest batch fits into memory; a ``RuntimeError`` too, as scripts for Accelerate expect."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, on a device or on the host."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    if not any(words in str(error) for words in _WORDS):
        return False
    # A subclass may be the user's own. Torch's are AcceleratorError, since torch 2.8, and DistBackendError, of NCCL.
    kind = type(error)
    return kind is RuntimeError or (issubclass(kind, RuntimeError) and kind.__module__.startswith("torch"))


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorator: run ``function(batch_size, ...)`` again with a smaller batch whenever memory runs out.

    All processes try the same sizes: where memory ran out on one, all start over. Whatever is prepared must be
    prepared inside ``function``, as each attempt has a new process group; an Accelerator made outside it stays usable:
    call its ``free_memory()`` first.

    Where ``function`` has a parameter ``gradient_accumulation_steps``, it is given as many times more as the batch is
    smaller, so the global batch stays what it was.

    A GPU that waits in a collective for one whose memory ran out can not be freed: an error ends the run in a minute.

    Args:
        function: what to run; its first parameter is the batch size.
        starting_batch_size: the first size that is tried, in every call.
        reduce_batch_size_fn: returns the next size. Default: the largest divisor of ``starting_batch_size`` that is at
            most half of the size that failed.

    Raises:
        MemoryError: if a batch of one does not fit.
        ValueError: if a size is no whole number of at least 1, or ``reduce_batch_size_fn`` returns no smaller one.
        TypeError: if ``function`` can't be called so.
    """
    if function is None:
        return partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    check_int("starting_batch_size", starting_batch_size, 1)
    body, signature = function, inspect.signature(function)
    accumulates = _ACCUMULATION in signature.parameters

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(starting_batch_size, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{body.__name__} gets its batch size from find_executable_batch_size: {error}") from None
        first = _read_accumulation(body, signature, args, kwargs, starting_batch_size) if accumulates else 1
        size, attempts = starting_batch_size, Attempts()
        while True:
            if accumulates:
                kwargs[_ACCUMULATION] = -(-first * starting_batch_size // size)
            attempts.begin()
            fits, result = attempt(attempts, partial(body, size, *args, **kwargs))
            if fits:
                return result
            del result
            attempts.start_over()
            size = _choose_smaller(size, starting_batch_size, reduce_batch_size_fn)
            _announce(body, size, starting_batch_size, first if accumulates else None)

    _check_call(body, signature)
    return run


def attempt(attempts: Attempts, call: Callable[[], Any]) -> tuple[bool, Any]:
    """Make one attempt: whether it fitted on all processes, and what it returned here."""
    try:
        result = call()
    except BaseException as error:
        # What breaks where another process has run out of memory is a consequence.
        if not is_out_of_memory(error) and not (attempts.size > 1 and attempts.someone_retries()):
            attempts.report(f"{type(error).__name__}: {error}")
            raise
        _forget(error)
    else:
        attempts.report(DONE)
        return attempts.agree(), result
    attempts.report(RETRY)
    return False, None


def _forget(error: BaseException) -> None:
    """Let go of what the frames of a failed attempt hold: models, gradients, batches."""
    following: BaseException | None = error
    while following is not None:
        traceback.clear_frames(following.__traceback__)
        following = following.__cause__ or following.__context__


def _choose_smaller(size: int, starting: int, reduce: Callable[[], int] | None) -> int:
    if size == 1 and reduce is None:
        raise NoBatchSizeFits("no batch size fits into memory: not even a batch of 1.")
    if reduce is None:
        return next(i for i in range(size // 2, 0, -1) if starting % i == 0)
    smaller = reduce()
    if isinstance(smaller, bool) or not isinstance(smaller, int) or not 1 <= smaller < size:
        raise ValueError(
            f"no batch size fits into memory: {size} did not, and reduce_batch_size_fn returned {smaller!r}, "
            f"which is not from 1 to {size - 1}."
        )
    return smaller


def _announce(function: Callable[..., Any], size: int, starting: int, first: int | None) -> None:
    name = getattr(function, "__name__", "the function")
    if first is None:
        rest = f" The global batch is smaller by it; give {name} a parameter {_ACCUMULATION} to keep it."
    else:
        steps = -(-first * starting // size)
        unchanged = size * steps == first * starting
        rest = f" {_ACCUMULATION}={steps}: the global batch " + (
            "stays what it was." if unchanged else "grows a little."
        )
    announce(f"Memory ran out in {name}: batch_size={size} is next.{rest}")


def _check_call(function: Callable[..., Any], signature: inspect.Signature) -> None:
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD) or first.name == _ACCUMULATION:
        name = getattr(function, "__name__", "the function")
        raise TypeError(f"{name}{signature} must take the batch size as its first parameter.")


def _read_accumulation(
    function: Callable[..., Any], signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], size: int
) -> int:
    """The accumulation steps that the caller wants with the starting batch size."""
    bound = signature.bind_partial(size, *args, **kwargs)
    bound.apply_defaults()
    steps = bound.arguments.get(_ACCUMULATION, 1)
    if _ACCUMULATION not in kwargs and _ACCUMULATION in signature.bind_partial(size, *args).arguments:
        raise TypeError(f"give {_ACCUMULATION} to {getattr(function, '__name__', 'the function')} by its name.")
    return int(steps)
