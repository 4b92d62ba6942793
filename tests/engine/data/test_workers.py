"""Data workers end with their rank, leave its signals alone, and say when they copy a dataset of Python objects."""

import os
import re
import signal
import subprocess
import sys

import pytest
from support.launches import gone, wait_for
from support.processes import clean_environment, python, script

pytestmark = [pytest.mark.guarantee, pytest.mark.skipif(sys.platform != "linux", reason="process groups")]

HEAD = """
import os, signal, subprocess, time, torch, treadle
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.tensor([index, os.getpid()])

def loader(**options):
    return treadle.Accelerator(cpu=True).prepare(DataLoader(Slow(), num_workers=2, **options))
"""

KILLED = """
batches = iter(loader(persistent_workers=True))
print(*{int(next(batches)[0, 1]) for _ in range(4)}, flush=True)
time.sleep(60)
"""

SIGNALLED = """
if os.getpgrp() != os.getpid():
    os.setpgrp()
caught = []
signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
seen = []
for batch in loader():
    seen.append(int(batch[0, 0]))
    if len(seen) == 2:
        subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], start_new_session=True)  # as torchrun does
print(seen, caught)
"""


def test_workers_end_when_their_rank_is_killed(tmp_path):
    (tmp_path / "train.py").write_text(HEAD + KILLED)
    process = subprocess.Popen(
        [python(), "train.py"], cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, text=True
    )
    workers = process.stdout.readline().split()
    assert len(workers) == 2
    with open(f"/proc/{workers[0]}/stat") as file:
        rank = int(file.read().rpartition(")")[2].split()[1])
    os.kill(rank, signal.SIGKILL)
    process.wait(10)
    wait_for(lambda: all(gone(int(pid)) for pid in workers), 2)  # torch's own look for their parent every 5 s


def test_a_signal_to_the_process_group_of_a_rank_leaves_its_workers_alone():
    done = script(HEAD + SIGNALLED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == f"{list(range(8))} [{int(signal.SIGTERM)}]"


COPIED = """
import time, torch, treadle
from torch.utils.data import DataLoader, Dataset
from treadle.engine.data import workers

workers.COPIES_TOLD_FROM = 2**26

class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows
    def __len__(self):
        return 20
    def __getitem__(self, index):
        time.sleep(0.08)
        size = len(self.rows) // 20
        for row in self.rows[index * size : (index + 1) * size]:  # the slice counts one reference more to each
            pass
        return torch.zeros(1)

def load(rows, workers):  # one batch, and so ten samples, for each worker
    loader = DataLoader(Rows(rows), batch_size=10, num_workers=workers, multiprocessing_context="fork")
    return treadle.Accelerator(cpu=True).prepare(loader)

objects, array = [bytes(4000) for _ in range(40_000)], torch.zeros(40_000, 1000)
print(len(list(zip(load(objects, 2), load(array, 2), load(objects[:20_000], 1), strict=True))))
"""


@pytest.mark.long
def test_a_dataset_of_python_objects_that_workers_copy_is_said():
    done = script(COPIED, fresh=True)
    assert done.stdout == "2\n", done.stderr
    # Tensors are not copied, and the one worker alone is not judged.
    (line,) = [line for line in done.stderr.splitlines() if "have copied" in line]
    copied, each = re.search(r"the 2 data workers have copied (\S+) GiB .* hold (\S+) GiB each", line).groups()
    # 40,000 objects of a page each are 0.15 GiB; the last of them are read after the last measurement.
    assert 0.1 <= float(copied) <= 0.2
    assert 0.05 <= float(each) <= 0.15
