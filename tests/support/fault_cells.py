"""Strike a training at one point, by a fault in one rank or by signals from outside, and observe how the job ends.

`strike` runs ``struck_job.py`` under a launcher in a folder of its own and returns an `Outcome`; `FaultCell` and
`SignalCell` say what is struck and what the outcome has to be.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from treadle.engine.checkpoint import CheckpointStore
from treadle.engine.checkpoint import store as checkpoint
from treadle.engine.checkpoint.atomic_swap import is_whole

from support import struck_job
from support.processes import clean_environment, programs

FAILING = ("raise", "exit 0", "exit 3", "SIGKILL", "SIGSEGV")
HANGING = ("SIGSTOP", "sleep", "lock", "in C")
PEERS = tuple(struck_job.BUSY)  # points at which the other rank is busy by itself, and needs nothing of this one
POINTS = (*(point for point in struck_job.POINTS if point not in PEERS), "after fit")
SAVED = dict(
    zip((*POINTS, *PEERS), (0, 0, 4, 4, 8, 4, 12, 12, 4, 4), strict=True)
)  # step of the newest checkpoint that has to be there
COMMANDS = {  # those of `make test-faults`; srun needs a cluster
    "local": ("python",),
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node", "2"),
    "treadle launch": ("treadle", "launch", "--nproc-per-node", "2"),
}
SRUN = ("srun", "-N1", "-n2", "--kill-on-bad-exit=0", "python")  # the ranks have to end each other
LIMIT = 5.0  # seconds: of the failing ranks' end, and `Trainer(timeout=)` for the hanging ones'
SLACK = 5.0
BOUND = 20.0  # seconds after which a job counts as hung, and is killed
START = 60.0  # seconds that a job may take to come to the point, on a busy machine
WATCHDOG_STATUS = 124  # that of timeout(1)
SIGNALS = ("TERM", "USR1", "INT", "HUP")
STATUS_OF_SIGNAL = {"TERM": 143, "USR1": 143, "INT": 130, "HUP": 129}


@dataclass
class Outcome:
    """How a job ended.

    Attributes:
        seconds: from the fault or the first signal to the end of the launcher; None if it never came.
        status: of the launcher, as a shell says it.
        steps: optimizer steps that were complete when it was struck.
        orphans: processes that lived 2 s longer than the launcher: their pids and roles.
        leftovers: files that nobody needs any more.
        newest: step of the newest checkpoint, None without one.
        broken: checkpoints that can't be loaded.
        err: what was printed.
    """

    seconds: float | None = None
    status: int | None = None
    steps: int = 0
    orphans: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    newest: int | None = None
    broken: list[str] = field(default_factory=list)
    err: str = ""

    @property
    def hung(self):
        return self.seconds is None

    def faults(self, limit, statuses):
        """What is wrong whatever struck the job: its end within ``limit`` seconds, its status and what it leaves."""
        found = ["HUNG"] if self.hung else []
        if not self.hung and self.seconds > limit:
            found.append("late")
        if not self.hung and self.status not in statuses:
            found.append(f"exit {self.status}")
        if self.orphans:
            found.append(f"{len(self.orphans)} orphans")
        if self.leftovers and not self.hung:  # else they are of the test's own kill
            found.append(f"left {', '.join(self.leftovers)}")
        if self.broken:
            found.append("broken checkpoint")
        return found

    def report(self, cell, wrong):
        """A line on how the job ended, for the summary of the tests."""
        words = ", ".join(map(str, dataclasses.astuple(cell)))
        seconds = math.inf if self.hung else self.seconds
        return f"{words}: {seconds:.1f} s, status {self.status}; {', '.join(wrong) or 'as it has to be'}"


@dataclass(frozen=True)
class FaultCell:
    """One fault in one rank."""

    point: str
    action: str
    rank: int
    strategy: str = "ddp"
    launcher: str = "local"

    @property
    def plan(self):
        plan = {"point": self.point, "action": self.action, "rank": self.rank, "strategy": self.strategy}
        return plan | ({"timeout": 60.0} if self.point in PEERS else {})  # the watchdog is not to end the peer

    @property
    def statuses(self):
        """The exit statuses that are right; torchrun has one for all failures."""
        if self.action == "exit 0" and self.point == "after fit":
            return {0}  # every rank has finished the run; how a script ends after it is its own affair
        if self.launcher == "torchrun":
            return {1}
        if self.launcher == "srun":  # the highest of the ranks' statuses
            statuses = {"exit 3": 3, "SIGKILL": 137, "SIGSEGV": 139} | dict.fromkeys(HANGING, WATCHDOG_STATUS)
            return {statuses.get(self.action, 1)} | ({137} if self.action in HANGING else set())
        if self.action in HANGING:
            return {WATCHDOG_STATUS}
        return {{"raise": 1, "exit 0": 1, "exit 3": 3, "SIGKILL": 137, "SIGSEGV": 139}[self.action]}

    @property
    def cause(self):
        """A pattern for the line that names the first cause."""
        rank = self.rank
        if self.action == "raise":
            return r"^(\S*: )?RuntimeError: the planned fault"
        if self.action in HANGING:
            return rf"rank {rank} of 2 .*(stopped|hung|no progress|not respond).*"
        if self.launcher in ("torchrun", "srun"):
            return rf"rank {rank} of 2 ended first"
        ending = {"exit 0": "exit status 0", "exit 3": "exit status 3"}.get(self.action, f"killed by {self.action}")
        return rf"rank {rank} of 2 (failed first: {ending}|.*left)"

    def faults_of(self, outcome, patience=1.0):
        """What is wrong with the outcome; nothing, if the guarantees hold within ``patience`` times the limit."""
        limit = patience * (LIMIT + SLACK if self.action in HANGING else LIMIT)
        found = outcome.faults(limit, self.statuses)
        if (outcome.newest or 0) < SAVED[self.point]:
            found.append(f"checkpoint {outcome.newest}, not {SAVED[self.point]}")
        if outcome.status != 0 and not outcome.hung:
            found += self._faults_of_cause(outcome)
        return found

    def _faults_of_cause(self, outcome):
        causes = list(re.finditer(self.cause, outcome.err, re.MULTILINE))
        if not causes and self.launcher == "torchrun":  # which may end the other rank before that can say anything
            code = {"exit 0": "0", "exit 3": "3", "SIGKILL": "-9", "SIGSEGV": "-11"}.get(self.action, "none")
            words = rf"Root Cause(.*\n)*  rank +: {self.rank} .*\n *exitcode +: {code} "
            causes = list(re.finditer(words, outcome.err))
        if not causes:
            return ["cause not named"]
        found = [f"cause {len(causes)} times"] if len(causes) > 1 else []
        before = [line for line in outcome.err[: causes[0].start()].splitlines() if _is_error(line)]
        return [*found, f"first said: {before[0][:70]}"] if before else found


def _is_error(line):
    if line.startswith("Exception raised from "):  # in a warning of torch's, of a store that is gone
        return False
    pattern = r"(\[?rank\d+\]?:? *)?(\w+\.)*(?!ChildFailedError)\w*(Error|Exception|PeerFailed)\b"
    return bool(re.match(pattern, line)) or "failed first" in line


@dataclass(frozen=True)
class SignalCell:
    """A signal to some processes, while the run is in some phase."""

    name: str
    target: str
    times: int
    point: str
    strategy: str = "ddp"
    launcher: str = "local"

    @property
    def plan(self):
        point = "mid-epoch" if self.point == "training" else self.point
        asked = self.name == "INT"  # Ctrl-C saves where that is asked for
        plan = {"point": point, "action": "wait", "rank": 1, "strategy": self.strategy, "save_on_exception": asked}
        return plan | ({"rank": 0} if self.point == "save" else {})

    @property
    def status(self):
        return 1 if self.launcher == "torchrun" else STATUS_OF_SIGNAL[self.name]

    def send(self, process, ranks):
        number = getattr(signal, f"SIG{self.name}")
        pids = {"supervisor": [process.pid], "rank 1": [ranks[1]], "all": [process.pid, *ranks.values()]}[self.target]
        for turn in range(self.times):
            if turn:
                time.sleep(0.2)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def faults_of(self, outcome, resumed, same):
        found = outcome.faults(2 * LIMIT, {self.status})
        if (lost := outcome.steps - (outcome.newest or 0)) > 0 and not (self.name == "INT" and self.times == 2):
            found.append(f"{lost} steps lost")
        if resumed.status != 0:
            found.append("resume fails")
        elif not same:
            found.append("resumed run differs")
        return found


# -- running ----------------------------------------------------------------------------------------------------------


def strike(folder, plan, launcher, cell=None, *, variables=None):
    """Run the job in ``folder`` as ``plan`` says until it ends, or is killed ``BOUND`` seconds after it was struck.

    ``variables`` are more environment variables, which ``srun`` needs to find its cluster.
    """
    folder.mkdir(exist_ok=True)
    for name in ("fired", "fired.part", "busy", "sent", "done-0", "done-1"):
        (folder / name).unlink(missing_ok=True)
    (folder / "strike.json").write_text(json.dumps({"timeout": LIMIT, **plan}))
    struck = "point" in plan
    temporary = Path(tempfile.mkdtemp(prefix="strike-"))
    env = clean_environment({"TMPDIR": str(temporary), **(variables or {})})
    env["PATH"] = f"{programs()}{os.pathsep}{env['PATH']}"
    if launcher == "torchrun":  # by default SIGUSR1 ends its agent, and the store with it
        env["PET_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    program, *options = SRUN if launcher == "srun" else COMMANDS[launcher]
    command = [shutil.which(program, path=env["PATH"]), *options, struck_job.__file__]
    outcome = Outcome()
    with (folder / "out.txt").open("a") as out, (folder / "err.txt").open("w") as err:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=err, start_new_session=True)
        try:
            start = time.monotonic()
            while struck and not (folder / "fired").exists():
                if process.poll() is not None or time.monotonic() - start > START:
                    raise AssertionError(f"{plan}: not struck in {folder}\n{(folder / 'err.txt').read_text()}")
                time.sleep(0.005)
            if struck:
                words = json.loads((folder / "fired").read_text())
                start, outcome.steps = words["time"], words["steps"]
            if cell is not None:
                start = time.monotonic()
                cell.send(process, read_ranks(folder))
                (folder / "sent").touch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(max(0.1, start + (BOUND if struck else START) - time.monotonic()))
                outcome.seconds = time.monotonic() - start
                outcome.status = code if code >= 0 else 128 - code
            outcome.orphans = [] if outcome.hung else find_orphans(folder)
        finally:
            kill_all(folder, process)
    outcome.err = (folder / "err.txt").read_text()
    _look_at_disk(folder, temporary, outcome)
    return outcome


def read_ranks(folder):
    """The ranks' pids, as they have written them down; data workers inherit RANK and are left out by their parent."""
    found = {}
    for file in sorted((folder / "pids").iterdir(), key=lambda file: file.stat().st_mtime):
        role = file.read_text()
        if role in ("0", "1"):
            found.setdefault(int(role), int(file.name))
    return found


