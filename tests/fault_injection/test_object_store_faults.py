"""A save to an S3 server that is killed at every request, or whose connection is cut: what was committed stays.

The server is real (moto's, on loopback). Requests are counted at `RemotePath`, the one place that makes them; a child
process is killed before or after one of them, and then this process looks at what the store holds. A cut breaks off
connections that are open, while a file is on its way.
"""

import contextlib
import os
import signal
import socket
import struct
import threading
import warnings

import pytest
import torch
from support.models import SGDTask
from support.object_store import S3Server, environment
from support.processes import RankError, run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import ModelCheckpoint
from treadle.common import remote_path
from treadle.common.remote_path import RemotePath
from treadle.engine.checkpoint import OpenCheckpoint
from treadle.engine.checkpoint.store import CheckpointStore

import treadle

pytestmark = pytest.mark.guarantee

WRITES = ("upload", "write_bytes", "unlink", "_call_s3")
"""The requests that change a store."""


@pytest.fixture(scope="module")
def server():
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def bucket(server, request):
    """The URL of a bucket of this test's own, in a list with the variables by which it is reached."""
    name = f"test-{abs(hash(request.node.name)) % 10**12}"
    server.make_bucket(name)
    return f"s3://{name}/run", environment(server.url)


class Task(SGDTask):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()


def fit(root, steps, ckpt_path=None):
    """Train for some steps, saved every second one to the same URL and to one of its own, of which two are kept."""
    treadle.seed_everything(3)
    data = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4, shuffle=True)
    last = ModelCheckpoint(f"{root}/last", "last", every_n_train_steps=2, enable_version_counter=False)
    best = {"monitor": "step", "mode": "max", "save_top_k": 2}
    newest = ModelCheckpoint(f"{root}/newest", "{step}", every_n_train_steps=2, **best)
    flags = {"max_epochs": None, "max_steps": steps, "enable_checkpointing": True, "default_root_dir": root}
    trainer = make_trainer(callbacks=[last, newest], **flags)
    task = Task()
    trainer.fit(task, data, ckpt_path=ckpt_path)
    return task


def weights(task):
    return [parameter.detach().clone() for parameter in task.parameters()]


# -- killed at every request -----------------------------------------------------------------------------------------


def fit_and_die(root, steps, ckpt_path, number, moment):
    """Train, and be killed before or after the request that has this number; returns how many there were."""
    made = 0

    def watch(name):
        real = getattr(RemotePath, name)

        def request(path, *args, **options):
            nonlocal made
            made += 1
            mine = made == number
            if mine and moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(path, *args, **options)
            if mine and moment == "after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(RemotePath, name, request)

    for name in WRITES:
        watch(name)
    remote_path._PART_BYTES, remote_path._PARTS_AT_ONCE = 1000, 1
    fit(root, steps, ckpt_path)
    return made


def describe(root):
    """Every checkpoint below a URL as it is loaded: its step and weights, by its own name."""
    found = {}
    for place in ("last", "newest"):
        path, skipped = CheckpointStore(f"{root}/{place}").latest()
        assert skipped == []  # nothing that counts is damaged
        if path is not None:
            opened = OpenCheckpoint(path)
            found[place] = opened.manifest.step, opened.read_part("model")
    return found


def count_requests(root):
    """Train for two steps, then two more; returns how many requests the second training made."""
    fit(root, 2)
    return fit_and_die(root, 4, f"{root}/last/last.ckpt", 0, "")


