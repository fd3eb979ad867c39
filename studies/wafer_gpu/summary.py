"""The figures of README.md, from the tables: python studies/wafer_gpu/summary.py"""

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean

from jaxmoe.files import read_table

FOLDER = Path(__file__).parent
Rows = list[dict[str, str]]


def read(name: str) -> Rows:
    return read_table(FOLDER / f"{name}.csv")


def select(rows: Rows, **values: str) -> Rows:
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def average(rows: Iterable[dict[str, str]], key: str) -> float:
    return mean(float(row[key]) for row in rows)


LARGE = ("4096", "8192", "16384")  # batches that the text speaks of: 4096, over 10,000, over 15,000
MODELS = {"DeepSeek-V3": (5.3, 7.0), "Qwen3-235B": (3.1, 4.1)}  # of allo+pred over base: the paper, its later edition
MACHINES = {"dojo_5x5": (3.7, 6.0), "tsmc_sow_3x8": (4.7, 7.5)}


def main_rows() -> Rows:
    return [row for row in read("throughput") if row["machine"] in MACHINES]


def gains(rows: Rows, policy: str, base: str) -> list[float]:
    """Time of a base over that of a policy, case by case."""
    times = ({key(row): float(row["layer_us"]) for row in select(rows, policy=name)} for name in (base, policy))
    own, other = times
    return [own[case] / other[case] for case in own]


def key(row: dict[str, str]) -> tuple[str, ...]:
    return row["model"], row["machine"], row["batch"]


def saved(rows: Rows, policy: str, base: str) -> float:
    """Hops of a base over those of a policy, all cases together."""
    own, other = (sum(float(row["hops"]) for row in select(rows, policy=name)) for name in (policy, base))
    return other / own if own else float("inf")


def against_the_paper() -> None:
    """Line 1: means over all batches, or the large ones, under base by blocks and base over three dies."""
    for base, pred in (("base", "pred"), ("base, 3 dies", "pred, 3 dies")):
        for label, batches in (("all batches", None), ("4,096 and more", LARGE)):
            rows = [row for row in main_rows() if batches is None or row["batch"] in batches]
            print(f"  over {base}, {label}: allo+pred (paper, later edition, ours, off the paper by)")
            for name, (paper, later) in (MODELS | MACHINES).items():
                part = "model" if name in MODELS else "machine"
                own = mean(gains(select(rows, **{part: name}), "allo+pred", base))
                print(f"    {name:14} {paper} {later} {own:.2f} {100 * (own / paper - 1):+.0f} %")
            for name in (pred, "home", "allo", "allo+pred"):
                own, hops = gains(rows, name, base), saved(rows, name, base)
                cells = [saved(select(rows, model=m, machine=c), name, base) for m in MODELS for c in MACHINES]
                print(f"    {name:13} {mean(own):.2f} ({min(own):.2f} to {max(own):.2f}), hops {hops:.1f}", end=" ")
                print(f"by model and machine {min(cells):.1f} to {max(cells):.1f}")
    rows = main_rows()
    for name in ("pred, perfect", "pred, unlimited"):
        print(f"  {name}: {mean(gains(rows, name, 'base')):.2f}, hops {saved(rows, name, 'base'):.1f}")


HBM = {"dojo_5x5": 25 * 2e12, "tsmc_sow_3x8": 24 * 2e12}  # B/s of all dies, Table I


def most_of_copies() -> None:
    """What no copies can beat while base deals: its reads, each from the HBM of the die, all dies alike busy."""
    for base, pred in (("base", "pred"), ("base, 3 dies", "pred, 3 dies")):
        rows = select(main_rows(), policy=base)
        read = [1e6 * (float(row["local_read"]) + float(row["remote_read"])) / HBM[row["machine"]] for row in rows]
        least = (max(each, float(row["even_us"])) for each, row in zip(read, rows, strict=True))
        most = [float(row["layer_us"]) / each for row, each in zip(rows, least, strict=True)]
        own = gains(main_rows(), pred, base)
        print(f"  over {base}: at most {mean(most):.2f} ({min(most):.2f} to {max(most):.2f}),", end=" ")
        print(f"{pred} {mean(own):.2f} ({min(own):.2f} to {max(own):.2f})")


