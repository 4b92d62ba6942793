"""Processes that start at once: forked from an interpreter which has imported torch and Treadle, and done nothing else.

To import torch and the compiler, which its optimizers import, costs 4 s of CPU, nearly all that a process of a small
test needs. A forked process finds what a fresh one finds: its own session, environment, streams, working directory and
random state; one thread; no process group; nothing of the test imported. Strings hash differently in the two fork
servers, as in any two processes: what ranks 0 and 1 do may not hang on the order of a set. A process in whose
environment something is unusual that torch may read while it is imported is started the long way.

Two kinds of processes are forked: ranks (`fork`, for `processes.run`), and whole programs, for which `executables` is a
folder with a `python` that tests, command lines and launchers run instead of the interpreter (`forked_program.py`).
Programs that would find another Treadle, or whose environment has `UNIMPORTED`, import it themselves: 0.6 s of CPU.

The standard library's fork server (`multiprocessing.forkserver`) forks functions only, not programs with streams,
signals and an exit status of their own.
"""

import atexit
import builtins
import contextlib
import fcntl
import functools
import gc
import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from multiprocessing import connection
from pathlib import Path

from support import processes
from support.forked_program import MOST_DESCRIPTORS, number_from

COUNT = 2
REFUSED = -1  # said in place of a process id
IMPORTED = ("Trainer", "Accelerator")  # what nearly every rank uses of Treadle
SHARED = "PYTEST_FORK_SERVERS"  # variable with the names of the fork servers that a parent process has started
UNIMPORTED = "PYTEST_IMPORTS_TREADLE"  # variable of programs that have to import Treadle themselves


class Forked:
    """A process started by a fork server: as much of `subprocess.Popen` as `processes.run` needs.

    Args:
        address: Where the fork server listens.
        request: What the process does, see `_become`.
        streams: The descriptors that it gets as 0, 1 and 2.
    """

    def __init__(self, address, request, streams):
        self._reply = socket.socket(socket.AF_UNIX)
        self._reply.connect(address)
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps({**request, "descriptors": [0, 1, 2]}).encode())
            file.flush()
            socket.send_fds(self._reply, [b"."], [file.fileno(), *streams])
        self._code = None
        if (pid := number_from(self._reply)) is None:
            raise RuntimeError("the fork server of the ranks (tests/support/fork_server.py) died; its words are above")
        self.pid = pid

    def poll(self):
        return self.wait() if self._code is not None or connection.wait([self._reply], 0) else None

    def wait(self):
        if self._code is None:
            code = number_from(self._reply)
            self._code = -signal.SIGKILL if code is None else code  # no word: the keeper was killed, and it with it
            self._reply.close()
        return self._code


def fork(rank, folder, env, base):
    """Starts rank ``rank`` with the environment ``env``, in a fork server that was started with ``base``."""
    address = _start_servers(os.getpid(), tuple(sorted(base.items())))[rank % COUNT]
    request = {"call": str(folder), "env": dict(env), "cwd": os.getcwd(), "umask": None}
    with open(os.devnull) as nothing:
        return Forked(address, request, [nothing.fileno(), 1, 2])


@functools.cache
def _start_servers(owner, env):
    """Addresses of fork servers; they end with this process, which holds the only other end of their lifelines."""
    usual, *names = os.environ.get(SHARED, "").split(" ")
    if usual == _digest(env):
        return [f"\0{name}" for name in names]
    addresses = []
    for index in range(COUNT):  # both import at the same time
        address = f"\0treadle-fork-server-{owner}-{index}-{os.urandom(4).hex()}"
        held, lifeline = socket.socketpair()
        _LIFELINES.append(held)
        with lifeline, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            descriptors = [listener.fileno(), lifeline.fileno()]
            command = [sys.executable, "-m", "support.fork_server", *map(str, descriptors)]
            tests = Path(__file__).parents[1]
            subprocess.Popen(command, cwd=tests, env=dict(env), pass_fds=descriptors, start_new_session=True)
        addresses.append(address)
    return addresses


_LIFELINES = []


def share(base):
    """Start fork servers for this process and for those that it starts, such as the workers of one run of the tests."""
    env = tuple(sorted(base.items()))
    os.environ[SHARED] = " ".join([_digest(env), *(name.lstrip("\0") for name in _start_servers(os.getpid(), env))])


def _digest(env):
    """Of what a fork server compares with the environment of a process: one that differs would be refused."""
    return hashlib.sha256(repr(sorted(processes.early(dict(env)).items())).encode()).hexdigest()


@functools.cache
def executables(base):
    """A folder for ``PATH``: `python` and the programs of this environment that tests start, all forked.

    Args:
        base: The environment that fork servers are started with, as sorted pairs.
    """
    folder = tempfile.TemporaryDirectory(prefix="forked-programs-")
    atexit.register(folder.cleanup)
    known = {"servers": _start_servers(os.getpid(), base), "python": sys.executable}
    (Path(folder.name) / "known.json").write_text(json.dumps(known))
    # Isolated and without `site`: 20 ms, which is all that starting costs.
    text = f"#!{sys.executable} -IS\n{Path(__file__).with_name('forked_program.py').read_text()}"
    for name in ("python", "treadle", "torchrun"):
        file = Path(folder.name) / name
        file.write_text(text)
        file.chmod(0o755)
    return Path(folder.name)


# -- in the fork server -----------------------------------------------------------------------------------------------


def serve(listener, lifeline, usual):
    """Fork a keeper per request, until the lifeline is closed, whose other end the process that started this one holds.

    Requests are answered whose environment is the ``usual`` one, as far as torch reads it when it is imported.
    """
    server = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a keeper
    while lifeline not in connection.wait([listener, lifeline]):
        reply, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            processes.die_with(server)
            _keep(reply, lifeline, usual)
        reply.close()


