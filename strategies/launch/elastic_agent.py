"""torch's elastic agent, extended to report which rank failed first."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, _RendezvousExitOp
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ...common.messages import format_count, group_ranks, write_stderr
from ..distributed import HUNG
from ..processes import RankBoard, kill_session
from .rendezvous import SIGNALS, Job, Place

# Signals that make ranks save and leave; SIGUSR2 if their Trainer was told to.
_SAVING = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
_PREEMPTING = tuple(getattr(signal, name) for name in _SAVING if hasattr(signal, name))
# Exit codes of ranks that were asked to leave; 1: SIGHUP. Python ends itself with SIGINT after a KeyboardInterrupt.
_STOPPED = (128 + 1, 128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT)
_POLL = 0.01  # seconds; the order of failures closer than this is unknown; a rank needs longer to end
_HUNG_GRACE = 0.5  # seconds
_AGAIN_GRACE = 1.0  # seconds
_NEWS, _NEWS_OF_LEAVING = 1.2, 3.0  # seconds; torch requests the state of the machines at most once per second
# Seconds that machines that meet again wait for more machines. They lost each other at the same time, whereas machines
# that meet for the first time may be started half a minute apart (torch's default for both, which --rdzv-conf changes).
_LAST_CALL = timedelta(seconds=5)
_LEAVE = 5.0  # seconds
_CHANGED = "the machines of the run have changed; restarting"
_LEFT_EARLY = 256  # not an exit status that the system uses
# Keys under which the machines' agents inform each other.
_END, _DONE, _LEFT = "treadle/end", "treadle/done", "treadle/left"


class Membership:
    """Machines that take part in a run, wait to join it, or have left it.

    Changes are reported only if the rendezvous is a `DynamicRendezvousHandler` of torch, as with the c10d backend.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler if isinstance(handler, DynamicRendezvousHandler) else None
        self._size = 0

    def begin_round(self) -> None:
        """Prepare the first or a later rendezvous of the run, so that torch creates a new store for the ranks."""
        if self._handler is None:
            return
        # torch (2.4 to 2.13) keeps the ranks' store over restarts, with the keys of the killed ranks, and on some
        # machines with the address of a machine that has left. With None it is created again, and all machines see the
        # new one.
        self._handler._bootstrap_store_info = self._handler._shared_tcp_store_server = None
        self._handler.num_nodes_waiting()  # this requests the state from the store
        state, timeout = self._handler._state_holder.state, self._handler.settings.timeout
        if (state.complete or state.round > 0) and timeout.last_call > _LAST_CALL:
            timeout._set_timeouts(last_call=_LAST_CALL)

    def end_round(self, size: int) -> None:
        """Record the number of machines that took part in the completed rendezvous."""
        self._size = size

    def look(self) -> tuple[bool, bool]:
        """Return whether a machine has left the run, and whether another one is waiting to join."""
        if self._handler is None:
            return False, False
        waiting = self._handler.num_nodes_waiting()
        present = len(self._handler._state_holder.state.participants)
        # A machine that is alone and was stopped for a while has no information about itself.
        return self._size > 1 and present < self._size, waiting > 0

    def report_leaving(self) -> None:
        """Report immediately that this machine leaves, so that the other machines need not wait for a timeout."""
        if self._handler is not None:
            self._handler._stop_heartbeats()
            with contextlib.suppress(RendezvousError):  # the store has ended, or does not answer in time
                self._handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + _LEAVE)


