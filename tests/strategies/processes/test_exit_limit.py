"""A process that does not end after its script is ended after the limit, whatever keeps it."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.processes import clean_environment, programs
from treadle.strategies.processes import collect_frames, format_stack

pytestmark = pytest.mark.guarantee

JOB = """
import atexit, os, sys, threading, time, torch, treadle
from treadle.compat.demos.boring_classes import BoringModel

kind, processes = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)

def retry():
    while True:  # as a client whose server is gone
        time.sleep(0.01)

class Task(BoringModel):
    def training_step(self, batch, batch_idx):
        if kind == "error" and self.trainer.global_rank == self.trainer.world_size - 1:
            raise ValueError("the first cause")
        return super().training_step(batch, batch_idx)

def main():
    trainer = treadle.Trainer(
        devices=processes, accelerator="cpu", logger=False, max_epochs=1, enable_progress_bar=False,
        limit_train_batches=4, limit_val_batches=0, enable_checkpointing=False, timeout={"seconds": 3},
    )
    if trainer.global_rank == processes - 1:
        if kind in ("atexit", "error"):
            atexit.register(time.sleep, 3600)
        if kind == "thread":
            threading.Thread(target=retry).start()
    trainer.fit(Task())
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
OWN, LAUNCH = "python job.py", "treadle launch --nproc-per-node 2 job.py"
TORCHRUN = "torchrun --standalone --nproc-per-node 2 job.py"
JOBS = {  # by command: the exit status and words of the output
    f"{OWN} atexit 1": (124, "rank 0 of 1 has not ended within 3 s after its script"),
    f"{OWN} thread 1": (124, "rank 0 of 1 has not ended within 3 s after its script"),
    f"{OWN} early 1": (124, "rank 0 of 1 has not ended within 3 s after its script"),
    f"{OWN} destructor 1": (128 + signal.SIGALRM, ""),
    f"{OWN} error 1": (1, "ValueError: the first cause"),
    f"{OWN} atexit 2": (124, "rank 1 of 2 failed first: exit status 124"),
    f"{OWN} thread 2": (124, "rank 1 of 2 has not ended within 3 s after its script"),
    f"{OWN} error 2": (None, "ValueError: the first cause"),
    f"{OWN} notebook 2": (1, "rank 1 of 2 ended with exit status 124"),
    f"{LAUNCH} thread 2": (124, "rank 1 of 2 failed first: exit status 124"),
    f"{LAUNCH} error 2": (1, "ValueError: the first cause"),
    f"{LAUNCH} collective 2": (1, "rank 1 of 2 has not ended within"),
    f"{TORCHRUN} atexit 2": (1, "rank 1 of 2 has not ended within"),
    f"{TORCHRUN} thread 2": (1, "rank 1 of 2 has not ended"),
    f"{TORCHRUN} error 2": (1, "ValueError: the first cause"),
    f"{TORCHRUN} collective 2": (1, "has not ended within"),
}


def check(commands, tmp_path):
    jobs = []
    for number, command in enumerate(commands):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "job.py").write_text(JOB)
        program, *arguments = command.split()
        # Programs of `programs` are forked, and end without the interpreter's own last phase.
        path = sys.executable if "destructor" in arguments else str(programs() / program)
        with (folder / "out").open("w") as out:
            process = subprocess.Popen([path, *arguments], cwd=folder, env=clean_environment(), stdout=out, stderr=out)
        jobs.append((command, process, folder))
    end = time.monotonic() + 100
    for command, process, folder in jobs:
        status, words = JOBS[command]
        try:
            ended = process.wait(max(1.0, end - time.monotonic()))
        finally:
            process.kill()
            process.wait()
        ended = ended if ended >= 0 else 128 - ended
        text = f"{command}, status {ended}:\n{(folder / 'out').read_text()}"
        assert ended == status if status is not None else ended, text
        assert words in text


@pytest.mark.long
def test_a_process_alone(tmp_path):
    check([f"{OWN} thread 1", f"{OWN} early 1", f"{OWN} destructor 1"], tmp_path)


@pytest.mark.long
def test_one_of_two_ranks(tmp_path):
    check([f"{OWN} atexit 2", f"{OWN} notebook 2", f"{TORCHRUN} collective 2"], tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("command", JOBS)
def test_every_launcher(tmp_path, command):
    check([command], tmp_path)


def wait_deep(depth, ready, end):
    if depth:
        wait_deep(depth - 1, ready, end)
    else:
        ready.set()
        end.wait()


def test_no_garbage_is_collected_while_the_frames_of_a_thread_are_read():
    ready, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_deep, args=(200, ready, end), daemon=True)
    thread.start()
    ready.wait()
    phases, thresholds = [], gc.get_threshold()
    gc.callbacks.append(note := lambda phase, details: phases.append(phase))
    gc.set_threshold(1)
    try:
        frames = collect_frames(thread.ident)
        assert gc.get_threshold()[0] == 1
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert [frame.f_code.co_name for frame in frames].count("wait_deep") == 201
    assert len(phases) < 10  # 2 for each of some hundred collections otherwise, with Python 3.11
    assert format_stack(thread.ident).count("in wait_deep") > 1
    if (pid := os.fork()) == 0:  # a fork waits for no lock that a walk has left
        os._exit(0 if collect_frames(threading.get_ident()) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    end.set()
    thread.join()
    assert (collect_frames(thread.ident), format_stack(thread.ident)) == ([], "")
