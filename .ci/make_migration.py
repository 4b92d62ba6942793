"""Write what documents and `treadle migrate` share: compat/differences.toml, and the site's page of names.

    python .ci/make_migration.py            write compat/differences.toml if it is out of date
    python .ci/make_migration.py --check    name it if it is, and end with status 1

`compat/differences.toml` has the rows of docs/differences whose first cell has a comment with the signs by which a
program is concerned:

    <!-- used: Trainer(accumulate_grad_batches), ModelCheckpoint(save_last="link"), LocalSGD, .lr_find, def hook -->

A sign is a flag, a flag with a value, a name, a method that is called, or a method that is defined. ``by hand:`` before
them means that the program needs a change.

The page lists the counterpart of each public name of the peers (`.ci/peer_names.json`); the answers come from Treadle
itself, as in `treadle migrate`. `.ci/build_site.py` writes it as migrating/names.md.
"""

import json
import re
import sys
from pathlib import Path

from treadle.common.peer_names import Answer
from treadle.tools.migrate import find_counterpart

ROOT = Path(__file__).resolve().parent.parent
DIFFERENCES = ROOT / "docs" / "differences"
SIGNS = ROOT / "compat" / "differences.toml"
ROOTS = {"lightning": "lightning.pytorch", "accelerate": "accelerate"}
HEAD = """# Names of Lightning and Accelerate

These tables list the public names of Lightning {lightning} and accelerate {accelerate}, and the Treadle module that
provides each of them. `pytorch_lightning.X` and `lightning.X` are listed as `lightning.pytorch.X`. Importing a name
without a counterpart raises an error with the message in its row. A test imports all other names.
"""
USED = re.compile(r"\s*<!-- used: (by hand: )?(.*?) -->")


def read_peer_names():
    """Return the peers' public names by module: ``{"lightning": {"lightning.pytorch.callbacks": ["Timer", ...]}}``."""
    record = json.loads((ROOT / ".ci" / "peer_names.json").read_text(encoding="utf-8"))
    return {
        peer: {f"{root}.{path}".rstrip("."): names for path, names in record[peer]["names"].items()}
        for peer, root in ROOTS.items()
    }


def find_names():
    """Return the answer for each public name of the peers.

    Returns:
        By peer, the names by their module and their home here, the names by the sentence of their import error, and the
        names that have neither.
    """
    found = {}
    for peer, modules in read_peer_names().items():
        rows, answers, unknown = {}, {}, []
        for module, names in modules.items():
            for name in names:
                home = find_counterpart(module, name)
                if home is None:
                    unknown.append(f"{module}.{name}")
                elif isinstance(home, Answer):
                    answers.setdefault(str(home), []).append(f"{module}.{name}")
                else:
                    rows.setdefault((module, home), []).append(name)
        found[peer] = rows, answers, unknown
    return found


def write_names():
    """Return the text of the page of names."""
    versions = json.loads((ROOT / ".ci" / "peer_names.json").read_text(encoding="utf-8"))
    lines = [HEAD.format(**{peer: versions[peer]["version"] for peer in ROOTS})]
    for peer, (rows, answers, _) in find_names().items():
        lines += [f"## {peer.title()}", "", "| Before | Now | Names |", "|---|---|---|"]
        lines += [f"| `{module}` | `{home}` | {spans(names)} |" for (module, home), names in sorted(rows.items())]
        lines += ["", f"### Without a counterpart in {peer.title()}'s list", "", "| Not here | |", "|---|---|"]
        lines += [f"| {spans(names)} | {answer} |" for answer, names in sorted(answers.items(), key=lambda row: row[1])]
        lines += [""]
    return "\n".join(lines)


def spans(names):
    """Return names as code spans."""
    return ", ".join(f"`{name}`" for name in names)


def write_signs():
    """Return the text of compat/differences.toml."""
    lines = ["# Rows of docs/differences, by what a program uses; written by `make compat`."]
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DIFFERENCES.glob("*.md")))
    for row in re.findall(r"^\| (.*) \|$", pages, re.MULTILINE):
        used = USED.search(row)
        if used is None:
            continue
        cells = USED.sub("", row).split(" | ")
        lines += [
            "",
            "[[rows]]",
            f"case = {quote(cells[0])}",
            f"says = {quote(cells[-2])}",
            f"used = [{', '.join(map(quote, re.split(r', ', used[2])))}]",
            f"must_change = {str(used[1] is not None).lower()}",
        ]
    return "\n".join(lines) + "\n"


def quote(text):
    """Return a text as a TOML string."""
    return json.dumps(text, ensure_ascii=False)


def main(arguments):
    """Write or check the file and return the exit status."""
    signs = write_signs()
    stale = SIGNS.read_text(encoding="utf-8") != signs
    if stale:
        print(SIGNS.relative_to(ROOT))
        if "--check" not in arguments:
            SIGNS.write_text(signs, encoding="utf-8")
    return int(stale and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
