"""Compare a wheel with the git tree: it must contain the tracked files of the package, byte for byte, and no others.

Type stubs are the exception: setup.py makes them from the tables of ``compat``.

A file in a released wheel that is in no commit is the sign of a compromised release.
"""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from setup import STUB, list_stubs  # noqa: E402


def tracked() -> dict[str, Path]:
    """Return the files that the wheel should contain: the name in the wheel and the file in the tree."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = settings["package-dir"]
    wanted = {}
    for package in settings["packages"]:
        home = package
        while home not in folders:
            home = home.rpartition(".")[0]
        folder = folders[home] + package.removeprefix(home).replace(".", "/")
        listed = subprocess.run(
            ["git", "ls-files", *(f"{folder}/{name}" for name in ("*.py", "py.typed", "*.toml", "*.css", "*.js"))],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for name in listed:
            if Path(name).parent == Path(folder):
                wanted[f"{package.replace('.', '/')}/{Path(name).name}"] = ROOT / name
    return wanted


def main(path: str) -> int:
    """Compare, print the differences and return the exit status."""
    wanted = {name: file.read_bytes() for name, file in tracked().items()}
    wanted |= {f"treadle/{name}": STUB.encode() for name in list_stubs(ROOT)}
    with zipfile.ZipFile(path) as wheel:
        held = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
        licenses = [wheel.read(name) for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    wrong = [f"missing: {name}" for name in sorted(wanted.keys() - held.keys())]
    wrong += [f"not in the tree: {name}" for name in sorted(held.keys() - wanted.keys())]
    wrong += [f"differs: {n}" for n in sorted(held.keys() & wanted.keys()) if held[n] != wanted[n]]
    if licenses != [(ROOT / "LICENSE").read_bytes()]:
        wrong.append("missing: the tree's LICENSE")
    print("\n".join(wrong) or f"{path}: {len(held)} files, all as in the tree")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
