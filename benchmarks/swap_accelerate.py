"""The loop of `tests/integration/swap/accelerate` under Accelerate: what it finds, kept for the test of it.

    .venv-bench/bin/python benchmarks/swap_accelerate.py            compare with what was kept
    .venv-bench/bin/python benchmarks/swap_accelerate.py --record   keep it

It needs an environment with Accelerate; each run is one or two interpreters of its own, started by torchrun.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "integration" / "swap" / "accelerate"
RECORDED = FOLDER / "recorded.json"
ARGUMENTS: dict[str, list[str]] = {"plain": [], "set_epoch": ["--set_epoch"], "data_seed": ["--data_seed", "7"]}


def run(arguments: list[str], processes: int) -> dict[str, Any]:
    """What the loop prints on rank zero."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launch if processes > 1 else []), str(FOLDER / "decay.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", action="store_true", help=f"rewrite {RECORDED.name}")
    args = parser.parse_args()
    versions = {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in ("accelerate", "torch")
    }
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