def both_over_allo() -> None:
    """What copies add to Algorithm 1, and what anything could."""
    rows = main_rows()
    allo, both = select(rows, policy="allo"), select(rows, policy="allo+pred")
    ratio = gains(rows, "allo+pred", "allo")
    most = [float(row["layer_us"]) / float(row["even_us"]) for row in allo]
    print(f"  allo+pred over allo in time: {mean(ratio):.3f} ({min(ratio):.3f} to {max(ratio):.3f})")
    print(f"  dies evenly busy and every expert read once, over allo: {mean(most):.3f} (to {max(most):.3f})")
    fewer = sum(float(row["hops"]) for row in allo) / sum(float(row["hops"]) for row in both)
    print(f"  hops: {fewer:.2f} times fewer")
    ratio = gains(rows, "allo", "home")
    print(f"  allo over expert parallelism: {mean(ratio):.3f} ({min(ratio):.3f} to {max(ratio):.3f})", end="; ")
    large = [row for row in rows if row["batch"] == "16384"]
    print(f"at 16,384 {mean(gains(large, 'allo+pred', 'home')):.2f} (later edition 1.44)")
    for name in ("base", "allo", "allo+pred"):
        own = select(rows, policy=name, batch="4096", model="Qwen3-235B", machine="tsmc_sow_3x8")[0]
        parts = (f"{kind} {float(own[kind]) / 1e9:.2f}" for kind in ("local_read", "remote_read", "local_write"))
        print(f"  Fig. 13, {name}, GB a layer:", ", ".join(parts))


def later() -> None:
    """The machines and FP16 weights of the later edition."""
    rows = read("later")
    for base in ("base", "base, 3 dies"):
        for name, (_, published) in (MODELS | MACHINES).items():
            part = "model" if name in MODELS else "machine"
            own = mean(gains(select(rows, **{part: name}), "allo+pred", base))
            print(f"  over {base}, {name:14} {published} {own:.2f} {100 * (own / published - 1):+.0f} %")
    hops = (f"{name} {saved(rows, name, 'base'):.1f}" for name in ("pred", "allo", "allo+pred"))
    print("  hops:", ", ".join(hops), "(pred 4.5, allo 142, allo+pred 213)")
    ratio = [mean(gains(select(rows, batch=batch), "allo+pred", "home")) for batch in LARGE]
    print("  allo+pred over expert parallelism by batch:", ", ".join(f"{each:.3f}" for each in ratio), "(1, to 1.44)")
    print(f"  allo+pred over allo: {mean(gains(rows, 'allo+pred', 'allo')):.3f} (1.1)")


def limits() -> None:
    """Line 2: which resource is the busiest."""
    rows = read("throughput")
    for policy in ("base", "pred", "home", "allo", "allo+pred"):
        own = select(rows, policy=policy)
        keys = ("link_us", "hbm_us", "compute_us")
        busiest = [max(keys, key=lambda key, row=row: float(row[key])) for row in own]
        print(f"  {policy:10}", ", ".join(f"{key[:-3]} {busiest.count(key)} of {len(own)}" for key in keys))


def seeds() -> None:
    """Other traces and homes."""
    rows = read("seeds")
    for model in MODELS:
        for machine in MACHINES:
            own = select(rows, model=model, machine=machine)
            told = []
            for name, base in (
                ("pred", "base"),
                ("allo", "home"),
                ("allo+pred", "allo"),
                ("allo+pred", "base, 3 dies"),
            ):
                ratio = [gains(select(own, seed=seed), name, base)[0] for seed in dict.fromkeys(r["seed"] for r in own)]
                told.append(f"{name} over {base} {min(ratio):.3f} to {max(ratio):.3f}")
            print(f"  {model} on {machine}:", "; ".join(told))


def llc() -> None:
    """Insight 2 on the LLC."""
    rows = read("llc")
    for homes in ("random", "in turn"):
        for model in MODELS:
            own = select(rows, homes=homes, model=model)
            told = []
            for batch in dict.fromkeys(row["batch"] for row in own):
                ratio = gains(select(own, batch=batch), "allo, LLC", "allo")
                told.append(f"{batch} {min(ratio):.3f} to {max(ratio):.3f}")
            print(f"  homes {homes}, {model}, time without over with:", ", ".join(told))


