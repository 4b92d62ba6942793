"""What an installation adds to an environment that has torch: seconds, megabytes, packages.

    make install-size                            builds the wheel and prints a table

Each library is installed into a fresh environment with torch (CPU), in which pip has been run once.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIBRARIES = ("lightning", "accelerate", "transformers")
TORCH = "torch==2.13.0"


def measure(folder: Path) -> tuple[float, int]:
    """Return the megabytes and the number of distributions below a folder of packages."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return size / 1e6, len(list(folder.glob("*.dist-info")))


def install(name: str, wanted: str, folder: Path) -> str:
    environment = folder / name
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, TORCH], check=True, stderr=subprocess.DEVNULL)
    packages = next(environment.glob("lib/*/site-packages"))
    before, distributions = measure(packages)
    alone = folder / f"{name}-alone"
    subprocess.run([*pip, "--no-deps", "--target", alone, wanted], check=True, stderr=subprocess.DEVNULL)
    start = time.perf_counter()
    subprocess.run([*pip, wanted, TORCH], check=True, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    after, total = measure(packages)
    version = next(alone.glob(f"{name}-*.dist-info")).name.removesuffix(".dist-info").partition("-")[2]
    own = measure(alone)[0]
    return f"| {name} {version} | {own:.1f} | {after - before:.1f} | {total - distributions} | {seconds:.0f} |"


def main() -> None:
    (wheel,) = Path(sys.argv[1]).glob("treadle-*.whl")
    print(f"Python {sys.version.split()[0]}, {TORCH}; the wheel has {wheel.stat().st_size / 1e6:.1f} MB\n")
    print("| | the package, MB | with what it requires beside torch, MB | packages | s |\n|---|---|---|---|---|")
    for name, wanted in {"treadle": str(wheel), **{name: name for name in LIBRARIES}}.items():
        with tempfile.TemporaryDirectory() as folder:
            print(install(name, wanted, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
