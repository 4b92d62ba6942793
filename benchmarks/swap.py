"""Run the scripts of `tests/integration/swap` under Lightning and, with only their imports changed, under Treadle.

    .venv-bench/bin/python benchmarks/swap.py                   the table: do they produce the same numbers?
    .venv-bench/bin/python benchmarks/swap.py --record          and keep Lightning's, for tests/integration/test_swap.py
    .venv-bench/bin/python benchmarks/swap.py --processes 2     on so many processes (DDP on the CPU), without losses

It needs an environment with both libraries. Each script runs in its own interpreter; its seconds include the imports.
``same`` counts the numbers that agree to ``--tolerance``; the others are listed below, and
tests/integration/test_swap.py gives the reason for each. The programs of `tests/integration/swap/programs` follow, all
of them in one process per library; a program that fails with Treadle alone is recorded nevertheless.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.differences import differences
from support.swapped import RECORDED, RUNS, list_programs, write

LIBRARIES = ("lightning", "treadle")


def run(name: str, library: str, processes: int, folder: Path) -> tuple[dict[str, Any] | None, float, str]:
    """Return the results of a script, the seconds it took, and the end of its output."""
    script, out = write(name, library, folder), folder / f"{library}.json"
    command = [sys.executable, str(script), "--root", str(folder / library), "--out", str(out), *RUNS[name]]
    if processes > 1 and name == "distributed":
        command += ["--devices", str(processes)]
    elif processes > 1:
        # In the order of the data both libraries have the same global batches; what they shuffle differs.
        command += ["--devices", str(processes), *([] if "--sequential" in RUNS[name] else ["--sequential"])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    seconds = time.perf_counter() - start
    found = json.loads(out.read_text()) if done.returncode == 0 and out.exists() else None
    return found, seconds, (done.stdout + done.stderr)[-2000:]


def compare_programs(recorded: dict[str, Any], tolerance: float, only: list[str] | None) -> tuple[list[str], bool]:
    """Run the programs, add Lightning's results to ``recorded``, and return lines to print and if Lightning failed."""
    names = [name for name in list_programs() if not only or name in only]
    script, found = Path(__file__).resolve().parent.parent / "tests" / "support" / "swapped.py", {}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        for library in LIBRARIES:
            out = Path(folder) / f"{library}.json"
            subprocess.run(
                [sys.executable, str(script), library, str(out), *names],
                env=environment,
                cwd=folder,
                capture_output=True,
                check=True,
                timeout=600,
            )
            found[library] = json.loads(out.read_text())
    listed, failed = [], False
    for name in names:
        theirs, ours = (found[library][name] for library in LIBRARIES)
        times = f"{name:30} {theirs['seconds']:12.1f} {ours['seconds']:10.1f}"
        for library in LIBRARIES:
            if "error" in found[library][name]:
                listed.append(f"\n{name}: failed with {library}\n{found[library][name]['error']}")
        if "results" in theirs:
            recorded[name] = theirs["results"]
        else:
            failed = True
        if "error" in theirs or "error" in ours:
            print(f"{times} {'failed':>13}")
            continue
        other = differences(ours["results"], theirs["results"], tolerance)
        print(f"{times} {count(ours['results']) - len(other):6} {len(other):6}")
        listed += [f"\n{name}: treadle, lightning"] * bool(other) + [f"    {p}: {a}, {b}" for p, a, b in other[:8]]
    return listed, failed


def count(found: Any) -> int:
    """Return the number of numbers and words in a result."""
    if isinstance(found, dict | list):
        return sum(map(count, found.values() if isinstance(found, dict) else found))
    return 1


def versions() -> dict[str, str]:
    """Return the versions that were compared."""
    names = ("lightning", "torch", "torchmetrics", "scikit-learn")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", action="store_true", help="rewrite tests/integration/swap/recorded.json")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--only", nargs="*", choices=[*(name for name in RUNS if "," not in name), *list_programs()])
    parser.add_argument("--list", type=int, default=8, help="differences to list of each script")
    args = parser.parse_args()
    if args.record and args.processes > 1:
        parser.error("--record takes one process")

    print(versions())
    print(f"{'script':30} {'lightning s':>12} {'treadle s':>10} {'same':>6} {'other':>6}")
    recorded: dict[str, Any] = {"versions": versions(), "runs": {}, "programs": {}}
    if args.only and RECORDED.exists():
        recorded |= json.loads(RECORDED.read_text(encoding="utf-8")) | {"versions": versions()}
    listed, failed = [], False
    for name in RUNS:
        if args.only and name.split(",")[0] not in args.only:
            continue
        results, seconds = {}, {}
        with tempfile.TemporaryDirectory() as folder:
            for library in LIBRARIES:
                results[library], seconds[library], said = run(name, library, args.processes, Path(folder))
                if results[library] is None:
                    failed = True
                    listed.append(f"\n{name}: failed with {library}\n{said}")
        recorded["runs"][name] = {"arguments": list(RUNS[name]), "results": results["lightning"]}
        times = f"{name:30} {seconds['lightning']:12.1f} {seconds['treadle']:10.1f}"
        if None in results.values():
            print(f"{times} {'failed':>13}")
            continue
        if args.processes > 1:  # of one process, and the libraries deal samples out in another way
            for result in results.values():
                result.pop("losses"), result.pop("outputs", None)
        found = sorted(differences(results["treadle"], results["lightning"], args.tolerance), key=lambda one: one[0])
        print(f"{times} {count(results['treadle']) - len(found):6} {len(found):6}", flush=True)
        if found:
            listed.append(f"\n{name}: treadle, lightning")
            listed += [f"    {place}: {ours}, {theirs}" for place, ours, theirs in found[: args.list]]
            listed += [f"    and {len(found) - args.list} more"] if len(found) > args.list else []
    if args.processes == 1 and (not args.only or set(args.only) & set(list_programs())):
        lines, programs_failed = compare_programs(recorded["programs"], args.tolerance, args.only)
        listed, failed = listed + lines, failed or programs_failed
    print("\n".join(listed))
    if args.record and not failed:
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
