"""Run notebooks and store their outputs, without Jupyter.

    python .ci/run_notebooks.py docs/tutorials/*.ipynb    run each in an empty folder, and store its outputs
    python .ci/run_notebooks.py --check NOTEBOOK          run one here, and compare its outputs with the stored ones

The output of a cell is what it and its processes print, and the value of its last line. Figures of matplotlib become
images. The notebook stores a digest of its code, with which a test checks that the outputs belong to the cells.
"""

import argparse
import ast
import base64
import hashlib
import io
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

# What tells of the machine and not of the run, and what it becomes.
SCRUBBED = [
    (re.compile(r"/\S*/notebook-\w+"), "."),
    (re.compile(r"/\S*/site-packages/"), "site-packages/"),
    (re.compile(re.escape(f"{Path(__file__).resolve().parents[1]}/")), "site-packages/treadle/"),
    (re.compile(r"^(?:[WI]\d{4} |Failed to load ).*\n", re.MULTILINE), ""),  # of packages built for another torch
    (re.compile(r"^.*\r(?!\n)", re.MULTILINE), ""),  # bars that draw over themselves
]


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest(notebook):
    """Return a digest of the code of a notebook."""
    sources = ["".join(cell["source"]) for cell in code_cells(notebook)]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]


def run(notebook):
    """Run the code cells one after the other in this process, in the current folder.

    Args:
        notebook: The parsed notebook. Its cells get their outputs.

    Raises:
        Exception: The error of a cell; its frames name the cell and its lines.
    """
    warnings.simplefilter("ignore", FutureWarning)  # between other packages
    sys.argv = ["notebook"]  # the command in what a run leaves
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    main = sys.modules["__main__"]
    for number, cell in enumerate(code_cells(notebook), start=1):
        source = "".join(cell["source"])
        name = f"<cell {number}>"
        # As for the lines of a file: inspect and tracebacks find them.
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        with Capture() as captured:
            value = evaluate(source, name, names)
        vars(main).update({k: v for k, v in names.items() if not k.startswith("__")})  # for what pickles a cell's class
        cell["execution_count"] = number
        cell["outputs"] = outputs(captured.text, value, number)
    notebook["metadata"]["treadle"] = {"code": digest(notebook)}


def evaluate(source, name, names):
    """Execute a cell and return the value of its last line; None if that is not an expression."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    return None if source.rstrip().endswith(";") else value


class Capture:
    """Context that captures everything that this process and its children print, in `text`."""

    def __enter__(self):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.file = tempfile.TemporaryFile("w+b")
        self.saved = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(self.file.fileno(), number)
        return self

    def __exit__(self, *failed):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, saved in zip((1, 2), self.saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)
        self.file.seek(0)
        self.text = self.file.read().decode(errors="replace")
        for pattern, replacement in SCRUBBED:
            self.text = pattern.sub(replacement, self.text)
        self.file.close()
        if failed[0] is not None:
            sys.stderr.write(self.text)


def outputs(text, value, number):
    """Return a cell's outputs in the form of a notebook."""
    made = []
    if text:
        made.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "savefig"):
            image = io.BytesIO()
            value.savefig(image, format="png", dpi=72, bbox_inches="tight", metadata={"Software": None})
            data = {
                "image/png": base64.b64encode(image.getvalue()).decode(),
                "text/plain": [f"<{type(value).__name__}>"],
            }
        made.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return made


def kinds(notebook):
    """Return the kinds of each cell's outputs, which do not differ between runs."""
    return [[output["output_type"] for output in cell["outputs"]] for cell in code_cells(notebook)]


def check(path):
    """Run a notebook here and compare it with its stored outputs."""
    notebook = json.loads(path.read_text())
    stored = kinds(notebook), notebook["metadata"].get("treadle", {}).get("code")
    run(notebook)
    if (kinds(notebook), digest(notebook)) != stored:
        sys.exit(f"{path}: the outputs are not those of its cells. Run .ci/run_notebooks.py {path.name}.")


def store(path):
    """Run a notebook in its own interpreter, in an empty folder, and store its outputs."""
    env = {"OMP_NUM_THREADS": "1", **os.environ, "MPLBACKEND": "Agg", "CUDA_VISIBLE_DEVICES": ""}  # as the test has it
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        command = [sys.executable, __file__, "--here", str(path.resolve())]
        subprocess.run(command, cwd=folder, check=True, env=env)


def write(path):
    notebook = json.loads(path.read_text())
    run(notebook)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="+", type=Path)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", action="store_true", help="compare with what is stored, store nothing")
    group.add_argument("--here", action="store_true", help="run in this process and this folder")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    for notebook_path in options.notebooks:
        (check if options.check else write if options.here else store)(notebook_path)
