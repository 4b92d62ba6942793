"""Build the site into build/html with Zensical (mkdocs.yml), and check what was written.

    python .ci/build_site.py

1. The rooms are copied into one folder under their import name, where mkdocstrings finds them.
2. The pages are laid out in build/docs/pages. Fences lose the words that only the tests read (```` ```python x.py ````)
   and links out of `docs/` their targets. benchmarks/RESULTS.md, CHANGELOG.md, the notebooks and the names in
   compat/*.toml become pages.
3. Zensical builds them, strictly: no broken link, no docstring that griffe warns of. Beside them come llms.txt, the
   Markdown that it links to, and redirects from addresses that moved.
4. Each page is read again: its links and pictures exist, nothing is fetched from another host, code kept its lines.
"""

import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = ROOT / "build" / "docs" / "pages"
THEME = ROOT / "build" / "docs" / "theme"
PACKAGE = ROOT / "build" / "docs" / "package" / "treadle"
SITE = ROOT / "build" / "html"
# Files outside docs/ by the pages that they become. These are not in the search, since what they say stands on other
# pages, too.
SOURCES = {
    "benchmarks/RESULTS.md": "results.md",
    "CHANGELOG.md": "changelog.md",
    "compat/lightning.toml": "migrating/names.md#lightning",
    "compat/accelerate.toml": "migrating/names.md#accelerate",
}
GENERATED = {address.partition("#")[0]: source for source, address in SOURCES.items()}
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
MOVED = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={url}">
<title>Moved</title>
<a href="{url}">This page has moved.</a>
"""
FENCE = re.compile(r"^( *)```(\w+)[ \t]+(\S[^\n]*)$", re.MULTILINE)
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\)")
MARKS = re.compile(r"^ *<!-- (?:not run:|make test-all).*?-->\n+", re.MULTILINE | re.DOTALL)  # for the tests
BUTTONS = re.compile(r"^(?:\*\*\[[^\]]+\]\(\S+\)\*\* ?)+$", re.MULTILINE)
TITLE = re.compile(r"^# (.+)\n", re.MULTILINE)


def copy_package():
    """Copy the rooms as they are imported: griffe reads files, and knows neither links nor import hooks."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    shutil.copytree(ROOT / "treadle", PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for face in ROOT.glob("*/__init__.py"):
        if face.parent.name != "treadle":
            shutil.copytree(face.parent, PACKAGE / face.parent.name, ignore=shutil.ignore_patterns("__pycache__"))


def lay_out_pages():
    """Write each page as Zensical shall read it, and copy what is no page as it is."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(DOCS, PAGES, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for path in PAGES.rglob("*.ipynb"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        path.with_suffix(".md").write_text(convert_notebook(notebook), encoding="utf-8")
    import make_migration  # here, so that tests can import this file on its own

    for page, source in GENERATED.items():
        is_page = source.endswith(".md")
        text = (ROOT / source).read_text(encoding="utf-8") if is_page else make_migration.write_names()
        (PAGES / page).write_text(NOT_SEARCHED + text, encoding="utf-8")
    for path in PAGES.rglob("*.md"):
        page = path.relative_to(PAGES).as_posix()
        text = adapt_markdown(path.read_text(encoding="utf-8"), page)
        if path.with_suffix(".ipynb").exists():
            text = TITLE.sub(lambda match, page=page: f"{match[0]}\n{link_notebook(page)}\n", text, count=1)
        path.write_text(text, encoding="utf-8")


def source_of(page):
    """Return the path of a page's Markdown in the repository."""
    return GENERATED.get(page, posixpath.join("docs", page))


def adapt_markdown(markdown, page):
    """Adapt GitHub's Markdown to the site's."""
    markdown = FENCE.sub(adapt_fence, MARKS.sub("", markdown))

    def adapt(match):
        text, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"\w+:", target):
            return match[0]
        target = re.sub(r"\.ipynb$", ".md", target)
        path = posixpath.normpath(posixpath.join(source_of(page), "..", target))
        if path in SOURCES or path.startswith("docs/"):
            address = SOURCES.get(path, path.removeprefix("docs/"))
            return f"[{text}]({posixpath.relpath(address, posixpath.dirname(page) or '.')}{anchor})"
        return text if (ROOT / path).exists() else match[0]  # a broken link, which the build reports

    return BUTTONS.sub(adapt_buttons, LINK.sub(adapt, markdown))


def adapt_buttons(match):
    """Return bold links that fill a line as buttons, the first of which stands out."""
    links = re.findall(r"\*\*(\[[^\]]+\]\(\S+\))\*\*", match[0])
    return " ".join(f"{link}{{ .md-button{' .md-button--primary' * (link == links[0])} }}" for link in links)


def adapt_fence(match):
    """Return the first line of a fence for the site, with the file's name or "Output" as the title."""
    indent, language, how = match.groups()
    if "=" in how and not how.startswith("ranks="):
        return match[0]
    title = {"says": "Output"}.get(how, how if "." in how else "")
    return f"{indent}```{language}" + (f' title="{title}"' if title else "")


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


def link_notebook(page):
    """Return the buttons of a notebook's page. Colab reads notebooks from GitHub, whose actions name the repository."""
    name = posixpath.basename(page).removesuffix(".md") + ".ipynb"
    buttons = [
        f"**[Download the notebook]({name})**",
        "**[Open Colab](https://colab.research.google.com/#upload=true)**",
    ]
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        path = f"{repository}/blob/{os.environ.get('GITHUB_REF_NAME', 'main')}/docs/{page.removesuffix('.md')}.ipynb"
        buttons = [f"**[Open in Colab](https://colab.research.google.com/github/{path})**", buttons[0]]
    return BUTTONS.sub(adapt_buttons, " ".join(buttons))