class EndedByOtherMachine(Exception):
    """Error that ends the run because another machine ended it or cannot be reached.

    ``status`` is the exit status; the message is the reason.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Agent(LocalElasticAgent):
    """torch's agent that also records the order in which ranks end and uses Treadle's grace periods.

    torch's agent cannot tell which of two failures between its checks came first. After a failure, it gives the other
    ranks a fixed 30 s to end (torch 2.11, 2.13).
    """

    def __init__(self, spec: WorkerSpec, job: Job, board: RankBoard) -> None:
        # A log directory only if one is requested, because a killed supervisor would leave it behind.
        redirects, tee = Std.from_str(job.redirects), Std.from_str(job.tee)
        super().__init__(spec, DefaultLogsSpecs(log_dir=job.log_dir or os.devnull, redirects=redirects, tee=tee))
        self.job = job
        self.board = board
        self.membership = Membership(spec.rdzv_handler)
        self.grace = job.grace
        self.looks = max(1, round(job.monitor_interval / _POLL))
        self.restarting = self.hurried = False
        self.closing: signal.Signals | None = None  # the signal that the ranks were sent first
        # Exit codes by local rank, in the order of time; `_LEFT_EARLY` for an exit with 0 from within a stage.
        self.ends: dict[int, int] = {}
        self.sent: dict[int, set[int]] = {}  # by local rank, the signals that this process has sent it

    def _rendezvous(self, worker_group: Any) -> None:
        self.membership.begin_round()
        super()._rendezvous(worker_group)
        self.membership.end_round(worker_group.group_world_size)

    def _start_workers(self, worker_group: Any) -> Any:
        self.closing = None
        self.ends.clear()
        self.sent.clear()
        self.board.clear()
        return super()._start_workers(worker_group)

    def _restart_workers(self, worker_group: Any) -> None:
        first = self.first_failure()
        reason = f"{first}; restart {self.job.max_restarts - self._remaining_restarts} of {self.job.max_restarts}"
        self._start_again(worker_group, reason if first else _CHANGED, self.grace)

    def _start_again(self, worker_group: Any, reason: str, grace: float) -> None:
        """End the ranks, repeat the rendezvous of the machines, and restart the ranks."""
        write_stderr(reason)
        if self.first_failure():
            self.sweep()
        self.restarting, before, self.grace = True, self.grace, grace
        try:
            super()._restart_workers(worker_group)
        finally:
            self.restarting, self.grace = False, before

    def _monitor_workers(self, worker_group: Any) -> Any:
        # After each return the agent asks its store for news, which takes longer than a check.
        for _ in range(self.looks):
            time.sleep(_POLL)
            if self._note_ends() or self._end_silent() or len(self.ends) == len(worker_group.workers):
                break
        else:
            # Not torch's own check: one that noticed a failure before ours would start its 30 s.
            self._check_for_end()
            # torch only checks for machines that join, and the ranks of this machine may wait for half an hour.
            if self.may_change and self.membership.look()[0]:
                self._start_again(worker_group, _CHANGED, self.job.failure_grace)
            return RunResult(state=WorkerState.HEALTHY)
        if failed := [code for code in self.ends.values() if code]:
            if self._await_change(failed):
                self._start_again(worker_group, _CHANGED, self.job.failure_grace)
                return RunResult(state=WorkerState.HEALTHY)
            if self._remaining_restarts > 0:
                self._check_for_end()
            else:
                self.tell(_convert_to_status(failed[0]), f"{self.first_failure()} on {socket.gethostname()}")
            # A rank that was asked to stop ended as intended, and the others may still be saving.
            saving = failed[0] in _STOPPED or any(map(self.board.is_leaving, self._list_living()))
            seconds = self.grace if saving else self.job.failure_grace
            # The watchdogs of the others have ended them by now, or cannot.
            seconds = min(seconds, _HUNG_GRACE) if failed[0] == HUNG else seconds
            self._end_ranks(signal.SIGTERM, seconds, patient=saving)
        elif not self._await_others():
            self._start_again(worker_group, _CHANGED, self.job.failure_grace)
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _await_change(self, failed: list[int]) -> bool:
        """Wait briefly, and return whether a machine joins or leaves, which would explain the failure."""
        nodes = self.job.nodes
        if nodes is None or not nodes.elastic:
            return False
        # A machine that is told to leave does so when its ranks have saved, at the same time as this one.
        seconds = _NEWS_OF_LEAVING if failed[0] in _STOPPED else _NEWS
        end = time.monotonic() + (seconds if self.several else 0.0)
        while not any(self.membership.look()):
            if time.monotonic() >= end:
                return False
            self._check_for_end()
            time.sleep(0.05)
        return True

    def _exit_barrier(self) -> None:
        """Do nothing. torch would wait for the other machines here, but `_await_others` has waited already."""

    def _await_others(self) -> bool:
        """Wait until the ranks of all machines have ended. Return False if the machines have to start again instead."""
        if not self.several:
            return True
        self._ask("add", _DONE, 1)
        while self._ask("add", _DONE, 0) < self._worker_group.group_world_size:
            time.sleep(0.05)
            self._check_for_end()
            if self.membership.look()[0]:
                if self.may_change:
                    return False
                raise self._make_other_end(1, "a machine left the run before its ranks had ended")
        return True

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        if not self.restarting:
            if not self.closing:
                _protect_save(death_sig)
            # torch calls this again if a second signal interrupted the first wait.
            if self.closing is signal.SIGINT:
                self._close(signal.SIGINT, _AGAIN_GRACE)  # a rank cleans up what it interrupts
            death_sig, self.closing = (signal.SIGKILL if self.closing else death_sig), death_sig
        self._end_ranks(death_sig, self.grace, patient=not self.hurried)
        super()._shutdown(death_sig)

    def _list_living(self) -> list[int]:
        handlers = {} if self._pcontext is None else self._pcontext.subprocess_handlers  # type: ignore[attr-defined]
        return [rank for rank, handler in handlers.items() if handler.proc.poll() is None]

    def _end_ranks(self, number: signal.Signals, seconds: float, *, patient: bool) -> None:
        """Send a signal to all ranks that still run, and SIGKILL to those that have not ended in time.

        If ``patient`` is set, the countdown restarts while a rank is leaving because of a signal, since a save may take
        any amount of time.
        """
        context: Any = self._pcontext
        for rank in self._list_living():
            context.subprocess_handlers[rank].close(death_sig=number)
            self.sent.setdefault(rank, set()).add(number)
        end = time.monotonic() + seconds
        while living := self._list_living():
            now = time.monotonic()
            if patient and any(map(self.board.is_leaving, living)):
                end = now + seconds
            if now >= end:
                break
            time.sleep(_POLL)
        self._close(signal.SIGKILL, 1.0)

    def _close(self, number: signal.Signals, seconds: float) -> None:
        context: Any = self._pcontext
        if context is not None:
            for rank in self._list_living():  # torch sends SIGKILL after the timeout
                self.sent.setdefault(rank, set()).update((number, signal.SIGKILL))
            context.close(number, timeout=seconds)

    def _note_ends(self) -> bool:
        """Record the ranks that ended since the last call, and return whether any rank has failed."""
        handlers = {} if self._pcontext is None else self._pcontext.subprocess_handlers  # type: ignore[attr-defined]
        had_failed = any(self.ends.values())
        codes = {rank: handler.proc.poll() for rank, handler in handlers.items() if rank not in self.ends}
        # Of the ranks found in one check a killed one comes first, because it makes the others raise errors.
        for rank, code in sorted(codes.items(), key=lambda end: end[1] is None or end[1] >= 0):
            if code is not None:
                self.ends[rank] = _LEFT_EARLY if code == 0 and self.board.is_running(rank) else code
        failed = next((rank for rank, code in self.ends.items() if code), None)
        if failed is not None and not had_failed and not self.board.has_exited(failed):
            # A rank that left its stage with `sys.exit(0)` is why the other one failed, even if it needs longer to end.
            exited = [rank for rank in handlers if self.board.has_exited(rank) and not self.ends.get(rank)]
            self.ends = dict.fromkeys(exited, _LEFT_EARLY) | {r: c for r, c in self.ends.items() if r not in exited}
        return failed is not None

    def _end_silent(self) -> bool:
        """End the remaining ranks if all have been silent for longer than their limit; return whether this happened."""
        silent = self.board.find_silent(self.ends)
        folder_name = f"stacks-{datetime.now():%Y%m%d-%H%M%S}" if silent else ""
        for rank in silent:
            write_stderr(f"rank {self.global_rank(rank)} of {self.world_size} {self.board.report(rank, folder_name)}")
        self.ends |= dict.fromkeys(silent, HUNG)
        if silent:
            self._close(signal.SIGKILL, self.job.failure_grace)
        return bool(silent)

    @property
    def may_change(self) -> bool:
        """True if the ranks may be restarted after a machine has left."""
        nodes = self.job.nodes
        return nodes is not None and (nodes.elastic or self.job.max_restarts > 0)

    @property
    def several(self) -> bool:
        """True if other machines took part in the last rendezvous."""
        return self._worker_group.store is not None and self._worker_group.group_world_size > 1

    def global_rank(self, local_rank: int) -> int:
        """Return the global rank of a local rank, or the local rank itself before global ranks are assigned."""
        workers = self._worker_group.workers
        return local_rank if local_rank >= len(workers) else workers[local_rank].global_rank

    @property
    def world_size(self) -> int:
        """World size of the run. Before ranks are assigned, the number of ranks of this machine."""
        workers = self._worker_group.workers
        return workers[0].world_size if workers else self.job.nproc

    def first_failure(self) -> str:
        """Describe the rank of this machine that was the first to fail or to be stopped; return "" if there is none."""
        local = next((rank for rank, code in self.ends.items() if code), None)
        if local is None:
            return ""
        code = self.ends[local]
        hint = " (by a user, or by the system because memory ran out)" if code == -signal.SIGKILL else ""
        event = "was stopped first" if code in _STOPPED else "failed first"
        return f"rank {self.global_rank(local)} of {self.world_size} {event}: {_describe_ending(code)}{hint}"

    def _ask(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self._worker_group.store, method)(*args)
        except RuntimeError as error:  # DistError and its subclasses
            raise self._make_other_end(
                1, f"the machine that hosts the run's store does not respond ({_get_first_line(error)})"
            ) from None

    def _make_other_end(self, status: int, text: str) -> EndedByOtherMachine:
        if status not in _STOPPED:
            self.grace, self.hurried = self.job.failure_grace, True  # nothing can be saved without the other machines
        return EndedByOtherMachine(status, text)

    def _check_for_end(self) -> None:
        """Raise an error if another machine has reported the end of the run or the ranks' store does not respond."""
        if self.several and self._ask("check", [_END]):
            raise self._make_other_end(*json.loads(self._ask("get", _END)))

    def tell(self, status: int, text: str) -> None:
        """Report the end of the run to the other machines, unless another machine has already reported it.

        Raises:
            EndedByOtherMachine: If another machine has reported first, or if the store does not respond.
        """
        if self.several:
            mine = json.dumps([status, text])
            stored = self._ask("compare_set", _END, "", mine)
            if stored.decode() != mine:
                raise self._make_other_end(*json.loads(stored))

    def await_leave(self, seconds: float) -> None:
        """Wait at most ``seconds`` for all machines to be ready to leave, because the store ends with its host."""
        if not self.several:
            return
        end = time.monotonic() + seconds
        with contextlib.suppress(EndedByOtherMachine):
            self._ask("add", _LEFT, 1)
            while self._ask("add", _LEFT, 0) < self._worker_group.group_world_size and time.monotonic() < end:
                time.sleep(0.05)

    def sweep(self) -> None:
        """Kill the ranks that still run, and the processes in the ranks' sessions, such as data workers."""
        if self._pcontext is not None:
            for pid in self._pcontext.pids().values():
                kill_session(pid)

    def finish(self, sweep: bool) -> None:
        """End all remaining ranks and, after a failure or with ``sweep``, also the processes that they had started."""
        if self._pcontext is None:
            return
        if self._note_ends() or sweep:
            self.sweep()
        self._close(signal.SIGKILL, 1.0)
        self._note_ends()


