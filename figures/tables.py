"""Tables of the studies as the figures read them: rows of text, and their columns as numbers."""

import argparse
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np

from jaxmoe import files

HERE = Path(__file__).resolve().parent
STUDIES = HERE.parent / "studies"
Rows = list[dict[str, str]]


def images_folder(doc: str | None) -> Path:
    """Where images go, by the command line of a script with this docstring; made if need be."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=HERE, metavar="FOLDER", help="folder of the images, figures/ unless said"
    )
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    return out


@cache
def read_table(path: Path, missing_ok: bool = False) -> Rows:
    """A table. One that is not made yet is an error, or none with `missing_ok`."""
    if missing_ok and not path.is_file():
        return []
    return files.read_table(path)


def select(rows: Iterable[dict[str, str]], **values: str) -> Rows:
    """Rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def column(rows: Iterable[dict[str, str]], key: str) -> np.ndarray:
    """A column as numbers, NaN where nothing stands."""
    return np.array([float(row[key] or "nan") for row in rows])


def distinct(rows: Iterable[dict[str, str]], key: str) -> list[str]:
    """Values of a column in the order in which they first occur."""
    return list(dict.fromkeys(row[key] for row in rows))
