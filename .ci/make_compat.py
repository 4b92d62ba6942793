"""Write the modules of `treadle.compat` that contain only a peer's names, one for each of its module paths.

    python .ci/make_compat.py            write what is missing or out of date
    python .ci/make_compat.py --check    list it, and end with status 1

The tables `compat/*.toml` have the paths and the names. Modules written by hand are not changed.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = "written by `make compat`"
# For each table: what its paths begin with below ``treadle.compat``, and the peer's package that these are below.
TABLES = {
    "lightning": ("", "lightning.pytorch"),
    "accelerate": ("", "accelerate"),
    "fabric": ("fabric", "lightning"),
}
# Accelerate's modules that are imported most are at ``treadle.`` too, next to `treadle.utils`.
DIRECT = ("data_loader", "logging", "state", "tracking", "utils")


def collect_modules() -> dict[str, str]:
    """Return the module paths below ``treadle.compat``, packages included, each with the peer's name."""
    peer_by_path: dict[str, str] = {}
    for peer, (prefix, _) in TABLES.items():
        table = tomllib.loads((ROOT / "compat" / f"{peer}.toml").read_text(encoding="utf-8"))
        for path in table.keys() - {"answers"}:
            parts = [*filter(None, f"{prefix}.{path}".split("."))]
            for count in range(1, len(parts) + 1):
                peer_by_path.setdefault(".".join(parts[:count]), peer)
    return dict(sorted(peer_by_path.items()))


def place_module(path: str, paths: list[str], home: str) -> Path:
    """Return the file of a module; the ``__init__.py`` of a package if other modules are below it."""
    file = ROOT / home / path.replace(".", "/")
    return file / "__init__.py" if any(p.startswith(f"{path}.") for p in paths) else file.with_suffix(".py")


def write_module(path: str, peer: str, file: Path, home: str) -> str:
    """Return the text of a module."""
    depth = len(file.relative_to(ROOT / home).parts) + (home == "compat")
    return (
        f'"""Names of ``{TABLES[peer][1]}.{path}``; {MARK}."""\n\n'
        f"from {'.' * depth}common.peer_names import export_peer_names\n\n"
        "__getattr__, __dir__, __all__ = export_peer_names(__name__)\n"
    )


def main(arguments: list[str]) -> int:
    """Write or check the modules and return the exit status."""
    paths = collect_modules()
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
