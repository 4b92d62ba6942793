"""A process that does not end after its script is ended after the limit, whatever keeps it."""

import signal
import subprocess
import sys
import time

import pytest
from support.processes import clean_environment, programs

pytestmark = pytest.mark.guarantee

JOB = """
import atexit, os, sys, threading, time, torch, treadle
from torch.utils.data import DataLoader, TensorDataset

kind, processes = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)

def retry():
    while True:  # as a client whose server is gone
        time.sleep(0.01)

class Task(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        if kind == "error" and self.trainer.global_rank == self.trainer.world_size - 1:
            raise ValueError("the first cause")
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)

def main():
    trainer = treadle.Trainer(
        devices=processes, accelerator="cpu", logger=False, max_epochs=1, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, timeout={"seconds": 3},
    )
    if trainer.global_rank == processes - 1:
        if kind in ("atexit", "error"):
            atexit.register(time.sleep, 3600)
        if kind == "thread":
            threading.Thread(target=retry).start()
    trainer.fit(Task(), DataLoader(TensorDataset(torch.ones(8, 2)), 2))
    open(f"ended-{trainer.global_rank}", "w").close()

def wait_in_a_collective():
    accelerator = treadle.Accelerator(cpu=True, timeout={"seconds": 3})
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    if accelerator.process_index == processes - 1:
        threading.Thread(target=retry).start()
        raise ValueError("the first cause")
    torch.distributed.all_reduce(total)

if kind == "early":  # runs after the watchdog's own handler
    atexit.register(time.sleep, 3600)
if kind == "destructor":  # after the interpreter has stopped its threads
    class Blocks:
        def __del__(self, sleep=time.sleep):
            sleep(3600)
    sys.modules["blocks"] = Blocks()
if kind == "notebook":
    kind = "thread"
    treadle.notebook_launcher(main, num_processes=processes)
elif kind == "collective":
    wait_in_a_collective()
else:
    main()
"""
JOBS = {  # by name: the command, the exit status and words of the output
    "single, atexit": ("python job.py atexit 1", 124, "rank 0 of 1 has not ended within 3 s after its script"),
    "single, thread": ("python job.py thread 1", 124, "rank 0 of 1 has not ended within 3 s after its script"),
    "single, early": ("python job.py early 1", 124, "rank 0 of 1 has not ended within 3 s after its script"),
    "single, destructor": ("python job.py destructor 1", 128 + signal.SIGALRM, ""),
    "single, error": ("python job.py error 1", 1, "ValueError: the first cause"),
    "own, atexit": ("python job.py atexit 2", 124, "rank 1 of 2 failed first: exit status 124"),
    "own, thread": ("python job.py thread 2", 124, "rank 1 of 2 has not ended within 3 s after its script"),
    "own, error": ("python job.py error 2", None, "ValueError: the first cause"),
    "notebook": ("python job.py notebook 2", 1, "rank 1 of 2 ended with exit status 124"),
    "launch": ("treadle launch --nproc-per-node 2 job.py thread 2", 124, "rank 1 of 2 failed first: exit status 124"),
    "launch, error": ("treadle launch --nproc-per-node 2 job.py error 2", 1, "ValueError: the first cause"),
    "launch, collective": (
        "treadle launch --nproc-per-node 2 job.py collective 2",
        1,
        "rank 1 of 2 has not ended within",
    ),
    "torchrun": ("torchrun --standalone --nproc-per-node 2 job.py atexit 2", 1, "rank 1 of 2 has not ended within"),
    "torchrun, thread": ("torchrun --standalone --nproc-per-node 2 job.py thread 2", 1, "rank 1 of 2 has not ended"),
    "torchrun, error": ("torchrun --standalone --nproc-per-node 2 job.py error 2", 1, "ValueError: the first cause"),
    "torchrun, collective": ("torchrun --standalone --nproc-per-node 2 job.py collective 2", 1, "has not ended within"),
}


def start(name, program):
    """The path of a program. Those of `programs` are forked, and end without the interpreter's own last phase."""
    return sys.executable if name == "single, destructor" else str(programs() / program)


def check(names, tmp_path):
    jobs = []
    for name in names:
        (folder := tmp_path / name).mkdir()
        (folder / "job.py").write_text(JOB)
        program, *arguments = JOBS[name][0].split()
        with (folder / "out").open("w") as out:
            process = subprocess.Popen(
                [start(name, program), *arguments], cwd=folder, env=clean_environment(), stdout=out, stderr=out
            )
        jobs.append((name, process, folder))
    end = time.monotonic() + 100
    for name, process, folder in jobs:
        _, status, words = JOBS[name]
        try:
            ended = process.wait(max(1.0, end - time.monotonic()))
        finally:
            process.kill()
            process.wait()
        ended = ended if ended >= 0 else 128 - ended
        text = f"{name}, status {ended}:\n{(folder / 'out').read_text()}"
        assert ended == status if status is not None else ended, text
        assert words in text


def test_a_process_alone(tmp_path):
    check(["single, thread", "single, early", "single, destructor"], tmp_path)


def test_one_of_two_ranks(tmp_path):
    check(["own, atexit", "notebook", "torchrun, collective"], tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("name", JOBS)
def test_every_launcher(tmp_path, name):
    check([name], tmp_path)
