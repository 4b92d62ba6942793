"""Launchers that run a function in several processes: for notebooks, and for strategies such as ``"ddp_spawn"``."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...common.messages import name_type, nearest
from ...common.validation import check_int, choose
from ..distributed import (
    LaunchEnvironment,
    World,
    format_error,
    hide_frames,
    process_group,
)
from ..processes import die_with_parent, kill_session, sweep
from .rendezvous import FAILURE_GRACE
from .supervisor import cpus

_ANY_PORT = "29500"  # Accelerate's default, on which two notebooks would conflict
_HOST = "127.0.0.1"
_INTERVAL = 0.1  # seconds between checks of the processes
# Accelerate's other arguments: those with the only value that a notebook has, and those without effect on one machine.
_FIXED = {"node_rank": 0, "num_nodes": 1, "max_restarts": 0}
_IGNORED = (
    *("log_line_prefix_template", "master_addr", "monitor_interval", "rdzv_backend", "rdzv_conf", "rdzv_endpoint"),
    "rdzv_id",
)


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = _ANY_PORT,
    **other: Any,
) -> None:
    """Call `function(*args)` in several processes and wait for all of them, as Accelerate's function with this name.

    The processes are forked, so the function may use the session's variables. Before this call, the session must not
    use a GPU or open the GPU driver. Torch initially uses one CPU thread in each forked process. With a world size of
    1, the function runs in the session itself, without a fork.

    Args:
        function: Function to run in each process. Create the Accelerator or Trainer inside it.
        args: Positional arguments of `function`. Default: none.
        num_processes: Number of processes. Default: one per GPU, or one if there is no GPU.
        mixed_precision: Must be ``"no"``. Set the precision in the function.
        use_port: Port for the rendezvous. Default: 29500, which stands for any free port.
        other: Accelerate's other arguments. ``num_nodes``, ``node_rank`` and ``max_restarts`` must have their defaults,
            because only `treadle launch` uses several machines and restarts processes. The others have no effect.

    Raises:
        ValueError, TypeError: If an argument is invalid, the session cannot be forked, or a distributed run is active.
        RuntimeError: If a process fails. The message contains the traceback, signal or exit status.
    """
    if mixed_precision != "no":
        choose("mixed_precision", mixed_precision, ("no", "fp16", "bf16", "fp8"))
        raise ValueError(
            f"mixed_precision={mixed_precision!r} must be 'no', because the launcher does not set the precision. Set "
            f"it in the function: Accelerator(mixed_precision={mixed_precision!r}), or Trainer(precision=...)."
        )
    valid = [*_FIXED, *_IGNORED]
    for name, value in other.items():
        if name not in valid:
            raise TypeError(f"notebook_launcher() has no argument {name!r}.{nearest(name, valid)}")
        if value != _FIXED.get(name, value):
            raise ValueError(
                f"{name}={value!r} is not supported in a notebook. Remove it, or put the code in a file and use "
                "`treadle launch`, also for several machines and for restarts."
            )
    if not str(use_port).isdecimal():
        raise ValueError(f"use_port={use_port!r} must be a port number.")
    _Launch(
        function=function,
        args=tuple(args),
        count=torch.cuda.device_count() or 1 if num_processes is None else num_processes,
        port=0 if str(use_port) == _ANY_PORT else int(use_port),
    ).run()


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> None:
    """Call `function(*args)` in several processes on the CPU, even if there are GPUs; see `notebook_launcher`.

    Even a single process is forked.

    Args:
        function: Function to run in each process.
        args: Positional arguments of `function`. Default: none.
        num_processes: Number of processes. Default: 2.

    Raises:
        ValueError, TypeError: If an argument is invalid, the session cannot be forked, or this process already belongs
            to a distributed run.
        RuntimeError: If a process fails. The message contains its traceback, signal or exit status.
    """
    _Launch(function=function, args=tuple(args), count=num_processes, variables={"CUDA_VISIBLE_DEVICES": ""}).run()


@dataclass(frozen=True)
class FunctionLaunch:
    """Number of processes that run a function, and how they start.

    Args:
        strategy: Name of the strategy, for error messages.
        count: Number of processes.
        start_method: ``"spawn"`` or ``"fork"``; see ``multiprocessing``.
    """

    strategy: str
    count: int
    start_method: str

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in each process, with the environment variables of its rank, and return rank zero's result.

        With ``"spawn"``, it must be a function of a module.

        Raises:
            ValueError: If the processes cannot be started, or the arguments cannot be sent to them.
            RuntimeError: If a process fails. The message contains its traceback, signal or exit status.
        """
        call = self._pickle((function, args)) if self.start_method == "spawn" else (function, args)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "result"
            _Launch(function=_run_call, args=(call, path), count=self.count, start_method=self.start_method).run()
            # Written by this process's own child, in a folder that only this user can write to.
            return pickle.loads(path.read_bytes())

    def _pickle(self, call: Any) -> bytes:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise RuntimeError(
                f"strategy={self.strategy!r} starts processes that import the main script, and the script starts the "
                "run again while it is imported. Put the run under `if __name__ == '__main__':`, or use strategy='ddp'."
            )
        fork = self.strategy.replace("spawn", "fork")
        try:
            # Not with multiprocessing's own pickler, which would let the processes share the memory of tensors.
            pickled = pickle.dumps(call)
        except Exception as error:
            raise ValueError(
                f"strategy={self.strategy!r} sends the task, its data and the callbacks to new processes, but they "
                f"can't be pickled: {error}. Define classes and functions at the top level of a module, or use "
                f"strategy={fork!r}, which sends nothing."
            ) from error
        if b"__main__" in pickled and not getattr(sys.modules["__main__"], "__file__", None):
            raise ValueError(
                f"strategy={self.strategy!r} starts processes that import the main script, but this session has none "
                f"and defines classes or functions that the run uses. Move them into a module, or use "
                f"strategy={fork!r}."
            )
        return pickled