def resume(root):
    """Continue to the end; returns the weights, the checkpoints, and what lies around that no manifest names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        task = fit(root, 6, "auto")
    committed = {
        f"{place}/{path.name}/{manifest.folder}"
        for place in ("last", "newest")
        for manifest, path in CheckpointStore(f"{root}/{place}").scan()[0]
    }
    folders = {name.rpartition("/")[0] for name in RemotePath(root).sizes() if "/data-" in name}
    return weights(task), describe(root), sorted(folders - committed)


def kill_at(bucket, numbers, moments):
    url, env = bucket
    whole = run(fit_for, 1, f"{url}/whole", 6, env=env)[0]
    total = run(count_requests, 1, f"{url}/count", env=env)[0]
    assert total > 15  # files, manifests, probes and deletions of two saves
    for number in numbers(total):
        for moment in moments:
            root = f"{url}/{number}-{moment}"
            run(fit_for, 1, root, 2, env=env)
            with contextlib.suppress(RankError):
                run(fit_and_die, 1, root, 4, f"{root}/last/last.ckpt", number, moment, env=env)
                pytest.fail(f"nobody was killed {moment} request {number}")
            stands = run(describe, 1, root, env=env)[0]
            for place in ("last", "newest"):
                assert stands[place][0] in (2, 4), f"killed {moment} request {number} of {total}"
            resumed, after, stray = run(resume, 1, root, env=env)[0]
            assert all(map(torch.equal, resumed, whole)), f"killed {moment} request {number} of {total}"
            assert after["newest"][0] == after["last"][0] == 6
            assert stray == []  # nothing is left of the killed save


def fit_for(root, steps):
    return weights(fit(root, steps))


@pytest.mark.exhaustive
def test_killed_at_a_request_in_the_middle_of_a_save(bucket):
    kill_at(bucket, lambda total: [total // 2], ["after"])


@pytest.mark.slow
def test_killed_at_every_request_of_a_save(bucket):
    kill_at(bucket, lambda total: range(1, total + 1), ["before", "after"])


# -- cut in the middle -----------------------------------------------------------------------------------------------


class Wire:
    """A port that leads to a server, until it is cut: open connections break off, and new ones are refused.

    Args:
        port: the server's.

    Attributes:
        url: the address of this end.
        cuts: how often it was cut.
    """

    def __init__(self, port):
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open = set()
        self._is_cut = False
        self._left = None
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, after):
        """Cut the connection when so many bytes have gone to the server from now on."""
        self._left = after

    def cut(self):
        """Break off what is open, and refuse what comes."""
        with self._lock:
            self._is_cut = True
            self.cuts += 1
            self._left = None
            for end in self._open:
                _reset(end)
            self._open.clear()

    def mend(self):
        """Let connections through again."""
        self._is_cut = False

    def close(self):
        """End it."""
        self._listener.close()
        self.cut()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            with self._lock:
                if self._is_cut:
                    _reset(client)
                    _reset(server)
                    continue
                self._open |= {client, server}
            threading.Thread(target=self._carry, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._carry, args=(server, client, False), daemon=True).start()

    def _carry(self, source, target, counts):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if counts and self._left is not None:
                    self._left -= len(data)
                    if self._left <= 0:
                        self.cut()
                        return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def _reset(end):
    """Break a connection off: the other side gets an error, not the end of what was sent."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RD)  # whoever waits for it in a thread of ours wakes up
        end.close()


def save_through_a_cut(root, port, after, mended):
    """Save once, then once more through a connection that is cut on the way; returns the error and the cuts."""
    wire = Wire(port)
    os.environ["AWS_ENDPOINT_URL"] = wire.url
    remote_path._PAUSES = (0.05,)
    remote_path._PART_BYTES = 100_000
    accelerator = treadle.Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(300, 300))
    accelerator.save_state(f"{root}/last")
    with torch.no_grad():
        model.weight.fill_(2.0)
    wire.arm(after)
    error = ""
    if mended:  # by the next attempt
        pause = remote_path.time.sleep
        remote_path.time.sleep = lambda seconds: (pause(seconds), wire.mend())
    try:
        accelerator.save_state(f"{root}/last")
    except OSError as caught:
        error = str(caught)
    wire.mend()
    opened = OpenCheckpoint(f"{root}/last")
    opened.verify()
    first = float(opened.read_part("model")["weight"][0, 0])
    objects = RemotePath(f"{root}/last").sizes()
    accelerator.save_state(f"{root}/last")  # a failed save is in no later one's way
    wire.close()
    return error, wire.cuts, first, {name.partition("/")[0] for name in objects}


CUTS = [  # after so many bytes: before, in the middle of and after the weights
    pytest.param(2_000, marks=pytest.mark.exhaustive),
    150_000,
    pytest.param(361_000, marks=pytest.mark.exhaustive),
]


@pytest.mark.long
@pytest.mark.parametrize("after", CUTS)
def test_a_cut_connection_is_used_again(server, bucket, after):
    url, env = bucket
    error, cuts, first, _ = run(save_through_a_cut, 1, url, server.port, after, True, env=env)[0]
    assert (error, first) == ("", 2.0)
    assert cuts >= 1


@pytest.mark.long
@pytest.mark.parametrize("after", CUTS)
def test_a_connection_that_stays_cut_fails_the_save_and_nothing_else(server, bucket, after):
    url, env = bucket
    error, cuts, first, folders = run(save_through_a_cut, 1, url, server.port, after, False, env=env)[0]
    assert "s3://" in error
    assert "4 attempts failed" in error
    assert cuts >= 1
    assert first != 2.0  # what was committed before
    assert "manifest.json" in folders
