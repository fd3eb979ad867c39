"""`jaxmoe report studies/`: one page with every study's claim, its pictures and the rest of its README."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

FIRST = """# First: which is faster?

**Claim.** Tuned is faster, [by this table](times.csv), or [by that](https://example.com/x). <script>alert(1)</script>

![Times of both](../../figures/shown.png)

## Measured

| plan | time |
| --- | --- |
| tuned | 3 |

`figures/named.png` has all cases.

**Missed** by one case.
"""
SECOND = "# Second\n\nNo more than this, but [for](../first/README.md) ![the same](../../figures/shown.png)\n"


@pytest.fixture
def studies(tmp_path):
    for name, text in (("first", FIRST), ("second_one", SECOND)):
        (tmp_path / "studies" / name).mkdir(parents=True)
        (tmp_path / "studies" / name / "README.md").write_text(text)
    (tmp_path / "figures").mkdir()
    for shade, name in enumerate(("shown", "named", "second_map", "other")):
        picture = np.full((40, 2000 if name == "shown" else 60, 3), 60 * shade, np.uint8)
        Image.fromarray(picture).save(tmp_path / "figures" / f"{name}.png")
    return tmp_path / "studies"


def pictures(page: str) -> dict[str, tuple[str, Image.Image]]:
    """Pictures by key, with their captions, in the order of the page."""
    found = re.findall(r'<figure id="picture-(.*?)".*?src="data:image/webp;base64,(.*?)".*?<figcaption>(.*?)<', page)
    return {name: (caption, Image.open(io.BytesIO(base64.b64decode(data)))) for name, data, caption in found}


def test_every_study_is_on_the_page_with_its_claim_and_pictures(run, studies):
    done = run("report", studies)
    assert done.exit_code == 0, done.output
    page = (studies / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"<h2>(.*?)</h2>", page.split("<details>")[0])[0] == "First: which is faster?"
    assert "<h2>Second</h2>" in page
    shown = pictures(page)
    assert [*shown] == ["shown", "named", "second_map"]  # what no study names or is named like is no study's
    assert [caption for caption, _ in shown.values()] == ["Times of both", "named", "second map"]
    assert shown["shown"][1].size == (1400, 28)
    assert np.asarray(shown["named"][1]).mean() == pytest.approx(60, abs=3)
    before, unfolded = page.split("<details>")
    assert "Claim." in before
    assert "by one case" in before  # out of the part that is folded
    assert "<td>tuned</td>" in unfolded
    assert "<td>tuned</td>" not in before


def test_links_lead_from_the_page_and_nothing_is_markup_or_loaded(run, studies, tmp_path):
    assert run("report", studies, "--out", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'href="studies/first/times.csv"' in page
    assert 'href="https://example.com/x"' in page
    assert '<a href="figures/shown.png"><img' in page
    assert '<a href="#picture-shown">Picture: Times of both</a>' in page
    assert "<script>alert" not in page
    assert not re.search(r'src="(?!data:)', page)
    assert len(page) < 100_000  # without the library that draws figures


def test_a_picture_that_is_none_is_one_clear_error(run, studies):
    (studies.parent / "figures" / "shown.png").write_text("no picture")
    done = run("report", studies)
    assert done.exit_code == 2
    assert "it is no picture; draw it anew" in " ".join(done.stderr.split())
    (studies.parent / "figures" / "shown.png").unlink()
    assert "No such file" in " ".join(run("report", studies).stderr.split())
    assert not (studies / "report.html").exists()


def test_every_picture_of_the_project_is_in_the_gallery(run, tmp_path, pytestconfig, monkeypatch):
    """All pictures, each once. Here they are opened, but not unpacked; tests in a browser have the whole page."""
    monkeypatch.setattr("PIL.Image.Image.convert", lambda image, mode: Image.new(mode, (8, 8)))
    root = pytestconfig.rootpath
    assert run("report", root / "studies", "--out", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    keys = re.findall(r'<figure id="picture-(.*?)"', page)
    assert sorted(keys) == sorted(path.stem for path in (root / "figures").glob("*.png"))
    assert page.count("<section ") == len([*(root / "studies").glob("*/README.md")])


def test_a_command_without_figures_of_its_own_has_its_pictures_and_summary(run, tmp_path):
    Image.fromarray(np.zeros((30, 40, 3), np.uint8)).save(tmp_path / "slots.png")
    (tmp_path / "summary.json").write_text('{"command": "plan show", "ranks": 8, "versions": {"jaxmoe": "1"}}')
    done = run("report", tmp_path)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert [*pictures(page)] == ["slots"]
    assert "&quot;ranks&quot;: 8" in page
