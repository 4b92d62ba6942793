"""Supervisor that starts the ranks of one machine, and is not a rank itself."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from ..distributed import is_ray_worker, variables_set
from ..processes import RankBoard, sweep
from .rendezvous import GRACE, SIGNALS, Job

_TEST_RUNNERS = ("pytest", "py.test", "unittest")


def relaunch(nproc: int, *, grace: float = GRACE) -> NoReturn:
    """Run this script again in `nproc` ranks, and end this process with their exit status.

    The code above the call runs once in this process and once in each rank.
    """
    if (config := _get_hydra_config()) is not None:
        os.chdir(config.runtime.cwd)  # `hydra.job.chdir` changes it again in each rank
    with variables_set({"TREADLE_SUPERVISOR_RELAUNCHES": "1"}):
        status = supervise(Job(nproc=nproc, command=build_relaunch_command(nproc), grace=grace))
    for stream in (sys.stdout, sys.stderr):
        # The reader of a pipe may have ended by now; that must not replace the ranks' status with this process's own.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    sys.exit(status)


def supervise(job: Job) -> int:
    """Run a job's command in its processes, with torchrun's environment variables, and wait for them.

    The calling process is a supervisor and not a rank. It forwards SIGTERM, SIGUSR1, SIGUSR2, SIGINT, SIGHUP and
    SIGQUIT to the ranks, except signals that it ignores itself. When a rank fails, the other ranks are ended. If
    `OMP_NUM_THREADS` is not set, the CPUs of this process are divided among the ranks. A job may span several machines,
    each with its own supervisor.

    Args:
        job: The job.

    Returns:
        0 if the run succeeded. Otherwise, the status of the rank that failed first, on any machine, or 128 + n if
        signal n killed it or was sent to this process. SIGUSR1 and SIGUSR2 count as SIGTERM if they are sent to this
        process.

    Raises:
        ValueError: If this is not the main thread.
        OSError: If the program cannot be started.
    """
    if threading.current_thread() is not threading.main_thread():
        # Signals reach the main thread only, and Linux ends a rank along with the thread that started it.
        raise ValueError(
            f"devices={job.nproc} starts {job.nproc} processes, which only the main thread can supervise. Start the "
            "run in the main thread."
        )
    # Text that is still in a buffer would appear after the ranks' output.
    sys.stdout.flush()
    sys.stderr.flush()
    handled = [name for name in SIGNALS if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]
    variables = {
        "TREADLE_SUPERVISOR": str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cpus() // job.nproc)),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(handled),
    }
    board = RankBoard(job.nproc)
    variables |= board.variables
    place = job.nodes.place() if job.nodes is not None else None
    if place is not None and place.interface is not None:
        variables["GLOO_SOCKET_IFNAME"] = place.interface
    # torch's agent starts each rank with a copy of this process's variables.
    with variables_set(variables), _restore_signals():
        from . import elastic_agent  # takes a second, for imports that only a supervisor needs

        try:
            return elastic_agent.run(job, place, board)
        finally:
            board.close()
            sweep(os.getpid(), all_ended=True)


def has_script() -> bool:
    """Return whether this process runs a script or module that `relaunch` could run again."""
    return _find_obstacle() is None


def build_relaunch_command(nproc: int) -> list[str]:
    """Return the command that runs this script again, with its interpreter flags and arguments.

    Raises:
        ValueError: If this process cannot be run again.
    """
    if (obstacle := _find_obstacle()) is not None:
        if is_ray_worker():
            raise ValueError(
                f"devices={nproc} starts {nproc} processes, but {obstacle}. Use devices='auto', and "
                f"ray.train.torch.TorchTrainer with ScalingConfig(num_workers={nproc})."
            )
        raise ValueError(
            f"devices={nproc} runs this script again in {nproc} processes, but {obstacle}. Put the code in a file "
            f"and run `python train.py` or `torchrun --nproc-per-node {nproc} train.py`, or use devices=1. In a "
            f"notebook, use `treadle.notebook_launcher(function, num_processes={nproc})`."
        )
    # The function that multiprocessing's spawn uses. It omits -u, which is only visible in the stream.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.__stdout__, "write_through", False):
        flags.append("-u")
    target = _find_target()
    assert target is not None
    return [sys.executable, *flags, *target, *_add_hydra_overrides(_read_arguments(target))]


def _add_hydra_overrides(arguments: list[str]) -> list[str]:
    """Add this process's output folder to the arguments of a script that uses Hydra.

    Without this override, each rank would create its own output folder.
    """
    config = _get_hydra_config()
    if config is None:
        return arguments
    if getattr(getattr(config, "mode", None), "name", "") == "MULTIRUN":  # the ranks execute all of its jobs
        overrides = {"hydra.sweep.dir": _quote(os.path.join(config.runtime.cwd, config.sweep.dir))}
    else:
        # The content of its .hydra is complete, and two ranks would write it at the same time.
        overrides = {"hydra.run.dir": _quote(config.runtime.output_dir), "hydra.output_subdir": "null"}
    # Next to the other overrides, because argparse accepts them in one piece only.
    override_positions = [
        position
        for position, argument in enumerate(arguments)
        if "=" in argument.lstrip("~") and not argument.startswith("-")
    ]
    end = override_positions[-1] + 1 if override_positions else len(arguments)
    return [*arguments[:end], *(f"{name}={value}" for name, value in overrides.items()), *arguments[end:]]


def _get_hydra_config() -> Any:
    """Return Hydra's own configuration; None outside a Hydra application."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    return None if hydra is None or not hydra.HydraConfig.initialized() else hydra.HydraConfig.get()


