"""Measure README's comparison of Treadle, Lightning, Accelerate and the HF Trainer again.

    make bench-peers                             makes the environment with their newest releases, and runs this
    .venv-bench/bin/python benchmarks/peers.py --only "SIGTERM"

A program of `benchmarks/peers` shows each row. It is run once per library, in a fresh process and a fresh folder, and
gives the cell and what was seen. The exit status is 1 if a cell of README differs. A run of all rows also writes
the section of RESULTS.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
LIBRARIES = ("treadle", "lightning", "accelerate", "transformers")
VERSIONED = ("torch", "lightning", "accelerate", "transformers")
# The row of README, and the program that shows it.
ROWS = {
    "Trainer with hooks and callbacks": ("features.py", "hooks"),
    "Your own loop": ("features.py", "own_loop"),
    "Resume in the middle of an epoch": ("resume.py",),
    "Resume with a different number of processes": ("world_size.py",),
    "Evaluation with multiple processes": ("evaluation.py",),
    "Partial accumulation group at the end of an epoch": ("accumulation.py",),
    "Checkpoint files": ("features.py", "files"),
    "SIGTERM": ("sigterm.py",),
    "FSDP on the CPU, for testing": ("fsdp.py",),
    "Inference with models too large for one device": ("features.py", "offloading"),
    "Memory and time estimates before a run": ("features.py", "plans"),
    "Configuration files and run folders": ("features.py", "configuration"),
    "HTML report of each run": ("features.py", "report_page"),
    "DeepSpeed, TPU": ("features.py", "other_hardware"),
}
START = "## peers.py\n"


def read_table(text: str) -> dict[str, list[str]]:
    """Return the cells of README's comparison by row."""
    table = text.partition("## How it compares")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \[([^\]]+)\]\([^)]+\) \| (.+) \|$", table, re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split(" | ")][: len(LIBRARIES)] for name, cells in rows}


def run(row: str, library: str) -> tuple[str, str]:
    """Return the cell of a library and what was seen, from a process of its own."""
    program, *arguments = ROWS[row]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", ROOT / "benchmarks" / "peers" / program, *arguments, library]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode:
        return "FAILED", done.stderr[-1500:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return found["cell"], found["seen"]


def write_section(versions: str, found: dict[str, list[tuple[str, str]]]) -> None:
    """Replace the section of RESULTS.md by what was found."""
    lines = [START, f"`make bench-peers`, {datetime.date.today():%d %B %Y}; {versions}.", ""]
    for row, cells in found.items():
        lines += [f"**{row}** (`{' '.join(ROWS[row])}`)", "", "| | cell | seen |", "|---|---|---|"]
        lines += [
            f"| {name} | {cell} | {' '.join(seen.split())} |"
            for name, (cell, seen) in zip(LIBRARIES, cells, strict=True)
        ]
        lines += [""]
    before, _, after = RESULTS.read_text().partition(START)
    rest = after.partition("\n## ")[2]
    text = before.rstrip() + "\n\n" + "\n".join(lines).rstrip() + "\n"
    RESULTS.write_text(text + (f"\n## {rest}" if rest else ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=list(ROWS), help="rows to run; RESULTS.md is then left alone")
    parser.add_argument("--jobs", type=int, default=2, help="programs that run at once")
    args = parser.parse_args()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONED)
    print(versions)
    claimed = read_table((ROOT / "README.md").read_text())
    wrong = sorted(claimed.keys() ^ ROWS.keys())
    found, faults = {}, [f"only in README or in ROWS: {row}" for row in wrong]
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = args.only or ROWS
        started = {row: [pool.submit(run, row, library) for library in LIBRARIES] for row in rows}
        for row, futures in started.items():
            found[row] = [future.result() for future in futures]
            print(f"\n{row}")
            for library, claim, (cell, seen) in zip(LIBRARIES, claimed.get(row, [""] * 4), found[row], strict=True):
                print(f"  {library:12} {cell}\n               {seen}", flush=True)
                if cell != claim:
                    faults.append(f"{row}, {library}: README says {claim!r}, found {cell!r}")
    if not args.only and not any(cell == "FAILED" for cells in found.values() for cell, _ in cells):
        write_section(versions, found)
    print("\n" + ("\n".join(faults) or "README's table is what was found"))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
