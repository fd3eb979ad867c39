"""Verdicts on claims, by hand."""

import pytest

from jaxmoe.experiment.claims import Claim, Finding, claim_rows, counts_of, verdict

RATIO = Claim("gain", "V-C", 4.0, 4.0, 0.2)
RANGE = Claim("hops", "V-D", 7.2, 10.8, 0.2)
POINTS = Claim("saved", "VI-B", 54.0, 54.0, 15.0, "points")
FLOOR = Claim("never slower", "VI-B", 0.0, None, 0.0, "points")


@pytest.mark.parametrize(
    ("claim", "value", "told"),
    [
        (RATIO, 4.7, "holds"),
        (RATIO, 5.0, "missed by +25 %"),
        (RATIO, 2.0, "missed by -50 %"),
        (RANGE, 8.0, "holds"),
        (RANGE, 12.9, "holds"),  # 19 % over the most
        (RANGE, 3.6, "missed by -50 %"),
        (POINTS, 40.0, "holds"),
        (POINTS, 83.0, "missed by +29 points"),
        (FLOOR, 23.0, "holds"),
        (FLOOR, -17.0, "missed by -17 points"),
    ],
)
def test_a_figure_holds_within_its_tolerance(claim, value, told):
    assert verdict(claim, Finding(value)) == told


def test_what_was_fitted_never_holds():
    assert verdict(RATIO, Finding(4.0, fitted=True)) == "calibrated"
    assert verdict(RATIO, Finding(9.0, fitted=True)) == "missed by +125 %"


def test_what_was_not_tried_says_why():
    assert verdict(RATIO, Finding(None, because="no numbers are printed")) == (
        "not attempted because no numbers are printed"
    )


def test_kinds_are_counted_by_reading():
    claims = [
        (RATIO, {"before": Finding(9.0), "now": Finding(4.0)}),
        (RANGE, {"before": Finding(8.0, fitted=True), "now": Finding(None, because="of time")}),
    ]
    rows = list(claim_rows(claims))
    assert [row["paper"] for row in rows] == ["4", "4", "7.2 to 10.8", "7.2 to 10.8"]
    assert counts_of(rows, "before") == {"holds": 0, "calibrated": 1, "missed": 1, "not attempted": 0}
    assert counts_of(rows, "now") == {"holds": 1, "calibrated": 0, "missed": 0, "not attempted": 1}
