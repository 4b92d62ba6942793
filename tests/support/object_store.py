"""A real S3 server on loopback (moto's)."""

import json
import os
import subprocess
import sys

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
