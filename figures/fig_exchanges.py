"""Figure of the study `exchanges`, drawn from its table alone: communication by model and simulator, by network.

python figures/fig_exchanges.py
"""

import numpy as np
from panels import ScatterPanel, plot_scatter_panels
from tables import STUDIES, Rows, column, distinct, images_folder, read_table, select

from jaxmoe.placement.exchange import Gather, Rings, exchange_of

MICRO = 1e6
TITLES = {"mesh": "4x4 mesh", "torus": "4x4 torus", "wafers": "two 2x4 wafers", "clusters": "four clusters of four"}


def family(exchange: str) -> str:
    """The kind of an exchange."""
    match exchange_of(exchange):
        case Rings():
            return "rings"
        case Gather(route=route):
            return "gather by unicasts" if route == "unicast" else "gather along trees"
    return "reduce-scatter"


def panel(network: str, rows: Rows) -> ScatterPanel:
    """All cases of a network."""
    kinds = np.array([family(row["exchange"]) for row in rows])
    seen, told = (MICRO * column(rows, f"{who}_communication_s") for who in ("simulated", "model"))
    points = {kind: (seen[kinds == kind], told[kinds == kind]) for kind in dict.fromkeys(kinds)}
    error = 100 * np.abs(told / seen - 1).mean()
    title = f"{TITLES[network]}: {len(rows)} cases, mean error {error:.1f} %"
    return ScatterPanel(title, points, "simulated [µs]", "model [µs]", logarithmic=True)


def main() -> None:
    """Draw it."""
    out = images_folder(__doc__)
    rows = read_table(STUDIES / "exchanges" / "agreement.csv")
    panels = [panel(name, select(rows, network=name)) for name in distinct(rows, "network")]
    plot_scatter_panels(out / "exchanges.png", panels, "Dispatch and combine of a layer, all exchanges", columns=2)


if __name__ == "__main__":
    main()
