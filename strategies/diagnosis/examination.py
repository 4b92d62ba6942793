"""Examination of a job's ranks, in two parts: the reports of the ranks, and the measurements.

Each rank inspects itself and reports through torch's store. One rank evaluates all reports. The store responds even if
ranks are missing, so a rank that never reports can be named, while a collective would wait for it. The measurements
follow once every rank has reported. Each part has a time limit, and a timer ends a process that exceeds it.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .. import open_world
from ..distributed import LaunchEnvironment, disconnect, process_group
from ..processes import die_with_parent
from .findings import FAULT, Finding, find_worst, format_ranks, judge
from .machine import Facts, inspect_process
from .measurements import measure_all_reduce, measure_clocks

Report = dict[str, Any]
_STORE_ERRORS = (RuntimeError, dist.DistError)  # raised by torch if the store does not answer or no longer exists
MARGIN = 5.0  # seconds after torch's own limits, whose errors say more, at which the timer ends
_numbers = itertools.count()  # numbers of the examinations in this process


def examine(
    launched: LaunchEnvironment,
    run_folder: str | Path,
    limit: float,
    publish: Callable[[Report], None],
    accelerator: str = "auto",
) -> Report | None:
    """Examine the ranks that a launcher started. Must be called on all ranks; one of them publishes the report.

    To publish a report, a rank passes it to ``publish``. A rank that fails may publish a report of its failure.
    ``limit`` is the number of seconds that each rank waits for other ranks. A process that needs more than
    ``2 * limit + MARGIN`` seconds for one of the two parts exits with status 1.

    Returns:
        The report on each rank that published one, None on the other ranks.
    """
    if launched.supervisor is not None:
        die_with_parent(launched.supervisor)
    examination = _Examination(launched, run_folder, limit, publish)
    examination.start_timer("the rendezvous of the ranks", 2 * limit)
    facts = inspect_process(run_folder)
    try:
        store = examination.meet(facts["environment"])
        examination.call_roll(store, facts)
    except (ValueError, *_STORE_ERRORS) as error:
        examination.end(_describe_failed_meeting(launched, error, limit), facts)
        return examination.report
    if not examination.missing:
        examination.start_timer("the measurements", 2 * limit)
        examination.measure(accelerator)
    examination.end("", facts)
    return examination.report


def examine_without_ranks(run_folder: str | Path, errors: list[str]) -> Report:
    """Return a report on this process alone, for use if no ranks report.

    ``errors`` lists the reasons why no rank has reported.
    """
    facts = inspect_process(run_folder) | {"rank": 0}
    return make_report([facts], judge([facts], size=1, launched=None, missing=[], errors=errors, measured={}))


def make_report(ranks: list[Facts], findings: list[Finding]) -> Report:
    """Return the report that `treadle doctor --json` prints.

    ``ranks`` contains the result of `inspect_process` for each rank, plus the key ``"rank"``.
    """
    return {
        "result": find_worst(finding.mark for finding in findings),
        "findings": [finding.to_dict() for finding in findings],
        "ranks": ranks,
    }


class _Examination:
    """Examination by one rank, with the state that the main thread and the timer's thread share."""

    def __init__(
        self, launched: LaunchEnvironment, run_folder: str | Path, limit: float, publish: Callable[[Report], None]
    ) -> None:
        self.launched = launched
        self._run_folder = run_folder
        self.limit = limit
        self.report: Report | None = None
        self.missing: list[int] = []
        self._publish = publish
        self._number = next(_numbers)
        self._store: dist.Store | None = None
        self._facts: list[Facts] = []
        self._errors: list[str] = []
        self._measured: Facts = {}
        self._is_reporter = launched.rank == 0
        self._timer: threading.Timer | None = None
        self._ending = threading.Lock()

    def start_timer(self, purpose: str, seconds: float) -> None:
        """Start the timer for the next part. When it expires, this rank ends the examination and exits."""
        self._cancel_timer()
        self._timer = threading.Timer(seconds + MARGIN, self._time_out, (purpose, seconds))
        self._timer.daemon = True
        self._timer.start()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _time_out(self, purpose: str, seconds: float) -> None:
        """End the examination from the timer's thread, because torch calls may block the main thread."""
        self._errors = self._list_errors()
        error = "" if self._errors else f"{purpose} did not end within {seconds:g} s"
        self.end(error, inspect_process(self._run_folder))
        os._exit(1)

    def meet(self, environment: Mapping[str, str]) -> dist.Store:
        """Return a store that all ranks of this examination share."""
        launched = self.launched
        address = launched.address
        host = address[0] if address else environment["MASTER_ADDR"]
        try:
            socket.getaddrinfo(host, None)  # torch would retry until the limit
        except OSError as error:
            raise ValueError(
                f"MASTER_ADDR={host!r} can't be resolved on {socket.gethostname()} ({error.strerror or error}). Set "
                "MASTER_ADDR to the address of rank 0's machine."
            ) from None
        if address is None and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # Rank zero holds the store. In torch's own rendezvous it would wait for all ranks, without naming the
            # missing ones.
            port = environment["MASTER_PORT"]
            if not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"MASTER_PORT={port!r} must be an integer from 1 to 65535.")
            address = (host, int(port))
        store = process_group.meeting_place(launched.rank, launched.world_size, timedelta(seconds=self.limit), address)
        self._store = dist.PrefixStore(f"treadle/{launched.run_id}/diagnosis {self._number}", store)
        return self._store

    def call_roll(self, store: dist.Store, facts: Facts) -> None:
        """Report this rank's inspection, and determine which ranks are missing and which rank publishes the report."""
        rank, size = self.launched.rank, self.launched.world_size
        if store.add(f"arrivals of {rank}", 1) > 1:
            raise ValueError(f"another process is also rank {rank} of {size}. Set a different RANK for each process.")
        store.set(f"facts of {rank}", json.dumps(facts))
        if rank == 0 or not self._await(store, "roll"):
            names = [f"facts of {other}" for other in range(size)]
            present = self._await_keys(store, names) if rank == 0 else [store.check([name]) for name in names]
            self._is_reporter = present.index(True) == rank
        if self._is_reporter:
            self._facts = [
                json.loads(store.get(names[other])) | {"rank": other} for other in range(size) if present[other]
            ]
            store.set("roll", json.dumps([other for other in range(size) if not present[other]]))
        elif not self._await(store, "roll"):
            raise RuntimeError("the rank that writes the report did not state which ranks are missing")
        self.missing = json.loads(store.get("roll"))

    def _await_keys(self, store: dist.Store, names: list[str]) -> list[bool]:
        """Wait until all keys are set or the limit has passed, and return for each key whether it is set."""
        deadline = time.monotonic() + self.limit
        while not store.check(names) and time.monotonic() < deadline:
            time.sleep(0.02)
        return [store.check([name]) for name in names]

    def _await(self, store: dist.Store, name: str) -> bool:
        """Wait for a key up to the limit, and return whether it is set."""
        with suppress(*_STORE_ERRORS):
            store.wait([name], timedelta(seconds=self.limit))
            return True
        return False

    def measure(self, accelerator: str) -> None:
        """Connect the ranks and run the measurements. If a rank fails, the failure becomes part of the report."""
        assert self._store is not None
        error = ""
        try:
            world = open_world(accelerator, spread=False, timeout=timedelta(seconds=self.limit))
            self._store.set(f"{world.rank} is connected", "")
            if world.size > 1:
                self._measured["clocks"] = measure_clocks(world)
                self._measured["all-reduce"] = measure_all_reduce(world)
        except (ValueError, ArithmeticError, *_STORE_ERRORS) as caught:
            error = str(caught).strip().split("\n")[0] or type(caught).__name__
        with suppress(*_STORE_ERRORS):
            self._store.set(f"error of {self.launched.rank}", error)
            if self._is_reporter:
                names = [f"error of {rank}" for rank in range(self.launched.world_size)]
                self._await_keys(self._store, names)
                self._errors = self._list_errors()
        if not error and not self._errors:
            disconnect()

    def _list_errors(self) -> list[str]:
        """Return the failures of the measurements with their ranks; an empty list if this rank knows of none."""
        if self._store is None or not self._facts or self.missing:
            return []
        store, ranks, errors = self._store, range(self.launched.world_size), []
        with suppress(*_STORE_ERRORS):
            late = [rank for rank in ranks if not store.check([f"error of {rank}"])]
            unconnected = [rank for rank in late if not store.check([f"{rank} is connected"])]
            if late:
                errors.append(f"{format_ranks(late)} did not finish the measurements within {self.limit:g} s")
            if unconnected:
                errors[-1] = f"{format_ranks(unconnected)} did not connect within {self.limit:g} s"
            texts: dict[str, list[int]] = {}
            for rank in ranks:
                if rank not in late and (text := store.get(f"error of {rank}").decode()):
                    texts.setdefault(text, []).append(rank)
            errors += [f"{format_ranks(failed)}: {text}" for text, failed in texts.items()]
        return errors

    def end(self, error: str, facts: Facts) -> None:
        """Publish a report if this rank has to publish or has failed; otherwise wait for the publishing rank."""
        with self._ending:  # the timer may expire while the report is being sent
            if self.report is not None:
                return
            if not self._is_reporter:
                if error or self._store is None:
                    self.report = make_report([facts], [Finding(FAULT, f"rank {self.launched.rank}", error)])
                    self._publish(self.report)
                else:
                    self._await(self._store, "reported")
                self._cancel_timer()
                return
            ranks = self._facts or [facts | {"rank": self.launched.rank}]
            findings = judge(
                ranks,
                size=self.launched.world_size,
                launched=self.launched,
                missing=self.missing,
                errors=[*([error] if error else []), *self._errors],
                measured=self._measured,
            )
            self.report = make_report(ranks, findings)
            self._publish(self.report)
            self._cancel_timer()
            if self._store is not None:
                with suppress(*_STORE_ERRORS):
                    self._store.set("reported", "")


def _describe_failed_meeting(launched: LaunchEnvironment, error: Exception, limit: float) -> str:
    text = str(error).strip().split("\n")[0]
    if launched.rank == 0 or isinstance(error, ValueError):
        return text
    return f"rank 0 or the launcher, which hosts the store, did not respond within {limit:g} s: {text}"
