"""Start the ranks of one machine: a supervisor, itself no rank, on top of torch's own elastic agent."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

GRACE = 30.0
FAILURE_GRACE = 2.0
_POLL = 0.01  # seconds; two failures closer than this can't be told apart, and a rank's death throes take longer
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_TEST_RUNNERS = ("pytest", "py.test", "unittest")


def relaunch(nproc: int, *, grace: float = GRACE) -> NoReturn:
    """Runs this very script again in `nproc` ranks, and ends this process with their exit status.

    This is what `Trainer(devices=2)` in a plain `python train.py` calls. Interpreter flags, `-m` and the command line
    are kept; the code above the call runs once here and once in each rank.

    Args:
        nproc: Number of ranks.
        grace: Seconds the ranks have to save and leave after a SIGTERM or SIGINT. Default: 30.

    Raises:
        SystemExit: Always, with the status that `supervise` describes, when the ranks have ended.
        ValueError: There is no script to run again: a prompt, a notebook, `python -c`, a test runner. Nothing was
            started.
    """
    status = supervise(nproc, grace=grace)
    for stream in (sys.stdout, sys.stderr):
        # The reader of a pipe may be gone by now, which must not replace the ranks' status by our own.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    sys.exit(status)


def supervise(
    nproc: int,
    argv: list[str] | None = None,
    *,
    run_id: str | None = None,
    grace: float = GRACE,
    failure_grace: float = FAILURE_GRACE,
) -> int:
    """Runs a command in `nproc` processes of this machine, with torchrun's variables, and waits for all of them.

    The calling process is a supervisor and no rank. It forwards SIGTERM, SIGINT, SIGHUP and SIGQUIT to every rank
    (those it doesn't ignore itself: `nohup` stays effective), and a second signal kills at once. The first rank to
    fail ends the others. Every launch listens on a port of its own which the system picks.

    `TREADLE_SUPERVISOR` hands each rank this process's id for `die_with_parent`. `OMP_NUM_THREADS`, where unset,
    becomes this process's CPUs divided by `nproc`.

    Args:
        nproc: Number of ranks, at least 1.
        argv: The command, program first. Default: this script with its flags and arguments.
        run_id: Name of this run, `TORCHELASTIC_RUN_ID` in the ranks. Default: a random one.
        grace: Seconds from a forwarded signal to SIGKILL. Default: 30.
        failure_grace: Seconds which the others have from SIGTERM to SIGKILL once a rank failed. Default: 2, as they
            can only wait for a rank that is gone.

    Returns:
        0 if every rank exited with 0; else the status of the rank that failed first in time, 128 + n for one killed
        by signal n; 128 + n if this process got signal n, whatever the ranks then did.

    Raises:
        ValueError: `nproc` is no positive number, there is no script to run again, or this is not the main thread.
        OSError: The program can't be started.
    """
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise ValueError(f"nproc={nproc!r} must be a number of processes, at least 1.")
    command = own_command(nproc) if argv is None else [str(part) for part in argv]
    if threading.current_thread() is not threading.main_thread():
        # Signals reach the main thread only, and Linux ends a rank with the thread that started it.
        raise ValueError(f"devices={nproc} starts {nproc} processes, which only the main thread can supervise.")
    # Text still in a buffer would come out after that of the ranks.
    sys.stdout.flush()
    sys.stderr.flush()
    handled = [name for name in _SIGNALS if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN]
    variables = {
        "TREADLE_SUPERVISOR": str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, _cpus() // nproc)),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(handled),
    }
    with _environment(variables), _signals_restored(), _quiet_agent():
        return _run_agent(nproc, command, run_id or uuid.uuid4().hex, grace, failure_grace)


def die_with_parent(supervisor_pid: int) -> None:
    """Makes the system kill this rank when its supervisor dies, however that dies. Does nothing off Linux.

    The signal is SIGKILL: a supervisor that was itself killed can no longer end a rank which ignores or never gets to
    handle a gentler one, and a checkpoint cut short is never published. A process that is not the supervisor's own
    child, such as a program started by a rank, inherits the variables but is left alone.

    Args:
        supervisor_pid: The supervisor's process id, as handed down in `TREADLE_SUPERVISOR`.
    """
    if sys.platform != "linux":
        return
    import ctypes

    set_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if os.getppid() == supervisor_pid:
        prctl(set_death_signal, signal.SIGKILL)
    # The supervisor may have died before that call took effect, or before this process got here at all.
    if os.getppid() != supervisor_pid and not _alive(supervisor_pid):
        os.kill(os.getpid(), signal.SIGKILL)


def has_script() -> bool:
    """Tells whether this process runs a script or module that `relaunch` could run again."""
    return _obstacle() is None


def own_command(nproc: int) -> list[str]:
    """Builds the command that runs this very script again.

    Args:
        nproc: Number of ranks asked for, named in the error.

    Returns:
        Interpreter, its flags, the script's absolute path or `-m` and the module's name, then the arguments.

    Raises:
        ValueError: There is no script to run again.
    """
    if (obstacle := _obstacle()) is not None:
        raise ValueError(
            f"devices={nproc} runs this script again in {nproc} processes, but {obstacle}. Put the code into a file "
            f"and run `python train.py` or `torchrun --nproc-per-node {nproc} train.py`, or use devices=1. "
            "(In a notebook: notebook_launcher, which is coming.)"
        )
    # The function behind multiprocessing's spawn. It leaves out -u, which shows only in the stream it makes.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    if getattr(sys.__stdout__, "write_through", False):
        flags.append("-u")
    target = _target()
    assert target is not None
    return [sys.executable, *flags, *target, *_arguments(target)]


def _target() -> list[str] | None:
    """What to run again: a script's absolute path, or `-m` and a module's name; None where there is no file."""
    main = sys.modules.get("__main__")
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None and name != "__main__":
        return ["-m", name.removesuffix(".__main__")]
    # That name is what a folder or zip file with a __main__.py inside runs under.
    file = getattr(main, "__file__", None) if name is None else sys.argv[0]
    # Absolute: the script may have changed its directory since.
    return [os.path.abspath(file)] if file is not None and os.path.exists(file) else None


def _arguments(target: list[str]) -> list[str]:
    """The arguments as the interpreter got them: those in `sys.argv` may be used up by the script."""
    given, name = sys.orig_argv, target[1] if target[0] == "-m" else sys.argv[0]
    # Not there if a debugger stands between; then `sys.argv` is what it left for the script.
    return given[given.index(name) + 1 :] if name in given else sys.argv[1:]


def _obstacle() -> str | None:
    """Says why this process can't be run again, or None if it can."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return "this is a notebook or an IPython session"
    if hasattr(sys, "ps1"):
        return "this is an interactive prompt"
    target = _target()
    if target is None:
        return "the code came from `python -c` or standard input, which can't be read again"
    program = os.path.basename(target[-1]).removesuffix(".exe")
    if program in _TEST_RUNNERS:
        return f"this is {program}, which would run its whole session again in each of them"
    if multiprocessing.parent_process() is not None:
        return "this is a child of multiprocessing (is `if __name__ == '__main__':` missing in the script?)"
    return None


def _cpus() -> int:
    """CPUs this process may use: in a container or a batch job fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for a while: torch's agent starts each rank with a copy of this process's own."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """Puts back the signal handlers which torch's agent replaces and keeps."""
    before = {number: signal.getsignal(number) for number in _signal_numbers()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: set by something that is not Python
                signal.signal(number, handler)


def _signal_numbers() -> list[signal.Signals]:
    return [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Drops what the agent logs about every rank it ends; one report of ours says it. Other messages pass."""
    expected = ("Sending process", "Unable to shutdown process", "failed (exitcode:", "Received ")
    loggers = [
        logging.getLogger(f"torch.distributed.elastic.{name}") for name in ("multiprocessing.api", "agent.server.api")
    ]

    def unexpected(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(expected)

    for logger in loggers:
        logger.addFilter(unexpected)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(unexpected)


def _run_agent(nproc: int, command: list[str], run_id: str, grace: float, failure_grace: float) -> int:
    # A second of imports, which only a supervisor has to pay.
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    # Port 0: the system picks a free one and the agent keeps it open, so two launches never meet.
    place = RendezvousParameters("c10d", "localhost:0", run_id, 1, 1, local_addr="localhost", is_host=True)
    rendezvous = get_rendezvous_handler(place)
    spec = WorkerSpec(
        role="treadle",
        local_world_size=nproc,
        entrypoint=command[0],
        # The agent fills in templates such as ${local_rank}; a command line must arrive as it is.
        args=tuple(part.replace("$", "$$") for part in command[1:]),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=_POLL,
        local_addr="localhost",
    )
    agent = _agent_class()(spec, grace, failure_grace)
    stop: signal.Signals | None = None
    try:
        agent.run()
    except SignalException as error:
        stop = error.sigval
    finally:
        for number in _signal_numbers():
            signal.signal(number, signal.SIG_IGN)  # what is left takes a moment and must be done
        agent.finish(sweep=stop is not None)
        rendezvous.shutdown()
    return _verdict(nproc, agent.ends, stop)


def _agent_class() -> type[Any]:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    class Agent(LocalElasticAgent):
        """torch's agent, which also knows who ended first and keeps to our times for the rest.

        Upstream looks every 0.1 s and can't order two failures in between. After a failure it gives the others a
        fixed 30 s, which `shutdown_timeout` does not change (torch 2.11, 2.13); that one holds after a signal to
        the agent, and only since torch 2.13.
        """

        def __init__(self, spec: Any, grace: float, failure_grace: float) -> None:
            # No log directory: a killed supervisor would leave it behind.
            super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull))
            self.grace = grace
            self.failure_grace = failure_grace
            self.closing = False
            self.ends: dict[int, int] = {}  # rank: exit code, in the order of time

        def _monitor_workers(self, worker_group: Any) -> Any:
            for _ in range(10):  # after each return the agent asks its store for news, which costs more than a look
                time.sleep(_POLL)
                if self._note_ends() or len(self.ends) == len(worker_group.workers):
                    break
            else:
                # Not torch's own look: one that met a failure before ours would start its 30 s.
                return RunResult(state=WorkerState.HEALTHY)
            if failed := [code for code in self.ends.values() if code]:
                # A rank that was asked to stop did so in order, and the others may still be saving.
                stopped = failed[0] in (128 + signal.SIGTERM, 128 + signal.SIGINT)
                self._close(signal.SIGTERM, self.grace if stopped else self.failure_grace)
            return super()._monitor_workers(worker_group)

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
            # torch comes here again when a second signal broke off the first wait.
            death_sig, self.closing = (signal.SIGKILL if self.closing else death_sig), True
            self._close(death_sig, self.grace)
            super()._shutdown(death_sig)

        def _close(self, number: signal.Signals, seconds: float) -> None:
            context: Any = self._pcontext
            if context is not None:
                context.close(number, timeout=seconds)

        def _note_ends(self) -> bool:
            """Notes who ended since the last look, and tells whether any rank has failed by now."""
            handlers = {} if self._pcontext is None else self._pcontext.subprocess_handlers  # type: ignore[attr-defined]
            codes = {rank: handler.proc.poll() for rank, handler in handlers.items() if rank not in self.ends}
            # Within one look a killed rank comes first: it is what makes others raise.
            for rank, code in sorted(codes.items(), key=lambda end: end[1] is None or end[1] >= 0):
                if code is not None:
                    self.ends[rank] = code
            return any(self.ends.values())

        def finish(self, sweep: bool) -> None:
            """Leaves no process behind; after a failure not even what the ranks had started, such as data workers."""
            if self._pcontext is None:
                return
            if self._note_ends() or sweep:
                for pid in self._pcontext.pids().values():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)  # each rank leads a session of its own
            self._close(signal.SIGKILL, 1.0)
            self._note_ends()

    return Agent


def _verdict(nproc: int, ends: Mapping[int, int], stop: signal.Signals | None) -> int:
    """Prints how it ended, unless well, and returns the exit status."""
    # A rank that not even SIGKILL ended, as it hangs in a driver, is missing in `ends`.
    codes = dict(ends) | {rank: -signal.SIGKILL for rank in range(nproc) if rank not in ends}
    words = {rank: _ending(code) for rank, code in codes.items()}
    first = next((rank for rank, code in codes.items() if code), None)
    if stop is not None:
        lines = [f"{stop.name} was forwarded to {nproc} rank(s)"]
        status = 128 + stop
    elif first is not None:
        for rank in list(codes)[: list(codes).index(first)]:
            words[rank] += " before that"
        hint = " (by hand, or by the system for want of memory)" if codes[first] == -signal.SIGKILL else ""
        lines = [f"rank {first} of {nproc} failed first: {words.pop(first)}{hint}"]
        status = codes[first] if codes[first] > 0 else 128 - codes[first]
    else:
        return 0
    for ending in dict.fromkeys(words.values()):
        ranks = ", ".join(str(rank) for rank in sorted(words) if words[rank] == ending)
        lines.append(f"rank {ranks}: {ending}")
    print("\n".join(f"treadle: {line}" for line in lines), file=sys.stderr, flush=True)
    return status


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    name = next((number.name for number in signal.Signals if number == -code), f"signal {-code}")  # not SIGRTMIN + 1
    return f"killed by {name}"
