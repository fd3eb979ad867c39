"""moentwine's mapping drawn and measured: geometry of layouts (Fig. 8, 10b), and links by phase (Fig. 11).

Writes `geometry.csv`, `layouts.csv`, `links.csv` and `heat.csv`: `python studies/moentwine/geometry.py`.
"""

import itertools
from collections.abc import Callable, Iterator

import numpy as np
from cases import STAGES, Case, layout_of, priced, topology_of
from layouts import average_hops, domain_area, overlapping_domains, ring_step_hops
from study import HERE, WAFERS, Row

from jaxmoe.experiment.table import make_tables, study_options, tables_of
from jaxmoe.placement.token_layout import links_inside_domains, token_layout

DRAWN = (
    ("moentwine_4x4", "baseline", 4),
    ("moentwine_4x4", "er", 4),
    ("moentwine_4x4", "er", 8),
    ("moentwine_6x6", "er", 4),
    ("moentwine_6x6", "er", 9),
    ("moentwine_8x8", "er", 16),
)


def geometry() -> Iterator[Row]:
    """Line 1: hops, areas and overlaps of domains, and steps of rings."""
    for shape, tp in (
        ((4, 4), 2),
        ((4, 4), 4),
        ((4, 4), 8),
        ((6, 6), 3),
        ((6, 6), 4),
        ((6, 6), 9),
        ((8, 8), 4),
        ((8, 8), 16),
    ):
        for name, fetch in itertools.product(("baseline", "er"), ("domain", "nearest")):
            layout = token_layout(name, shape, tp, fetch=fetch)
            steps = ring_step_hops(layout)
            yield {
                "mesh": f"{shape[0]}x{shape[1]}",
                "tp": tp,
                "layout": name,
                "fetch": fetch,
                "average_hops": average_hops(layout),
                "domain_area": float(domain_area(layout).mean()),
                "overlapping_pairs": len(overlapping_domains(layout)),
                "pairs": tp * (tp - 1) // 2,
                "longest_ring_step": int(steps.max()),
            }


def links() -> Iterator[Row]:
    """Line 3: which part of the links is idle in every phase, and which as busy as the busiest."""
    cases = [
        (machine, layout, tp) for machine, degrees in WAFERS.items() for tp in degrees for layout in ("baseline", "er")
    ]
    cases += [("moentwine_4x8x8", layout, tp) for tp in (4, 16) for layout in ("baseline", "er", "her")]
    for machine, layout, tp in cases:
        case = Case(machine, layout, tp=tp, rule="congestion")
        topology, _ = topology_of(machine)
        inside = links_inside_domains(layout_of(case), topology.link_ends)
        stages = priced(case)
        for phase in STAGES:
            stage = stages[phase]
            busy = stage["link_time"] / max(float(stage["seconds"]), 1e-30)
            for place, chosen in (("inside", inside), ("between", ~inside)):
                known = chosen.any()
                yield {
                    "machine": machine,
                    "layout": layout,
                    "tp": tp,
                    "phase": phase,
                    "links": place,
                    "count": int(chosen.sum()),
                    "idle_share": float((stage["link_bytes"][chosen] == 0).mean()) if known else "",
                    "saturated_share": float((busy[chosen] > 0.999 * busy.max()).mean()) if known else "",
                    "mean_busy": float(busy[chosen].mean()) if known else "",
                    "bytes": float(stage["link_bytes"][chosen].sum()),
                }


def layouts() -> Iterator[Row]:
    """Every device of the layouts that are drawn."""
    for machine, name, tp in DRAWN:
        layout = layout_of(Case(machine, name, tp=tp))
        place = np.empty(layout.num_nodes, int)
        place[layout.ring] = np.arange(tp)
        for node in range(layout.num_nodes):
            x, y = divmod(node, layout.shape[1])
            known = {"machine": machine, "layout": name, "tp": tp, "node": node, "x": x, "y": y}
            yield known | {"group": layout.group[node], "domain": layout.domain[node], "place": place[node]}


def heat() -> Iterator[Row]:
    """How busy every link is in every phase of the layouts that are drawn, as part of the phase."""
    for machine, name, tp in DRAWN:
        case = Case(machine, name, tp=tp, rule="congestion")
        ends, stages = topology_of(machine)[0].link_ends, priced(case)
        for phase in STAGES:
            busy = stages[phase]["link_time"] / float(stages[phase]["seconds"])
            for link, (start, end) in enumerate(ends.tolist()):
                known = {"machine": machine, "layout": name, "tp": tp, "phase": phase}
                yield known | {"link": link, "from": start, "to": end, "busy": float(busy[link])}


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "geometry": geometry,
    "layouts": layouts,
    "links": links,
    "heat": heat,
}


if __name__ == "__main__":
    make_tables(HERE, tables_of(TABLES, digits=6), study_options(__doc__).parse_args())