def _run_call(call: Any, path: Path) -> None:
    function, args = pickle.loads(call) if isinstance(call, bytes) else call  # by this process's parent
    result = function(*args)
    if os.environ["RANK"] == "0":
        path.write_bytes(pickle.dumps(result))


@dataclass(kw_only=True)
class _Launch:
    """Launch of a function in several processes, with its settings."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    count: int
    port: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    start_method: str = "fork"

    def run(self) -> None:
        self._check()
        if self.count == 1 and not self.variables:
            self.function(*self.args)
        else:
            self._run_processes()

    def _check(self) -> None:
        check_int("num_processes", self.count, 1)
        if not callable(self.function):
            raise TypeError(f"function={self.function!r} must be callable, not {name_type(self.function)}.")
        if (launched := LaunchEnvironment.read()) is not None:
            raise ValueError(
                f"this process is already rank {launched.rank} of {launched.world_size}, so this launcher would start "
                "more processes in each rank. Call the function directly."
            )
        if self.start_method == "fork":
            self._check_fork()

    def _check_fork(self) -> None:
        if dist.is_initialized():
            raise ValueError(
                "this session already has a process group, created by an Accelerator, a Trainer or "
                "init_process_group(). Restart the session, and create the Accelerator inside the function."
            )
        if self.count == 1 and not self.variables:
            return
        if "fork" not in multiprocessing.get_all_start_methods():
            raise ValueError(
                f"the notebook launcher starts processes by forking, which {sys.platform} does not support. Put the "
                "code in a file and use `treadle launch`."
            )
        reach = _collect_reachable(self.function)
        for name, value in reach.items():
            if isinstance(value, World) or isinstance(getattr(value, "world", None), World):
                raise ValueError(
                    f"{name!r}, which the function uses, was created in this session. In each process, its world size "
                    "would be 1. Create it inside the function."
                )
        if torch.cuda.is_initialized():
            session = {**vars(sys.modules["__main__"]), **reach}
            gpu_names = [name for name, value in session.items() if _on_gpu(value)]
            cause = f"for {', '.join(map(repr, gpu_names))}" if gpu_names else "by a call such as `.cuda()`"
            raise ValueError(
                f"this session has used a GPU ({cause}), and CUDA does not work in processes forked afterwards. "
                "Restart the session and use GPUs only inside the function."
            )
        if not self.variables and _has_opened_gpu():
            raise ValueError(
                "this session has opened the GPU driver, for example by calling torch.cuda.is_available(), so forked "
                "processes can't use a GPU. Restart the session, and first set "
                "os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = '1', so that torch.cuda.is_available() does not open "
                "the driver."
            )

    def _run_processes(self) -> None:
        context: Any = multiprocessing.get_context(self.start_method)
        sys.stdout.flush()
        sys.stderr.flush()
        ranks: list[Any] = []
        pipes: list[Connection] = []
        stores: list[dist.TCPStore] = []
        try:
            with _block_interrupt():
                for rank in range(self.count):
                    ours, theirs = context.Pipe()
                    ranks.append(context.Process(target=self._run_rank, args=(rank, theirs, os.getpid())))
                    ranks[-1].start()
                    theirs.close()
                    pipes.append(ours)
            # Created after the forks, which could not contain its threads.
            stores.append(dist.TCPStore(_HOST, self.port, is_master=True, wait_for_workers=False))
            for pipe in pipes:
                pipe.send(stores[0].port)
            self._wait(ranks, pipes)
        finally:
            _end(ranks)
            # A rank's error refers to this frame and to the copy of its variables that `hide_frames` made, which forms
            # a cycle. A rank of the next launch that collected the store would wait for threads that it does not have.
            stores.clear()
            sweep(os.getpid(), all_ended=True)

    def _wait(self, ranks: list[Any], pipes: list[Connection]) -> None:
        waiting = dict(enumerate(ranks))
        while waiting:
            wait([rank.sentinel for rank in waiting.values()], timeout=_INTERVAL)
            ended = {local: rank.exitcode for local, rank in waiting.items() if rank.exitcode is not None}
            failed = {local: _receive_failure(pipes[local]) for local, code in ended.items() if code}
            if failed:
                # A killed rank comes first, then the one that reported first, because one failure makes the others
                # raise errors.
                first = min(failed, key=lambda local: (ended[local] >= 0, failed[local][0]))
                failure = self._describe_failure(first, ended[first], failed[first][1])
                hide_frames(failure)
                raise failure
            for local in ended:
                del waiting[local]

    def _describe_failure(self, local: int, code: int, text: str) -> RuntimeError:
        name = f"rank {local} of {self.count}"
        if text:
            return RuntimeError(f"{name} failed:\n{text}")
        with contextlib.suppress(ValueError):
            return RuntimeError(f"{name} was killed by {signal.Signals(-code).name}.")
        return RuntimeError(f"{name} ended with exit status {code}.")

    def _run_rank(self, rank: int, pipe: Connection, parent: int) -> None:
        """Run the function in a forked process, with the environment variables of its rank."""
        os.setsid()  # so that ending it ends its data workers, and only the parent gets the notebook's interrupt
        die_with_parent(parent)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.environ.update(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.count),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self.count),
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "MASTER_ADDR": _HOST,
                "MASTER_PORT": str(pipe.recv()),
                "TORCHELASTIC_RUN_ID": f"treadle-{parent}",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TREADLE_SUPERVISOR": str(parent),
                **self.variables,
            }
        )
        # The threads of the session's OpenMP are not in a fork, and the first parallel loop would wait for them.
        torch.set_num_threads(1 if self.start_method == "fork" else max(1, cpus() // self.count))
        try:
            if self.start_method == "fork":
                _check_autograd()
            self.function(*self.args)
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                return
            function_trace = error.__traceback__ and error.__traceback__.tb_next  # from the user's function on
            words = format_error(error, function_trace)
            pipe.send((time.time(), words[-20_000:]))  # at most what a pipe holds, because it is not read yet
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # the others may have ended, and a backend's shutdown would wait for them
        process_group.disconnect_at_exit()


def _check_autograd() -> None:
    try:
        torch.zeros(1, requires_grad=True).sum().backward()
    except RuntimeError as error:
        raise RuntimeError(
            "this session has called backward(), whose threads do not exist in a forked process. Restart the session "
            "and call backward() only inside the function, or use num_processes=1."
        ) from error


def _collect_reachable(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the globals and closure variables that a function's own code uses, by name.

    The dict is empty for a callable without Python code.
    """
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    session = getattr(function, "__globals__", {})
    around = {}
    for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # it is not filled yet
            around[name] = cell.cell_contents
    return {name: session[name] for name in code.co_names if name in session} | around


def _on_gpu(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        return any(parameter.is_cuda for parameter in value.parameters())
    return isinstance(value, torch.Tensor) and value.is_cuda


def _has_opened_gpu() -> bool:
    """Return whether this process has opened CUDA's driver, with or without torch. A fork could then not use it."""
    for descriptor in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) == "/dev/nvidia-uvm":
                return True
    return False


def _receive_failure(pipe: Connection) -> tuple[float, str]:
    """Return the time and text of a rank's failure report; infinity and "" without a report."""
    with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
        if pipe.poll():
            moment, text = pipe.recv()
            return float(moment), str(text)
    return float("inf"), ""


@contextlib.contextmanager
def _block_interrupt() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(ranks: list[Any]) -> None:
    """Send SIGTERM to the ranks that still run. If there were any, or a rank failed, kill the sessions of all ranks."""
    left = [rank for rank in ranks if rank.exitcode is None]
    for rank in left:
        rank.terminate()
    end = time.monotonic() + FAILURE_GRACE
    for rank in left:
        rank.join(max(0.0, end - time.monotonic()))
    if left or any(rank.exitcode for rank in ranks):
        for rank in ranks:
            kill_session(rank.pid)
    for rank in ranks:
        rank.join()
