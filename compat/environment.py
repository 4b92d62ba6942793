"""Accelerate's helpers for environment variables, memory, progress bars, hardware and names."""

from __future__ import annotations

import gc
import operator
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn

import torch

from ..common.messages import warn
from ..common.validation import parse_truth
from ..strategies.distributed import current_place, variables_set


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables within a ``with`` block, and restore them afterwards.

    Args:
        **kwargs: Values of the variables, keyed by name. Names are converted to upper case, and values to strings.

    Example:
        >>> import os
        >>> with patch_environment(treadle_example=1):
        ...     os.environ["TREADLE_EXAMPLE"]
        '1'
    """
    with variables_set({name.upper(): str(value) for name, value in kwargs.items()}):
        yield


@contextmanager
def clear_environment() -> Iterator[None]:
    """Remove all environment variables within a ``with`` block, and restore them afterwards."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


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


def write_basic_config(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise RuntimeError, because Treadle does not have a machine-wide configuration file.

    Args:
        *args: Accepted and ignored.
        **kwargs: Accepted and ignored.
    """
    raise RuntimeError(
        "write_basic_config is not supported: Treadle has no machine-wide configuration file. Pass the settings "
        "to Accelerator(...), and the number of processes to torchrun or `treadle launch`."
    )


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


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the value of the first environment variable with a number of at least 0, or ``default``."""
    return next((number for key in env_keys if (number := int(os.environ.get(key, -1))) >= 0), default)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return the names of the libraries that have been imported."""
    return [name for name in library_names if name in sys.modules]


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    r"""Return a line ``"KEY=value\n"`` for each variable. Skip invalid variables, with a warning."""
    lines = []
    for key, value in current_env.items():
        if key and value and not set(";\n<> ") & set(key + value):
            lines.append(f"{key}={value}\n")
        else:
            warn(
                f"{key}={value!r} is skipped, because a variable must not be empty or contain ';', '<', '>', spaces "
                "or line breaks."
            )
    return lines


def get_current_device_type() -> tuple[str, str]:
    """Return ``("cuda", "MULTI_GPU")`` on every machine."""
    return "cuda", "MULTI_GPU"


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the machine's GPUs and their number, from ``nvidia-smi``, without initializing CUDA."""
    names = _query_gpus("name")
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of the NVIDIA driver that ``nvidia-smi`` reports."""
    return _query_gpus("driver_version")[0]


def _query_gpus(field: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True).strip().splitlines()


def check_cuda_p2p_ib_support() -> bool:
    """Return False if there are several GPUs and the name of one contains ``RTX 40``, otherwise True."""
    try:
        names, count = get_gpu_info()
    except (OSError, subprocess.CalledProcessError):  # no driver is installed, so there is no objection
        return True
    return count < 2 or not any("RTX 40" in name for name in names)


@dataclass
class CPUInformation:
    """Rank and world size of this process, on the machine and in the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return this process's ranks and world sizes from the variables of torchrun, Intel MPI, Open MPI or MVAPICH2."""
    return CPUInformation(
        get_int_from_env(["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"], 0),
        get_int_from_env(["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"], 1),
        get_int_from_env(
            ["LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"], 0
        ),
        get_int_from_env(
            ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"], 1
        ),
    )


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Decorate a function, or the test methods of a class, to restore variables ``ACCELERATE_*`` after each call."""
    if not isinstance(func_or_cls, type):
        return _restore_variables(func_or_cls)

    def wrap_tests(cls: Any) -> None:
        for name in dir(cls):
            method = getattr(cls, name)
            if name.startswith("test") and callable(method) and not hasattr(method, "_restores_variables"):
                setattr(cls, name, _restore_variables(method))

    wrap_tests(func_or_cls)
    func_or_cls.__init_subclass__ = classmethod(lambda cls, **_: wrap_tests(cls))  # type: ignore[assignment]
    return func_or_cls


def _restore_variables(function: Callable[..., Any]) -> Callable[..., Any]:
    def collect() -> dict[str, str]:
        return {key: value for key, value in os.environ.items() if key.startswith("ACCELERATE_")}

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = collect()
        try:
            return function(*args, **kwargs)
        finally:
            for key in collect():
                del os.environ[key]
            os.environ.update(before)

    run._restores_variables = True  # type: ignore[attr-defined]
    return run


def env_var_path_add(env_var_name: str, path_to_add: Any) -> str:
    """Return the value of a path variable, such as ``PYTHONPATH``, with a path appended."""
    return ":".join([path for path in os.environ.get(env_var_name, "").split(":") if path] + [str(path_to_add)])


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether a port of this machine, by default 29500, accepts connections."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        return connection.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def check_os_kernel() -> None:
    """Warn if the Linux kernel is older than 5.5, on which processes may hang."""
    if platform.system() != "Linux":
        return
    version = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    if version < (5, 5):
        warn(f"Linux {platform.release()} is older than 5.5, so processes may hang. Upgrade the kernel.")


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text with a unit from bytes to PB, such as ``"1.5 KB"`` for 1536."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Merge ``source`` into ``destination``, nested dicts item by item, and return ``destination``."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return a nested attribute by its dotted name, such as ``"encoder.layer.weight"``."""
    return operator.attrgetter(attr)(obj)


def get_pretty_name(obj: Any) -> str:
    """Return the qualified name of a class or function, or of the class of any other object."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


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


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, whatever the arguments are."""


def test_launch() -> None:
    """Create a `PartialState`, to test whether the processes can connect."""
    from ..engine import PartialState

    PartialState()


test_launch.__test__ = False  # type: ignore[attr-defined]
