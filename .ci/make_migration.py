"""Write what documents and `treadle migrate` share: the tables of docs/migrating, and compat/differences.toml.

    python .ci/make_migration.py            write what is out of date
    python .ci/make_migration.py --check    list it, and end with status 1

The tables list the counterpart of each public name of the peers (`.ci/peer_names.json`); the answers come from Treadle
itself, as in `treadle migrate`. `compat/differences.toml` has the rows of docs/differences whose first cell has a
comment with the signs by which a program is concerned:

    <!-- used: Trainer(accumulate_grad_batches), ModelCheckpoint(save_last="link"), LocalSGD, .lr_find, def hook -->

A sign is a flag, a flag with a value, a name, a method that is called, or a method that is defined. ``by hand:`` before
them means that the program needs a change.
"""

import json
import re
import sys
from pathlib import Path

from treadle.common.peer_names import Answer
from treadle.tools.migrate import find_counterpart

ROOT = Path(__file__).resolve().parent.parent
NAMES = ROOT / "docs" / "migrating" / "names.md"
DIFFERENCES = ROOT / "docs" / "differences"
SIGNS = ROOT / "compat" / "differences.toml"
ROOTS = {"lightning": "lightning.pytorch", "accelerate": "accelerate"}
USED = re.compile(r"\s*<!-- used: (by hand: )?(.*?) -->")


def read_peer_names():
    """Return the peers' public names by module: ``{"lightning": {"lightning.pytorch.callbacks": ["Timer", ...]}}``."""
    record = json.loads((ROOT / ".ci" / "peer_names.json").read_text(encoding="utf-8"))
    return {
        peer: {f"{root}.{path}".rstrip("."): names for path, names in record[peer]["names"].items()}
        for peer, root in ROOTS.items()
    }


def write_names():
    """Return the text of the page of names, and the names without counterpart or answer."""
    text, unknown = NAMES.read_text(encoding="utf-8"), []
    for peer, modules in read_peer_names().items():
        rows, answers = {}, {}
        for module, names in modules.items():
            for name in names:
                home = find_counterpart(module, name)
                if home is None:
                    unknown.append(f"{module}.{name}")
                elif isinstance(home, Answer):
                    answers.setdefault(str(home), []).append(f"`{module}.{name}`")
                else:
                    rows.setdefault((module, home), []).append(f"`{name}`")
        table = ["| Before | Now | Names |", "|---|---|---|"]
        table += [f"| `{module}` | `{home}` | {', '.join(names)} |" for (module, home), names in sorted(rows.items())]
        text = replace_part(text, f"names of {peer}", table)
        table = ["| Not here | |", "|---|---|"]
        table += [f"| {', '.join(names)} | {answer} |" for answer, names in sorted(answers.items(), key=lambda a: a[1])]
        text = replace_part(text, f"answers for {peer}", table if answers else ["Every name has a counterpart."])
    return text, unknown


def replace_part(text, name, lines):
    """Replace the lines between two marks."""
    start, end = f"<!-- {name}, written by `make compat` -->\n", "<!-- end -->"
    before, _, rest = text.partition(start)
    if not rest:
        raise ValueError(f"docs/migrating/names.md has no line {start}")
    return before + start + "\n".join(["", *lines, "", end]) + rest.partition(end)[2]


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
    """Write or check the files and return the exit status."""
    names, unknown = write_names()
    texts = {SIGNS: write_signs(), NAMES: names}
    stale = [file for file, text in texts.items() if file.read_text(encoding="utf-8") != text]
    if "--check" not in arguments:
        for file in stale:
            file.write_text(texts[file], encoding="utf-8")
    for file in stale:
        print(file.relative_to(ROOT))
    if "--unknown" in arguments:
        print(*unknown, sep="\n")
    if unknown:
        print(f"{len(unknown)} public names have neither a counterpart nor an answer (--unknown lists them)")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
