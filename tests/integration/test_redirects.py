"""Addresses of pages that moved lead to the pages that have their content: `.ci/write_redirects.py`."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_PAGES = 60  # beside the reference of classes and functions
SPEC = importlib.util.spec_from_file_location("write_redirects", ROOT / ".ci" / "write_redirects.py")
redirects = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(redirects)


def read_anchors(page):
    """Return the anchors of a page's headings, as the site makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w]+", "-", re.sub(r"[`.,:?*()]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize(("old", "new"), redirects.read_moved().items())
def test_each_target_is_there_and_no_page_has_the_old_address(old, new):
    assert not (ROOT / "docs" / f"{old}.md").exists()
    page, _, anchor = new.partition("#")
    assert (ROOT / "docs" / f"{page}.md").exists()
    assert not anchor or anchor in read_anchors(ROOT / "docs" / f"{page}.md")


@pytest.mark.parametrize(
    ("built", "page", "url"),
    [
        ("launching.html", "how_to/slurm.html", "../launching.html#slurm"),
        ("launching/index.html", "how_to/slurm/index.html", "../../launching/index.html#slurm"),
    ],
)
def test_links_fit_the_form_of_the_site(built, page, url, tmp_path):
    (tmp_path / built).parent.mkdir(exist_ok=True)
    (tmp_path / built).touch()
    redirects.write_redirects(tmp_path)
    assert f'url={url}"' in (tmp_path / page).read_text(encoding="utf-8")
    assert (tmp_path / page).parent.joinpath(url.partition("#")[0]).resolve() == tmp_path / built


def test_pages_stay_few():
    pages = [page for page in (ROOT / "docs").rglob("*.md") if not page.is_relative_to(ROOT / "docs/reference/api")]
    assert len(pages) <= MOST_PAGES
