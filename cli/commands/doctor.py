"""`treadle doctor`: checks of a run's machines, libraries and network connections."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ...common.messages import nearest
from ..config import make_printable

if TYPE_CHECKING:
    from ...strategies.diagnosis import Report

DESCRIPTION = """\
Check what a run would use: versions on all ranks, devices, backends, disks, limits, environment variables, clocks, and
an all-reduce with its latency and bandwidth. Prints one line for each, marked good, note or FAULT, and exits with
status 1 if there is a FAULT.

    treadle doctor                                                   two ranks, or one per GPU if there are several
    treadle launch --nproc-per-node 8 -m treadle doctor              the ranks that the launcher starts
    torchrun --nproc-per-node 8 -m treadle doctor                    likewise
    srun treadle doctor                                              likewise
    treadle doctor --json > doctor.json                              all findings, for a bug report"""

_WIDTH, _SUBJECT = 80, 12  # columns


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def build_parser(program: str = "treadle doctor") -> argparse.ArgumentParser:
    """Return the argument parser of `treadle doctor`. It raises a ValueError for an invalid command line."""
    parser = _Parser(
        program, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dir", default=".", metavar="FOLDER", help="where the run would write (default: .)")
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="S", help="seconds to wait for a rank (default: 30)"
    )
    parser.add_argument("--nproc-per-node", type=int, metavar="N", help="ranks to start if no launcher has started any")
    parser.add_argument("--cpu", action="store_true", help="measure the all-reduce on the CPU")
    parser.add_argument("--json", action="store_true", help="print the report as a JSON object")
    parser.add_argument("--report", metavar="FILE", help=argparse.SUPPRESS)  # used for a rank that this command started
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run `treadle doctor` and return the exit status: 1 if it prints a fault, 2 for invalid arguments, otherwise 0."""
    try:
        options = _parse(arguments)
    except ValueError as error:
        print(make_printable(f"treadle doctor: {error}"), file=sys.stderr)
        return 2
    from ...strategies import LaunchEnvironment
    from ...strategies.diagnosis import FAULT, choose_ranks, examine, examine_own_ranks, examine_without_ranks

    def publish(report: Report) -> None:
        if options.report is not None:
            Path(options.report).write_text(json.dumps(report), encoding="utf-8")
        else:
            print(json.dumps(report, indent=2) if options.json else format_report(report), flush=True)

    try:
        launched = LaunchEnvironment.read()
    except ValueError as error:
        report = examine_without_ranks(options.dir, [str(error)])
        publish(report)
        return 1
    if launched is not None:
        own = examine(launched, options.dir, options.timeout, publish, "cpu" if options.cpu else "auto")
        return int(own is not None and own["result"] == FAULT and options.report is None)
    nproc, accelerator = choose_ranks()
    nproc = options.nproc_per_node or nproc
    on_cpu = options.cpu or accelerator == "cpu"

    def build_command(path: str) -> list[str]:
        settings = ["--dir", options.dir, "--timeout", str(options.timeout), *(["--cpu"] if on_cpu else [])]
        return [sys.executable, "-m", "treadle", "doctor", "--report", path, *settings]

    report = examine_own_ranks(nproc, build_command, options.dir, options.timeout)
    publish(report)
    return int(report["result"] == FAULT)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = build_parser()
    names = [name for name in parser._option_string_actions if name not in ("--report", "-h")]
    for word in arguments:
        if word.startswith("--") and (name := word.partition("=")[0]) not in parser._option_string_actions:
            raise ValueError(f"unknown option {name}.{nearest(name, names)} `treadle doctor --help` lists the options.")
    options = parser.parse_args(arguments)
    if not options.timeout > 0:
        raise ValueError(f"--timeout {options.timeout:g} must be a positive number of seconds.")
    if options.nproc_per_node is not None and options.nproc_per_node < 2:
        raise ValueError(
            f"--nproc-per-node {options.nproc_per_node} must be at least 2, because an all-reduce needs two ranks."
        )
    return options


def format_report(report: Report) -> str:
    """Format a report as text with lines of at most 80 columns."""
    lines = []
    for finding in report["findings"]:
        mark = finding["mark"].upper() if finding["mark"] == "fault" else finding["mark"]
        head = f"{mark:<6}{finding['subject']:<{_SUBJECT}}  "
        text = make_printable(finding["text"])
        lines += textwrap.wrap(head + text, _WIDTH, subsequent_indent=" " * len(head), break_on_hyphens=False)
    counts = Counter(finding["mark"] for finding in report["findings"])
    faults, notes = (_count(counts[mark], mark) for mark in ("fault", "note"))
    return "\n".join([*lines, "", f"{faults}, {notes}"])


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'s' * (number != 1)}"