def _quote(text: str) -> str:
    """Quote a text as a value in Hydra's grammar, in which backslashes are special only before quotation marks."""
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"


def _find_target() -> list[str] | None:
    """Return the program to run again: a script's absolute path, or `-m` and a module's name; None if there is none."""
    main = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None and name != "__main__":
        return ["-m", name.removesuffix(".__main__")]
    # A folder or zip file with a __main__.py inside runs under this name.
    file = getattr(main, "__file__", None) if name is None else sys.argv[0]
    # Absolute, because the script may have changed its directory since.
    return [os.path.abspath(file)] if file is not None and os.path.exists(file) else None


def _read_arguments(target: list[str]) -> list[str]:
    """Return the script's original arguments, which may differ from `sys.argv` if the script has changed it."""
    original_argv, name = sys.orig_argv, target[1] if target[0] == "-m" else sys.argv[0]
    # It is missing if a debugger is in between; then `sys.argv` is what the debugger left for the script.
    return original_argv[original_argv.index(name) + 1 :] if name in original_argv else sys.argv[1:]


def _find_obstacle() -> str | None:
    """Describe why this process cannot be run again, or return None if it can."""
    if is_ray_worker():
        return "this is a worker of Ray, which starts the processes of a run on its own"
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return "this is a notebook or an IPython session"
    if hasattr(sys, "ps1"):
        return "this is an interactive prompt"
    target = _find_target()
    if target is None:
        return "the code came from `python -c` or standard input, which can't be run again"
    program = os.path.basename(target[-1]).removesuffix(".exe")
    if program in _TEST_RUNNERS:
        return f"this is {program}, which would run its whole session again in each process"
    if multiprocessing.parent_process() is not None:
        return "this is a multiprocessing child process (is `if __name__ == '__main__':` missing in the script?)"
    return None


def cpus() -> int:
    """Return the number of CPUs that this process may use, which may be lower than that of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _restore_signals() -> Iterator[None]:
    """Restore the signal handlers that torch's agent replaces, at the end of the context."""
    before = {number: signal.getsignal(number) for number in _list_signal_numbers()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: set by code other than Python's
                signal.signal(number, handler)


def _list_signal_numbers() -> list[signal.Signals]:
    return [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
