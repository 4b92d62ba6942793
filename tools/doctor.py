"""`treadle doctor`: checks of the machines, versions and connections that a run would use."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli.commands import CommandParser
from ..cli.config import make_printable
from ..common.command_results import fail, report
from ..common.messages import format_count, named_ranks

if TYPE_CHECKING:
    from ..strategies import LaunchEnvironment, World

SUMMARY = "check the machines, libraries and connections of a run, on every rank"
DESCRIPTION = """\
Check what a run would use, on every rank: versions, devices, CPUs, disks, and an all-reduce with its latency and
bandwidth. Prints one line for each, marked good, note or FAULT, and exits with status 1 if there is a FAULT.

    treadle doctor                                                   two ranks, or one per GPU if there are several
    treadle launch --nproc-per-node 8 -m treadle doctor              the ranks that the launcher starts
    torchrun --nproc-per-node 8 -m treadle doctor                    likewise
    srun treadle doctor                                              likewise
    treadle doctor --json > doctor.json                              for a bug report, with torch's collect_env"""

GOOD, NOTE, FAULT = "good", "note", "fault"
_MARKS = (GOOD, NOTE, FAULT)
_COMPARED = ("Python", "torch", "treadle", "numpy", "torchmetrics", "transformers", "CUDA")
_WIDTH, _SUBJECT = 80, 12  # columns
_SMALL_SHM, _MODEST_SHM = 100e6, 1e9  # bytes; Docker's default is 64 MiB, which is too little for a few batches
_FULL_DISK, _MODEST_DISK = 100e6, 5e9  # bytes
_MARGIN = 5.0  # seconds for imports and measurements, beside the waits that have errors of their own
_LENGTH = 2**23  # float32 values of the all-reduce: 32 MiB
_PROBE = b"\0" * 65536  # bytes; a file system without space may still create empty files


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        mark: ``"good"``, ``"note"`` or ``"fault"``.
        subject: Name of the inspected item, such as ``"run folder"``.
        text: State of the subject and, for a problem, the fix.
    """

    mark: str
    subject: str
    text: str


def build_parser(program: str = "treadle doctor") -> argparse.ArgumentParser:
    """Return the argument parser of `treadle doctor`. It raises a ValueError for an invalid command line."""
    parser = CommandParser(program, DESCRIPTION)
    parser.add_argument("--dir", default=".", metavar="FOLDER", help="where the run would write (default: .)")
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="S", help="seconds to wait for a rank (default: 30)"
    )
    parser.add_argument("--nproc-per-node", type=int, metavar="N", help="ranks to start if no launcher has started any")
    parser.add_argument("--cpu", action="store_true", help="measure the all-reduce on the CPU")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run `treadle doctor` and return the exit status: 1 if it prints a fault, 2 for invalid arguments, otherwise 0."""
    try:
        options = _parse(arguments)
    except ValueError as error:
        return fail("treadle doctor", error)
    from ..strategies import LaunchEnvironment

    try:
        launched = LaunchEnvironment.read()
    except ValueError as error:
        return _print([Finding(FAULT, "ranks", str(error)), *check_machine(options.dir)], options.json)
    return _start_ranks(arguments, options) if launched is None else _examine(launched, options)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    options = build_parser().parse_args(arguments)
    if not options.timeout > 0:
        raise ValueError(f"--timeout {options.timeout:g} must be a positive number of seconds.")
    if options.nproc_per_node is not None and options.nproc_per_node < 2:
        raise ValueError(
            f"--nproc-per-node {options.nproc_per_node} must be at least 2, because an all-reduce needs two ranks."
        )
    return options


