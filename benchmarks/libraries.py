"""Run the test suites of libraries that are built on Lightning: with Lightning, and with Treadle in its place.

    python benchmarks/libraries.py lightly                       clones the library, makes an environment, runs both
    python benchmarks/libraries.py --folder ~/libraries          all of libraries.toml, keeping what is there already
    python benchmarks/libraries.py scvi-tools --source ../scvi   from a clone that is on this machine

What is tested stands in `libraries.toml`. Each library gets an environment of its own, with the versions of Lightning,
torch and pytest below. `library_swap.py` swaps the imports; nothing of the library is changed. A test counts if it
passes with Lightning. For each library, one line of a Markdown table is printed, and then the tests that fail with
Treadle alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = ["lightning==2.6.6", "pytorch-lightning==2.6.6"]
TOOLS = ["torch==2.13.0", "pytest", "pytest-timeout", "pytest-xdist"]


def call(*command: str | Path, **options: Any) -> None:
    """Run a command, and end this program if it fails."""
    if subprocess.run([str(part) for part in command], **options).returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}")


def prepare(library: dict[str, Any], folder: Path, source: str | None) -> tuple[Path, Path]:
    """Return the paths of a clone of the library and of an environment's interpreter, and make what is missing."""
    clone, environment = folder / library["name"], folder / f"{library['name']}-environment"
    if not clone.exists():
        call("git", "clone", "--quiet", source or f"https://github.com/{library['repository']}", clone)
        call("git", "-C", clone, "checkout", "--quiet", library["commit"])
    python, ready = environment / "bin" / "python", environment / "ready"
    if not ready.exists():
        call(sys.executable, "-m", "venv", environment)
        pip = [python, "-m", "pip", "install", "--quiet"]
        call(*pip, *TOOLS, *PEERS, *library["requirements"])
        call(*pip, "--no-deps", "--editable", clone)
        call(*pip, "--editable", ROOT, "torch==2.13.0")
        path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
        for command in library.get("prepare", ()):
            call("sh", "-c", command, cwd=clone, env=os.environ | {"PATH": path})
        ready.touch()
    return clone, python


def run(
    library: dict[str, Any], clone: Path, python: Path, swapped: bool, processes: int
) -> tuple[dict[str, str], dict[str, str], float]:
    """Return the outcome of each test, the reasons of failures, and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        out, copy = Path(folder) / "outcomes", Path(folder) / library["name"]
        shutil.copytree(clone, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))  # without traces of others
        environment = os.environ | {
            "LIBRARY_SWAP": str(int(swapped)),
            "LIBRARY_OUTCOMES": str(out),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **library.get("environment", {}),
        }
        command = [python, "-m", "pytest", "-q", "-p", "library_swap", "-n", processes, "--dist", "loadfile"]
        command += ["--timeout", library.get("timeout", 120), "--continue-on-collection-errors"]
        start = time.perf_counter()
        subprocess.run(
            [str(c) for c in [*command, *library.get("options", []), *library["tests"]]],
            cwd=copy,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - start
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    outcomes: dict[str, str] = {}
    for line in lines:
        if outcomes.get(line["test"]) != "failed":  # a failure in the tear-down comes after a pass
            outcomes[line["test"]] = line["outcome"]
    return outcomes, {line["test"]: line["reason"] for line in lines}, seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names in libraries.toml; default: all")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "treadle-libraries")
    parser.add_argument("--source", help="a clone or URL of the one library, instead of GitHub")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    libraries = tomllib.loads((Path(__file__).parent / "libraries.toml").read_text())["libraries"]
    chosen = [library for library in libraries if not options.names or library["name"] in options.names]
    if unknown := set(options.names) - {library["name"] for library in chosen}:
        sys.exit(f"{', '.join(unknown)}: not in libraries.toml")
    options.folder.mkdir(parents=True, exist_ok=True)
    print("| Library | Version | Pass with Lightning | Of these with Treadle | | s, Lightning | s, Treadle |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for library in chosen:
        clone, python = prepare(library, options.folder, options.source)
        theirs, _, theirs_seconds = run(library, clone, python, False, options.processes)
        ours, reasons, seconds = run(library, clone, python, True, options.processes)
        passed = [test for test, outcome in theirs.items() if outcome == "passed"]
        failed = [test for test in passed if ours.get(test) != "passed"]
        kept = len(passed) - len(failed)
        cells = [library["name"], library["version"], len(passed), kept]
        cells += [f"{kept / max(1, len(passed)):.1%}", f"{theirs_seconds:.0f}", f"{seconds:.0f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        for test in failed:
            print(f"    {test}: {reasons.get(test, 'not run')}", flush=True)


if __name__ == "__main__":
    main()