def living(folder):
    """Processes whose working directory is ``folder``, as that of every process of the job is: command by pid."""
    found = {}
    for process in psutil.process_iter(["cwd", "name"]):  # one that has ended has no working directory
        if process.info["cwd"] == str(folder):
            role = folder / "pids" / str(process.pid)
            found[process.pid] = role.read_text() if role.exists() else process.info["name"]
    return found


def kill_all(folder, process):
    """End every process of the job, whatever state it is in."""
    for _ in range(200):
        pids = living(folder)
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    process.wait(10)


def find_orphans(folder):
    """Return the roles of processes of the job that live 2 s longer."""
    end = time.monotonic() + 2.0
    while (pids := living(folder)) and time.monotonic() < end:
        time.sleep(0.02)
    return [f"{role} ({pid})" for pid, role in pids.items()]


def _look_at_disk(folder, temporary, outcome):
    store = CheckpointStore(folder / "ckpt")
    path, outcome.broken = store.latest()
    outcome.newest = None if path is None else checkpoint.read_manifest(path).step
    # A rank that was killed right before the last rename of its save leaves it whole: the next start puts it in place.
    # A stopped one gets there in the few milliseconds for which its stack is read, see `fetch_stacks`.
    hidden = [file.name for file in (folder / "ckpt").glob(".*") if not is_whole(file)]
    # torchrun's, and torch's cache of compiled code, which `import torch._dynamo` creates and every process keeps.
    files = [name for name in sorted(os.listdir(temporary)) if not name.startswith(("torchelastic_", "torchinductor_"))]
    pids = "|".join(file.name for file in (folder / "pids").iterdir())
    shared = [name for name in os.listdir("/dev/shm") if re.search(rf"_({pids})_", name)]
    outcome.leftovers = hidden + files + shared
    shutil.rmtree(temporary)


def weights(folder):
    """What the ranks had at the end of the run."""
    return [json.loads((folder / f"done-{rank}").read_text()) for rank in (0, 1)]
