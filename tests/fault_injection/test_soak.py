"""Long trainings with everything on: memory, descriptors, threads, files and CPU time per step do not grow.

The judge of what grows is shown on series whose growth is known.
"""

import json
import math
import os
import random
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

import pytest
from scipy import stats
from support.processes import clean_environment, programs, python

JOB = str(Path(__file__).with_name("soak_job.py"))
MINUTES = float(os.environ.get("TREADLE_SOAK_MINUTES", "10"))
WARM_UP = 0.25  # of the samples: caches fill, allocators reach their size
MOST = 200  # samples that are compared pairwise
CHANCE = stats.norm.sf(3)  # that a series without a trend seems to have one: one of 740

# What a quantity may grow by over all samples after the warm-up: absolute, and relative to its median. Both must be
# exceeded. Counts may not grow by one.
TOLERANCES = {
    "allocated MB": (1.0, 0.0),  # a kilobyte per step is 4 MB in five minutes at 17 steps a second; without, 0.15 MB
    "rank MB": (8.0, 0.02),
    "shared MB": (4.0, 0.02),
    "workers MB": (8.0, 0.02),
    "Python blocks": (3000.0, 0.0),
    "CPU ms per step": (math.inf, 0.0),  # shown only: other processes' load moves it
    "CPU of a step by machine": (0.0, 0.20),
}
OF_COUNTS = (0.9, 0.0)


def measure_growth(values):
    """Return by how much a series grows from the end of its warm-up to its end; 0 where no trend is significant.

    The slope is Theil's and Sen's, and the trend Kendall's, which outliers and noise do not move. A leak of one
    descriptor in every tenth fit is found, a jump that is never repeated is not: it is no growth without end.
    """
    kept = list(values[int(len(values) * WARM_UP) :])
    stride = max(1, math.ceil(len(kept) / MOST))
    # Means, not every n-th sample: what happens rarely must not fall between.
    kept = [statistics.fmean(kept[start : start + stride]) for start in range(0, len(kept), stride)]
    if len(kept) < 8:
        raise ValueError(f"{len(kept)} samples after the warm-up are too few to judge; run longer.")
    trend = stats.kendalltau(range(len(kept)), kept, method="asymptotic", alternative="greater").pvalue
    if not trend < CHANCE:  # of a constant it is NaN
        return 0.0
    slope = stats.theilslopes(kept).slope
    # Of a count that rarely changes the median of slopes is zero: its thirds show that it rose.
    third = len(kept) // 3
    rise = statistics.fmean(kept[-third:]) - statistics.fmean(kept[:third])
    return max(slope * (len(kept) - 1), 1.5 * rise if slope == 0 and rises_repeatedly(kept) else 0.0)


def rises_repeatedly(values):
    """Tell whether the highest value so far is exceeded at least three times."""
    highest, rises = values[0], 0
    for value in values:
        rises += value > highest
        highest = max(highest, value)
    return rises >= 3


def find_growth(series):
    """Return the quantities that grow by more than they may, with their growth."""
    grown = {}
    for name, values in series.items():
        absolute, relative = TOLERANCES.get(name, OF_COUNTS)
        growth = measure_growth(values)
        if growth > max(absolute, relative * abs(statistics.median(values))):
            grown[name] = growth
    return grown


def format_table(title, values):
    """Return the median of each quantity, and its growth after the warm-up."""
    rows = [
        f"{name:>24}  {statistics.median(found):12.6g}  {measure_growth(found):+.4g}" for name, found in values.items()
    ]
    return "\n".join([title, *rows])


def soak(folder, world, *options, seconds):
    """Run the job and return its series by phase and rank."""
    out = folder / "out"
    out.mkdir()
    temp = tempfile.mkdtemp(prefix="soak-", dir="/tmp")  # short: names of sockets have 107 letters at most
    command = [python(), JOB]
    if world > 1:
        command = [str(programs() / "treadle"), "launch", "--nproc-per-node", str(world), JOB]
    # One arena: glibc's others keep pages that threads have freed, as many as threads happened to run at once.
    env = clean_environment({"TMPDIR": temp, "CUDA_VISIBLE_DEVICES": "", "MALLOC_ARENA_MAX": "1"})
    command += [str(out), *map(str, options)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    series = {}
    for path in sorted(out.glob("*.jsonl")):
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        series[path.stem] = {name: [sample[name] for sample in samples] for name in samples[0]}
    assert [name for name in os.listdir(temp) if not name.startswith("torchinductor_")] == []  # torch's own cache
    shutil.rmtree(temp)
    return series


def check(series, record_property):
    assert len(series) > 0
    for title, values in series.items():
        record_property("soak", format_table(title, values))
    grown = {title: growth for title, values in series.items() if (growth := find_growth(values))}
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
    for values in series.values():
        assert shows <= set(find_growth(values))


# -- the judge ---------------------------------------------------------------------------------------------------------


def make_noise(count, size, seed=0):
    generator = random.Random(seed)
    return [generator.gauss(0, size) for _ in range(count)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [40, 300])
def test_noise_does_not_grow(count, seed):
    values = [300 + noise for noise in make_noise(count, 5, seed)]
    steps = [noise + 20 for noise in make_noise(count, 6, seed)]
    assert find_growth({"rank MB": values, "CPU of a step by machine": steps}) == {}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("CPU ms per step", [float(number) for number in range(40)]),  # only shown
        ("rank MB", [300.0 + (500 if number % 9 == 0 else 0) for number in range(100)]),  # outliers
        ("threads", [12.0 + random.Random(number).randrange(3) for number in range(200)]),  # up and down
        ("rank MB", [100.0 + 200 * min(1, number / 20) for number in range(100)]),  # a warm-up
        ("threads", [12.0] * 50 + [13.0] * 50),  # one jump
    ],
)
def test_what_is_no_growth(name, values):
    assert find_growth({name: values}) == {}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("descriptors", [40.0 + number // 10 for number in range(80)]),  # one leaks in every tenth fit
        ("CPU of a step by machine", [20 + 0.2 * number + noise for number, noise in enumerate(make_noise(100, 3))]),
        ("rank MB", [300.0 + 0.1 * number + noise for number, noise in enumerate(make_noise(300, 3))]),
    ],
)
def test_what_grows(name, values):
    assert name in find_growth({name: values})


def test_too_few_samples():
    with pytest.raises(ValueError, match="run longer"):
        measure_growth([1.0] * 9)
