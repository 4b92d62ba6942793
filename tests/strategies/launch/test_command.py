"""`treadle launch` on one machine: what the ranks get, what is refused, and how it ends."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import clean_environment, python
from treadle.strategies.launch import command as launch_command

SHOW = """
import os, sys
line = os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[1:], os.environ.get("TREADLE_DEBUG")
os.write(1, f"{(*line, os.environ.get('CUDA_VISIBLE_DEVICES'))}\\n".encode())
sys.exit(int(os.environ["RANK"]) * 3)
"""


def treadle(*args, cwd=None, env=None):
    command = [python(), "-m", "treadle", *args]
    return subprocess.run(
        command, cwd=cwd, env=clean_environment(env), capture_output=True, text=True, timeout=60, check=False
    )


def job(*args):
    return launch_command.job_of(launch_command.parse(args))


def test_the_ranks_and_the_exit_status(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    # What follows the script is the script's, whatever it looks like.
    script = ["show.py", "--nnodes", "3", "--help", "-m", "${local_rank}"]
    done = treadle("launch", "--nproc_per_node=2", "--debug", "--cpu", *script, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "treadle: rank 1 of 2 failed first: exit status 3\n" in done.stderr
    rows = [f"('{rank}', '2', {script[1:]}, '1', '')" for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) in (rows, rows[1:])  # rank 0 may be ended first


@pytest.mark.long
def test_files_of_each_rank_and_a_module_and_a_program(tmp_path):
    (tmp_path / "module.py").write_text("print('from', __spec__.name)")
    logs = ["--log-dir", str(tmp_path / "logs"), "--redirects", "3"]
    done = treadle("launch", *logs, "--nproc-per-node", "2", "-m", "module", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    texts = [path.read_text() for path in sorted((tmp_path / "logs").rglob("stdout.log"))]
    assert texts == ["from module\n"] * 2
    assert treadle("launch", "--no-python", "true").returncode == 0
    gone = treadle("launch", "--no-python", "no-such-program")
    assert gone.returncode == 2
    assert "no-such-program" in gone.stderr


def test_the_command_line():
    assert re.search(r"launch +start a script", treadle().stdout)
    shown = treadle("launch", "--help")
    assert shown.returncode == 0
    assert "--rdzv-endpoint HOST:PORT" in shown.stdout


def test_options_become_a_job(tmp_path):
    script = str(tmp_path / "train.py")
    Path(script).touch()
    one = job("--nproc-per-node", "2", "--max-restarts=3", script, "--lr", "1")
    assert (one.nproc, one.max_restarts, one.nodes) == (2, 3, None)
    assert one.command == [sys.executable, "-u", script, "--lr", "1"]
    assert job("--nproc-per-node", "cpu", script).nproc == len(os.sched_getaffinity(0))
    assert job("--cpu", script).nproc == 1
    many = job("--nnodes", "2:4", "--rdzv-endpoint", "host", "--rdzv-id", "x", "--rdzv-conf", "timeout=9", script)
    assert (many.nodes.least, many.nodes.most, many.nodes.backend, many.run_id) == (2, 4, "c10d", "x")
    assert many.nodes.conf == {"timeout": "9"}
    named = job("--num_machines", "2", "--num_processes", "4", "--machine_rank", "1", "--main_process_ip", "h", script)
    assert (named.nproc, named.nodes.rank, named.nodes.endpoint, named.nodes.backend) == (2, 1, "h:29500", "static")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--nproc 2", r"--nproc is not an option of treadle launch. Did you mean '--nproc-per-node'"),
        ("-x", "-x is not an option of treadle launch"),
        ("--rdzv-conf= --nprocs 2", r"--nprocs is not an option of treadle launch"),
        ("--mixed_precision fp16", r"Set it in the script: Accelerator\(mixed_precision"),
        ("--use_fsdp", r"Trainer\(strategy=...\)"),
        ("--config_file x", "Pass the settings of the file as options of this command"),
        ("--nproc-per-node two", "'two' must be a positive number"),
        ("--nproc-per-node 2 --num_processes 2", "can't be combined"),
        ("--nnodes x", "'x' must have the form N or N:M"),
        ("--nnodes 3:2 --rdzv-endpoint h", "--nnodes 3:2 must be N:M"),
        ("--nnodes 2", "needs an endpoint"),
        ("--nnodes 2 --rdzv-endpoint h --node-rank 0", "--rdzv-endpoint can't be combined with --node-rank. Remove"),
        ("--nnodes 2 --master-addr h", "--master-addr needs --node-rank"),
        ("--nnodes 2 --node-rank 2 --master-addr h", "--node-rank 2 must be from 0 to 1"),
        ("--nnodes 2 --rdzv-endpoint h --rdzv-conf timeout", "KEY=VALUE"),
        ("--nnodes 2 --node-rank 0 --max-restarts 1", "can't rendezvous a second time"),
        ("--local-addr h", "--local-addr h is for several machines, but --nnodes is 1. Set --nnodes"),
        ("--standalone --nnodes 2 --rdzv-endpoint h", "is for one machine and contradicts --nnodes 2"),
        ("--tee 3", "--tee 3 writes files. Add --log-dir"),
        ("--max-restarts -1", "--max-restarts=-1 must be"),
        ("--multi_gpu --cpu", "--multi_gpu"),
        ("-m --no-python", "contradict"),
    ],
)
def test_what_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        job(*options.split(), __file__)


def test_a_script_that_is_not_there():
    with pytest.raises(ValueError, match=r"the script 'nowhere.py' does not exist"):
        job("nowhere.py")
    with pytest.raises(ValueError, match="required"):
        job()
