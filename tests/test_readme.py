"""Pages for people: short, with links that lead somewhere, and the command that the project's own check reads."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(page.relative_to(ROOT) for page in ROOT.glob("*/**/README.md") if ".venv" not in page.parts)
PAGES = [Path("README.md"), *PAGES]


def anchors(page: Path) -> set[str]:
    """What links to headings of a page are called, as on code hosts."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:href|src)="(.*?)"', text)
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert target.resolve().is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_second_command_of_the_quick_start_runs_the_tests():
    """`.ci/run` takes it from there."""
    after = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Quick start\n")[1]
    assert "pytest -n auto" in re.findall(r"^```sh\n(.*?)^```$", after, re.M | re.S)[1]
