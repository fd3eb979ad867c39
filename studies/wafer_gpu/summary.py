"""The figures of README.md, from the tables: python studies/wafer_gpu/summary.py"""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean

FOLDER = Path(__file__).parent
Rows = list[dict[str, str]]


def read(name: str) -> Rows:
    with (FOLDER / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def select(rows: Rows, **values: str) -> Rows:
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def average(rows: Iterable[dict[str, str]], key: str) -> float:
    return mean(float(row[key]) for row in rows)


def against_the_paper() -> None:
    """Line 1: means over all batches of the two machines of Fig. 11."""
    rows = [row for row in read("throughput") if row["machine"] != "dojo_enhanced_5x5"]
    both = select(rows, policy="allo+pred")
    print("speed-up of allo+pred over base (published, ours, off by):")
    for where, published in (
        ({"model": "DeepSeek-V3"}, 5.3),
        ({"model": "Qwen3-235B"}, 3.1),
        ({"machine": "dojo_5x5"}, 3.7),
        ({"machine": "tsmc_sow_3x8"}, 4.7),
    ):
        own = average(select(both, **where), "speedup")
        print(f"  {next(iter(where.values())):14} {published} {own:.2f} {100 * (own / published - 1):+.0f} %")
    print("speed-up over base, and hops of base over own:")
    kinds = list(dict.fromkeys((row["model"], row["machine"]) for row in rows))
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = select(rows, policy=policy)
        cells = [average(select(own, model=model, machine=machine), "hop_reduction") for model, machine in kinds]
        speed = f"{average(own, 'speedup'):.2f} ({min(float(r['speedup']) for r in own):.2f} to"
        print(f"  {policy:21} {speed} {max(float(r['speedup']) for r in own):.2f}),", end=" ")
        print(f"hops {average(own, 'hop_reduction'):.1f}, by model and machine {min(cells):.1f} to {max(cells):.1f}")
    allo = select(rows, policy="allo")
    ratio = [float(one["layer_us"]) / float(two["layer_us"]) for one, two in zip(allo, both, strict=True)]
    fewer = [float(one["hops"]) / float(two["hops"]) for one, two in zip(allo, both, strict=True)]
    print(f"allo+pred over allo: {mean(ratio):.2f} in time ({min(ratio):.2f} to {max(ratio):.2f}),", end=" ")
    print(f"{mean(fewer):.1f} in hops")


def limits() -> None:
    """Line 2: which resource is the busiest."""
    rows = read("throughput")
    for policy in ("base", "pred", "allo", "allo+pred"):
        own = select(rows, policy=policy)
        keys = ("link_us", "hbm_us", "compute_us")
        busiest = [max(keys, key=lambda key, row=row: float(row[key])) for row in own]
        print(f"  {policy:10}", ", ".join(f"{key[:-3]} {busiest.count(key)} of {len(own)}" for key in keys))


def agreement() -> None:
    """Line 3."""
    rows = read("agreement")
    model, simulated = ([float(row[key]) for row in rows] for key in ("model_us", "simulated_us"))
    error = [abs(one / two - 1) for one, two in zip(model, simulated, strict=True)]
    centre = mean(simulated)
    left = sum((one - two) ** 2 for one, two in zip(model, simulated, strict=True))
    r2 = 1 - left / sum((two - centre) ** 2 for two in simulated)
    same = sum(row["same_traffic"] == "True" for row in rows)
    print(f"  {len(rows)} layers: R2 {r2:.4f}, error {100 * mean(error):.1f} % on average,", end=" ")
    print(f"{100 * max(error):.0f} % at worst")
    print(f"  hops and bytes by source equal in {same} of {len(rows)}")


def bounds() -> None:
    """Line 5."""
    rows = read("bounds")
    for name in ("allo", "gradient"):
        over = [100 * (float(row[f"{name}_us"]) / float(row["bound_us"]) - 1) for row in rows]
        print(f"  {name:9} above the bound: {mean(over):.1f} % on average, {max(over):.0f} % at worst")
    gap = [row for row in rows if float(row["allo_us"]) > 1.05 * float(row["bound_us"])]
    better = sum(float(row["gradient_us"]) < float(row["allo_us"]) for row in gap)
    worse = sum(float(row["gradient_us"]) > 1.001 * float(row["allo_us"]) for row in rows)
    print(f"  where the bound leaves over 5 %: gradient better in {better} of {len(gap)};", end=" ")
    print(f"worse anywhere in {worse} of {len(rows)}")


def doubled() -> None:
    """Line 7: twice the bandwidth between dies."""
    rows = read("doubled")
    kept = sum(float(row["kept_us"]) > float(row["allo_us"]) for row in rows)
    anew = [float(row["anew_us"]) / float(row["allo_us"]) for row in rows]
    slower = [100 * (ratio - 1) for ratio in anew if ratio > 1.001]
    print(f"  the same allocation is slower in {kept} of {len(rows)}; one made anew in {len(slower)}", end=", ")
    print(f"by up to {max(slower, default=0):.0f} %")


def by_batch() -> None:
    """Speed-up of allo+pred over base by batch, mean of both machines of Fig. 11."""
    rows = [row for row in read("throughput") if row["machine"] != "dojo_enhanced_5x5"]
    for model in dict.fromkeys(row["model"] for row in rows):
        own = select(rows, model=model, policy="allo+pred")
        batches = dict.fromkeys(row["batch"] for row in own)
        print(f"  {model}:", ", ".join(f"{b} {average(select(own, batch=b), 'speedup'):.2f}" for b in batches))


def insights() -> None:
    """Line 6: time without the insight over time with it, mean over models, machines and batches."""
    rows = read("insights")
    for insight in dict.fromkeys(row["insight"] for row in rows):
        gains = [
            average(select(rows, insight=insight, policy=name), "speedup") for name in ("base", "allo", "allo+pred")
        ]
        print(
            f"  {insight:32}",
            ", ".join(f"{name} {gain:.2f}" for name, gain in zip(("base", "allo", "both"), gains, strict=True)),
        )


def host() -> None:
    """Fig. 14."""
    rows = read("host")
    print(f"  fixed cost {float(rows[0]['fixed_us']):.1f} us, fitted on DeepSeek-V3 on dojo_5x5")
    for model, machine in dict.fromkeys((row["model"], row["machine"]) for row in rows):
        own = [float(row["overhead_percent"]) for row in select(rows, model=model, machine=machine)]
        told = select(rows, model=model, machine=machine)[0]
        print(f"  {model} on {machine}: {min(own):.1f} to {max(own):.1f} %, mean {mean(own):.1f}; published", end=" ")
        print(f"{told['published_least']} to {told['published_most']}")


def sensitivity() -> None:
    """Which assumption moves which figure: means over the cases of the table."""
    rows = read("sensitivity")
    for what, to in dict.fromkeys((row["what"], row["to"]) for row in rows):
        own = select(rows, what=what, to=to)
        print(f"  {what + (': ' + to if to else ''):32}", end="")
        for name in ("pred", "allo", "allo+pred"):
            speed, hops = (average(select(own, policy=name), key) for key in ("speedup", "hop_reduction"))
            print(f" {name} {speed:.2f}x, hops {hops:.1f};", end="")
        print()


PARTS: dict[str, Callable[[], None]] = {
    "Against the paper": against_the_paper,
    "By batch": by_batch,
    "The busiest resource": limits,
    "Model and simulator": agreement,
    "Bound and gradient": bounds,
    "Doubled bandwidth": doubled,
    "Insights 4 to 6": insights,
    "Host": host,
    "Sensitivity": sensitivity,
}

if __name__ == "__main__":
    for title, part in PARTS.items():
        print(title)
        part()
