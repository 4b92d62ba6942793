"""Write the modules of `treadle.compat` that hold a peer's names and nothing else, one for each of its module paths.

    python .ci/make_compat.py            write what is missing or out of date
    python .ci/make_compat.py --check    list it, and end with status 1

`compat/lightning.toml` and `compat/accelerate.toml` have the paths and the names. A module that was written by hand
stays as it is.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = "written by `make compat`"
ROOTS = {"lightning": "lightning.pytorch", "accelerate": "accelerate"}
# Accelerate's modules that are imported most are at ``treadle.`` too, beside `treadle.utils`.
DIRECT = ("data_loader", "logging", "state", "tracking", "utils")


def iter_modules() -> dict[str, str]:
    """The peers' module paths below their roots, packages among them, each with the peer's name."""
    peer_by_path: dict[str, str] = {}
    for peer in ROOTS:
        table = tomllib.loads((ROOT / "compat" / f"{peer}.toml").read_text(encoding="utf-8"))
        for path in filter(None, table.keys() - {"answers"}):
            parts = path.split(".")
            for count in range(1, len(parts) + 1):
                peer_by_path.setdefault(".".join(parts[:count]), peer)
    return dict(sorted(peer_by_path.items()))


def place_module(path: str, paths: list[str], home: str) -> Path:
    """The file of a module; a package, where others lie below it."""
    file = ROOT / home / path.replace(".", "/")
    return file / "__init__.py" if any(p.startswith(f"{path}.") for p in paths) else file.with_suffix(".py")


def write_module(path: str, peer: str, file: Path, home: str) -> str:
    """The text of a module."""
    depth = len(file.relative_to(ROOT / home).parts) + (home == "compat")
    return (
        f'"""Names of ``{ROOTS[peer]}.{path}``; {MARK}."""\n\n'
        f"from {'.' * depth}common.peer_names import export_peer_names\n\n"
        "__getattr__, __dir__, __all__ = export_peer_names(__name__)\n"
    )


def main(arguments: list[str]) -> int:
    """Write or check; returns the exit status."""
    paths = iter_modules()
    stale, made = [], set()
    for path, peer in paths.items():
        for home in ["compat"] + ["treadle"] * (path.split(".")[0] in DIRECT):
            file = place_module(path, list(paths), home)
            text = write_module(path, peer, file, home)
            made.add(file)
            if file.exists() and (
                MARK not in file.read_text(encoding="utf-8") or file.read_text(encoding="utf-8") == text
            ):
                continue
            stale.append(file)
            if "--check" not in arguments:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
    for home in ("compat", "treadle"):
        for file in (ROOT / home).rglob("*.py"):
            if file not in made and MARK in file.read_text(encoding="utf-8"):
                stale.append(file)
                if "--check" not in arguments:
                    file.unlink()
    for file in stale:
        print(file.relative_to(ROOT))
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
