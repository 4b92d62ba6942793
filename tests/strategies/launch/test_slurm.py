"""SLURM, the real one: two nodes on this machine. `make test-slurm` runs this and says what is missing."""

import ast
import re
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support.cluster import Cluster, obstacle
from support.launches import wait_for
from treadle.strategies.distributed.launch_environment import first_host

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))]
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "digits.py"
LOOPBACK = {"MASTER_ADDR": "127.0.0.1"}  # n1 is no name of a host
WHERE = """
import os, sys
import torch
from treadle.strategies import LaunchEnvironment, open_world
launched = LaunchEnvironment.read()
world = open_world("cpu", *map(int, sys.argv[1:]))
total = world.all_reduce(torch.tensor([world.rank + 1]))
place = (world.rank, world.size, world.node_rank, world.local_rank, world.local_size, int(total))
print(place, launched and launched.run_id)
"""
FAIL = """
import os, sys, torch
from treadle.strategies import open_world
world = open_world("cpu")
world.barrier()
if world.rank == 1:
    sys.exit(7)
world.barrier()
"""


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, Cluster(Path(folder)) as made:
        yield made


def seen(output):
    return sorted(ast.literal_eval(line) for line in re.findall(r"\(\d+(?:, \d+){5}\)", output))


@pytest.fixture
def where(cluster):
    return write(cluster, "where.py", WHERE)


def write(cluster, name, text):
    path = cluster.folder / name
    path.write_text(text)
    return str(path)


def test_srun_trains_the_example_as_two_nodes(cluster, tmp_path):
    done = cluster.run("srun", "-N2", "-n2", sys.executable, str(EXAMPLE), env=LOOPBACK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Test accuracy") == 1
    assert float(re.search(r"Test accuracy +([\d.]+)", done.stdout)[1]) >= 0.97
    assert "2 processes" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "places"),
    [
        (("-N2", "-n2"), [(0, 2, 0, 0, 1, 3), (1, 2, 1, 0, 1, 3)]),
        (("-N2", "-n3"), [(0, 3, 0, 0, 2, 6), (1, 3, 0, 1, 2, 6), (2, 3, 1, 0, 1, 6)]),
        (("-N2", "-n3", "-m", "cyclic"), [(0, 3, 0, 0, 2, 6), (1, 3, 1, 0, 1, 6), (2, 3, 0, 1, 2, 6)]),
    ],
    ids=["one-each", "uneven", "cyclic"],
)
def test_places(cluster, where, options, places):
    done = cluster.run("srun", *options, sys.executable, where, env=LOOPBACK)
    assert done.returncode == 0, done.stderr
    assert seen(done.stdout) == places


def test_salloc_and_two_steps_at_once(cluster, where):
    shell = f"{sys.executable} {where} & "
    shell += "".join(f"srun -N1 -n2 --exclusive {sys.executable} {where} & " for _ in range(2)) + "wait"
    done = cluster.run("salloc", "-N2", "-n4", "bash", "-c", shell, env=LOOPBACK)
    assert done.returncode == 0, done.stderr
    pair = [(0, 2, 0, 0, 2, 3), (1, 2, 0, 1, 2, 3)]
    assert seen(done.stdout) == sorted([(0, 1, 0, 0, 1, 1), *pair, *pair])
    steps = set(re.findall(r"\) (\d+\.\d+)$", done.stdout, re.MULTILINE))
    assert len(steps) == 2


def test_a_failing_rank_fails_srun(cluster):
    began = time.monotonic()
    done = cluster.run("srun", "-N2", "-n2", sys.executable, write(cluster, "fail.py", FAIL), env=LOOPBACK)
    assert done.returncode != 0
    assert "n2: task 1: Exited with exit code 7" in done.stderr
    assert time.monotonic() - began < 60