def _start_ranks(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Run this command in ranks on this machine: one per GPU if there are several, otherwise two on the CPU."""
    import torch

    from ..strategies.launch import Job, supervisor

    gpus = torch.cuda.device_count()
    command = [sys.executable, "-m", "treadle", "doctor", *arguments, *(["--cpu"] if gpus < 2 else [])]
    return supervisor.supervise(Job(nproc=options.nproc_per_node or max(gpus, 2), command=command))


def _examine(launched: LaunchEnvironment, options: argparse.Namespace) -> int:
    """Connect this rank with the others and examine them. Rank zero prints the report, and a failing rank its error.

    Returns:
        The exit status.
    """
    from ..engine import environment
    from ..strategies import open_world
    from ..strategies.distributed import disconnect

    place = f"rank {launched.rank} of {launched.world_size}"
    seconds = 2 * options.timeout + _MARGIN

    def give_up() -> None:  # torch may block the main thread
        error = f"{place} was not connected and measured within {seconds:g} s: a rank hangs."
        _print([Finding(FAULT, "connection", error)], options.json)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    began = time.monotonic()
    try:
        world = open_world("cpu" if options.cpu else "auto", spread=False, timeout=timedelta(seconds=options.timeout))
        facts = {"rank": world.rank, **environment(), "findings": check_machine(options.dir)}
        ranks = world.gather_objects(facts)
        connected = f"{launched.world_size} of {launched.world_size} on {_name_hosts(ranks)}, started by "
        connected += f"{'treadle' if launched.supervisor else launched.launcher}, in {time.monotonic() - began:.1f} s"
        measured = _measure_all_reduce(world)
        disconnect()
    except (ValueError, RuntimeError, OSError) as error:
        text = str(error).strip().split("\n")[0] or type(error).__name__
        machine = check_machine(options.dir) if launched.rank == 0 else []
        return _print([Finding(FAULT, "connection", f"{place}: {text}"), *machine], options.json)
    finally:
        timer.cancel()
    if launched.rank != 0:
        return 0
    findings = [Finding(GOOD, "ranks", connected), _compare_versions(ranks), _describe_machines(ranks)]
    findings += [*merge_findings([each.pop("findings") for each in ranks]), measured]
    return _print(findings, options.json, ranks)


def _name_hosts(ranks: Sequence[Mapping[str, Any]]) -> str:
    hosts = list(dict.fromkeys(facts["host"] for facts in ranks))
    return hosts[0] if len(hosts) == 1 else f"{len(hosts)} machines"


def _compare_versions(ranks: Sequence[Mapping[str, Any]]) -> Finding:
    """Compare the versions on all ranks with rank zero's."""
    first, differences = ranks[0], []
    for name in _COMPARED:
        others: dict[str, list[int]] = {}
        for facts in ranks[1:]:
            if (version := facts.get(name, "none")) != first.get(name, "none"):
                others.setdefault(version, []).append(facts["rank"])
        differences += [
            f"{name} {first.get(name, 'none')} on rank 0, {version} on {named_ranks(numbers)}"
            for version, numbers in others.items()
        ]
    if differences:
        text = "; ".join(differences) + ". Install the same versions on all machines."
        return Finding(FAULT, "versions", text)
    return Finding(GOOD, "versions", ", ".join(f"{name} {first[name]}" for name in _COMPARED if name in first))


def _describe_machines(ranks: Sequence[Mapping[str, Any]]) -> Finding:
    machines = [", ".join(facts[name] for name in ("processor", "GPUs", "system") if name in facts) for facts in ranks]
    counts = Counter(machines)
    return Finding(GOOD, "machines", "; ".join(f"{format_count(n, 'rank')} on {name}" for name, n in counts.items()))


def merge_findings(by_rank: Sequence[Sequence[Finding]]) -> Iterator[Finding]:
    """Yield the worst finding about each subject, with the ranks that it concerns unless it concerns all ranks."""
    for subject in dict.fromkeys(finding.subject for findings in by_rank for finding in findings):
        ranks: dict[Finding, list[int]] = {}
        for rank, findings in enumerate(by_rank):
            for finding in findings:
                if finding.subject == subject:
                    ranks.setdefault(finding, []).append(rank)
        worst = max(ranks, key=lambda finding: _MARKS.index(finding.mark))
        concerned = sorted(rank for finding, numbers in ranks.items() if finding.mark == worst.mark for rank in numbers)
        is_general = worst.mark == GOOD or len(concerned) == len(by_rank)
        yield worst if is_general else Finding(worst.mark, subject, f"{named_ranks(concerned)}: {worst.text}")


def check_machine(run_folder: str) -> list[Finding]:
    """Return the findings about this process's machine: devices, CPUs and folders."""
    findings = [_check_devices(), _check_cpus()]
    findings += [_check_folder("run folder", run_folder), _check_folder("temp folder", tempfile.gettempdir())]
    return findings + ([_check_folder("/dev/shm", "/dev/shm")] if os.path.isdir("/dev/shm") else [])


def _check_devices() -> Finding:
    import torch

    visible, has_driver = os.environ.get("CUDA_VISIBLE_DEVICES"), os.path.exists("/dev/nvidiactl")
    if not torch.cuda.is_available():
        if has_driver and visible != "":
            text = "torch sees no CUDA device, but this machine has an NVIDIA driver. Check with `nvidia-smi` whether"
            return Finding(FAULT, "devices", f"{text} the driver supports torch's CUDA version (torch.version.cuda).")
        hidden = ", GPUs are hidden by CUDA_VISIBLE_DEVICES=''" if has_driver else ""
        return Finding(GOOD, "devices", f"{'mps' if torch.backends.mps.is_available() else 'CPU only'}{hidden}")
    memory = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
    free, total = min(memory)
    text = f"{len(memory)} visible, at least {_format_bytes(free)} of {_format_bytes(total)} free"
    if visible is not None and len(memory) < (named := len([name for name in visible.split(",") if name.strip()])):
        mismatch = f"CUDA_VISIBLE_DEVICES={visible!r} names {named} devices. Name existing devices only."
        return Finding(FAULT, "devices", f"{text}, but {mismatch}")
    if free < total / 2:
        return Finding(NOTE, "devices", f"{text}: another program uses GPU memory. `nvidia-smi` lists the programs.")
    return Finding(GOOD, "devices", text)


def _check_cpus() -> Finding:
    import torch

    from ..strategies.launch import cpus

    usable, threads, ranks = cpus(), torch.get_num_threads(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    each = format_count(threads, "thread")
    text = f"{usable} usable, {format_count(ranks, 'rank')} on this machine with {each} each"
    if threads * ranks > max(usable, ranks):
        return Finding(NOTE, "CPUs", f"{text}: too few. Set OMP_NUM_THREADS={max(1, usable // ranks)}.")
    return Finding(NOTE if usable < ranks else GOOD, "CPUs", text)


def _check_folder(subject: str, folder: str) -> Finding:
    """Check the free space of a folder, or of its nearest existing parent, and write a file to it."""
    path = Path(folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(_PROBE)
            file.flush()
            os.fsync(file.fileno())  # network file systems report a full disk or quota only here
        space = shutil.disk_usage(existing)
    except OSError as error:
        reason = error.strerror or error
        return Finding(FAULT, subject, f"{path}: can't write a file: {reason}. Choose a writable folder.")
    text = f"{_format_bytes(space.free)} of {_format_bytes(space.total)} free"
    text = text if subject == folder else f"{path}: {text}"
    if subject == "/dev/shm":
        if space.free < _SMALL_SHM:
            hint = "data workers crash with a bus error. Use docker run --shm-size=8g, or --ipc=host."
            return Finding(FAULT, subject, f"{text}: {hint}")
        return Finding(NOTE if space.free < _MODEST_SHM else GOOD, subject, text)
    if space.free < _FULL_DISK:
        return Finding(
            FAULT, subject, f"{text}: too little for checkpoints. Free some space, or choose another folder."
        )
    return Finding(NOTE if space.free < _MODEST_DISK else GOOD, subject, text)


def _measure_all_reduce(world: World) -> Finding:
    """Check the sum of an all-reduce, and measure its latency and its bus bandwidth.

    Bus bandwidth is the data rate of each link in a ring: 2 (n - 1) / n times the tensor's size in bytes, divided by
    the duration in seconds, where n is the world size.
    """
    import torch

    from ..strategies.distributed import backend_of

    if world.size == 1:
        return Finding(GOOD, "all-reduce", "one rank, nothing to reduce")
    values = world.all_reduce(torch.full((_LENGTH,), float(world.rank + 1), device=world.device))
    wrong = world.gather_objects(int((values != world.size * (world.size + 1) / 2).sum()))
    if any(wrong):
        ranks = named_ranks([rank for rank, count in enumerate(wrong) if count])
        hint = "Check the network or the GPUs' links of these machines."
        return Finding(FAULT, "all-reduce", f"an all-reduce of {_LENGTH:,} values has wrong sums on {ranks}. {hint}")

    def measure(length: int, repeats: int) -> float:
        tensor, times = torch.zeros(length, device=world.device), []
        for _ in range(repeats):
            begun = time.perf_counter()
            world.all_reduce(tensor)
            tensor[0].item()  # waits for the device
            times.append(time.perf_counter() - begun)
        return max(world.gather_objects(min(times)))

    latency, seconds = measure(2, 20), measure(_LENGTH, 3)
    bandwidth = 4 * _LENGTH * 2 * (world.size - 1) / world.size / seconds
    rate = f"bus bandwidth {_format_bytes(bandwidth)}/s for {4 * _LENGTH >> 20} MiB"
    return Finding(GOOD, "all-reduce", f"{backend_of(world)}, latency {latency * 1e6:.0f} us, {rate}")


def _format_bytes(size: float) -> str:
    unit = next((power for power in (4, 3, 2, 1) if size >= 1000**power), 0)
    return f"{size / 1000**unit:.3g} {['B', 'kB', 'MB', 'GB', 'TB'][unit]}"


def _print(findings: Sequence[Finding], as_json: bool, ranks: Sequence[Mapping[str, Any]] = ()) -> int:
    """Print a report, and return the exit status."""
    result = max((finding.mark for finding in findings), key=_MARKS.index)
    if as_json:
        from torch.utils.collect_env import get_pretty_env_info

        described = {"result": result, "findings": [asdict(finding) for finding in findings], "ranks": list(ranks)}
        report(None, {**described, "machine": get_pretty_env_info()})
    else:
        report(format_report(findings))
    return int(result == FAULT)


def format_report(findings: Iterable[Finding]) -> str:
    """Format findings as text with lines of at most 80 columns."""
    lines, counts = [], Counter[str]()
    for finding in findings:
        counts[finding.mark] += 1
        mark = finding.mark.upper() if finding.mark == FAULT else finding.mark
        head = f"{mark:<6}{finding.subject:<{_SUBJECT}}  "
        text = head + make_printable(finding.text)
        lines += textwrap.wrap(text, _WIDTH, subsequent_indent=" " * len(head), break_on_hyphens=False)
    faults, notes = (f"{counts[mark] or 'no'} {mark}{'s' * (counts[mark] != 1)}" for mark in (FAULT, NOTE))
    return "\n".join([*lines, "", f"{faults}, {notes}"])