def run(job: Job, place: Place | None, board: RankBoard) -> int:
    """Run a job under an agent, and return the run's exit status. Must be called in the main thread of the process.

    ``place`` is None for a run on one machine.
    """
    if job.nodes is not None and place is not None:
        source = "" if place.local_addr is None else f" as {place.local_addr}"
        write_stderr(f"waiting at {place.endpoint}{source} for {_count(job)} of the run {job.run_id}")
    stop: signal.Signals | None = None
    other_end: EndedByOtherMachine | None = None
    with _silence_agent():
        rendezvous = _make_rendezvous(job, place)
        agent = Agent(_make_spec(job, place, rendezvous), job, board)
        try:
            agent.run()
        except SignalException as error:
            stop = error.sigval
        except KeyboardInterrupt:  # while the machines were meeting
            stop = signal.SIGINT
        except EndedByOtherMachine as error:
            other_end = error
        except RendezvousError as error:
            other_end = EndedByOtherMachine(
                1, f"the rendezvous of the machines failed, or a machine has left: {_get_first_line(error)}"
            )
        finally:
            for number in (getattr(signal, name) for name in SIGNALS if hasattr(signal, name)):
                signal.signal(number, signal.SIG_IGN)  # the rest takes a moment and must be completed
            agent.finish(sweep=stop is not None or other_end is not None)
            _take_leave(agent, rendezvous, stop)
    return _report_outcome(agent, stop, other_end)


