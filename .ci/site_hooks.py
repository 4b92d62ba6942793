"""Hooks of the site's build (mkdocs.yml) that adapt pages and add generated ones.

- The rooms are copied into one folder under their import name, where mkdocstrings finds them.
- An entry of the nav with a ``*`` becomes the pages that match it.
- Fences lose the words that only the tests read (```` ```python train.py ````), links out of `docs/` their targets.
- An example that is not rendered as code fails the build.
- benchmarks/RESULTS.md, CHANGELOG.md and the notebooks of `docs/tutorials` become pages.
"""

import json
import logging
import posixpath
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "build" / "docs" / "package" / "treadle"
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
FENCE = re.compile(r"^( *)```(\w+)[ \t]+(\S[^\n]*)$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\)")
MARKS = re.compile(r"^ *<!-- (?:not run:|make test-all).*?-->\n+", re.MULTILINE | re.DOTALL)  # for the tests


def on_config(config):
    """Lay out the package and expand the nav."""
    copy_package()
    pages = [path.relative_to(config.docs_dir).as_posix() for path in Path(config.docs_dir).rglob("*.*")]
    pages.sort(key=lambda page: (not page.endswith("index.md"), page))
    config.nav = expand_nav(config.nav, pages)
    return config


on_config.mkdocs_priority = 100  # before mkdocstrings looks for the package


def copy_package():
    """Copy the rooms as they are imported: griffe reads files, and knows neither links nor import hooks."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    shutil.copytree(ROOT / "treadle", PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for face in ROOT.glob("*/__init__.py"):
        if face.parent.name != "treadle":
            shutil.copytree(face.parent, PACKAGE / face.parent.name, ignore=shutil.ignore_patterns("__pycache__"))


def _entries(nav):
    for entry in nav:
        if isinstance(entry, str):
            yield entry
            continue
        for value in entry.values():
            yield from [value] if isinstance(value, str) else _entries(value)


def expand_nav(nav, pages):
    """Replace each pattern by the pages that match it, and drop sections without pages.

    Pages that the nav names are excluded. If several patterns match, the longest one gets the page.
    """
    entries = list(_entries(nav))
    taken = {}
    for page in set(pages) - set(entries):
        patterns = [entry for entry in entries if "*" in entry and _matches(page, entry)]
        taken[page] = max(patterns, key=len, default=None)
    return _expand(nav, {entry: [page for page in pages if taken.get(page) == entry] for entry in entries})


def _matches(page, pattern):
    """Return whether a page is in the folder of a pattern and matches it."""
    return page.count("/") == pattern.count("/") and fnmatch(page, pattern)


def _expand(nav, pages):
    expanded = []
    for entry in nav:
        if isinstance(entry, str):
            expanded += [_page(page) for page in pages[entry]] if "*" in entry else [entry]
        else:
            ((title, value),) = entry.items()
            value = value if isinstance(value, str) else _expand(value, pages)
            expanded += [{title: value}] if value else []
    return expanded


def _page(path):
    """Return the page of a file: a notebook is converted to Markdown."""
    return re.sub(r"\.ipynb$", ".md", path)


def on_files(files, config):
    """Add the pages that are generated from other files."""
    from mkdocs.structure.files import File  # here, so that tests can import this file without mkdocs

    last_in_search = "---\nsearch:\n  boost: 0.2\n---\n\n"
    results = last_in_search + RESULTS.read_text(encoding="utf-8")
    files.append(File.generated(config, "results.md", content=results))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "changelog.md", content=changelog))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = json.loads(Path(file.abs_src_path).read_text(encoding="utf-8"))
        files.remove(file)
        files.append(File.generated(config, _page(file.src_uri), content=convert_notebook(notebook)))
    return files


def on_page_content(html, page, **_):
    """Warn of examples in the API reference that lost their lines, which makes a strict build fail."""
    if page.file.src_uri.startswith("reference/api/") and (lost := find_lost_code(html)):
        logging.getLogger("mkdocs.site_hooks").warning("%s: not rendered as code: %s", page.file.src_uri, lost)


def find_lost_code(html):
    """Return the beginning of an indented quote, or of a prompt outside a block of code, in a page; "" without one."""
    prose = re.sub(r"<(pre|code)\b.*?</\1>", "", html, flags=re.DOTALL)
    found = re.search(r"(<blockquote>|&gt;&gt;&gt;).{0,80}", prose, re.DOTALL)
    return found[0] if found else ""


def convert_notebook(notebook):
    """Return a notebook as Markdown: text, code and outputs, images included."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"]).rstrip()
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            text = "".join(output.get("text") or data.get("text/plain") or output.get("traceback") or [])
            if "image/png" in data:
                parts.append(f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})")
            elif text.strip():
                parts.append(f'```text title="Output"\n{text.rstrip()}\n```')
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown, page, config, files):
    """Adapt GitHub's Markdown to the site's."""
    markdown = FENCE.sub(adapt_fence, MARKS.sub("", markdown))
    folder = posixpath.dirname(page.file.src_uri)

    def adapt(match):
        text, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"\w+:", target):
            return match[0]
        target = re.sub(r"\.ipynb$", ".md", target)
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if path == RESULTS.relative_to(ROOT).as_posix():
            return f"[{text}]({posixpath.relpath('results.md', folder or '.')}{anchor})"
        if path.startswith("docs/"):
            return f"[{text}]({target}{anchor})"
        if not (ROOT / path).exists():
            return match[0]  # a broken link, which the build reports
        return text

    return LINK.sub(adapt, markdown)


def adapt_fence(match):
    """Return the first line of a fence for the site, with the file's name or "Output" as the title."""
    indent, language, how = match.groups()
    if "=" in how and not how.startswith("ranks="):
        return match[0]
    title = {"says": "Output"}.get(how, how if "." in how else "")
    return f"{indent}```{language}" + (f' title="{title}"' if title else "")
