"""A second signal that is not the first one again never costs the save: every ordered pair, through every door."""

import itertools
import os
import signal
import subprocess
import time

import pytest
from support.processes import clean_environment, programs
from treadle.engine.checkpoint import CheckpointStore

pytestmark = pytest.mark.guarantee

JOB = """
import os, sys, time, torch, treadle
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import Callback, ModelCheckpoint

door, processes = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
loader = DataLoader(TensorDataset(torch.ones(40_000, 2)), 2)

def work(step, rank):
    if rank == 0:
        open("step", "w").write(str(step))
    if step >= 3:
        open(f"begun-{rank}", "w").close()
    time.sleep(0.05)

class Slow:
    def state_dict(self):
        open("saving", "w").close()
        time.sleep(1.5)
        return {}
    def load_state_dict(self, state): ...

class Task(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        work(self.trainer.global_step, self.trainer.global_rank)
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)

class SlowSave(Slow, Callback):
    pass

if door == "loop":
    accelerator = treadle.Accelerator(cpu=True)
    net = torch.nn.Linear(2, 1)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 1e-3), loader)
    accelerator.register_for_checkpointing(Slow())
    with accelerator.preemptible(interrupts=True) as preemption:
        for (batch,) in loader:
            work(accelerator.steps, accelerator.process_index)
            accelerator.backward(net(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if preemption.should_stop():
                accelerator.save_state("ckpt/last")
                preemption.leave()
else:
    saving = ModelCheckpoint("ckpt", every_n_train_steps=10**6, save_last=True, save_on_exception=True)
    treadle.Trainer(
        devices=processes, accelerator="cpu", logger=False, max_epochs=1, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[saving, SlowSave()],
    ).fit(Task(), loader)
"""
DOORS = {  # the command, and the number of ranks
    "Trainer": (["python", "job.py", "trainer", "1"], 1),
    "own loop": (["python", "job.py", "loop", "1"], 1),
    "local launcher": (["python", "job.py", "trainer", "2"], 2),
    "treadle launch": (["treadle", "launch", "--nproc-per-node", "2", "job.py", "loop", "2"], 2),
}
STATUS = {"TERM": 143, "INT": 130, "USR1": 143, "HUP": 129}
PAIRS = [pair for pair in itertools.product(STATUS, (*STATUS, "USR2")) if pair != ("INT", "INT")]


def begin(door, folder):
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    command, _ = DOORS[door]
    out = (folder / "out").open("w")
    return subprocess.Popen(
        [str(programs() / command[0]), *command[1:]], cwd=folder, env=clean_environment(), stdout=out, stderr=out
    )


def strike(process, folder, ranks, signals, pause):
    end = time.monotonic() + 90
    while not all((folder / f"begun-{rank}").exists() for rank in range(ranks)) and process.poll() is None:
        assert time.monotonic() < end, (folder / "out").read_text()
        time.sleep(0.02)
    for number, name in enumerate(signals):
        if number:
            time.sleep(pause)
        process.send_signal(getattr(signal, f"SIG{name}"))


def end_of(process, folder):
    try:
        status = process.wait(90)
    finally:
        process.kill()
        process.wait()
    latest, skipped = CheckpointStore(folder / "ckpt").latest()
    saved = None if latest is None else CheckpointStore(folder / "ckpt").scan()[0][-1][0].step
    hidden = [name for name in os.listdir(folder / "ckpt") if name.startswith(".")] if latest else []
    return status if status >= 0 else 128 - status, saved, skipped, hidden


def check(doors, signals, tmp_path, pause, statuses):
    jobs = {door: begin(door, tmp_path / door) for door in doors}  # all at once, for they mostly wait
    for door, process in jobs.items():
        strike(process, tmp_path / door, DOORS[door][1], signals, pause)
    for door, process in jobs.items():
        folder = tmp_path / door
        ended, saved, skipped, hidden = end_of(process, folder)
        text = f"{door}, {' then '.join(signals)} after {pause} s:\n{(folder / 'out').read_text()}"
        assert ended in statuses, text
        assert saved in (int((folder / "step").read_text()), int((folder / "step").read_text()) + 1), text
        assert (skipped, hidden) == ([], []), text


@pytest.mark.long
def test_one_ctrl_c_after_a_schedulers_signal_does_not_cost_the_save(tmp_path):
    check(DOORS, ("TERM", "INT"), tmp_path, 0.7, {143})


@pytest.mark.exhaustive
def test_a_schedulers_signal_after_ctrl_c_does_not_cost_the_save(tmp_path):
    check(DOORS, ("INT", "TERM", "USR2"), tmp_path, 0.3, {130})


@pytest.mark.long
def test_a_second_ctrl_c_still_ends_a_run_at_once(tmp_path):
    jobs = {door: begin(door, tmp_path / door) for door in ("Trainer", "treadle launch")}
    for door, process in jobs.items():
        strike(process, tmp_path / door, DOORS[door][1], ("TERM", "INT", "INT"), 0.4)
    for door, process in jobs.items():
        status, saved, _, _ = end_of(process, tmp_path / door)
        assert (status in (130, 143), saved) == (True, None), (tmp_path / door / "out").read_text()


@pytest.mark.faults
@pytest.mark.parametrize("pair", PAIRS, ids=" then ".join)
def test_every_pair(tmp_path, pair):
    check(DOORS, pair, tmp_path, 0.7, {STATUS[pair[0]]})


@pytest.mark.faults
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[1] in STATUS], ids=" then ".join)
def test_every_pair_at_one_moment(tmp_path, pair):
    """The system delivers pending signals by their numbers. SIGUSR2 could end the process before any handler runs."""
    check(DOORS, pair, tmp_path, 0.0, {STATUS[name] for name in pair})
