"""Kill ranks of a training again and again while a launcher restarts them, and observe how it ends.

`run` starts ``restarted_job.py`` in a folder under a launcher and kills one rank in each attempt, as a list of `Kill`
says; `draw_kills` draws such a list from a seed.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.fault_cells import find_orphans, kill_all
from support.processes import clean_environment, programs

JOB = Path(__file__).with_name("restarted_job.py")
COMMANDS = {
    "treadle launch": ("treadle", "launch", "--nproc-per-node", "2"),
    "torchrun": ("torchrun", "--nproc-per-node", "2"),
    "torchrun --standalone": ("torchrun", "--standalone", "--nproc-per-node", "2"),
}
# What a rank tells, and for how many seconds after it the kill may come.
MOMENTS = {"begin": 2.5, "connect": 0.3, "setup": 0.1, "resume": 0.05, "step": 0.1, "save": 0.05, "validation": 0.05}
MOMENTS |= {"done": 0.2}
SETTINGS = {
    "strategy": "ddp",
    "async_save": False,
    "epochs": 3,
    "samples": 32,
    "batch_size": 2,
    "pause": 0.02,
    "late": 0,
    "wait_at_the_end": [],
    "step_micro_batches": None,
    "every_n_train_steps": 2,
}
PATIENCE = 60.0  # seconds without any news after which a job counts as hung


@dataclass(frozen=True)
class Kill:
    """SIGKILL to one rank, ``delay`` seconds after it has told the ``moment`` for the ``count``-th time."""

    rank: int
    moment: str
    count: int = 1
    delay: float = 0.0

    def __str__(self):
        return f"rank {self.rank} {self.delay:.2f} s after {self.moment} {self.count}"


@dataclass
class Outcome:
    """How a job ended.

    Attributes:
        status: of the launcher, as a shell says it; None if it hung.
        seconds: for which the job ran.
        killed: kills that found their rank alive.
        latencies: seconds from each kill to the first step of the next attempt, where it came to one.
        events: what the ranks told.
        done: what each rank that came to the end had: step and digest of the weights.
        orphans: processes that outlived the launcher by 2 s.
        output: what was printed.
    """

    status: int | None = None
    seconds: float = 0.0
    killed: list[Kill] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    done: dict[int, Any] = field(default_factory=dict)
    orphans: list[str] = field(default_factory=list)
    output: str = ""


def draw_kills(seed, number, ranks=2):
    """Draw kills at random moments; any of them may be the start of an attempt, soon after the kill before."""
    chance = random.Random(seed)
    kills = []
    for left in reversed(range(number)):
        moment = chance.choice([moment for moment in MOMENTS if moment != "done" or not left])
        count = chance.randint(1, 8) if moment in ("step", "save") else 1
        kills.append(Kill(chance.randrange(ranks), moment, count, chance.uniform(0, MOMENTS[moment])))
    return kills


def run(folder, launcher, kills, max_restarts=None, **settings):
    """Run the job in ``folder`` and kill; `SETTINGS` holds what ``settings`` may change."""
    folder.mkdir(exist_ok=True)
    (folder / "job.json").write_text(json.dumps({**SETTINGS, **settings}))
    env = clean_environment()
    env["PATH"] = f"{programs()}{os.pathsep}{env['PATH']}"
    program, *options = COMMANDS[launcher]
    options += ["--max-restarts", str(len(kills) if max_restarts is None else max_restarts)]
    command = [str(programs() / program), *options, str(JOB)]
    outcome, times = Outcome(), []
    start = time.monotonic()
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            for kill in kills:
                pid = _await_moment(folder, process, kill)
                if pid is None:
                    break
                time.sleep(kill.delay)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    outcome.killed.append(kill)
                    times.append(time.monotonic())
            outcome.status = _await_end(folder, process)
            outcome.seconds = time.monotonic() - start
            outcome.orphans = [] if outcome.status is None else find_orphans(folder)
        finally:
            kill_all(folder, process)
    outcome.events = list(read_events(folder))
    outcome.latencies = [_find_latency(outcome.events, moment) for moment in times]
    outcome.done = {rank: json.loads(path.read_text()) for rank in (0, 1) if (path := folder / f"done-{rank}").exists()}
    outcome.output = (folder / "output.txt").read_text()
    return outcome


def read_events(folder):
    with contextlib.suppress(FileNotFoundError):
        yield from map(json.loads, (folder / "events").read_text().splitlines())


def _await_moment(folder, process, kill):
    """Return the pid of the rank that is to be killed once it has told the moment; None if the job ends before."""
    before = {event["pid"] for event in read_events(folder)}
    news, since = 0, time.monotonic()
    while process.poll() is None:
        events = list(read_events(folder))
        told = [
            event["pid"]
            for event in events
            if event["pid"] not in before and (event["rank"], event["moment"]) == (kill.rank, kill.moment)
        ]
        if len(told) >= kill.count:
            return int(told[kill.count - 1])
        if len(events) > news:
            news, since = len(events), time.monotonic()
        if time.monotonic() - since > PATIENCE:
            return None
        time.sleep(0.002)
    return None


def _await_end(folder, process):
    news, since = -1, time.monotonic()
    while time.monotonic() - since < PATIENCE:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(0.2)
            return code if code >= 0 else 128 - code
        if (count := len(list(read_events(folder)))) > news:
            news, since = count, time.monotonic()
    return None


def _find_latency(events, killed):
    steps = [event["time"] for event in events if event["moment"] == "step" and event["time"] > killed]
    begun = [event["time"] for event in events if event["moment"] == "begin" and event["time"] > killed]
    return min((time for time in steps if begun and time > min(begun)), default=float("nan")) - killed


def final_samples(events):
    """Return the samples of each epoch in the steps that count: those a later attempt did not take again."""
    taken = {}
    for event in events:
        if event["moment"] == "resume" and event["rank"] == 0:
            for epoch, steps in taken.items():
                taken[epoch] = [(step, samples) for step, samples in steps if step < event["step"]]
        elif event["moment"] == "step":
            taken.setdefault(event["epoch"], []).append((event["step"], event["samples"]))
    return {
        epoch: sorted(itertools.chain.from_iterable(samples for _, samples in steps)) for epoch, steps in taken.items()
    }
