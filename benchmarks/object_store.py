"""Measure saving and loading of a checkpoint on an S3 server, relative to boto3's own transfer of the same bytes.

The server is moto's, in its own process on loopback, so all of it shares this machine's cores: only the ratio is
meaningful. The three ways take turns, after one round that is not counted.

    python benchmarks/object_store.py --mib 256 --rounds 5
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import torch

import treadle

SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def s3_server():
    """Run a server with one bucket within the context, and name it in the environment."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(process.stdout.readline())}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield
    process.terminate()
    process.wait()


def boto3_transfer(files: list[Path], download: bool, folder: Path) -> None:
    """Transfer files with boto3's defaults: parts of 8 MiB, ten concurrently for each of four concurrent files."""
    client = boto3.client("s3")

    def move(file: Path) -> None:
        if download:
            client.download_file("bucket", f"boto3/{file.name}", str(folder / file.name))
        else:
            client.upload_file(str(file), "bucket", f"boto3/{file.name}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(move, files))


def measure(work) -> float:
    """Return the seconds that a function takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the model's weights")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(max(1, options.mib // 4))]
    accelerator = treadle.Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Sequential(*layers))
    seconds: dict[str, list[float]] = {"boto3 up": [], "save": [], "boto3 down": [], "load": []}
    with s3_server(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        accelerator.save_state(folder / "state")
        files = sorted(path for path in (folder / "state").iterdir() if path.is_file())
        (folder / "back").mkdir()
        for number in range(options.rounds + 1):
            row = {
                "boto3 up": measure(lambda: boto3_transfer(files, False, folder)),
                "save": measure(lambda: accelerator.save_state("s3://bucket/state")),
                "boto3 down": measure(lambda: boto3_transfer(files, True, folder / "back")),
                "load": measure(lambda: accelerator.load_state("s3://bucket/state")),
            }
            for key, value in row.items() if number else ():
                seconds[key].append(value)
    size = sum(file.stat().st_size for file in files if file.exists()) or options.mib * 2**20
    print(f"{size / 2**20:.0f} MiB, torch {torch.__version__}, {os.cpu_count()} cores, {options.rounds} rounds")
    for ours, theirs in (("save", "boto3 up"), ("load", "boto3 down")):
        ratios = [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
        print(
            f"{ours}: {statistics.median(seconds[ours]):.2f} s, {theirs} {statistics.median(seconds[theirs]):.2f} s, "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
