"""Pages of pictures: a gallery of studies with their claims, and the folder of a command without figures."""

import base64
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from jaxmoe.extras import install_command
from jaxmoe.report.html.blocks import Block, Folded, FoldedProse, Picture, Prose, ReportError
from jaxmoe.report.html.page import Page

WIDTH = 1400  # px: wider pictures are made smaller, since the page holds them all
QUALITY = 80  # of WebP
ABOUT = ("hardware", "scenario", "versions", "device", "wall_s", "command_line")  # told elsewhere on the page
README = "README.md"
CLAIMS = re.compile(r"\*\*(Claims?|Question|Measured|Met|Missed)\b")  # what paragraphs that are shown begin with


def picture(path: Path, caption: str, link: str, named_by: Path) -> Picture:
    """A picture small enough for a page, with a link to the original. Raises `ReportError` naming who wants it."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        reason = getattr(error, "strerror", None) or "it is no picture"
        raise ReportError(f"{named_by}: cannot read its picture {path}: {reason}; draw it anew") from error
    image.thumbnail((WIDTH, 4 * WIDTH))
    written = io.BytesIO()
    image.save(written, "WEBP", quality=QUALITY)
    data = "data:image/webp;base64," + base64.b64encode(written.getvalue()).decode()
    return Picture(f"picture-{path.stem}", data, caption, link, image.size)


def plain_blocks(folder: Path, summary: Mapping[str, Any]) -> dict[str, list[Block]]:
    """Blocks by heading: the pictures of a folder, and what its summary says as it stands there."""
    drawn: list[Block] = [picture(path, path.stem, path.name, folder) for path in sorted(folder.glob("*.png"))]
    told = {key: value for key, value in summary.items() if key not in ABOUT}
    figures: list[Block] = [Folded("The summary", json.dumps(told, indent=1))]
    return ({"Pictures": drawn} if drawn else {}) | {"Figures": figures}


@dataclass
class StudyFolder:
    """Folder of one study: the text of its README, and the captions of its pictures by file."""

    readme: Path
    text: str
    pictures: dict[Path, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.readme.parent.name

    def told(self, path: Path) -> bool:
        """Whether the text of the README names this picture."""
        return re.search(rf"\b{re.escape(path.name)}\b", self.text) is not None


def is_gallery(folder: Path) -> bool:
    """Whether folders in it have READMEs that claim something."""
    return any(CLAIMS.search(_read(path)) for path in folder.glob(f"*/{README}"))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")  # a folder may hold anything


def gallery(folder: Path, target: Path) -> Page:
    """The page of all studies in a folder, whose pictures are those that READMEs show and those of `../figures`.

    `target` is where the page will be: links lead from there. Raises `ReportError` for a picture that cannot be read.
    """
    if find_spec("markdown_it") is None:
        raise ReportError(
            f"a gallery needs markdown-it-py; install it with: {install_command('report', 'markdown-it-py')}"
        )
    studies = [StudyFolder(path, _read(path)) for path in sorted(folder.glob(f"*/{README}"))]
    drawn = sorted(path.resolve() for path in (folder.resolve().parent / "figures").glob("*.png"))
    _with_pictures(studies, drawn)
    facts = [
        ("Studies", str(len(studies))),
        ("Pictures", str(sum(len(study.pictures) for study in studies))),
        ("Each has", "its claim, its pictures (a click shows the original), and what was measured, to unfold"),
    ]
    return Page("Studies of jaxmoe", facts, [_section(study, target) for study in studies])


def _with_pictures(studies: Sequence[StudyFolder], drawn: Sequence[Path]) -> None:
    """Give every study the pictures that its README shows, and of the others those that it names or is named like.

    A picture that two READMEs show is with the first of them.
    """
    placed: set[Path] = set()
    for study in studies:
        shown = re.findall(r"!\[(.*?)\]\((.+?)\)", study.text)
        paths = {(study.readme.parent / link).resolve(): caption for caption, link in shown}
        study.pictures |= {path: caption for path, caption in paths.items() if path not in placed}
        placed |= paths.keys()
    for path in drawn:
        if path in placed:
            continue
        owner = max(studies, key=lambda study: (study.told(path), _alike(study.name, path.stem)))
        if owner.told(path) or _alike(owner.name, path.stem):
            owner.pictures[path] = path.stem.removeprefix(owner.name).replace("_", " ").strip()


def _alike(study: str, picture: str) -> int:
    """Words with which both names begin."""
    pairs = zip(study.split("_"), picture.split("_"), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _section(study: StudyFolder, target: Path) -> tuple[str, list[Block]]:
    """The heading of the README, what comes before its first part, the pictures, and all else."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(study.text)
    for token in tokens:
        _redirect(token, study, target)
    begins = [at for at, token in enumerate(tokens) if token.type == "heading_open"]
    title = tokens[begins[0] + 1].content if begins and tokens[begins[0]].tag == "h1" else study.name
    first = begins[0] + 3 if begins and tokens[begins[0]].tag == "h1" else 0
    rest = next((at for at in begins if tokens[at].tag == "h2"), len(tokens))

    def rendered(some: Sequence[Any]) -> str:
        return markdown.renderer.render(some, markdown.options, {})

    blocks: list[Block] = [Prose(rendered([*tokens[first:rest], *_claims(tokens[rest:])]))]
    blocks += [picture(path, caption, _from(target, path), study.readme) for path, caption in study.pictures.items()]
    if rest < len(tokens):
        parts = [tokens[at + 1].content for at in begins if tokens[at].tag == "h2"]
        blocks.append(FoldedProse(f"In full: {'; '.join(parts)}", rendered(tokens[rest:])))
    return title, blocks


def _claims(tokens: Sequence[Any]) -> list[Any]:
    """Paragraphs that say what is claimed or was found, under the headings that they stand below."""
    found: list[Any] = []
    heading: Sequence[Any] = ()
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            heading = tokens[at : at + 3]
        elif token.type == "paragraph_open" and token.level == 0 and CLAIMS.match(tokens[at + 1].content):
            found += [*heading, *tokens[at : at + 3]]
            heading = ()
    return found


def _redirect(token: Any, study: StudyFolder, target: Path) -> None:
    """Links lead from the page, and pictures, which stand beside the text, become links to them."""
    for each in token.children or ():
        if each.type == "link_open" and not re.match(r"[a-z]+:|#", href := str(each.attrGet("href"))):
            each.attrSet("href", _from(target, study.readme.parent / href))
        elif each.type == "image":
            name = Path(str(each.attrGet("src"))).stem
            each.type, each.tag, each.children = "html_inline", "", None
            each.content = f'<a href="#picture-{escape(name)}">Picture: {escape(each.content)}</a>'


def _from(target: Path, path: Path) -> str:
    """A link from the page to a file."""
    return os.path.relpath(path.resolve(), target.resolve().parent)
