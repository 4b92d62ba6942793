"""A real S3 server on loopback (moto's), and a connection to it that can be cut."""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading

_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class S3Server:
    """moto's server in a process of its own, which ends with this one. Buckets are in its memory."""

    def __init__(self):
        # S3 itself wants 5 MiB of each part but the last; with smaller ones, small checkpoints have several.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "S3_UPLOAD_PART_MIN_SIZE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True,
        )  # fmt: skip
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def make_bucket(self, name):
        """Make a bucket."""
        import boto3

        client = boto3.client("s3", endpoint_url=self.url, **_KEYS)
        client.create_bucket(Bucket=name)
        client.close()

    def close(self):
        """End the server."""
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait()


_KEYS = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}


def environment(url):
    """The variables by which packages find a server, and by which a cut is seen soon."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "FSSPEC_S3": json.dumps({"config_kwargs": {"read_timeout": 10, "connect_timeout": 10}}),
    }


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