def write_header():
    """Write Zensical's header with the version beside the name, linked to the changelog."""
    import zensical  # here, so that tests can import this file without it

    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    header = Path(zensical.__file__).parent / "templates" / "partials" / "header.html"
    title = re.compile(r"(\{\{ config\.site_name \}\}\s*</span>)")
    link = f'<a class="treadle-version" href="{{{{ \'changelog.html\' | url }}}}">{version}</a>'
    text, count = title.subn(rf"\1 {link}", header.read_text(encoding="utf-8"))
    if count != 1:
        sys.exit(f"{header} has {count} places for the version, not one: adapt write_header to this Zensical")
    (THEME / "partials").mkdir(parents=True, exist_ok=True)
    (THEME / "partials" / "header.html").write_text(text, encoding="utf-8")


def read_config():
    """Return mkdocs.yml; what only Zensical understands of it is left out."""
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), loader)


def list_pages(nav):
    """Yield the pages of a nav, in order."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
            continue
        for value in entry.values():
            yield from [value] if isinstance(value, str) else list_pages(value)


def describe_site(config, texts):
    """Return llms.txt: each page of the site with its first sentence.

    Args:
        config: What ``mkdocs.yml`` says.
        texts: The Markdown of each page. One made from docstrings is linked as HTML, any other as Markdown.
    """
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    for entry in config["nav"]:
        ((section, pages),) = entry.items()
        if isinstance(pages, str):
            continue
        lines += ["", f"## {section}", ""]
        for page in list_pages(pages):
            text = re.sub(r"\A---\n.*?\n---\n", "", texts[page], flags=re.DOTALL)
            title, rest = TITLE.search(text)[1], TITLE.split(text, maxsplit=1)[2]
            rest = FENCED.sub("", rest)
            prose = (part for part in re.split(r"\n{2,}", rest.strip()) if re.match(r"[\w`*\[]", part))
            first = " ".join(re.split(r"(?<=\.)\s", LINK.sub(r"\1", next(prose, "")), maxsplit=1)[0].split()).rstrip(
                ":"
            )
            target = page[:-3] + ".html" if "\n::: " in text else page
            lines.append(f"- [{title}]({target})" + (f": {first}" if first else ""))
    return "\n".join(lines) + "\n"


def write_redirects(site, moved):
    """Write a page at each address that moved. (Zensical's own redirects at times do not find a page under load.)

    Args:
        site: The folder of the site.
        moved: Pages in ``docs/``, and by what page or heading each was replaced.
    """
    for old, new in moved.items():
        url = posixpath.relpath(new, posixpath.dirname(old)).replace(".md", ".html")
        path = site / old.replace(".md", ".html")
        path.parent.mkdir(exist_ok=True)
        path.write_text(MOVED.format(url=url), encoding="utf-8")


class Page(HTMLParser):
    """What a page names: its anchors, what it links to and what a browser fetches to show it."""

    def __init__(self, html):
        super().__init__()
        self.anchors, self.links, self.fetched = set(), [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attrs = {name: value or "" for name, value in attrs}
        self.anchors |= {attrs[name] for name in ("id", "name") if name in attrs}
        if tag == "a" and "href" in attrs:
            self.links.append(attrs["href"])
        if "src" in attrs:
            self.fetched.append(attrs["src"])
        if tag == "link" and attrs.get("rel") not in ("canonical", "prev", "next"):
            self.fetched.append(attrs["href"])


def find_lost_code(html, quotes=r"<blockquote>"):
    """Return the beginning of a quote, or of a prompt outside a block of code, in a page; "" without one."""
    prose = re.sub(r"<(pre|code|script)\b.*?</\1>", "", html, flags=re.DOTALL)
    found = re.search(rf"({quotes}|&gt;&gt;&gt;|```).{{0,80}}", prose, re.DOTALL)
    return found[0] if found else ""


def check_site(site, expected):
    """Return what is wrong with a built site, a line each.

    Args:
        site: The folder of the site.
        expected: Paths of the pages that it must have.
    """
    texts = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    pages = {name: Page(text) for name, text in texts.items()}
    wrong = [f"{name}: not built" for name in sorted(set(expected) - set(pages))]
    for name, page in pages.items():
        # A docstring has no quotes; in other pages, one within another is an indentation that was taken for a quote.
        quotes = "<blockquote>" if name.startswith("reference/api/") else r"<blockquote>\s*<blockquote>"
        if lost := find_lost_code(texts[name], quotes):
            wrong.append(f"{name}: not rendered as code: {lost!r}")
        if name == "404.html":  # its links are those of the root of a server
            continue
        wrong += [f"{name}: fetches {url}" for url in page.fetched if re.match(r"(?!data:)\w+:|//", url)]
        for url in [*page.links, *page.fetched]:
            if re.match(r"\w+:|//", url):
                continue
            path, _, anchor = url.partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            if not (site / target).is_file():
                wrong.append(f"{name}: no such file: {url}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                wrong.append(f"{name}: no such anchor: {url}")
    return wrong


def main():
    """Build and check the site."""
    config = read_config()
    copy_package()
    lay_out_pages()
    write_header()
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(built.stdout, end="", flush=True)
    if built.returncode:
        sys.exit(built.returncode)
    texts = {path.relative_to(PAGES).as_posix(): path.read_text(encoding="utf-8") for path in PAGES.rglob("*.md")}
    write_redirects(SITE, config["extra"]["moved"])
    (SITE / "llms.txt").write_text(describe_site(config, texts), encoding="utf-8")
    for page in texts:
        shutil.copy(PAGES / page, SITE / page)
    wrong = [line for line in built.stdout.splitlines() if line.startswith("griffe: ")]  # not strict in Zensical
    wrong += check_site(SITE, [page[:-3] + ".html" for page in texts])
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
