"""Pictures that a page holds, and the page of a command that has no figures of its own to hover."""

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmoe.report.html.blocks import Block, Folded, Picture, ReportError

WIDTH = 1400  # px: wider pictures are made smaller, since the page holds them all
QUALITY = 80  # of WebP
ABOUT = ("hardware", "scenario", "versions", "device", "wall_s", "command_line")  # told elsewhere on the page


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
