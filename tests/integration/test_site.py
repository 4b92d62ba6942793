"""What the site makes of pages that the tests and GitHub read as well: `.ci/site_hooks.py`, without mkdocs."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("site_hooks", ROOT / ".ci" / "site_hooks.py")
hooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hooks)


def shown(text, page="start/install.md"):
    return hooks.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=page)), None, None)


@pytest.mark.parametrize(
    ("fence", "adapted"),
    [
        ("```python", "```python"),
        ("```python train.py", '```python title="train.py"'),
        ("```python ranks=2", "```python"),
        ("```bash fails", "```bash"),
        ("```text says", '```text title="Output"'),
        ('```python hl_lines="3"', '```python hl_lines="3"'),
    ],
)
def test_fences_lose_the_words_of_the_tests(fence, adapted):
    assert shown(f"{fence}\ncode\n```\n") == f"{adapted}\ncode\n```\n"


def test_marks_for_the_tests_are_left_out():
    text = (
        "before\n\n<!-- not run: takes\na network -->\n```bash\npip\n```\n\n<!-- make test-all -->\n```bash\nls\n```\n"
    )
    assert shown(text) == "before\n\n```bash\npip\n```\n\n```bash\nls\n```\n"


@pytest.mark.parametrize(
    ("link", "adapted"),
    [
        ("[data](../data.md#resume)", "[data](../data.md#resume)"),
        ("[digits](../../examples/digits.py)", "digits"),
        ("[results](../../benchmarks/RESULTS.md)", "[results](../results.md)"),
        ("[first](../tutorials/first.ipynb)", "[first](../tutorials/first.md)"),
        ("[broken](../../examples/none.py)", "[broken](../../examples/none.py)"),
        ("[web](https://pytorch.org)", "[web](https://pytorch.org)"),
        ("![picture](../images/overhead.svg)", "![picture](../images/overhead.svg)"),
    ],
)
def test_links_out_of_the_documents_become_text(link, adapted):
    assert shown(f"See {link}.") == f"See {adapted}."


def test_a_notebook_becomes_a_page():
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": [{"output_type": "stream", "text": ["1\n"]}]},
        {
            "cell_type": "code",
            "source": ["draw()"],
            "outputs": [{"data": {"image/png": "AAAA", "text/plain": ["<Figure>"]}}],
        },
    ]
    assert hooks.convert_notebook({"cells": cells}) == (
        '# Title\ntext\n\n```python\nprint(1)\n```\n\n```text title="Output"\n1\n```\n\n'
        "```python\ndraw()\n```\n\n![output](data:image/png;base64,AAAA)\n"
    )


def test_patterns_of_the_nav_take_the_pages_that_are_left():
    nav = [{"How to": ["how_to/*.md"]}, {"Tutorials": ["tutorials/*.ipynb"]}, {"None": ["none/*.md"]}, "data.md"]
    nav += [{"More": ["*.md", {"Words": ["gloss*.md"]}]}]
    pages = ["how_to/index.md", "data.md", "glossary.md", "how_to/a.md", "ray.md", "tutorials/b.ipynb"]
    assert hooks.expand_nav(nav, pages) == [
        {"How to": ["how_to/index.md", "how_to/a.md"]},
        {"Tutorials": ["tutorials/b.md"]},
        "data.md",
        {"More": ["ray.md", {"Words": ["glossary.md"]}]},
    ]


def test_every_page_is_in_the_nav():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load(re.search(r"^nav:\n(.*)", text, re.MULTILINE | re.DOTALL)[0])["nav"]
    entries = list(hooks._entries(nav))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in entries if "*" not in page} - {"results.md", "changelog.md"} <= pages
    assert {page for page in pages if not any(hooks._matches(page, entry) for entry in entries)} == set()


@pytest.mark.parametrize(
    ("html", "lost"),
    [
        ("<p>Adds.</p><pre><span>&gt;&gt;&gt; 1 + 1</span>\n2</pre>", ""),
        ("<p>A prompt is <code>&gt;&gt;&gt;</code>.</p>", ""),
        ("<blockquote><blockquote><p>1 + 1 2</p></blockquote></blockquote>", "<blockquote>"),
        ("<p>&gt;&gt;&gt; 1 + 1 2</p>", "&gt;&gt;&gt; 1 + 1 2"),
    ],
)
def test_examples_that_lost_their_lines_are_found(html, lost, caplog):
    hooks.on_page_content(html, SimpleNamespace(file=SimpleNamespace(src_uri="reference/api/data.md")))
    assert hooks.find_lost_code(html).startswith(lost)
    assert bool(lost) == bool(caplog.records)
