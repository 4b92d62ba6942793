"""Measure memory and time of loading a large model and of running it from disk.

Each line is a separate process: it builds the model empty, loads a safetensors checkpoint with a device map, and runs
it on one row. Peak memory is the kernel's count for the process, less its memory before, as a multiple of the model's
size; file pages that are mapped and touched are included. "equal" is whether the output equals, bit for bit, that of
the plain model. If Accelerate is installed, it is measured in turn.

    python benchmarks/big_models.py                 # 1 GB
    python benchmarks/big_models.py --layers 12     # 200 MB
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

WIDTH = 2048
LAYER_BYTES = 4 * WIDTH * WIDTH
LIBRARIES = {"treadle": "treadle.engine.big_models", "accelerate": "accelerate"}


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def one(library: str, layers: int, where: str, checkpoint: str, folder: str) -> None:
    """Run the measurement of a child process and print its numbers as JSON."""
    torch.set_num_threads(1)
    names = importlib.import_module(LIBRARIES[library])
    x = torch.ones(1, WIDTH)
    # What torch loads at its first product and its first weights on device meta.
    nn.functional.linear(x[:, :64], torch.ones(64, 64))
    nn.Linear(4, 4, device="meta")
    start, clock = peak(), time.perf_counter()
    with names.init_empty_weights():
        model = Stack(layers)
    device_map: dict[str, str] = {f"layers.{n}": "cpu" for n in range(layers)}
    if where == "disk":
        device_map |= {f"layers.{n}": "disk" for n in range(1, layers)}
    model = names.load_checkpoint_and_dispatch(model, checkpoint, device_map=device_map, offload_folder=folder)
    loaded, after_load = time.perf_counter() - clock, peak()
    with torch.no_grad():
        output = model(x)
        times = []
        for _ in range(5):
            clock = time.perf_counter()
            model(x)
            times.append(time.perf_counter() - clock)
    size = layers * LAYER_BYTES
    result = {"load_s": loaded, "load_peak": (after_load - start) / size, "run_s": statistics.median(times)}
    print(
        json.dumps(
            result | {"run_peak": (peak() - start) / size, "equal": output.tolist() == plain(layers, checkpoint)}
        )
    )


def plain(layers: int, checkpoint: str) -> list[list[float]]:
    """Return the output of the model loaded and run by torch alone."""
    model = Stack(layers)
    model.load_state_dict(load_file(checkpoint))
    with torch.no_grad():
        return model(torch.ones(1, WIDTH)).tolist()


def measure(library: str, where: str, layers: int, checkpoint: Path) -> str:
    """Return one line of the table."""
    command = [sys.executable, __file__, "--layers", str(layers), "--child", library, where, str(checkpoint)]
    done = subprocess.run([*command, str(checkpoint.parent / f"{library}-{where}")], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    row = json.loads(done.stdout.splitlines()[-1])
    numbers = f"{row['load_peak']:>10.3f}{row['run_peak']:>10.3f}{row['load_s']:>8.2f}{row['run_s']:>8.2f}"
    return f"{library + ', ' + where:<20}{numbers}{'yes' if row['equal'] else 'no':>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", type=int, default=64, help=f"layers of {LAYER_BYTES / 1e6:.1f} MB each (default: 64)"
    )
    parser.add_argument("--child", nargs=4, metavar=("LIBRARY", "WHERE", "CHECKPOINT", "FOLDER"), help="one line")
    args = parser.parse_args()
    if args.child:
        library, where, checkpoint, folder = args.child
        return one(library, args.layers, where, checkpoint, folder)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.safetensors"
        torch.manual_seed(0)
        scale = (2 / WIDTH) ** 0.5
        layers = {f"layers.{n}.weight": torch.randn(WIDTH, WIDTH) * scale for n in range(args.layers)}
        save_file(layers, path, {"format": "pt"})
        print(
            f"{path.stat().st_size / 1e9:.2f} GB, one layer is {1 / args.layers:.3f} of it; torch {torch.__version__}"
        )
        print(f"{'':<20}{'load peak':>10}{'run peak':>10}{'load s':>8}{'run s':>8}{'equal':>8}")
        for where in ("cpu", "disk"):
            for library in LIBRARIES:
                if importlib.util.find_spec(library) is not None:
                    print(measure(library, where, args.layers, path), flush=True)


if __name__ == "__main__":
    main()