def test_doctor_examines_the_ranks_of_srun(cluster):
    done = cluster.run("srun", "-N1", "-n2", sys.executable, "-m", "treadle", "doctor", env=LOOPBACK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all-reduce") == 1
    assert len(done.stdout.splitlines()) <= 30


def test_a_batch_script_without_srun_is_one_process(cluster, where):
    batch = write(cluster, "job.sh", f"#!/bin/bash\n{sys.executable} {where}\n")
    submit = ("sbatch", "--wait", "-N2", "-n2", "--output", "job.out", batch)
    assert cluster.run(*submit).returncode == 0
    assert seen((cluster.folder / "job.out").read_text()) == [(0, 1, 0, 0, 1, 1)]
    # Submitted by a task, it inherits the variables of that task's step.
    again = write(cluster, "again.sh", f'#!/bin/bash\n[ "$SLURM_PROCID" = 1 ] || {" ".join(submit)}\n')
    (cluster.folder / "job.out").unlink()
    assert cluster.run("srun", "-N1", "-n2", "bash", again).returncode == 0
    assert seen((cluster.folder / "job.out").read_text()) == [(0, 1, 0, 0, 1, 1)]


def test_a_shell_of_four_tasks_is_one_process_and_srun_in_it_is_not(cluster, where):
    typed = f"[ $SLURM_PROCID != 0 ] || {{ {sys.executable} {where}; srun --overlap -n2 {sys.executable} {where}; }}"
    write(cluster, "typed.sh", typed)
    done = cluster.run("script", "-qec", "srun --pty -N1 -n2 bash typed.sh", "/dev/null", env=LOOPBACK)
    assert done.returncode == 0, done.stdout
    assert seen(done.stdout) == [(0, 1, 0, 0, 1, 1), (0, 2, 0, 0, 2, 3), (1, 2, 0, 1, 2, 3)]


def test_devices_and_nodes_against_the_job(cluster, where):
    done = cluster.run("srun", "-N2", "-n2", sys.executable, where, "2", env=LOOPBACK)
    assert done.returncode != 0
    assert "`#SBATCH --ntasks-per-node=2`" in done.stderr
    done = cluster.run("srun", "-N2", "-n2", sys.executable, where, "1", "4", env=LOOPBACK)
    assert "num_nodes=4, but the launcher started processes on 2 machines" in done.stderr
    assert "`#SBATCH --nodes=4`" in done.stderr
    alone = cluster.run("srun", "-N1", "-n1", sys.executable, where, "2", env=LOOPBACK)
    assert seen(alone.stdout) == [(0, 2, 0, 0, 2, 3), (1, 2, 0, 1, 2, 3)], alone.stderr


def test_a_first_host_that_is_unknown_is_named(cluster, where):
    done = cluster.run("srun", "-N2", "-n2", sys.executable, where)
    assert done.returncode != 0
    assert "the address of rank 0, 'n1', can't be resolved on " in done.stderr
    assert "Set MASTER_ADDR" in done.stderr


def test_torchrun_started_by_srun_counts(cluster, where):
    launch = (sys.executable, "-m", "treadle", "launch", "--nproc-per-node", "2", "--nnodes", "2")
    done = cluster.run("srun", "-N2", "-n2", *launch, "--rdzv-endpoint", "127.0.0.1:29431", where)
    assert done.returncode == 0, done.stderr
    assert [place[:2] for place in seen(done.stdout)] == [(rank, 4) for rank in range(4)]


@pytest.mark.parametrize("text", ["n[1-3,07-09],m5", "m5", "r[001-003],r[4,10]n[1-2]"])
def test_the_first_host_is_that_of_scontrol(cluster, text):
    assert first_host(text) == cluster.run("scontrol", "show", "hostnames", text).stdout.split()[0]


TRAIN = """
import os, sys, time
import torch
import treadle
from treadle.callbacks import ModelCheckpoint
from treadle.compat.demos.boring_classes import BoringModel

class Task(BoringModel):
    def training_step(self, batch, batch_idx):
        if self.trainer.is_global_zero:
            with open(sys.argv[1] + "/steps", "a") as file:
                print(os.environ.get("SLURM_RESTART_COUNT", "0"), self.global_step, file=file)
        time.sleep(float(sys.argv[2]))
        return super().training_step(torch.nn.functional.dropout(batch), batch_idx)

treadle.seed_everything(1)
task = Task()
loader = torch.utils.data.DataLoader(torch.randn(40, 32) / 8, 1, shuffle=True)
saving = ModelCheckpoint(sys.argv[1] + "/ckpt")
trainer = treadle.Trainer(accelerator="cpu", max_epochs=1, limit_val_batches=0, logger=False, callbacks=saving)
trainer.fit(task, loader, ckpt_path="auto")
if trainer.is_global_zero:
    print("weights", float(sum(p.double().sum() for p in task.parameters())))
"""


@pytest.mark.parametrize("number", ["USR1", "TERM"])
def test_a_signal_saves_and_usr1_requeues_and_the_next_attempt_resumes(cluster, tmp_path, number):
    """As `#SBATCH --signal=USR1@90` sends it before the time is up, and SLURM itself SIGTERM."""
    script = write(cluster, "train.py", TRAIN)
    for name, pause in (("whole", 0.0), ("cut", 0.2)):
        (tmp_path / name).mkdir()
        batch = f"#!/bin/bash\nsrun --kill-on-bad-exit=0 {sys.executable} {script} {tmp_path / name} {pause}\n"
        output = str(tmp_path / f"{name}.out")
        submit = ("sbatch", "--parsable", "--requeue", "--open-mode=append", "-N2", "-n2", "--output", output)
        done = cluster.run(*submit, write(cluster, f"{name}.sh", batch), env=LOOPBACK)
        assert done.returncode == 0, done.stderr
        job, steps = done.stdout.strip(), tmp_path / name / "steps"
        if name == "cut":
            wait_for(lambda steps=steps: steps.exists() and len(steps.read_text().splitlines()) > 3, 60)
            assert cluster.run("scancel", f"--signal={number}", job).returncode == 0
            wait_for(lambda output=output: "is saved as" in Path(output).read_text(), 60)
            if number == "TERM":  # whoever sends it decides whether the job comes again
                assert "requeued" not in Path(output).read_text()
                wait_for(lambda job=job: cluster.run("scontrol", "requeue", job).returncode == 0, 60)
        wait_for(lambda output=output: Path(output).exists() and "weights" in Path(output).read_text(), seconds=200)
    whole, cut = (re.findall(r"weights (\S+)", (tmp_path / f"{name}.out").read_text()) for name in ("whole", "cut"))
    assert whole == cut
    attempts = [tuple(map(int, line.split())) for line in (tmp_path / "cut" / "steps").read_text().splitlines()]
    assert [step for _, step in attempts] == list(range(20))
    assert {attempt for attempt, _ in attempts} == {0, 1}
