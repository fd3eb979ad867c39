"""Claims of a paper beside what a study finds under readings of it, each with a verdict of one of four kinds.

`holds` is within the tolerance and nothing was fitted to it. `calibrated` is within it, and is what some number was
fitted to. Anything else is `missed by` so much, or `not attempted because` of something.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from jaxmoe.experiment.table import Table, make_tables, study_options

KINDS = ("holds", "calibrated", "missed", "not attempted")
Unit = Literal["times", "points"]


@dataclass(frozen=True)
class Claim:
    """A figure that a paper prints, or the least and most of a range, and the sentence or figure that has it.

    `within` is the tolerance: a part of the figure for what is so many `times`, or so many `points` of per cent.
    Without `most` the figure is the least that the paper claims.
    """

    name: str
    sentence: str
    least: float
    most: float | None
    within: float
    unit: Unit = "times"

    @property
    def paper(self) -> str:
        if self.most is None:
            return f"at least {self.least:g}"
        return f"{self.least:g}" if self.least == self.most else f"{self.least:g} to {self.most:g}"

    def off(self, found: float) -> float:
        """How far a figure is outside the range, as a part of its nearer end or in points; 0 inside it."""
        end = self.least if found < self.least else self.most if self.most is not None and found > self.most else found
        return found - end if self.unit == "points" else found / end - 1


@dataclass(frozen=True)
class Finding:
    """A figure under a reading, whether a number was fitted to the claim, or why there is none."""

    value: float | None
    fitted: bool = False
    because: str = ""


def verdict(claim: Claim, found: Finding) -> str:
    """One of the four kinds, with how far a figure misses or why there is none."""
    if found.value is None:
        return f"not attempted because {found.because}"
    off = claim.off(found.value)
    if abs(off) > claim.within:
        return f"missed by {off:+.3g} points" if claim.unit == "points" else f"missed by {100 * off:+.0f} %"
    return "calibrated" if found.fitted else "holds"


ClaimsFound = Iterable[tuple[Claim, Mapping[str, Finding]]]


def claim_rows(claims: ClaimsFound) -> Iterator[dict[str, object]]:
    """A row for every claim and reading."""
    for claim, readings in claims:
        for reading, found in readings.items():
            yield {
                "claim": claim.name,
                "sentence": claim.sentence,
                "paper": claim.paper,
                "within": claim.within,
                "unit": claim.unit,
                "reading": reading,
                "here": "" if found.value is None else found.value,
                "verdict": verdict(claim, found),
            }


def counts_of(rows: Iterable[Mapping[str, object]], reading: str) -> dict[str, int]:
    """How many claims have a verdict of each kind under a reading."""
    told = [str(row["verdict"]) for row in rows if row["reading"] == reading]
    return {kind: sum(each.startswith(kind) for each in told) for kind in KINDS}


def rows_of_parts(parts: Sequence[Callable[[], ClaimsFound]]) -> Iterator[dict[str, object]]:
    """Rows of all parts, one part after another."""
    for part in parts:
        yield from claim_rows(part())


def claims_script(doc: str | None, folder: Path, parts: Sequence[Callable[[], ClaimsFound]]) -> None:
    """The command of a study in `folder` that writes `claims.csv` of all parts and prints the count of each reading."""
    given = study_options(doc).parse_args()
    table = Table("claims", partial(rows_of_parts, parts), digits=4)
    (told,) = make_tables(folder, [table], given).values()
    for reading in dict.fromkeys(row["reading"] for row in told):
        print(f"{reading}:", ", ".join(f"{count} {kind}" for kind, count in counts_of(told, reading).items()))
