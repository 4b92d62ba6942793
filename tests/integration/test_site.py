"""`.ci/build_site.py`: what it makes of pages that the tests and GitHub read, too, and what it finds in built ones."""

import pytest
from support.house import ROOT, load_script

MOST_PAGES = 55  # beside the API's; a person must find the page
MOST_WORDS = 50_000  # in all pages, outside blocks of code
site = load_script(".ci/build_site.py")


def shown(text, page="start/install.md"):
    return site.adapt_markdown(text, page)


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
        ("[names](../../compat/accelerate.toml)", "[names](../migrating/names.md#accelerate)"),
        ("[first](../tutorials/first.ipynb)", "[first](../tutorials/first.md)"),
        ("[broken](../../examples/none.py)", "[broken](../../examples/none.py)"),
        ("[web](https://pytorch.org)", "[web](https://pytorch.org)"),
        ("![picture](../images/overhead.svg)", "![picture](../images/overhead.svg)"),
    ],
)
def test_links_out_of_the_documents_become_text(link, adapted):
    assert shown(f"See {link}.") == f"See {adapted}."


def test_bold_links_on_a_line_of_their_own_are_buttons():
    text = "Text\n\n**[Start](start/trainer.md)** **[Install](start/install.md)**\n\nSee **[data](data.md)**.\n"
    start, install = "[Start](start/trainer.md)", "[Install](start/install.md)"
    buttons = f"{start}{{ .md-button .md-button--primary }} {install}{{ .md-button }}"
    assert shown(text, "index.md") == f"Text\n\n{buttons}\n\nSee **[data](data.md)**.\n"


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
    assert site.convert_notebook({"cells": cells}) == (
        '# Title\ntext\n\n```python\nprint(1)\n```\n\n```text title="Output"\n1\n```\n\n'
        "```python\ndraw()\n```\n\n![output](data:image/png;base64,AAAA)\n"
    )


@pytest.mark.parametrize(
    ("environment", "first", "second"),
    [
        ({}, "Download the notebook](gan.ipynb)", "Open Colab](https://colab.research.google.com/#upload=true)"),
        (
            {"GITHUB_REPOSITORY": "some/one", "GITHUB_REF_NAME": "v1"},
            "Open in Colab](https://colab.research.google.com/github/some/one/blob/v1/docs/tutorials/gan.ipynb)",
            "Download the notebook](gan.ipynb)",
        ),
    ],
)
def test_buttons_of_a_notebook(environment, first, second, monkeypatch):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    line = f"[{first}{{ .md-button .md-button--primary }} [{second}{{ .md-button }}"
    assert site.link_notebook("tutorials/gan.md") == line


def test_every_page_is_in_the_nav_once():
    pages = {
        path.relative_to(ROOT / "docs").with_suffix(".md")
        for path in (ROOT / "docs").rglob("*.*")
        if path.suffix in (".md", ".ipynb")
    }
    wanted = sorted([*(page.as_posix() for page in pages), *site.GENERATED])
    assert sorted(site.list_pages(site.read_config()["nav"])) == wanted


def test_pages_stay_few_and_short():
    pages = [page for page in (ROOT / "docs").rglob("*.md") if not page.is_relative_to(ROOT / "docs/reference/api")]
    assert len(pages) <= MOST_PAGES
    texts = (page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    assert sum(len(site.FENCED.sub("", text).split()) for text in texts) <= MOST_WORDS


def test_addresses_that_moved_redirect(tmp_path):
    moved = site.read_config()["extra"]["moved"]
    assert len(moved) > 20
    assert not any((ROOT / "docs" / old).exists() for old in moved)
    site.write_redirects(tmp_path, {"ray.md": "b/c.md#part", "b/ray.md": "b/c.md#part", "d/ray.md": "e.md"})
    (tmp_path / "b" / "c.html").write_text('<h2 id="part">Part</h2>')
    assert site.check_site(tmp_path, []) == ["d/ray.html: no such file: ../e.html"]


def test_llms_txt_has_each_page_with_its_first_sentence():
    config = {"site_name": "Treadle", "site_description": "Trains", "nav": [{"Home": "index.md"}]}
    config["nav"] += [{"Start": ["a.md", {"More": ["b/c.md"]}]}, {"Reference": ["api.md"]}]
    texts = {
        "a.md": "---\nsearch: {}\n---\n\n# First\n\n```bash\nls\n\npwd\n```\n\nA\n[link](b/c.md) stands. More.\n",
        "b/c.md": "# Second\n\nThree sizes:\n\nMore.\n",
        "api.md": "# Names\n\n::: treadle.Trainer\n",
    }
    assert site.describe_site(config, texts) == (
        "# Treadle\n\n> Trains\n\n## Start\n\n- [First](a.md): A link stands.\n- [Second](b/c.md): Three sizes\n\n"
        "## Reference\n\n- [Names](api.html)\n"
    )


@pytest.mark.parametrize(
    ("html", "wrong"),
    [
        ('<a href="b/c.html#part">c</a> <a href="#top" id="top">top</a> <a href="https://pytorch.org">torch</a>', None),
        ('<img src="data:image/png;base64,AAAA"> <img src="x.svg">', None),
        ("<blockquote><p>said</p></blockquote>", None),
        ("<p>Adds.</p><pre><span>&gt;&gt;&gt; 1 + 1</span>\n2</pre>", None),
        ("<p>A prompt is <code>&gt;&gt;&gt;</code>.</p>", None),
        ("<p>&gt;&gt;&gt; 1 + 1 2</p>", "not rendered as code: '&gt;&gt;&gt; 1 + 1 2"),
        ("<p>```python</p>", "not rendered as code: '```python"),
        ('<a href="b/d.html">d</a>', "no such file: b/d.html"),
        ('<img src="y.svg">', "no such file: y.svg"),
        ('<a href="b/c.html#other">c</a>', "no such anchor: b/c.html#other"),
        ('<a href="#other">c</a>', "no such anchor: #other"),
        ('<script src="https://unpkg.com/shim"></script>', "fetches https://unpkg.com/shim"),
        ('<link rel="stylesheet" href="//fonts.com/x.css">', "fetches //fonts.com/x.css"),
        ("<blockquote>\n<blockquote><p>said</p></blockquote></blockquote>", "not rendered as code"),
    ],
)
def test_what_is_wrong_with_a_built_site(html, wrong, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "x.svg").write_text("<svg/>")
    (tmp_path / "b" / "c.html").write_text('<h2 id="part">Part</h2><a href="../a.html">a</a>')
    (tmp_path / "a.html").write_text(html)
    found = site.check_site(tmp_path, ["a.html", "b/c.html"])
    assert len(found) == bool(wrong)
    assert all(line.startswith(f"a.html: {wrong}") for line in found)
    assert site.check_site(tmp_path, ["b/e.html"])[0] == "b/e.html: not built"
