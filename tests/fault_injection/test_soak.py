"""Long trainings with everything on: memory, descriptors, threads, files and CPU time per step do not grow."""

import json
import os
import subprocess
import tempfile

import pytest
from support.growth import find_growth, format_table
from support.processes import clean_environment, programs, python
from support.soak_job import __file__ as JOB

MINUTES = float(os.environ.get("TREADLE_SOAK_MINUTES", "10"))


def soak(folder, world, *options, seconds):
    """Run the job and return its series by phase and rank, with the minute of each sample."""
    out = folder / "out"
    out.mkdir()
    temp = tempfile.mkdtemp(prefix="soak-", dir="/tmp")  # short: names of sockets have 107 letters at most
    command = [python(), JOB]
    if world > 1:
        command = [str(programs() / "treadle"), "launch", "--nproc-per-node", str(world), JOB]
    # One arena: glibc's others keep pages that threads have freed, as many as threads happened to run at once.
    env = clean_environment({"TMPDIR": temp, "CUDA_VISIBLE_DEVICES": "", "MALLOC_ARENA_MAX": "1"})
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [*command, str(out), *map(str, options)], env=env, stdout=log, stderr=log, timeout=seconds, check=False
        )
    assert done.returncode == 0, (folder / "log").read_text()[-5000:]
    series = {}
    for path in sorted(out.glob("*.jsonl")):
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        values = {name: [sample["values"][name] for sample in samples] for name in samples[0]["values"]}
        series[path.stem] = [sample["minute"] for sample in samples], values
    os.rmdir(temp)  # nothing is left in it
    return series


def check(series, record_property):
    for title, (minutes, values) in series.items():
        record_property("soak", format_table(title, minutes, values))
    grown = {title: growth for title, (_, values) in series.items() if (growth := find_growth(values))}
    assert grown == {}


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_two_ranks_with_everything_on(tmp_path, record_property):
    half = int(MINUTES * 30)
    series = soak(tmp_path, 2, "--long", half, "--often", half, seconds=4 * half + 300)
    assert sorted(series) == ["fits.0", "fits.1", "long.0", "long.1"]
    check(series, record_property)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_two_hundred_fits_in_one_process(tmp_path, record_property):
    check(soak(tmp_path, 1, "--count", 200, seconds=3600), record_property)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("leak", "shows"),
    [
        ("memory", {"allocated MB"}),
        ("descriptors", {"descriptors"}),
        ("threads", {"threads"}),
        ("time", {"CPU of a step by machine"}),
    ],
)
def test_a_leak_is_seen(tmp_path, leak, shows):
    """Watch a run that leaks a kilobyte or time on each step, or a descriptor or thread on every sixteenth."""
    series = soak(tmp_path, 2, "--long", 150, "--leak", leak, seconds=600)  # shorter: what is allocated still grows
    for _, values in series.values():
        assert shows <= set(find_growth(values))
