"""Real processes for tests: `run` a function in every rank of a world, or a `script` in a fresh interpreter."""

import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NPROC_PER_NODE")
LAUNCH_PREFIXES = ("GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TREADLE_", "SLURM_", "OMPI_", "PMI_", "PMIX_")
# What is read after torch was imported: a rank with another value of these may be forked from a process with torch.
READ_LATE = (
    *("GLOO_", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR"),
    "PL_",  # of seed_everything
    "KMP_",  # of another OpenMP than torch's; scikit-learn sets some
    *("AWS_", "FSSPEC_", "PYTEST_", "MLFLOW_", "_MLFLOW_", "WANDB_"),  # packages set some themselves
    *("AIM_", "CLEARML_", "COMET_", "GOODSEED_", "RAY_", "SWANLAB_", "TRACKIO_"),
)
# What matters to processes that are started from the one with torch, or where there are GPUs, alone.
NEVER_READ = {"PATH", "TMPDIR", "OLDPWD", "PWD", "SHLVL", "_", "COLUMNS", "LINES", "NO_COLOR", "PYTHONPATH", "TERM"}
if not os.path.exists("/dev/nvidiactl"):
    NEVER_READ.add("CUDA_VISIBLE_DEVICES")


class RankError(RuntimeError):
    """A rank failed in a way that left no exception to raise again, or what a raised one looked like over there."""


def clean_environment(env=None):
    """Builds the environment of a process nobody launched: this one's without any launch variable, plus `env`.

    Args:
        env: Variables to add or to replace. Default: none.

    Returns:
        A new dictionary for `subprocess`; with one OpenMP thread unless `env` says otherwise.
    """
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCH_VARIABLES and not k.startswith(LAUNCH_PREFIXES)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | dict(env or {})


def run(fn, world, *args, timeout=120, env=None):
    """Calls `fn(*args)` in `world` processes which see the variables torchrun sets, and returns what each returned.

    No process group is made beforehand: `fn` starts from where a launched script starts. Every call has its own
    port, taken by a store which lives here as torchrun's lives in its agent, so ranks may leave in any order and two
    calls never meet. A group which `fn` leaves behind is destroyed.

    Args:
        fn: A function at the top level of a test file; the file is loaded again, by its path, in every process.
        world: Number of processes, 1 included.
        args: Arguments of `fn`, the same for every rank; they are pickled.
        timeout: Seconds after which all ranks are killed. Default: 120.
        env: More environment variables for every rank. Default: none. GPUs are hidden unless it names some.

    Returns:
        The return values in the order of the ranks.

    Raises:
        Exception: What the first failing rank raised, caused by a `RankError` with that rank's traceback. The other
            ranks are killed.
        RankError: A rank died, left without a result, or raised something that can't be pickled.
        TimeoutError: Not done in time; the message holds the stacks of all ranks.
    """
    from torch.distributed import TCPStore

    if "<" in fn.__qualname__:
        raise ValueError(f"run({fn.__qualname__}): the function must stand at the top level of its file")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    base = clean_environment({"CUDA_VISIBLE_DEVICES": "", **(env or {})}) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": f"test-{os.getpid()}-{store.port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    deadline = time.time() + timeout
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        call = {"file": fn.__code__.co_filename, "module": fn.__module__, "function": fn.__qualname__}
        # The arguments are pickled apart: their classes may live in the test file, which the child loads first.
        payload = call | {"path": sys.path, "deadline": deadline, "parent": os.getpid(), "args": pickle.dumps(args)}
        (folder / "call").write_bytes(pickle.dumps(payload))
        ranks = []
        try:
            for rank in range(world):
                ranks.append(_start(rank, folder, base | {"RANK": str(rank), "LOCAL_RANK": str(rank)}))
            return [record["value"]() for record in _wait(fn, ranks, folder, deadline, timeout)]
        finally:
            _kill(ranks)


def in_own_process(test):
    """Has a test run in a process of its own, as one that sends signals to itself must: they would end a test worker.

    Args:
        test: A function at the top level of a test file, whose fixtures and parameters can be pickled.
    """
    names = list(inspect.signature(test).parameters)

    @functools.wraps(test)
    def started(*args, **kwargs):
        if "RANK" in os.environ:  # that process
            test(*args)
        else:
            run(test, 1, *(kwargs[name] for name in names))

    return started


def early(env):
    """The part of an environment that may matter while torch is imported."""
    late = (*LAUNCH_PREFIXES, *READ_LATE)
    never = {*LAUNCH_VARIABLES, *NEVER_READ}
    return {k: v for k, v in env.items() if k not in never and not k.startswith(late)}


# As it is before any test: what a fork server is started with.
_BASE = clean_environment({"CUDA_VISIBLE_DEVICES": ""})
_USUAL = early(_BASE)


def heed_signals():
    """Undo what a shell does to its background jobs, and nohup to all: they would ignore interrupts, or hangups."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def share_fork_servers():
    """Start what all workers of this run of the tests fork their processes from: each pair costs 8 s of CPU."""
    if sys.platform == "linux":
        from support import fork_server

        fork_server.share(_BASE)


def _start(rank, folder, env):
    """Starts a process of `run`: forked, which takes no time, unless its environment forbids that."""
    if sys.platform == "linux" and early(env) == _USUAL:
        from support import fork_server

        return fork_server.fork(rank, folder, env, _BASE)
    command = [sys.executable, os.path.abspath(__file__), str(folder)]
    return subprocess.Popen(command, env=env, start_new_session=True)


def _wait(fn, ranks, folder, deadline, timeout):
    """Waits for every rank's record of success; raises on the first failure or past the deadline."""
    seen_failure = False
    while True:
        codes = [process.poll() for process in ranks]
        ended = [rank for rank, code in enumerate(codes) if code is not None]
        records = {rank: record for rank in range(len(ranks)) if (record := _load(folder, rank)) is not None}
        # A rank which died without a word comes first: the errors of the others follow from it.
        silent = [rank for rank in ended if rank not in records]
        if silent:
            raise RankError(f"rank {silent[0]} of {fn.__qualname__} {_ending(codes[silent[0]])} and left no result")
        failed = [rank for rank in ended if "error" in records[rank]]
        if failed and not seen_failure and len(ended) < len(ranks):
            seen_failure = True
            time.sleep(0.2)  # the end of a killed rank may be known later than the error that follows from it
            continue
        if failed:
            errors = [rank for rank, record in records.items() if "error" in record]
            first = min(errors, key=lambda rank: records[rank]["time"])
            _raise(fn, first, records[first])
        if len(ended) == len(ranks):
            return [records[rank] for rank in ended]
        # One second more than the ranks have, so that their stacks are written.
        if time.time() > deadline + 1:
            running = [rank for rank in range(len(ranks)) if rank not in ended]
            stacks = [f"--- rank {rank}, {'running' if rank in running else 'ended'}:\n" for rank in range(len(ranks))]
            text = "".join(head + _stack(folder, rank) for rank, head in enumerate(stacks))
            raise TimeoutError(f"{fn.__qualname__}: ranks {running} not done after {timeout:g} s\n{text}")
        time.sleep(0.02)


def _raise(fn, rank, record):
    cause = RankError(f"rank {rank} of {fn.__qualname__} raised\n{record['text']}")
    try:
        error = record["error"]()
    except Exception:
        raise cause from None
    if not isinstance(error, BaseException):
        raise cause
    raise error from cause


def _load(folder, rank):
    """Reads a rank's record; values and errors stay pickled until asked for, so one broken pickle hides no other."""
    try:
        record = pickle.loads((folder / f"result{rank}").read_bytes())
    except FileNotFoundError:
        return None
    for key in ("value", "error"):
        if key in record:
            record[key] = lambda blob=record[key]: pickle.loads(blob)
    return record


def _ending(code):
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with status {code}"


def _stack(folder, rank):
    with contextlib.suppress(FileNotFoundError):
        return (folder / f"stack{rank}").read_text() or "no stack written (done, stopped, or not yet started)\n"
    return "never reached Python code\n"


def _kill(processes):
    """Kills each process with its session: a rank may have data workers."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def programs():
    """A folder to put first in ``PATH``: its `python`, `treadle` and `torchrun` start at once, see `fork_server`."""
    if sys.platform != "linux":
        return Path(sys.executable).parent
    from support import fork_server

    return fork_server.executables(tuple(sorted(_BASE.items())))


def python():
    """The interpreter that tests start programs with, in place of `sys.executable`."""
    return str(programs() / "python") if sys.platform == "linux" else sys.executable


def script(path_or_source, *args, env=None, timeout=120, fresh=False):
    """Runs a script in a process which no launcher started.

    Args:
        path_or_source: A `Path` to a script, or its source text, which is run as `train.py` from an empty folder of
            its own (also its working directory).
        args: Command line arguments for the script.
        env: More environment variables. Default: none.
        timeout: Seconds after which the script is ended. Default: 120.
        fresh: Whether the interpreter is a new one which imports torch itself, for tests of what is imported, or of
            the memory that this takes. Default: False, it is forked from one which has imported torch.

    Returns:
        Exit status and captured text of both streams; a non-zero status does not raise.

    Raises:
        TimeoutError: Not done in time; the message holds its stacks and what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="script-") as name:
        folder = Path(name) / "home"
        folder.mkdir()
        path = path_or_source
        if isinstance(path, str):
            path = folder / "train.py"
            path.write_text(str(path_or_source))
        command = [sys.executable if fresh else python(), str(path.resolve()), *args]
        cwd = folder if isinstance(path_or_source, str) else None
        # Files, not pipes: a process left over by a killed script would hold a pipe open and the reader with it.
        with (Path(name) / "out").open("w+") as out, (Path(name) / "err").open("w+") as err:
            process = subprocess.Popen(
                command, env=clean_environment(env), cwd=cwd, stdout=out, stderr=err, start_new_session=True
            )
            try:
                done = process.wait(timeout)
            except subprocess.TimeoutExpired:
                done = None
                process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            finally:
                _kill([process])
            texts = []
            for stream in (out, err):
                stream.seek(0)
                texts.append(stream.read())
        if done is None:
            raise TimeoutError(f"{path}: not done after {timeout:g} s\n--- stdout:\n{texts[0]}--- stderr:\n{texts[1]}")
        return subprocess.CompletedProcess(command, done, *texts)


def _module(file, name):
    """Loads a test file under the name pytest gave it, so that pickles name its classes the same on both sides."""
    for parent in [name[:i] for i, letter in enumerate(name) if letter == "."]:
        # pytest makes up the packages above a test file in the same way
        sys.modules.setdefault(parent, types.ModuleType(parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def die_with(parent):
    """Ends this process when its parent does: a killed test run leaves nothing behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def rank_main(folder):
    """What each process of `run` does; returns its exit status."""
    call, rank = pickle.loads((folder / "call").read_bytes()), os.environ["RANK"]
    stack = (folder / f"stack{rank}").open("w")
    faulthandler.dump_traceback_later(max(0.1, call["deadline"] - time.time()), file=stack)
    sys.path[:] = call["path"]
    status = 0
    record = {}
    try:
        # This file is the main module here, so a caller which is one itself gets another name.
        name = "test_main" if call["module"] == "__main__" else call["module"]
        target = _module(call["file"], name)
        for part in call["function"].split("."):
            target = getattr(target, part)
        record["value"] = pickle.dumps(target(*pickle.loads(call["args"])))
    except BaseException as error:
        status = 1
        record = {"time": time.time(), "text": traceback.format_exc(), "error": b""}
        with contextlib.suppress(Exception):
            record["error"] = pickle.dumps(error)
    part = folder / f"part{rank}"
    part.write_bytes(pickle.dumps(record))
    part.rename(folder / f"result{rank}")
    if status == 0 and (torch := sys.modules.get("torch")) is not None and torch.distributed.is_initialized():
        time.sleep(0.01)  # torch 2.6 joins gloo's threads with the GIL in hand, which they may need for a last tensor
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    # Leaving at once: a failed rank must not wait for the atexit hooks of a group whose other members still hang.
    folder = Path(sys.argv[1])
    die_with(pickle.loads((folder / "call").read_bytes())["parent"])
    if (code := rank_main(folder)) != 0:
        os._exit(code)
