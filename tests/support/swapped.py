"""The scripts of `swap`, with a peer's imports or ours: what `test_swap.py`, `test_accelerate_programs.py` and the two
`benchmarks/swap*.py` share.

They are written for Lightning and Accelerate, as people publish them. `SUBSTITUTIONS` and `ACCELERATE_SUBSTITUTIONS`
are all that is changed for Treadle; it is what docs/migrating.md says, line by line, and touches nothing but import
lines.

`swap/programs` and `swap/accelerate/programs` hold smaller programs, one per public source. Run as a script, this
module executes several of Lightning's in one process: `python swapped.py LIBRARY OUT NAME ...`.
"""

import importlib.util
import json
import re
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "integration" / "swap"
RECORDED = FOLDER / "recorded.json"
PROGRAMS = FOLDER / "programs"
ACCELERATE_PROGRAMS = FOLDER / "accelerate" / "programs"  # sources.toml beside it says what each is written after

SUBSTITUTIONS = (
    (r"^import lightning(\.pytorch)? as (\w+)$", r"import treadle.compat as \2"),
    (r"^from lightning import pytorch as (\w+)$", r"import treadle.compat as \1"),
    (r"^from lightning import ", "from treadle import "),
    (r"^from lightning\.pytorch import ", "from treadle.compat import "),
    (r"^from lightning\.pytorch\.(\w+(?:\.\w+)*) import ", r"from treadle.\1 import "),
)

ACCELERATE_SUBSTITUTIONS = (
    (r"^import accelerate$", "import treadle.compat as accelerate"),
    (r"^from accelerate import ", "from treadle import "),
    (r"^from accelerate\.(\w+(?:\.\w+)*) import ", r"from {home}.\1 import "),
)

RUNS = {
    "classifier": (),
    "transformer": (),
    "evaluation": (),
    "distributed": (),  # always on two processes
    # Where Lightning is wrong, or merely otherwise: see `test_swap.py`.
    "transformer, partial groups": ("--batches", "10", "--steps", "6", "--sequential"),
    "transformer, several epochs": ("--batches", "8", "--steps", "4"),
}


def swapped(source):
    """A script for Lightning as one for Treadle."""
    for pattern, replacement in SUBSTITUTIONS:
        source = re.sub(pattern, replacement, source, flags=re.MULTILINE)
    return source


def swapped_for_accelerate(source):
    """A program for Accelerate as one for Treadle; a module that `treadle` lacks is one of `treadle.compat`."""

    def replaced(match, replacement):
        if "{home}" in replacement:
            found = importlib.util.find_spec(f"treadle.{match[1].split('.')[0]}") is not None
            replacement = replacement.replace("{home}", "treadle" if found else "treadle.compat")
        return match.expand(replacement)

    for pattern, replacement in ACCELERATE_SUBSTITUTIONS:
        source = re.sub(pattern, lambda match, to=replacement: replaced(match, to), source, flags=re.MULTILINE)
    return source


def execute_accelerate_program(name, library, folder):
    """Run a program of `swap/accelerate/programs` in this process, of which there may be several."""
    source = (ACCELERATE_PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
    path = Path(folder) / f"{name}_with_{library}.py"
    return call_main(path, str(folder), source if library == "accelerate" else swapped_for_accelerate(source))


def write(run, library, folder):
    """The script of a run for a library, as a file in ``folder``."""
    script = FOLDER / f"{run.split(',')[0]}.py"
    source, path = script.read_text(encoding="utf-8"), folder / f"{script.stem}_with_{library}.py"
    path.write_text(source if library == "lightning" else swapped(source), encoding="utf-8")
    return path


def execute(run, library, folder):
    """Run a script in this process; what its ``main`` returns, as JSON has it."""
    return call_main(write(run, library, folder), ["--root", str(folder / "run"), *RUNS[run]])


def execute_program(name, library, folder):
    """Run a program of `swap/programs` in this process and return its results."""
    return call_main(write(f"programs/{name}", library, folder), str(folder / "run"))


def call_main(path, argument, source=None):
    """Import a script under a name of its own and return what ``main`` returns, as JSON reads it back.

    Args:
        path: the script.
        argument: what ``main`` gets.
        source: its text, where the file is not written.
    """
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    try:
        text = path.read_text(encoding="utf-8") if source is None else source
        exec(compile(text, str(path), "exec"), module.__dict__)
        return json.loads(json.dumps(module.main(argument)))
    finally:
        del sys.modules[path.stem]


def list_programs():
    """Return the names of the programs, in order."""
    return sorted(path.stem for path in PROGRAMS.glob("*.py"))


def execute_programs(library, names, out):
    """Run programs one after the other in this process and write ``{name: {"results" or "error", "seconds"}}``."""
    found = {}
    for name in names:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = {"results": execute_program(name, library, Path(folder))}
            except Exception:
                found[name] = {"error": traceback.format_exc()[-2000:]}
        found[name]["seconds"] = time.perf_counter() - start
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    execute_programs(sys.argv[1], sys.argv[3:], Path(sys.argv[2]))
