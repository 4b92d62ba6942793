"""Ranks that start at once: forked from a process which has imported torch and done nothing else.

To import torch costs 2.4 s of CPU (half of it the compiler, which its optimizers import), nearly all that a rank of a
small test needs. A forked rank finds what a fresh one finds: its own session, environment, streams, working directory
and random state; one thread; no process group; nothing of Treadle or of the test imported. Strings hash differently in
the two nurseries, as in any two processes: what ranks 0 and 1 do may not hang on the order of a set. A rank in whose
environment something is unusual that torch may read while it is imported is started the long way, by `processes.run`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

COUNT = 2


class Forked:
    """A rank started by a nursery: as much of `subprocess.Popen` as `processes.run` needs."""

    def __init__(self, control: socket.socket, folder: Path, env: Mapping[str, str]) -> None:
        self._reply, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as request, theirs, open(os.devnull) as nothing:
            request.write(json.dumps({"folder": str(folder), "env": dict(env), "cwd": os.getcwd()}).encode())
            request.flush()
            socket.send_fds(control, [b"."], [request.fileno(), nothing.fileno(), 1, 2, theirs.fileno()])
        self._words: list[int] = []
        self._code: int | None = None
        self._read(1)
        if not self._words:
            raise RuntimeError("the nursery of the ranks (tests/nursery.py) died; its words are above")
        self.pid = self._words[0]

    def poll(self) -> int | None:
        return self._status(block=False)

    def wait(self) -> int | None:
        return self._status(block=True)

    def _status(self, block: bool) -> int | None:
        if self._code is None:
            self._reply.setblocking(block)
            if self._read(2):
                # Without a word the nursery was killed, and its ranks with it.
                self._code = self._words[1] if len(self._words) == 2 else -signal.SIGKILL
                self._reply.close()
        return self._code

    def _read(self, count: int) -> bool:
        """Whether ``count`` numbers are here, or none will come."""
        while len(self._words) < count:
            try:
                word = self._reply.recv(8)
            except BlockingIOError:
                return False
            if not word:
                return True
            self._words.append(int.from_bytes(word, "little", signed=True))
        return True


def fork(rank: int, folder: Path, env: Mapping[str, str], base: Mapping[str, str]) -> Forked:
    """Starts rank ``rank`` with the environment ``env``, in a nursery that was started with ``base``."""
    return Forked(_nursery(rank % COUNT, os.getpid(), tuple(sorted(base.items()))), folder, env)


@functools.cache
def _nursery(index: int, owner: int, env: tuple[tuple[str, str], ...]) -> socket.socket:
    """What to ask a nursery through; it ends with this process, which holds the only other end."""
    if index + 1 < COUNT:
        _nursery(index + 1, owner, env)  # both import at the same time
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, os.path.abspath(__file__), str(theirs.fileno())]
        subprocess.Popen(command, env=dict(env), pass_fds=[theirs.fileno()], start_new_session=True)
    return ours


def main(control: socket.socket) -> int:
    """Forks a rank per request until the other end is closed; returns the status of the process, a rank's too."""
    import numpy
    import processes
    import torch
    import torch._dynamo  # noqa: F401  # optimizers import it when they are made

    if len(threads := os.listdir("/proc/self/task")) != 1:
        raise RuntimeError(f"a nursery must not have {len(threads)} threads: forked ranks would lack all but one")
    gc.collect()
    gc.freeze()  # else a rank looks through all of torch when it collects and when it ends: 0.8 s instead of 0.2
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    ranks: dict[int, tuple[int, socket.socket]] = {}
    nursery = os.getpid()
    while True:
        for key, _ in selector.select():
            if key.fd != control.fileno():
                pid, reply = ranks.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _say(reply, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                reply.close()
                continue
            word, descriptors, _, _ = socket.recv_fds(control, 1, 5)
            if not word:
                for pid, _ in ranks.values():
                    os.killpg(pid, signal.SIGKILL)
                return 0
            reply = socket.socket(fileno=descriptors[4])
            if (pid := os.fork()) == 0:
                processes.die_with(nursery)
                selector.close()
                for other in (control, *(known for _, known in ranks.values())):
                    other.close()
                for pidfd in ranks:
                    os.close(pidfd)
                request = _become(descriptors[:4])
                numpy.random.seed()
                _say(reply, os.getpid())
                reply.close()
                return processes.rank_main(Path(request["folder"]))
            for descriptor in descriptors[:4]:
                os.close(descriptor)
            pidfd = os.pidfd_open(pid)
            ranks[pidfd] = (pid, reply)
            selector.register(pidfd, selectors.EVENT_READ)


def _become(descriptors: list[int]) -> dict:
    """Takes the place in the world that the request tells."""
    os.setsid()
    request = json.loads(os.pread(descriptors[0], 1 << 24, 0))
    for stream, descriptor in enumerate(descriptors[1:]):
        os.dup2(descriptor, stream)
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    return request


def _say(reply: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody waits for it any more
        reply.send(number.to_bytes(8, "little", signed=True))


if __name__ == "__main__":
    end = socket.socket(fileno=int(sys.argv[1]))
    if (code := main(end)) != 0:
        os._exit(code)
