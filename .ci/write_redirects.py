"""Write a page that redirects for each address of the site that moved (.ci/moved_pages.toml).

python .ci/write_redirects.py build/html
"""

import posixpath
import sys
import tomllib
from pathlib import Path

PAGE = """<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<meta http-equiv="refresh" content="0; url={url}">
<a href="{url}">This page has moved.</a>
"""


def read_moved():
    """Return the new address by the old one, both without suffix: ``{"how_to/slurm": "launching#slurm"}``."""
    return tomllib.loads(Path(__file__).with_name("moved_pages.toml").read_text(encoding="utf-8"))


def write_redirects(site):
    """Write the pages into a built site, whose pages are files (``launching.html``) or folders with an index."""
    suffix = ".html" if (site / "launching.html").exists() else "/index.html"
    for old, new in read_moved().items():
        page, _, anchor = new.partition("#")
        url = posixpath.relpath(page + suffix, posixpath.dirname(old + suffix)) + (f"#{anchor}" if anchor else "")
        file = site / (old + suffix)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(PAGE.format(url=url), encoding="utf-8")


if __name__ == "__main__":
    write_redirects(Path(sys.argv[1]))
