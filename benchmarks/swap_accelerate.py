"""Run the loop and the programs of `tests/integration/swap/accelerate` under Accelerate, and record results for tests.

    .venv-bench/bin/python benchmarks/swap_accelerate.py                       compare with what was kept
    .venv-bench/bin/python benchmarks/swap_accelerate.py --record              keep it
    .venv-bench/bin/python benchmarks/swap_accelerate.py --record --only gan   keep the results of one program

It needs an environment with Accelerate; each run uses one or two interpreters of its own, started by torchrun.
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
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))
from support import swapped  # noqa: E402

FOLDER = TESTS / "integration" / "swap" / "accelerate"
RECORDED = FOLDER / "recorded.json"
PROGRAMS_RECORDED = FOLDER / "programs.json"
SOURCES = FOLDER / "sources.toml"
ARGUMENTS: dict[str, list[str]] = {"plain": [], "set_epoch": ["--set_epoch"], "data_seed": ["--data_seed", "7"]}


def run(arguments: list[str], processes: int) -> dict[str, Any]:
    """Return the values that the loop prints on rank zero."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launch if processes > 1 else []), str(FOLDER / "decay.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def run_program(name: str, processes: int) -> list[dict[str, Any]]:
    """Return the return values of a program's ``main`` on each process."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(Path(__file__).resolve()), "--rank-of", name, folder]
        command = [sys.executable, *(launch if processes > 1 else []), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise SystemExit(f"{name} on {processes} failed:\n{done.stderr[-3000:]}")
        found = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(processes)]
    return found


def programs(only: str | None, versions: dict[str, str], record: bool) -> None:
    """Compare the results of programs with the recorded ones, or record them."""
    table = tomllib.loads(SOURCES.read_text(encoding="utf-8"))
    names = [name for name in table if only in (None, name)]
    kept = json.loads(PROGRAMS_RECORDED.read_text(encoding="utf-8")) if PROGRAMS_RECORDED.exists() else {"programs": {}}
    tasks = [(name, processes) for name in names for processes in table[name]["processes"]]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda task: run_program(*task), tasks))
    for (name, processes), results in zip(tasks, found, strict=True):
        before = kept["programs"].setdefault(name, {}).get(str(processes))
        print(name, processes, "as kept" if before == results else "not as kept")
        if record:
            kept["programs"][name][str(processes)] = results
    if record:
        kept["versions"] = versions
        kept["programs"] = {name: kept["programs"][name] for name in table if name in kept["programs"]}
        PROGRAMS_RECORDED.write_text(json.dumps(kept, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", action="store_true", help="rewrite the recorded results")
    parser.add_argument("--only", metavar="PROGRAM", help="run this program alone")
    parser.add_argument("--rank-of", nargs=2, metavar=("PROGRAM", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        name, folder = args.rank_of
        results = swapped.execute_accelerate_program(name, "accelerate", Path(folder))
        (Path(folder) / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(results))
        return 0
    versions = {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in ("accelerate", "torch")
    }
    programs(args.only, versions, args.record)
    if args.only:
        return 0
    runs = [
        {"processes": processes, "arguments": arguments, "results": run(arguments, processes)}
        for processes in (1, 2)
        for arguments in ARGUMENTS.values()
    ]
    if args.record:
        RECORDED.write_text(json.dumps({"versions": versions, "runs": runs}, indent=1) + "\n", encoding="utf-8")
        return 0
    kept = json.loads(RECORDED.read_text(encoding="utf-8"))
    for now, before in zip(runs, kept["runs"], strict=True):
        same = now["results"] == before["results"]
        print(now["processes"], *now["arguments"], "as kept" if same else "not as kept")
    print(versions, "kept with", kept["versions"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
