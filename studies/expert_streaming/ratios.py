"""What the tables of the other scripts come to, as ratios: `python studies/expert_streaming/ratios.py`."""

from pathlib import Path
from statistics import mean

from jaxmoe.experiment.table import script_options
from jaxmoe.files import read_table

HERE = Path(__file__).parent
CIRCULATING = ("fse_tokens", "fse_tokens_prefetch")
Rows = list[dict[str, str]]


def rows_of(name: str) -> Rows:
    """A table; none where it is not made yet."""
    path = HERE / f"{name}.csv"
    return read_table(path) if path.is_file() else []


def own_cut(rows: Rows) -> Rows:
    """Of every strategy the row with the fastest cut."""
    best: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("model", "tokens", "strategy"))
        if key not in best or float(row["simulated_s"]) < float(best[key]["simulated_s"]):
            best[key] = row
    return list(best.values())


def groups(rows: Rows, *keys: str) -> dict[tuple[str, ...], dict[str, dict[str, str]]]:
    """Rows by these keys, and then by strategy."""
    found: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), {})[row["strategy"]] = row
    return found


def layer(told: str, rows: Rows) -> None:
    """Fig. 9, 12 and 15 on single layers: every ratio is of simulated times."""
    print(told)
    reached, saved, most = [], [], []
    for (model, tokens), mine in groups(rows, "model", "tokens").items():
        seconds = {name: float(row["simulated_s"]) for name, row in mine.items()}
        memory = {name: float(row["package_memory_MB"]) for name, row in mine.items()}
        serial, ahead = (min(seconds[f"{who}{end}"] for who in ("ep", "hydra")) for end in ("", "_prefetch"))
        paired = seconds["fse_paired"]
        reached.append(serial / paired)
        saved.append(1 - memory["fse_paired"] / memory["ep"])
        most.append(memory["fse_paired"])
        print(
            f"{model} {tokens}, {mine['fse_paired']['micro_slices']} micro-slices: "
            f"over serial {serial / paired:.2f}, over prefetch {ahead / paired:.2f}, "
            f"hydra {seconds['ep'] / seconds['hydra']:.2f} of ep, A2/A1 {seconds['fse_naive'] / seconds['fse']:.2f}, "
            f"A3/A2 {seconds['fse'] / paired:.3f}, A4/A3 {paired / seconds['fse_rule5']:.3f}, "
            + "".join(f"{name} {seconds[name] / paired:.2f}, " for name in CIRCULATING if name in seconds)
            + f"{memory['fse_paired']:.1f} of {memory['ep']:.1f} MB"
        )
    if reached:
        enough = sum(ratio >= 1.22 for ratio in reached)
        print(f"at least 1.22 in {enough} of {len(reached)} cells, up to {max(reached):.2f}")
        print(f"memory saved: up to {100 * max(saved):.1f} %, held at most {max(most):.1f} MB")


def end_to_end() -> None:
    """Fig. 14 and 15: throughput over serial EP, utilisation of the experts' part."""
    for (model, tokens), mine in groups(rows_of("end_to_end"), "model", "tokens").items():
        base = float(mine["ep"]["token_layers_per_s"])
        parts = [
            f"{name} {float(row['token_layers_per_s']) / base:.3f} ({float(row['utilisation']):.2f})"
            for name, row in mine.items()
        ]
        print(f"{model} {tokens}: " + ", ".join(parts))


def arrays() -> None:
    """Fig. 18: utilisation left on larger arrays, and time of the others over that of FSE-DP with its own best cut."""
    table = groups(rows_of("arrays"), "array", "tokens")
    for (array, tokens), mine in table.items():
        first, own = table["2x2", tokens], mine["fse_paired"]
        seconds = {name: float(row["simulated_s"]) / float(own["simulated_s"]) for name, row in mine.items()}
        kept = ", ".join(
            f"{name} {float(row['utilisation']) / float(first[name]['utilisation']):.2f}" for name, row in mine.items()
        )
        over = ", ".join(f"{name} {seconds[name]:.2f}" for name in ("ep_prefetch", "fse_tokens_prefetch"))
        print(
            f"{array}, {tokens} tokens, {own['micro_slices']} micro-slices: over serial "
            f"{min(seconds['ep'], seconds['hydra']):.2f}, over {over}; utilisation beside 2x2: {kept}"
        )


def readings() -> None:
    """What paired load and rule 5 gain under each reading, and A3 over expert parallelism."""
    for row in rows_of("readings"):
        a2, a3, a4, serial, ahead = (float(row[f"{name}_s"]) for name in ("A2", "A3", "A4", "ep", "ep_prefetch"))
        least, most = float(row["A3_least"]), float(row["A3_most"])
        print(
            f"{row['reading']}, {row['model']} {row['tokens']}: A3/A2 {a2 / a3:.3f} ({least:.3f} to {most:.3f}), "
            f"A4/A3 {a3 / a4:.3f}, A3 over ep {serial / a3:.2f}, over ep_prefetch {ahead / a3:.2f}"
        )


def agreement() -> None:
    """How far the model of A3 is off the simulator on 2x2, where all dies load and where dies with tokens do."""
    for name, strategy in (("agreement", "fse_paired"), ("own_dies", "A3 by dies with tokens")):
        told: dict[str, list[float]] = {}
        for row in rows_of(name):
            if row["strategy"] == strategy and row["shape"] == "2x2":
                off = 100 * abs(float(row["model_s"]) / float(row["simulated_s"]) - 1)
                told.setdefault(f"{row['tokens']} tokens", []).append(off)
        print(f"{name}, {strategy}:", ", ".join(f"{case} {mean(off):.2f} %" for case, off in told.items()))


if __name__ == "__main__":
    script_options(__doc__).parse_args()
    layers = rows_of("layer")
    layer("slices in 8", [row for row in layers if row["micro_slices"] in ("", "8")])
    layer("every strategy with its fastest cut", own_cut(layers))
    each_way = [row for row in rows_of("layer_each_way") if row["micro_slices"] in ("", "8")]
    layer("slices in 8, 72 GB/s each way of a link", each_way)
    end_to_end()
    arrays()
    readings()
    agreement()
