"""The page itself: HTML that holds everything it shows, and loads nothing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxmoe.extras import install_command
from jaxmoe.files import atomic_write
from jaxmoe.report.html.blocks import Block, Cell, Figure, Folded, FoldedProse, Picture, Prose, ReportError, TableBlock
from jaxmoe.report.style import aligned, digits

# Dark where the browser asks for it, and before anything is shown.
LOOK = 'document.documentElement.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches)'
# Nothing may be loaded, whatever a figure asks for. Plotly's parallel coordinates compile code of their own.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)

LIKE = 1000  # times as large is not of like size


@dataclass(frozen=True)
class Page:
    """A title, lines below it (name and text), and sections of blocks under headings."""

    title: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[tuple[str, Sequence[Block]]]


def check_installed() -> None:
    """Raise `ReportError` where Plotly is missing."""
    if find_spec("plotly") is None:
        raise ReportError(f"jaxmoe report needs plotly; install it with: {install_command('report', 'plotly')}")


def write_page(path: Path, page: Page) -> None:
    """Write the page whole or not at all. Raises `ReportError` where figures need Plotly and it is missing."""
    drawn: dict[str, Any] = {}
    body = "".join(_section(number, heading, blocks, drawn) for number, (heading, blocks) in enumerate(page.sections))
    own = files("jaxmoe.report.html")
    scripts = [*_plotly(drawn), own.joinpath("page.js").read_text(encoding="utf-8")]
    text = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(page.title)}</title>
<style>{own.joinpath("page.css").read_text(encoding="utf-8")}</style>
<script>{LOOK}</script>
</head>
<body>
<header><h1>{escape(page.title)}</h1>{_facts(page.facts)}{_contents(page)}</header>
<main>{body}</main>
<script type="application/json" id="figures">{in_script(drawn)}</script>
{"".join(f"<script>{script}</script>" for script in scripts)}
</body>
</html>
"""
    with atomic_write(path) as aside:
        aside.write_text(text, encoding="utf-8")


def _plotly(drawn: dict[str, Any]) -> list[str]:
    """The library that draws the figures, where there are any."""
    if not drawn:
        return []
    check_installed()
    from plotly.offline import get_plotlyjs

    return [get_plotlyjs()]


def in_script(value: object) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or begins another."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts) + "</dl>"


def _contents(page: Page) -> str:
    links = (f'<a href="#section-{number}">{escape(heading)}</a>' for number, (heading, _) in enumerate(page.sections))
    return f"<nav>{''.join(links)}</nav>"


def _section(number: int, heading: str, blocks: Sequence[Block], drawn: dict[str, Any]) -> str:
    """A section; its figures' data go to `drawn`, by key."""
    narrow = [block for block in blocks if _is_narrow(block)]
    alone = narrow[-1:] if len(narrow) % 2 else []  # two stand side by side where there is room
    inside = "".join(_block(block, drawn, any(block is each for each in alone)) for block in blocks)
    return f'<section id="section-{number}"><h2>{escape(heading)}</h2>{inside}</section>'


def _is_narrow(block: Block) -> bool:
    """Whether it stands beside another: figures that are not wide, and pictures that can be read at half a page."""
    if isinstance(block, Picture):
        return block.size[0] < 2 * block.size[1]
    return isinstance(block, Figure) and not block.wide


def _block(block: Block, drawn: dict[str, Any], alone: bool) -> str:
    if isinstance(block, Figure):
        key = f"figure-{len(drawn)}"
        drawn[key] = {"kind": block.kind, **block.data}
        size = f"height:{block.height}px" + (f";min-width:{block.least_width}px" if block.least_width else "")
        return (
            f'<figure id="{key}" class="{"whole" if block.wide or alone else "half"}"><h3>{escape(block.title)}</h3>'
            f'<div class="controls"></div><div class="plots"><div class="plot" style="{size}"></div>'
            f"</div><figcaption>{escape(block.caption)}</figcaption></figure>"
        )
    if isinstance(block, Picture):
        place, (width, height) = "whole" if alone or not _is_narrow(block) else "half", block.size
        image = f'<img src="{block.data}" width="{width}" height="{height}" alt="{escape(block.caption)}">'
        return (
            f'<figure id="{escape(block.key)}" class="{place}"><a href="{escape(block.link)}">{image}</a>'
            f"<figcaption>{escape(block.caption)}</figcaption></figure>"
        )
    if isinstance(block, Prose):
        return f'<div class="block prose">{block.html}</div>'
    if isinstance(block, FoldedProse):
        return f'<details><summary>{escape(block.title)}</summary><div class="prose">{block.html}</div></details>'
    if isinstance(block, TableBlock):
        return f'<div class="block"><h3>{escape(block.title)}</h3>{_table(block)}{_caption(block.caption)}</div>'
    if isinstance(block, Folded):
        return f"<details><summary>{escape(block.title)}</summary><pre>{escape(block.text)}</pre></details>"
    return f'<p class="note">{escape(block.text)}</p>'


def _caption(text: str) -> str:
    return f"<p class='caption'>{escape(text)}</p>" if text else ""


def _table(table: TableBlock) -> str:
    """Headings are buttons, which the keyboard reaches; `data-value` is what a column is sorted by."""
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(name)}</button></th>' for name in table.columns
    )
    texts = zip(*(_shown(column) for column in zip(*table.rows, strict=True)), strict=True)
    rows = "".join(f"<tr>{''.join(map(_cell, *row))}</tr>" for row in zip(table.rows, texts, strict=True))
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _shown(column: Sequence[Cell]) -> Sequence[str]:
    """Texts of a column: with one precision where its numbers are of like size."""
    sizes = [abs(value) for value in column if isinstance(value, float) and value]
    if sizes and max(sizes) <= LIKE * min(sizes) and not any(isinstance(value, str) for value in column):
        return aligned(column)  # type: ignore[arg-type]
    return [digits(value, 4) if isinstance(value, float) else "-" if value is None else str(value) for value in column]


def _cell(value: Cell, shown: str) -> str:
    if value is None:
        return f"<td class='number'>{shown}</td>"
    if isinstance(value, str):
        return f"<td>{escape(shown)}</td>"
    return f'<td class="number" data-value="{float(value)!r}">{shown}</td>'