def h100() -> None:
    """Fig. 12, beside published rates."""
    rows = read("h100")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        off = {
            float(row["amount"]): 100 * (float(row["simulated_us"]) / float(row["rate_us"]) - 1)
            for row in select(rows, kind=kind)
        }
        within = min(amount for amount in off if all(abs(off[a]) <= 5 for a in off if a >= amount))
        print(f"  {kind}: within 5 % of the rate from {within:g} on; first {next(iter(off.values())):.1f} %")


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
    """Line 5, of both models together and of each."""
    rows = read("bounds")
    for label, own in (("both models", rows), *((model, select(rows, model=model)) for model in MODELS)):
        print(f"  {label}, {len(own)} layers; above the bound on average and at worst:", end=" ")
        told = []
        for name in ("home", "allo", "gradient", "linear_program"):
            over = [100 * (float(row[f"{name}_us"]) / float(row["bound_us"]) - 1) for row in own]
            told.append(f"{name} {mean(over):.1f}, {max(over):.0f} %")
        gap = [row for row in own if float(row["allo_us"]) > 1.05 * float(row["bound_us"])]
        better = sum(float(row["gradient_us"]) < float(row["allo_us"]) for row in gap)
        there = []
        for name in ("allo", "gradient"):
            ratio = mean(float(row[f"{name}_us"]) / float(row["bound_us"]) for row in gap)
            there.append(f"{name} {100 * (ratio - 1):.1f} %")
        worse = sum(float(row["gradient_us"]) > 1.001 * float(row["allo_us"]) for row in own)
        print(f"{'; '.join(told)}; gradient worse anywhere in {worse}; where the bound leaves over 5 %:", end=" ")
        print(f"gradient better in {better} of {len(gap)}, on average {', '.join(there)} above")


def doubled() -> None:
    """Line 7: twice the bandwidth between dies."""
    rows = read("doubled")
    kept = sum(float(row["kept_us"]) > float(row["allo_us"]) for row in rows)
    anew = [float(row["anew_us"]) / float(row["allo_us"]) for row in rows]
    slower = [100 * (ratio - 1) for ratio in anew if ratio > 1.001]
    print(f"  the same allocation is slower in {kept} of {len(rows)}; one made anew in {len(slower)}", end=", ")
    print(f"by up to {max(slower, default=0):.0f} %")


def by_batch() -> None:
    """Speed-up of allo+pred by batch, mean of both machines of Fig. 11."""
    for base in ("base", "base, 3 dies", "home"):
        for model in MODELS:
            own = select(main_rows(), model=model)
            batches = dict.fromkeys(row["batch"] for row in own)
            told = (f"{batch} {mean(gains(select(own, batch=batch), 'allo+pred', base)):.2f}" for batch in batches)
            print(f"  over {base}, {model}:", ", ".join(told))


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
    for batch in dict.fromkeys(row["batch"] for row in rows):
        print(f"  fitted at {batch} requests alone:", ", ".join(_host_at(select(rows, batch=batch))))


def _host_at(rows: Rows) -> Iterable[str]:
    """Overheads had the fixed cost been fitted at the batch of these rows, beside the middle of what is published."""
    middle = [(float(row["published_least"]) + float(row["published_most"])) / 2 for row in rows]
    (fitted,) = (at for at, row in enumerate(rows) if (row["model"], row["machine"]) == ("DeepSeek-V3", "dojo_5x5"))
    scale = middle[fitted] / float(rows[fitted]["overhead_percent"])
    for row, published in zip(rows, middle, strict=True):
        own = scale * float(row["overhead_percent"])
        yield f"{row['model']} on {row['machine']} {own:.1f} % ({100 * (own / published - 1):+.0f} %)"


def sensitivity() -> None:
    """Which assumption moves which figure, in the case of each model."""
    rows = read("sensitivity")
    for model in dict.fromkeys(row["model"] for row in rows):
        print(f"  {model}")
        for what, to in dict.fromkeys((row["what"], row["to"]) for row in rows):
            own = select(rows, what=what, to=to, model=model)
            print(f"    {what + (': ' + to if to else ''):40}", end="")
            for name in ("pred", "allo", "allo+pred"):
                row = select(own, policy=name)[0]
                print(f" {name} {float(row['speedup']):.2f}x, hops {float(row['hop_reduction']):.1f};", end="")
            print()


PARTS: dict[str, Callable[[], None]] = {
    "Against the paper": against_the_paper,
    "Most that copies can gain": most_of_copies,
    "Both over allo": both_over_allo,
    "Later edition": later,
    "By batch": by_batch,
    "The busiest resource": limits,
    "Model and simulator": agreement,
    "Bound and gradient": bounds,
    "Doubled bandwidth": doubled,
    "Insights 4 to 6": insights,
    "Host": host,
    "LLC": llc,
    "H100": h100,
    "Seeds": seeds,
    "Sensitivity": sensitivity,
}

if __name__ == "__main__":
    for title, part in PARTS.items():
        print(title)
        try:
            part()
        except FileNotFoundError as missing:
            print(f"  no table {missing.filename}; make it with study.py")