def _keep(reply, lifeline, usual):
    """Fork the process that ``reply`` asks for, and tell its status; kill its session where nobody waits any more."""
    _, descriptors, _, _ = socket.recv_fds(reply, 1, 1 + MOST_DESCRIPTORS)
    request = json.loads(os.pread(descriptors[0], 1 << 24, 0)) if descriptors else None
    if request is None or processes.early(request["env"]) != usual:
        _say(reply, REFUSED)
        os._exit(0)
    keeper = os.getpid()
    if (pid := os.fork()) == 0:
        processes.die_with(keeper)
        os.setsid()
        _say(reply, os.getpid())
        reply.close()
        lifeline.close()
        _become(request, descriptors)
        if "target" in request:
            _end(_run(request))
        if (code := processes.rank_main(Path(request["call"]))) != 0:
            os._exit(code)  # not waiting for what a group does at its end whose other members still hang
        _end(0)
    for descriptor in descriptors:
        os.close(descriptor)
    end = os.pidfd_open(pid)
    if end not in connection.wait([end, reply, lifeline]):
        for kill in (os.killpg, os.kill):  # also where it is about to begin its session
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
    _say(reply, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    _say(reply, _has_group(pid))
    # Others of its session may live on, such as data workers: until whoever stands for them is killed.
    while _has_group(pid) and not connection.wait([reply, lifeline], 0.2):
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def main(listener, lifeline):
    """Imports what all forked processes find, and serves."""
    usual = processes.early(os.environ)  # before a package adds to it
    processes.heed_signals()
    import multiprocessing.spawn  # noqa: F401  # keeps the path of the interpreter

    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401  # most of what scikit-learn imports, which itself starts a thread
    import torch
    import torch._dynamo  # noqa: F401  # optimizers import it when they are made

    import treadle

    for name in IMPORTED:
        getattr(treadle, name)

    if len(threads := os.listdir("/proc/self/task")) != 1:
        raise RuntimeError(
            f"a fork server must not have {len(threads)} threads: forked processes would lack all but one"
        )
    gc.collect()
    gc.freeze()  # else a process looks through all of torch whenever it collects
    serve(listener, lifeline, usual)


def _has_group(pid):
    """Whether a process is left in the group of a process that has ended; its number is not given to another then."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _become(request, descriptors):
    """Takes the place in the world that the request tells."""
    wanted = request["descriptors"]
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, max(wanted) + 1) for one in descriptors[1:]]
    for descriptor in descriptors:
        os.close(descriptor)
    for mine, number in zip(moved, wanted, strict=True):
        os.dup2(mine, number)
        os.close(mine)
    os.chdir(request["cwd"])
    if request["umask"] is not None:
        os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # kept from an environment with another TMPDIR
    sys.modules["numpy"].random.seed()


def _run(request):
    """Runs a program as the interpreter does when it is started with these arguments; returns its exit status."""
    imports_itself = ("pytest", "_pytest", *(["treadle"] if _has_own_treadle(request) else []))
    for name in [name for name in sys.modules if name.partition(".")[0] in imports_itself]:
        del sys.modules[name]
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    for text in request["warnings"]:
        sys.warnoptions.append(text)
        warnings._processoptions([text])  # type: ignore[attr-defined]
    sys.dont_write_bytecode |= not request["bytecode"]
    unbuffered = request["unbuffered"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, unbuffered) if number in request["descriptors"] else None
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.executable, sys.orig_argv, sys.argv = request["executable"], request["orig_argv"], request["argv"]
    # The first place, which is the folder of the tests, becomes the program's.
    listed = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in listed if path and path not in sys.path[1:]]
    try:
        _execute(request["kind"], request["target"])
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
        sys.excepthook(type(error), error, trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _has_own_treadle(request):
    """Whether a program finds another Treadle than the tests do, or is asked to import it: that costs 0.6 s of CPU."""
    target = Path(request["target"]).parent if request["kind"] == "script" else Path()
    places = [target, *map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
    return UNIMPORTED in os.environ or any(place.is_file() or (place / "treadle").exists() for place in places)


def _stream(number, unbuffered):
    """One of the three standard streams, as the interpreter makes it."""
    at_once = unbuffered and number > 0
    raw = open(number, "wb" if number else "rb", 0 if at_once else -1, closefd=False)  # noqa: SIM115
    by_line = not at_once and (number == 2 or os.isatty(number))
    errors = "backslashreplace" if number == 2 else "strict"
    stream = io.TextIOWrapper(raw, "utf-8", errors, line_buffering=by_line, write_through=at_once)
    stream.mode = "w" if number else "r"
    return stream


def _execute(kind, target):
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __spec__=None)
    if kind == "script":
        sys.path[0] = os.path.dirname(os.path.realpath(target))
        module.__file__ = os.path.abspath(target)
        with open(target, "rb") as file:
            code = compile(file.read(), module.__file__, "exec")
    elif kind == "-m":
        import runpy

        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
        return
    else:
        sys.path[0] = ""
        code = compile(sys.stdin.read() if kind == "-" else target, target if kind == "-" else "<string>", "exec")
    exec(code, module.__dict__)


def _end(code):
    """Ends a forked process as the interpreter ends one, but leaves torch standing: to take it down costs 0.3 s.

    Args:
        code: The exit status, or the signal that ends it, negative.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if (program := sys.modules["__main__"].__dict__) is not globals():
        program.clear()
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or 120  # as of an interpreter that can't write its last words
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _say(reply, number):
    with contextlib.suppress(OSError):  # nobody waits for it any more
        reply.send(number.to_bytes(8, "little", signed=True))


if __name__ == "__main__":
    main(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
