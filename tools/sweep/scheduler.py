"""Scheduler of a sweep, which decides which trial starts or continues next, and records the outcomes.

Several processes may run a scheduler for the same sweep, on machines that share the sweep's folder. Each decision is
made under a lock: to start the study's next trial, or to continue a trial that no running process executes. A trial's
number, values and run folder are stored in the study before its process starts. If a scheduler is killed, another
scheduler finds its trials and continues each in its run folder, from the last checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from ...callbacks.reporting import format_duration, format_number
from ...cli.commands import format_parameters
from ...cli.config import ConfigError, make_printable
from ...common.command_results import report
from ...common.messages import format_count, print_unless_closed, warn, write_stderr
from ...engine.preemption import requeue_job
from ...trainer.runs import holder, index
from .assignment import Assignment, follow_scheduler
from .report import Report
from .study import Study
from .sweep_file import Sweep
from .sweep_folder import REPORT, SweepFolder
from .trial_config import TrialConfigs
from .workers import End, Outcome, Worker, Workers, judge

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
_LOOK = 2.0  # seconds between two checks of the trials that other processes run
_REPORT_EVERY = 10.0  # minimum seconds between two reports
_MOST_KILLS = 3  # kills of one trial that has made no progress in between
_ENDED = {End.COMPLETE: TrialState.COMPLETE, End.PRUNED: TrialState.PRUNED, End.FAILED: TrialState.FAIL}


class Scheduler:
    """Scheduler that runs the remaining trials of a sweep.

    Several processes, on machines that share the sweep's folder, may run the same sweep. Each decision is made under a
    lock. A trial is stored in the study before its process starts, so another scheduler can continue it.
    """

    def __init__(self, sweep: Sweep, configs: TrialConfigs, command: Sequence[str], workers: Workers) -> None:
        self.sweep, self.configs, self.command, self.workers = sweep, configs, command, workers
        self.folder = SweepFolder(sweep)
        self.study: Study
        self._signal: signal.Signals | None = None
        self._kills = False  # set by a second signal
        self._failures = 0  # failures in this session
        self._first_error = ""
        self._killed: dict[int, tuple[int, int]] = {}  # by trial: how often it was killed, and at which step
        self._elsewhere: dict[int, str] = {}  # by trial: the machine of the other process that runs it
        self._report_due = time.monotonic() + _REPORT_EVERY

    def run(self) -> int:
        """Run trials until none is left to run, or the sweep is stopped. Return the exit status."""
        with self.folder.working():
            with self.folder.deciding():
                self.folder.forget_the_dead()
                self._open()
            with self._catching_signals():
                try:
                    self._work()
                finally:  # some are left only if an error ends this process
                    self.workers.end(signal.SIGTERM)
                self._report(at_once=True)
                return self._conclude()

    def _open(self) -> None:
        """Open the study, check that it belongs to this folder, and write the sweep's settings to the folder."""
        is_new = self.folder.is_new()
        self.study = Study(self.sweep)
        trials = self.study.list_trials()
        if is_new and trials:
            raise ConfigError(
                f"{self.sweep.file}: storage: {self.study.place} contains a study {self.sweep.name!r} with "
                f"{format_count(len(trials), 'trial')}, but {self.folder.path} contains no runs of this study. Give "
                "the sweep another name (name: ..., or name=... on the command line)."
            )
        if not trials and self.folder.has_runs():
            raise ConfigError(
                f"{self.sweep.file}: {self.folder.path} contains runs of the sweep, but the study in "
                f"{self.study.place} has no trials. Set storage to the one with which the sweep was started, or give "
                "the sweep another name (name: ..., or name=... on the command line)."
            )
        self.folder.write_description()  # only now: with it, another run of the command would continue the study
        ended = sum(trial.state.is_finished() for trial in trials)
        begun = f"; ended: {ended}, to be continued: {len(trials) - ended}" if trials else ""
        count = format_count(self.sweep.trials, "trial")
        _print(f"sweep {self.sweep.name}: {count} by {self.sweep.method.kind}{begun}")

    # -- the loop ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        told = killed = False
        while True:
            while self._is_going() and self.workers.has_room and (number := self._decide()) is not None:
                self._start(number)
            if self._signal is not None and not told:
                told = True
                self.workers.end(signal.SIGTERM)
            if self._kills and not killed:
                killed = True
                self.workers.end(signal.SIGKILL)
            waits = self._is_going() and socket.gethostname() in self._elsewhere.values()
            if not self.workers.running and not waits:
                return
            worker = self.workers.wait(_LOOK if waits else None)
            if worker is not None:
                self._record_outcome(worker)

    def _is_going(self) -> bool:
        return self._signal is None and not self._has_failed_too_often()

    def _has_failed_too_often(self) -> bool:
        limit = self.sweep.max_failures
        if limit is None or self._failures < limit:
            return False
        return not any(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in self.study.list_trials())

    @contextmanager
    def _catching_signals(self) -> Iterator[None]:
        """Within a ``with`` block, record the first signal, and request on a second one that the trials are killed."""

        def record_signal(number: int, frame: FrameType | None) -> None:
            if self._signal is None:
                self._signal = signal.Signals(number)
                write_stderr(
                    f"{self._signal.name}: the running trials save and stop; a second signal kills them immediately"
                )
            else:
                self._kills = True
            self.workers.wake()

        handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, record_signal) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- the next trial ------------------------------------------------------------------------------------------

    def _decide(self) -> int | None:
        """Claim the next trial for this process and return its number; None if no trial is left or the sweep stops."""
        with self.folder.deciding():
            trials = self.study.list_trials()
            self._elsewhere = {}
            for trial in trials:
                if trial.state is TrialState.RUNNING and trial.number not in self.workers.running:
                    owner = trial.user_attrs.get("owner", "")
                    host = None if owner == self.folder.token else self.folder.find_host(owner)
                    if host is not None:
                        self._elsewhere[trial.number] = host
                    elif self._adopt(trial) and self._claim(trial.number, trial.user_attrs.get("run")):
                        return trial.number
            begun = sum(trial.state is not TrialState.WAITING for trial in trials)
            while begun < self.sweep.trials and self._is_going():
                number = self.study.ask()
                if self._claim(number, None):
                    return number
                begun += 1
        return None

    def _adopt(self, trial: FrozenTrial) -> bool:
        """Return whether to run a trial that no scheduler is running. If the trial has ended, record its outcome."""
        number = trial.user_attrs.get("run")
        if number is None:
            return True
        folder = self.folder.path / str(number)
        outcome = judge(folder)
        if outcome.end is End.ELSEWHERE:
            occupant = holder(folder)
            self._elsewhere[trial.number] = socket.gethostname() if occupant is None else occupant.host
            return False
        if outcome.end is End.CUT_SHORT:
            return True
        self._tell(trial.number, self._label(number), outcome)
        return False

    def _claim(self, number: int, run: int | None) -> bool:
        """Assign a trial to this scheduler and prepare its run folder.

        If its values are invalid, the trial is recorded as failed, and the result is False.
        """
        parameters = self.study.draw(number)
        if run is None:
            taken = {trial.user_attrs.get("run") for trial in self.study.list_trials()}
            run = self.folder.choose_number(number, taken)
        self.study.record_attributes(number, run=run, owner=self.folder.token)
        try:
            config = self.configs.write(parameters)
        except ConfigError as error:  # each value is valid, but not all of them together
            self._tell(number, self._label(run), Outcome(End.FAILED, error=str(error)))
            return False
        self.folder.prepare(run, number, config, parameters)
        return True

    def _start(self, number: int) -> None:
        trial = self.study.list_trials()[number]
        run = trial.user_attrs["run"]
        folder = self.folder.path / str(run)
        metric, prune = self.sweep.metric, self.sweep.prune
        assignment = Assignment(
            folder=str(folder),
            scheduler=os.getpid(),
            metric=metric.name,
            mode=metric.mode,
            take=metric.take,
            storage=self.study.url if prune is not None else "",
            study=self.sweep.name,
            number=number,
            pruner={} if prune is None else self.study.describe_pruner(),
        )
        steps = index.read(folder).facts.get("steps")
        again = f" (continued after step {steps:,})" if steps else ""
        _print(f"{self._label(run)}: {format_parameters(trial.params)}{again}")
        command = follow_scheduler([*self.command, "--from-run", str(folder), "ckpt_path=auto"])
        self.workers.start(number, folder, command, assignment.encode())

    def _label(self, run: int) -> str:
        return f"{self.sweep.name}/{run}"

    # -- outcomes ------------------------------------------------------------------------------------------------

    def _record_outcome(self, worker: Worker) -> None:
        """Record the outcome of a trial whose process has ended. A trial fails after three kills without progress."""
        outcome = judge(worker.folder, worker.process.returncode)
        label = self._label(int(worker.folder.name))
        if outcome.end is End.CUT_SHORT:
            if self._signal is not None:
                _print(f"{label}: stopped after step {outcome.steps:,}, to be continued")
                return
            count, steps = self._killed.get(worker.trial, (0, -1))
            count = count + 1 if outcome.steps <= steps else 1
            self._killed[worker.trial] = count, outcome.steps
            if count < _MOST_KILLS:
                _print(f"{label}: {outcome.error} after step {outcome.steps:,}")
                return
            error = f"{outcome.error} {count} times without progress; the machine may be out of memory"
            outcome = Outcome(End.FAILED, error=error, steps=outcome.steps)
        if outcome.end is End.ELSEWHERE:
            _print(f"{label}: running in another process")
            return
        seconds = time.monotonic() - worker.began
        self._tell(worker.trial, label, outcome, f", after {format_duration(seconds)}")
        self._report()

    def _tell(self, number: int, label: str, outcome: Outcome, took: str = "") -> None:
        if outcome.end is End.FAILED:
            self._failures += 1
            self._first_error = self._first_error or f"{label}: {outcome.error}"
            self.study.record_attributes(number, error=outcome.error)
        before = self.study.find_best()
        self.study.tell(number, _ENDED[outcome.end], outcome.value)
        best = self.study.find_best()
        if outcome.end is End.FAILED:
            _print(f"{label}: failed{took}: {outcome.error}")
        elif outcome.end is End.PRUNED:
            _print(f"{label}: pruned{took}")
        elif outcome.value is not None:
            is_best = best is not None and best.number == number and (before is None or before.number != number)
            words = ", the best so far" if is_best else ""
            _print(f"{label}: {self.sweep.metric.name} {format_number(outcome.value)}{took}{words}")

    def _report(self, at_once: bool = False) -> None:
        began = time.monotonic()
        if not at_once and began < self._report_due:
            return
        try:
            self.folder.write(REPORT, Report(self.study, self.folder.path).render())
        except OSError as error:
            warn(f"the sweep's report can't be written: {error}")
        ended = time.monotonic()
        self._report_due = ended + max(_REPORT_EVERY, 20 * (ended - began))

    # -- the end -------------------------------------------------------------------------------------------------

    def _conclude(self) -> int:
        """Print the state of the sweep and return the exit status. After SIGUSR1, also requeue the SLURM job."""
        trials = self.study.list_trials()
        counts = Counter(trial.state for trial in trials)
        words = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        parts = [f"{counts[state]} {word}" for word, state in words.items() if counts[state]]
        left = self.sweep.trials - sum(trial.state.is_finished() for trial in trials)
        if left > 0:
            parts.append(f"{left} left")
        _print(f"sweep {self.sweep.name}: {', '.join(parts) or 'nothing has run'}")
        if (best := self.study.find_best()) is not None:
            path = os.path.relpath(self.folder.path / str(best.user_attrs["run"]))
            value = format_number(best.value or 0.0)
            _print(f"best: {self._label(best.user_attrs['run'])}, {self.sweep.metric.name} {value}, {path}")
            _print(f"  {format_parameters(best.params)}")
            _print(f"  {self.configs.program.removesuffix('fit')}validate --from-run {path}")
        _print(f"report: {os.path.relpath(self.folder.path / REPORT)}")
        report(
            None, self._describe(best, {word: counts[state] for word, state in words.items()} | {"left": max(0, left)})
        )
        if self._signal is not None:
            if self._signal.name == "SIGUSR1":
                requeue_job()
                self._signal = signal.SIGTERM
            _print(f"the same command continues the sweep, with {format_count(left, 'trial')} left")
            return 128 + self._signal
        if remote := {host for host in self._elsewhere.values() if host != socket.gethostname()}:
            _print(f"still running on {', '.join(sorted(remote))}: {format_count(len(self._elsewhere), 'trial')}")
        if counts[TrialState.FAIL] and not (counts[TrialState.COMPLETE] or counts[TrialState.PRUNED]):
            _print(f"no trial has succeeded. The first error: {self._first_error or 'see the report'}")
            return 1
        return 0

    def _describe(self, best: FrozenTrial | None, counts: dict[str, int]) -> dict[str, Any]:
        found = best and {
            "run": str(self.folder.path / str(best.user_attrs["run"])),
            "value": best.value,
            "parameters": best.params,
        }
        names = {"sweep": self.sweep.name, "metric": self.sweep.metric.name, "report": str(self.folder.path / REPORT)}
        return {**names, "trials": counts, "best": found}


def _print(text: str) -> None:
    """Print text. If the output has been closed, as by `treadle sweep ... | head`, the sweep continues without it."""
    print_unless_closed("\n".join(map(make_printable, text.splitlines())))