def _protect_save(first: signal.Signals) -> None:
    """Ignore further signals while the ranks save. Only a second Ctrl-C ends them, and the first may have come before.

    A signal other than the first one is not its repetition: a scheduler's SIGTERM may follow a user's Ctrl-C.
    """
    for number in _PREEMPTING:
        signal.signal(number, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGINT)
    if first is signal.SIGINT or before is signal.SIG_IGN:
        return

    def announce_interrupt(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        write_stderr(f"the ranks already end because of {first.name}; press Ctrl-C again to end them immediately")

    signal.signal(signal.SIGINT, announce_interrupt)


def _take_leave(agent: Agent, rendezvous: Any, stop: signal.Signals | None) -> None:
    nodes = agent.job.nodes
    if stop is not None and nodes is not None and nodes.elastic:
        agent.membership.report_leaving()  # the others continue without this machine
        return
    if stop is not None:
        with contextlib.suppress(EndedByOtherMachine):
            agent.tell(_convert_signal(stop), f"{stop.name} was sent to {socket.gethostname()}")
    agent.await_leave(agent.job.failure_grace + 3)
    with contextlib.suppress(RendezvousError):
        rendezvous.shutdown()


def _make_rendezvous(job: Job, place: Place | None) -> Any:
    nodes = job.nodes
    if nodes is None or place is None:
        # Port 0: the system chooses a free port and the agent keeps it open, so two launches never conflict.
        alone = RendezvousParameters("c10d", "localhost:0", job.run_id, 1, 1, local_addr="localhost", is_host=True)
        return get_rendezvous_handler(alone)
    conf: dict[str, Any] = dict(nodes.conf)
    if nodes.backend == "static":
        conf["rank"] = nodes.rank
    # torch guesses from the host's name whether this process holds the store, which fails if the name resolves to a
    # loopback address. Several agents on the endpoint's machine may try: the first to get the port holds the store.
    tries = [conf.pop("is_host")] if "is_host" in conf else [True, False] if place.owner else [False]
    for holds in tries if nodes.backend == "c10d" else [None]:
        more = conf if holds is None else conf | {"is_host": holds}
        try:
            return get_rendezvous_handler(
                RendezvousParameters(
                    nodes.backend, place.endpoint, job.run_id, nodes.least, nodes.most, place.local_addr, **more
                )
            )
        except RendezvousConnectionError as error:
            cause: BaseException = error.__cause__ or error
    raise ValueError(
        f"the endpoint {place.endpoint}, at which the machines meet, did not respond ({_get_first_line(cause)}). "
        "Start the same command on the machine with this address, and make sure that "
        f"{place.local_addr or 'this machine'} can connect to the endpoint."
    )


def _make_spec(job: Job, place: Place | None, rendezvous: Any) -> WorkerSpec:
    host, _, port = place.endpoint.rpartition(":") if place is not None else ("", "", "")
    static = job.nodes is not None and job.nodes.backend == "static"
    return WorkerSpec(
        role="treadle",
        local_world_size=job.nproc,
        entrypoint=job.command[0],
        # The agent replaces templates such as ${local_rank}; the command line must arrive unchanged.
        args=tuple(part.replace("$", "$$") for part in job.command[1:]),
        rdzv_handler=rendezvous,
        max_restarts=job.max_restarts,
        monitor_interval=_POLL,
        master_addr=host.strip("[]") if static else None,
        master_port=int(port) if static else None,
        local_addr="localhost" if place is None else place.local_addr,
    )


def _report_outcome(agent: Agent, stop: signal.Signals | None, other_end: EndedByOtherMachine | None) -> int:
    """Print how the run ended, unless it succeeded, and return the exit status."""
    # A rank that even SIGKILL did not end, because it hangs in a driver, is missing in `ends`.
    started = agent.job.nproc if agent._worker_group.workers else 0
    codes = dict(agent.ends) | {rank: -signal.SIGKILL for rank in range(started) if rank not in agent.ends}
    agent.ends = codes
    words = {agent.global_rank(rank): _describe_ending(code) for rank, code in codes.items()}
    for rank, numbers in agent.sent.items():
        if stop is not None and -codes.get(rank, 0) == stop:
            words[agent.global_rank(rank)] = f"ended by {stop.name}"
        elif -codes.get(rank, 0) in numbers:
            words[agent.global_rank(rank)] += ", sent by this launcher"
    first = next((rank for rank, code in codes.items() if code), None)
    if other_end is not None:
        lines, status = [str(other_end)], other_end.status
    elif stop is not None:
        ranks = f"{started} rank{'' if started == 1 else 's'}"
        lines, status = [f"{stop.name} was forwarded to {ranks}"], _convert_signal(stop)
    elif first is not None:
        for rank in list(codes)[: list(codes).index(first)]:
            words[agent.global_rank(rank)] += " before that"
        del words[agent.global_rank(first)]
        lines, status = [agent.first_failure()], _convert_to_status(codes[first])
    else:
        return 0
    write_stderr("\n".join(lines + [f"{ranks}: {ending}" for ending, ranks in group_ranks(words).items()]))
    return status


def _count(job: Job) -> str:
    assert job.nodes is not None
    if job.nodes.elastic:
        return f"{job.nodes.least} to {job.nodes.most} machines"
    return format_count(job.nodes.most, "machine")


def _get_first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _convert_to_status(code: int) -> int:
    if code == _LEFT_EARLY:
        return 1
    return code if code >= 0 else 128 - code


def _convert_signal(number: signal.Signals) -> int:
    """Return the exit status for a signal, 128 + n. SIGUSR1 and SIGUSR2 count as a scheduler's early SIGTERM."""
    return 128 + (signal.SIGTERM if "SIGUSR" in number.name else number)


def _describe_ending(code: int) -> str:
    if code == _LEFT_EARLY:
        return "exit status 0 before its stage had ended"
    if code in _STOPPED and code > 0:
        return f"exit status {code}, after {signal.Signals(code - 128).name}"
    if code >= 0:
        return f"exit status {code}" + " (by the watchdog)" * (code == HUNG)
    # SIGRTMIN + 1 has no name.
    name = next((number.name for number in signal.Signals if number == -code), f"signal {-code}")
    return f"killed by {name}"


@contextlib.contextmanager
def _silence_agent() -> Iterator[None]:
    """Drop torch's log messages about signals and about ranks that end, because Treadle prints its own report."""
    expected = ("Sending process", "Unable to shutdown process", "failed (exitcode:", "Received ")
    loggers = [
        logging.getLogger(f"torch.distributed.elastic.{name}") for name in ("multiprocessing.api", "agent.server.api")
    ]

    def unexpected(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(expected)

    for logger in loggers:
        logger.addFilter(unexpected)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(unexpected)
