"""The fidelity of traces drawn from fitted processes to recorded ones, beside a Zipf-only generator; see README.md.

    python studies/data_movement/synthesis.py [TRACE ...]

Writes `synthesis.csv` and `synthesis_layers.csv` beside this file.
"""

import time

import numpy as np
from study import HERE, ROOT, gating_files, label

from jaxmoe.experiment.table import add_shared, folder_of_tables, script_options
from jaxmoe.files import write_table
from jaxmoe.traces import read_trace
from jaxmoe.traces.synthesis import fit_process, sample_trace, zipf_trace
from jaxmoe.traces.synthesis.fidelity import TOLERANCES, Fidelity, fidelity_of

SEED = 0
DRAWS = (1_000_000, 1_000_001, 1_000_002)  # seeds that fitting has not drawn with


def main() -> None:
    """Fit, draw and compare."""
    parser = script_options(__doc__, writes=True)
    parser.add_argument("trace", nargs="*", help="names of traces; all by default")
    add_shared(parser, ROOT.parent / "shared", "traces")
    arguments = parser.parse_args()
    folder, to = arguments.shared / "traces", folder_of_tables(HERE, arguments)
    figures: list[dict[str, object]] = []
    layers: list[dict[str, object]] = []
    files = [file for file in gating_files(folder) if not file.name.startswith("load_")]
    for name in arguments.trace or [label(file) for file in files]:
        trace = read_trace(folder / f"{name}.npz")
        start = time.perf_counter()
        process = fit_process(trace, SEED)
        print(f"{name}: fitted in {time.perf_counter() - start:.0f} s", flush=True)
        drawn = {f"synthetic {seed}": sample_trace(process, trace.num_tokens, seed) for seed in DRAWS}
        found = fidelity_of({"recorded": trace, **drawn, "zipf": zipf_trace(trace, SEED)}, SEED, lambda *_: None)
        figures += figure_rows(name, found, list(drawn))
        layers += layer_rows(name, found, next(iter(drawn)))
    write_table(to / "synthesis.csv", figures)
    write_table(to / "synthesis_layers.csv", layers)
    print((to / "synthesis.csv").read_text())


def figure_rows(name: str, found: dict[str, Fidelity], drawn: list[str]) -> list[dict[str, object]]:
    """Every figure with a tolerance: recorded, drawn (mean and worst of the draws), Zipf."""
    recorded, zipf = found["recorded"].figures, found["zipf"].figures
    rows = []
    for figure, tolerance in TOLERANCES.items():
        values = [found[draw].figures[figure] for draw in drawn]
        worst = max(values, key=lambda value: abs(value - recorded[figure]))
        rows.append(
            {
                "trace": name,
                "figure": figure,
                "recorded": f"{recorded[figure]:.4f}",
                "synthetic": f"{np.mean(values):.4f}",
                "worst_draw": f"{worst:.4f}",
                "zipf": f"{zipf[figure]:.4f}",
                "tolerance": str(tolerance),
                "met": "yes" if tolerance.met(recorded[figure], worst) else "no",
                "zipf_meets": "yes" if tolerance.met(recorded[figure], zipf[figure]) else "no",
            }
        )
    return rows


def layer_rows(name: str, found: dict[str, Fidelity], drawn: str) -> list[dict[str, object]]:
    """The figures of every layer, recorded and of one draw."""
    one, other = found["recorded"].summary, found[drawn].summary
    return [
        {"trace": name, "layer_id": int(layer)}
        | {
            f"{figure}_{kind}": f"{summary.figures[figure][row]:.4f}"
            for figure in TOLERANCES
            if figure in one.figures
            for kind, summary in (("recorded", one), ("synthetic", other))
        }
        for row, layer in enumerate(one.layer_ids)
    ]


if __name__ == "__main__":
    main()
