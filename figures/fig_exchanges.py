"""Figure of the study `exchanges`, drawn from its table alone: communication by model and simulator, by network.

python figures/fig_exchanges.py
"""

import argparse
import csv
from pathlib import Path

import numpy as np

from jaxmoe.plotting import ScatterPanel, plot_scatter_panels

HERE = Path(__file__).resolve().parent
STUDY = HERE.parent / "studies" / "exchanges"
MICRO = 1e6
TITLES = {"mesh": "4x4 mesh", "torus": "4x4 torus", "wafers": "two 2x4 wafers", "clusters": "four clusters of four"}


def family(exchange: str) -> str:
    """The kind of an exchange."""
    if exchange.startswith("ring"):
        return "rings"
    if exchange.endswith("tree"):
        return "gather along trees"
    return "reduce-scatter" if exchange == "reduce_scatter" else "gather by unicasts"


def panel(network: str, rows: list[dict[str, str]]) -> ScatterPanel:
    """All cases of a network."""
    kinds = np.array([family(row["exchange"]) for row in rows])
    seen, told = (
        MICRO * np.array([float(row[f"{who}_communication_s"]) for row in rows]) for who in ("simulated", "model")
    )
    points = {kind: (seen[kinds == kind], told[kinds == kind]) for kind in dict.fromkeys(kinds)}
    error = 100 * np.abs(told / seen - 1).mean()
    title = f"{TITLES[network]}: {len(rows)} cases, mean error {error:.1f} %"
    return ScatterPanel(title, points, "simulated [µs]", "model [µs]", logarithmic=True)


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the image")
    out = parser.parse_args().out
    with (STUDY / "agreement.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    networks = dict.fromkeys(row["network"] for row in rows)
    panels = [panel(name, [row for row in rows if row["network"] == name]) for name in networks]
    plot_scatter_panels(out / "exchanges.png", panels, "Dispatch and combine of a layer, all exchanges", columns=2)


if __name__ == "__main__":
    main()
