"""Claims of the five papers under every reading that was tried, one picture a paper, from their studies' tables.

`python figures/fig_claims.py` draws `STUDY_verdicts.png`. Of the claims those are there on which readings differ.
"""

import textwrap
from pathlib import Path

from matplotlib.patches import Patch
from tables import STUDIES, Rows, distinct, images_folder, read_table, select

from jaxmoe.experiment.claims import KINDS
from jaxmoe.report.style import INK, new_figure, save

TABLES = {
    "wafer_gpu": "claims",
    "moentwine": "verdicts",
    "hd_moe": "claims",
    "camoe": "claims",
    "expert_streaming": "claims",
}
COLOURS = dict(zip(KINDS, ("#8fbbe0", "#f7e29b", "#f2a983", "#e2e2e2"), strict=True))
CELL, ROW, LABELS = 1.25, 0.27, 5.6  # inches: the width of a reading, the height of a claim, and the width of its name


def apart(rows: Rows) -> Rows:
    """Rows of the claims on which readings have different figures."""
    return [row for row in rows if len(distinct(select(rows, claim=row["claim"]), "here")) > 1]


def short(figure: str) -> str:
    """A figure to three digits; what is no number, such as a range, as it stands."""
    try:
        return f"{float(figure):.3g}"
    except ValueError:
        return figure


def draw(study: str, path: Path) -> None:
    """A row for every claim and a column for every reading; cells have our figure, and the colour of its verdict."""
    told = apart(read_table(STUDIES / study / f"{TABLES[study]}.csv"))
    claims, readings = distinct(told, "claim"), distinct(told, "reading")
    width, height = LABELS + CELL * len(readings), 2.6 + ROW * len(claims)
    figure = new_figure(width, height, f"{study}: claims on which readings differ, the paper's figure in brackets")
    axes = figure.subplots()
    for row in told:
        at, line = readings.index(row["reading"]), claims.index(row["claim"])
        kind = next(kind for kind in KINDS if row["verdict"].startswith(kind))
        axes.barh(line, 0.96, 0.92, at - 0.48, color=COLOURS[kind])
        axes.text(at, line, short(row["here"]) or "-", ha="center", va="center", fontsize=8, color=INK)
    papers = {row["claim"]: short(row["paper"]) for row in told}
    axes.set_yticks(range(len(claims)), [f"{claim} ({papers[claim]})" for claim in claims], fontsize=8)
    axes.set_xticks(range(len(readings)), [textwrap.fill(each, 17) for each in readings], fontsize=8)
    axes.xaxis.tick_top()
    axes.set_xlim(-0.5, len(readings) - 0.5)
    axes.set_ylim(len(claims) - 0.5, -0.5)
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)
    keys = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False, fontsize=9)
    save(figure, path)


if __name__ == "__main__":
    folder = images_folder(__doc__)
    for name in TABLES:
        draw(name, folder / f"{name}_verdicts.png")
