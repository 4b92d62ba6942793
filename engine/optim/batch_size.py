"""Search for a batch size that fits into memory, the same on all processes."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from ...common.messages import announce, describe_error, read_text
from ...common.validation import check_int
from ...strategies.distributed import DONE, RETRY, Attempts

# Messages of errors about memory that have no type of their own.
_WORDS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's message for a workspace that it could not allocate, among other causes
)
_ACCUMULATION = "gradient_accumulation_steps"


class NoBatchSizeFits(MemoryError, RuntimeError):
    """Error raised if not even a batch of one fits into memory. It is also a ``RuntimeError``, as in Accelerate."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` means that memory ran out, on a device or on the host.

    Args:
        error: Any exception.
    """
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    text = read_text(error)
    if not any(words in text for words in _WORDS):
        return False
    # A subclass may be the user's own. Torch's are AcceleratorError and NCCL's DistBackendError.
    kind = type(error)
    return kind is RuntimeError or (issubclass(kind, RuntimeError) and kind.__module__.startswith("torch"))


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorate a function so that it is called again with a smaller batch size whenever it runs out of memory.

    All processes try the same sizes: if one process runs out of memory, all of them start over. Prepare models and
    optimizers inside ``function``, because the process group is replaced after a failed attempt. An Accelerator that is
    created outside of ``function`` stays usable; call its ``free_memory()`` at the start of ``function``.

    If ``function`` has a parameter ``gradient_accumulation_steps``, its value increases as the batch size decreases.
    The value is rounded up, so the global batch size stays the same or increases slightly.

    Args:
        function: Function whose first parameter is the batch size. Default: None, which returns a decorator.
        starting_batch_size: The batch size that each call tries first. Default: 128.
        reduce_batch_size_fn: Function that returns the next size. Default: the largest divisor of
            ``starting_batch_size`` that is at most half of the size that failed.

    Returns:
        The decorated function, which is called without the batch size.

    Raises:
        MemoryError: If no batch size fits. The error is also a ``RuntimeError``.
        ValueError: If a batch size is invalid, or the processes cannot be reconnected.
        TypeError: If ``function`` has the wrong parameters, or is called with the wrong arguments.
        RuntimeError: If ``function`` fails on another process for a reason other than a lack of memory, or if another
            process does not respond.

    Examples:
        >>> import treadle
        >>> @treadle.find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size):
        ...     if batch_size > 16:
        ...         raise MemoryError
        ...     return batch_size
        >>> train()
        16
    """
    if function is None:
        return partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    check_int("starting_batch_size", starting_batch_size, 0)
    body, signature = function, inspect.signature(function)
    accumulates = _ACCUMULATION in signature.parameters

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(body, signature, starting_batch_size, args, kwargs)
        first = _read_accumulation(body, signature, args, kwargs, starting_batch_size) if accumulates else None
        return _try_sizes(body, args, kwargs, starting_batch_size, first, reduce_batch_size_fn)

    _check_call(body, signature)
    return run


def _check_arguments(
    body: Callable[..., Any], signature: inspect.Signature, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        signature.bind(size, *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{_name(body)} was called with wrong arguments ({error}). Pass all arguments except the batch size, "
            "which find_executable_batch_size passes as the first argument."
        ) from None


def _try_sizes(
    body: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    starting: int,
    first: int | None,
    reduce: Callable[[], int] | None,
) -> Any:
    """Run the function with decreasing batch sizes until one fits, and return its result.

    ``first`` is the value of ``gradient_accumulation_steps`` for the ``starting`` size; None if the function does not
    have this parameter.
    """
    size, attempts = starting, Attempts()
    if size == 0:
        raise NoBatchSizeFits("starting_batch_size=0 must be at least 1. Pass the largest batch size to try.")
    while True:
        if first is not None:
            kwargs[_ACCUMULATION] = -(-first * starting // size)
        attempts.begin()
        fits, result = attempt(attempts, partial(body, size, *args, **kwargs))
        if fits:
            return result
        del result
        attempts.start_over()
        size = _choose_smaller(size, starting, reduce)
        _announce(body, size, starting, first)


def attempt(attempts: Attempts, call: Callable[[], Any]) -> tuple[bool, Any]:
    """Run one attempt, and agree with the other processes whether it fit into memory.

    Returns:
        Whether the attempt fit into memory on all processes, and its result on this process (None if it failed here).

    Raises:
        BaseException: An error of the attempt that is not a lack of memory.
    """
    try:
        result = call()
    except BaseException as error:
        # An error on this process is a consequence if another process has run out of memory.
        if not is_out_of_memory(error) and not (attempts.size > 1 and attempts.someone_retries()):
            attempts.report(describe_error(error))
            raise
        _forget(error)
    else:
        attempts.report(DONE)
        return attempts.await_all_done(), result
    attempts.report(RETRY)
    return False, None


def _forget(error: BaseException) -> None:
    """Release the models, gradients and batches that the frames of a failed attempt refer to."""
    following: BaseException | None = error
    while following is not None:
        traceback.clear_frames(following.__traceback__)
        following = following.__cause__ or following.__context__


def _choose_smaller(size: int, starting: int, reduce: Callable[[], int] | None) -> int:
    if size == 1 and reduce is None:
        raise NoBatchSizeFits("no batch size fits into memory: even batch_size=1 failed. Use a smaller model or input.")
    if reduce is None:
        return next(i for i in range(size // 2, 0, -1) if starting % i == 0)
    smaller = reduce()
    if isinstance(smaller, bool) or not isinstance(smaller, int) or not 1 <= smaller < size:
        if size == 1:
            raise ValueError(
                f"reduce_batch_size_fn returned {smaller!r}, but batch_size=1 failed and can't be reduced. Use a "
                "smaller model or input."
            )
        raise ValueError(
            f"batch_size={size} does not fit into memory, but reduce_batch_size_fn returned {smaller!r}. It must "
            f"return a positive integer below {size}."
        )
    return smaller


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "the function")  # a functools.partial has no name


def _announce(function: Callable[..., Any], size: int, starting: int, first: int | None) -> None:
    name = _name(function)
    if first is None:
        advice = f" The global batch size decreases. To keep it, give {name} a parameter {_ACCUMULATION}."
    else:
        steps = -(-first * starting // size)
        unchanged = size * steps == first * starting
        advice = f" With {_ACCUMULATION}={steps}, the global batch size " + (
            "stays the same." if unchanged else "increases slightly."
        )
    announce(f"{name} ran out of memory; trying batch_size={size}.{advice}")


def _check_call(function: Callable[..., Any], signature: inspect.Signature) -> None:
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD) or first.name == _ACCUMULATION:
        raise TypeError(f"{_name(function)}{signature} must have the batch size as its first parameter.")


def _read_accumulation(
    function: Callable[..., Any], signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], size: int
) -> int:
    bound = signature.bind_partial(size, *args, **kwargs)
    bound.apply_defaults()
    steps = bound.arguments.get(_ACCUMULATION, 1)
    if _ACCUMULATION not in kwargs and _ACCUMULATION in signature.bind_partial(size, *args).arguments:
        raise TypeError(f"{_ACCUMULATION} was passed to {_name(function)} by position. Pass it as a keyword argument.")
    return int(steps)
