"""Links of the documentation work on the repository as well as in the site that mkdocs builds."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def text_of(page: Path) -> str:
    """A page without its code, in which brackets are no links and # is no heading."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"(?<=\n\n)(?: {4}.*\n|\n)+", "\n", text)


def links(page: Path) -> list[str]:
    """Targets of Markdown and HTML links that are not addresses of the web."""
    text = re.sub(r"`[^`\n]*`", "", text_of(page))
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:href|src)=\"([^\"]+)\"", text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def github_slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def mkdocs_slug(heading: str) -> str:
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors(page: Path, slug: Callable[[str], str]) -> set[str]:
    """Anchors of the headings of a page, and of the objects that the API reference documents."""
    text = text_of(page)
    headings = re.findall(r"^#+ +(.+?)\s*$", text, re.M)
    named = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {slug(name.replace("`", "")) for name in named} | set(
        re.findall(r"^::: (\S+)$", text, re.M)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_work_on_the_repository_and_in_the_site(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{link}: no such file in the repository"
        assert target.is_relative_to(DOCS), f"{link}: not part of the site"
        if anchor:
            assert anchor in anchors(target, github_slug), f"{link}: no such heading on GitHub"
            assert anchor in anchors(target, mkdocs_slug), f"{link}: no such heading in the site"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_of_the_first_pages_work_on_the_repository(name: str) -> None:
    for link in links(ROOT / name):
        path, _, anchor = link.partition("#")
        target = ROOT / path if path else ROOT / name
        assert target.exists(), link
        assert not anchor or anchor in anchors(target, github_slug), link


def test_links_are_found() -> None:
    found = [link for page in PAGES for link in links(page)]
    assert "guard-a-predictor.md" in found
    assert "report.png" in found
    assert len(found) > 80


def test_the_start_page_links_every_page() -> None:
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in links(DOCS / "index.md")}
    assert {p for p in PAGES if p.stem not in ("index", "changelog")} <= linked
