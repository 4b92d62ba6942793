"""A real S3 server on loopback (moto's), and a connection to it that can be cut."""

import contextlib
import os
import socket
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
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
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
    """The variables by which packages find a server; one attempt for each request, as a cut is to be seen soon."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }


class Wire:
    """A port that leads to a server, until it is cut: open connections break off, and new ones are refused.

    Args:
        port: the server's.
        cut_after: cut it by itself when so many bytes went to the server since `arm` was called.
    """

    def __init__(self, port):
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._open = set()
        self._left = None
        self.is_cut = False
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, after):
        """Cut the connection when so many bytes have gone to the server from now on."""
        self._left = after

    def cut(self):
        """Break off what is open, and refuse what comes."""
        self.is_cut = True
        self.cuts += 1
        self._left = None
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not an end
                end.shutdown(socket.SHUT_RDWR)

    def mend(self):
        """Let connections through again."""
        self.is_cut = False

    def close(self):
        """End it."""
        self.cut()
        self._listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.is_cut:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._port))
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
        for end in (source, target):
            self._open.discard(end)
            with contextlib.suppress(OSError):
                end.close()


