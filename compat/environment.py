"""Accelerate's helpers for environment variables, memory, progress bars, hardware, names and launched functions."""

from __future__ import annotations

import gc
import operator
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..common.validation import parse_truth
from ..strategies.distributed import DistributedType, current_place, variables_set


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables within a ``with`` block, and restore them afterwards.

    Args:
        **kwargs: Values of the variables, keyed by name. Names are converted to upper case, and values to strings.

    Examples:
        >>> import os
        >>> with patch_environment(treadle_example=1):
        ...     os.environ["TREADLE_EXAMPLE"]
        '1'
    """
    with variables_set({name.upper(): str(value) for name, value in kwargs.items()}):
        yield


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release the unused memory that torch caches on a CUDA or Apple GPU.

    Args:
        garbage_collection: Whether to run Python's garbage collector first. Default: False.
    """
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage, empty the device's memory cache, and return a list with None for each argument.

    Assign the result to the variables that hold the objects, so that Python can free the objects:
    ``a, b = release_memory(a, b)``.

    Args:
        *objects: The objects to release.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a progress bar from ``tqdm.auto``. By default, it is shown only on local rank zero of each machine.

    Args:
        *args: Positional arguments of tqdm.
        main_process_only: Whether to show the bar only on local rank zero. Default: True.
        **kwargs: Keyword arguments of tqdm.
    """
    from tqdm.auto import tqdm as bar

    if args and isinstance(args[0], bool):
        raise TypeError(
            f"tqdm got {args[0]} as its first argument, which must be the iterable. Pass main_process_only={args[0]} "
            "as a keyword argument."
        )
    if main_process_only and current_place()[2] != 0:
        kwargs["disable"] = True
    return bar(*args, **kwargs)


def write_basic_config(mixed_precision: str = "no", save_location: str | None = None, use_xpu: bool = False) -> bool:
    """Do nothing and return False, which in Accelerate means that no file was written.

    Treadle has no machine-wide configuration file. Without one, `treadle launch` starts one process per GPU, as
    Accelerate's file of defaults says.

    Args:
        mixed_precision: Must be ``"no"`` (default).
        save_location: Must be None (default).
        use_xpu: Accepted and ignored.

    Raises:
        RuntimeError: If an argument asks for what only a configuration file could hold.
    """
    if mixed_precision != "no" or save_location is not None:
        asked = (
            f"mixed_precision={mixed_precision!r}" if mixed_precision != "no" else f"save_location={save_location!r}"
        )
        raise RuntimeError(
            f"write_basic_config({asked}) is not supported: Treadle has no machine-wide configuration file. Pass the "
            "settings to Accelerator(...), and the number of processes to torchrun or `treadle launch`."
        )
    return False


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for ``y, yes, t, true, on, 1`` and 0 for ``n, no, f, false, off, 0``; with ``to_bool``, a bool."""
    truth = parse_truth("value", value)
    return truth if to_bool else int(truth)


def parse_flag_from_env(key: str, default: Any = False) -> bool:
    """Return the truth value of an environment variable, or of ``default`` if it is not set; see `str_to_bool`."""
    return parse_truth(key, os.environ.get(key, str(default)))


def parse_choice_from_env(key: str, default: Any = "no") -> str:
    """Return the value of an environment variable, or ``default`` as text if the variable is not set."""
    return os.environ.get(key, str(default))


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the GPUs and their number, from ``nvidia-smi``."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.check_output(command, text=True).strip().splitlines()
    return names, len(names)


def check_cuda_p2p_ib_support() -> bool:
    """Return False if there are several GPUs and the name of one contains ``RTX 40``, otherwise True."""
    try:
        names, count = get_gpu_info()
    except (OSError, subprocess.CalledProcessError):  # no driver is installed, so there is no objection
        return True
    return count < 2 or not any("RTX 40" in name for name in names)


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether a port of this machine, by default 29500, accepts connections."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        return connection.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text with a unit from bytes to PB, such as ``"1.5 KB"`` for 1536."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return a nested attribute by its dotted name, such as ``"encoder.layer.weight"``."""
    return operator.attrgetter(attr)(obj)


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether an error is a ``RuntimeError`` that reports exhausted memory or cuDNN's "not supported"."""
    signs = (
        " out of memory.",
        "MPS backend out of memory",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
        "DefaultCPUAllocator: can't allocate memory",
    )
    if not isinstance(exception, RuntimeError) or len(exception.args) != 1:
        return False
    return any(sign in str(exception.args[0]) for sign in signs)


class PrepareForLaunch:
    """Callable for ``torch.multiprocessing`` that sets this process's rank and runs a function.

    Args:
        launcher: Function to run.
        distributed_type: A `DistributedType` or its value. With ``MULTI_*``, the rank is computed from the process's
            index and the environment variables ``NODE_RANK`` and ``NPROC``; other types set no rank. Default: ``"NO"``.
        debug: Whether to connect the processes with gloo instead, through the file ``ACCELERATE_DEBUG_RDV_FILE``.
            Default: False.
    """

    def __init__(self, launcher: Callable[..., Any], distributed_type: Any = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Set the rank or connect the processes, as configured, and run the function with ``args``."""
        if self.debug:
            size = int(os.environ["WORLD_SIZE"])
            store = torch.distributed.FileStore(os.environ["ACCELERATE_DEBUG_RDV_FILE"], size)
            torch.distributed.init_process_group("gloo", rank=index, store=store, world_size=size)
        elif self.distributed_type.startswith("MULTI_"):
            os.environ["LOCAL_RANK"] = str(index)
            before = int(os.environ.get("NPROC", 1)) * int(os.environ.get("NODE_RANK", 0))
            os.environ["RANK"] = str(before + index)
        os.environ["FORK_LAUNCHED"] = "1"
        self.launcher(*args)
