"""Check a wheel and a source distribution as their users get them: metadata, contents, and the demo of each.

    python .ci/check_release.py dist/

The wheel has to be that of the git tree (check_wheel.py). The source distribution has to build the same wheel. Each is
installed in a fresh environment, which runs examples/digits.py.
"""

import email
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

import check_wheel

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 2_000_000
FIELDS = ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Description-Content-Type")


def read_wheel(path: Path) -> dict[str, bytes]:
    """Return the files of a wheel by name, except for the list of their digests."""
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/RECORD")}


def check_metadata(wheel: dict[str, bytes]) -> list[str]:
    """Return what is wrong with a wheel's metadata."""
    text = next(data for name, data in wheel.items() if name.endswith(".dist-info/METADATA")).decode()
    metadata = email.message_from_string(text)
    wrong = [f"no {field} in the metadata" for field in FIELDS if not metadata[field]]
    if not metadata.get_payload().startswith("# Treadle"):
        wrong.append("README.md is not the description")
    return wrong


def run_demo(package: Path) -> None:
    """Install a wheel or a source distribution in a fresh environment, and run the demo from an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder, "environment")
        venv.create(environment, with_pip=True)
        python = str(environment / "bin" / "python")
        install = ["-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([python, *install, f"{package}[examples]"], check=True)
        subprocess.run([python, str(ROOT / "examples" / "digits.py")], cwd=folder, check=True)


def main(folder: str) -> int:
    """Check the wheel and the source distribution in a folder, and return the exit status."""
    (wheel,), (source,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
    if check_wheel.main(str(wheel)):
        return 1
    files = read_wheel(wheel)
    wrong = check_metadata(files)
    wrong += [f"{name} should not be in the wheel" for name in files if name.endswith(".ipynb") or "/tests/" in name]
    wrong += [
        f"{path.name} has over {MOST_BYTES:,} bytes" for path in (wheel, source) if path.stat().st_size > MOST_BYTES
    ]
    with tempfile.TemporaryDirectory() as built:
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", built, str(source)]
        subprocess.run(build, check=True)
        (again,) = Path(built).glob("*.whl")
        if (other := read_wheel(again)) != files:
            differ = sorted(name for name in files | other if files.get(name) != other.get(name))
            wrong.append(f"the source distribution builds another wheel; different: {', '.join(differ)}")
    if wrong:
        print("\n".join(wrong))
        return 1
    for package in (wheel, source):
        run_demo(package)
        print(f"{package.name}: {package.stat().st_size:,} bytes, installed, and the demo runs")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
