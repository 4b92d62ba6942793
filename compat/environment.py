"""Small things that scripts use: environment variables for a while, memory let go of, a bar on one process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from ..strategies.distributed import current_place, variables_set


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables for a while, their names in capitals; what was there comes back, whatever happens."""
    with variables_set({name.upper(): str(value) for name, value in kwargs.items()}):
        yield


@contextmanager
def clear_environment() -> Iterator[None]:
    """An empty environment for a while; what was there comes back, whatever happens."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give memory that the device's allocator keeps back to the device."""
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage, and return a None for each object given, to rebind their names: ``a, b = release_memory(a, b)``.

    The caller's names still hold the objects during the call, so their memory is free when these are bound anew.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """``tqdm.auto.tqdm``, shown on the first process of each machine only, unless ``main_process_only`` is False."""
    from tqdm.auto import tqdm as bar

    if args and isinstance(args[0], bool):
        raise TypeError("tqdm's first argument is what to go through; give main_process_only by its name.")
    if main_process_only and current_place()[2] != 0:
        kwargs["disable"] = True
    return bar(*args, **kwargs)


def write_basic_config(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused: there is no file that changes what a script does.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "Treadle reads no configuration file of the machine, so write_basic_config has nothing to write. Give the "
        "settings to Accelerator(...), and the number of processes to torchrun or `treadle launch`."
    )
