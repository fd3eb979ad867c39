"""The output of a command for other programs: its tables as CSV or LaTeX, or its summary as JSON."""

import csv
import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from jaxmoe.cli.progress import messages
from jaxmoe.errors import InputError
from jaxmoe.files import as_pdf_too, atomic_write

if TYPE_CHECKING:
    from jaxmoe.cli.session import OutputFolder

CSV, LATEX = "--csv", "--latex"
Csv = Annotated[
    Path | None,
    typer.Option(
        CSV, metavar="FILE", help="Write the printed tables as CSV too: FILE.csv, FILE_2.csv, ..", show_default=False
    ),
]
Latex = Annotated[
    Path | None,
    typer.Option(
        LATEX, metavar="FILE", help="Write the printed tables for LaTeX too, with booktabs.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print summary.json, and nothing else, in place of tables.")]
Pdf = Annotated[bool, typer.Option("--pdf", help="Write pictures as PDF too, beside each PNG.")]
OPTIONS = {
    name: Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=of)
    for name, of, default in (("csv", Csv, None), ("latex", Latex, None), ("pdf", Pdf, False), ("json", Json, False))
}
LAST = ("quiet", "verbose")  # of the options of a command
_kept: ContextVar[list[Table] | None] = ContextVar("_kept", default=None)


def keep(table: Table) -> None:
    """Remember a table that is printed, where files of tables are wanted."""
    if (tables := _kept.get()) is not None:
        tables.append(table)


def with_options(signature: Signature) -> Signature:
    """The signature of a command with the options of this module, which all that print tables have."""
    given = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in signature.parameters.values()]
    first, last = ([each for each in given if (each.name in LAST) == wanted] for wanted in (False, True))
    return signature.replace(parameters=[*first, *OPTIONS.values(), *last])


@dataclass
class KeptOutput:
    """Tables as files, pictures as PDF, and JSON in place of what is printed, where a command is asked for them."""

    csv: Path | None = None
    latex: Path | None = None
    pdf: bool = False
    json: bool = False
    _tables: list[Table] = field(default_factory=list)

    @property
    def _files(self) -> tuple[tuple[str, Path | None], ...]:
        return (CSV, self.csv), (LATEX, self.latex)

    def check(self) -> None:
        """Raise `InputError` where a file cannot be written, before any work."""
        for option, path in self._files:
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
                raise InputError(f"{option} is {path}, and {why}; give the name of a file in a folder that is there")

    @contextmanager
    def of(self, folder: "OutputFolder") -> Iterator[None]:
        """Run a command in here that writes to `folder`; files and JSON come when it ends, also early."""
        token, printed = _kept.set(self._tables), io.StringIO() if self.json else sys.stdout
        pictures = as_pdf_too.set(self.pdf)
        try:
            with redirect_stdout(printed):
                yield
        except typer.Exit:  # of a search that was stopped, and has told what it found
            self._write(folder)
            raise
        finally:
            _kept.reset(token)
            as_pdf_too.reset(pictures)
        self._write(folder)

    def _write(self, folder: "OutputFolder") -> None:
        if self.json:
            typer.echo(folder.summary, nl=False)
        if not self._tables:
            for option in (option for option, path in self._files if path is not None):
                messages().print(f"[yellow]note:[/] {option}: this run printed no table, so none is written")
            return
        if self.csv is not None:
            # A file has one table: the second is in FILE_2.csv.
            for number, table in zip(count(1), self._tables, strict=False):
                _put(self.csv if number == 1 else self.csv.with_stem(f"{self.csv.stem}_{number}"), as_csv(table))
        if self.latex is not None:
            _put(self.latex, "% needs \\usepackage{booktabs}\n\n" + "\n".join(map(as_latex, self._tables)))


def _put(path: Path, text: str) -> None:
    with atomic_write(path) as aside:
        aside.write_text(text, encoding="utf-8")


def as_csv(table: Table) -> str:
    """The table as CSV: units in the heads, numbers as printed, without `x` and commas of thousands."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([" ".join(head) for head in _heads(table)])
    writer.writerows([_number("; ".join(_lines(cell))) for cell in row] for row in _rows(table))
    return text.getvalue()


def as_latex(table: Table) -> str:
    """The table as a float of LaTeX with rules of booktabs and the title as its caption, names escaped."""
    sides = "".join("r" if column.justify == "right" else "l" for column in table.columns)
    title = " ".join(_lines(table.title or ""))
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_escaped(title)}}}",
            rf"\begin{{tabular}}{{{sides}}}",
            r"\toprule",
            _latex_row(_heads(table)),
            r"\midrule",
            *(_latex_row([*map(_lines, row)]) for row in _rows(table)),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _rows(table: Table) -> list[tuple[object, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


def _heads(table: Table) -> list[list[str]]:
    """The lines of every head; a unit in brackets that ends the title goes to all columns of numbers."""
    unit = re.findall(r"\[([^\]]+)\]$", " ".join(_lines(table.title or "")))
    return [_lines(column.header) + unit * (column.justify == "right") for column in table.columns]


def _lines(cell: object) -> list[str]:
    """The lines of a cell, without markup."""
    return (Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)).splitlines()


def _number(text: str) -> str:
    return text.replace(",", "").removesuffix("x") if re.fullmatch(r"-?[\d,]+(\.\d+)?x?", text) else text


def _latex_row(cells: Sequence[Sequence[str]]) -> str:
    return " & ".join(map(_latex_cell, cells)) + r" \\"


def _latex_cell(cell: Sequence[str]) -> str:
    lines = [*map(_escaped, cell)]
    if len(lines) < 2:
        return "".join(lines)
    return r"\begin{tabular}[c]{@{}l@{}}" + r" \\ ".join(lines) + r"\end{tabular}"


_SPECIAL = {character: "\\" + character for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "µ": r"$\mu$",
    "[": "{[}",  # at the start of a row it would be an option of the row before
    "]": "{]}",
    "*": "{*}",
}


def _escaped(text: str) -> str:
    """Text as LaTeX shows it as it is; `1.19x` with a sign of multiplication."""
    factor = re.fullmatch(r"(-?[\d.,]+)x", text)
    return rf"{factor[1]}$\times$" if factor else "".join(_SPECIAL.get(character, character) for character in text)
