"""The figures of README.md, from the tables: python studies/wafer_gpu/summary.py"""

from collections.abc import Callable
from statistics import mean

from gains import (
    ALLOCATED,
    MACHINES,
    MODELS,
    Rows,
    against_the_paper,
    average,
    both_over_allo,
    bound_by_compute,
    by_batch,
    by_model,
    gains,
    later,
    middle,
    most_of_copies,
    overheads,
    read,
    saved,
    select,
    shared_in_the_llc,
)
from in_turn import agreement_in_turn, readings, tops, vectors, verdicts

from jaxmoe.experiment.table import script_options


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
    print(f"  fixed cost {float(rows[0]['fixed_us']):.1f} µs, fitted on DeepSeek-V3 on dojo_5x5")
    for model, machine in dict.fromkeys((row["model"], row["machine"]) for row in rows):
        own = [float(row["overhead_percent"]) for row in select(rows, model=model, machine=machine)]
        told = select(rows, model=model, machine=machine)[0]
        print(f"  {model} on {machine}: {min(own):.1f} to {max(own):.1f} %, mean {mean(own):.1f}; published", end=" ")
        print(f"{told['published_least']} to {told['published_most']}")
    for batch in dict.fromkeys(row["batch"] for row in rows):
        _told_of_host(f"at {batch} requests alone", select(rows, batch=batch))
    binds = bound_by_compute(rows)
    _told_of_host(f"where compute binds, at {', '.join(dict.fromkeys(row['batch'] for row in binds))}", binds)


def _told_of_host(where: str, rows: Rows) -> None:
    """Overheads had the fixed cost been fitted on these rows, beside the middle of what is published."""
    told = []
    for (model, machine), own in overheads(rows).items():
        off = own / middle(select(rows, model=model, machine=machine)) - 1
        told.append(f"{model} on {machine} {own:.1f} % ({100 * off:+.0f} %)")
    print(f"  fitted {where}:", ", ".join(told))


def breakdown() -> None:
    """Fig. 2: what MoE moves, of the time of a decode step, where experts count as their weights."""
    rows = read("breakdown")
    for model in dict.fromkeys(row["model"] for row in rows):
        print(f"  {model}:")
        for row in select(rows, model=model):
            moved, experts, weights = (float(row[f"{name}_percent"]) for name in ("all_to_all", "experts", "weights"))
            print(
                f"    {row['gpus']} {row['machine']}, {row['layout']}, {row['sequences']} of {row['context']}:", end=" "
            )
            print(
                f"{moved:.0f} % all-to-all, {experts:.0f} % experts ({weights:.0f} % at the full rate of HBM)", end=", "
            )
            print(f"together {moved + experts:.0f} %, attention {float(row['attention_percent']):.0f} %")


def recorded() -> None:
    """Recorded gating and gating of processes fitted to it, all draws of a model and machine: means, least and most."""
    rows, by = read("recorded"), ("trace", "layers", "seed")
    about = ("requests", "gating", "model", "machine")
    fitted = {row["layers"] for row in select(rows, gating="fitted")}
    alike = [row | {"gating": "recorded, layers that were fitted"} for row in select(rows, gating="recorded")]
    told = rows + [row for row in alike if row["layers"] in fitted and row["requests"] == rows[0]["requests"]]
    for case in dict.fromkeys(tuple(row[name] for name in about) for row in told):
        own = select(told, **dict(zip(about, case, strict=True)))
        print(f"  {', '.join(case)}, {len(select(own, policy='base'))} draws")
        for name, base in (
            ("pred", "base"),
            *((each, "base") for each in ("home", *ALLOCATED)),
            ("allo", "home"),
            ("allo+pred", "allo"),
        ):
            ratio = gains(own, name, base, by)
            print(f"    {name} over {base} {mean(ratio):.2f} ({min(ratio):.2f} to {max(ratio):.2f})", end="; ")
        print("hops saved by", ", ".join(f"{name} {saved(own, name, 'base'):.1f}" for name in ("pred", *ALLOCATED)))
        for name in ("base", "pred", *ALLOCATED):
            parts = [average(select(own, policy=name), kind) for kind in ("local_read", "remote_read", "local_write")]
            told_of = ", ".join(f"{100 * part / sum(parts[:2]):.1f} %" for part in parts)
            print(f"    {name}: of {sum(parts[:2]) / 1e9:.3f} GB read local, remote, and written: {told_of}")
    model, simulated = ([float(row[key]) for row in rows] for key in ("model_us", "simulated_us"))
    error = [abs(one / two - 1) for one, two in zip(model, simulated, strict=True)]
    print(f"  model beside simulator, {len(rows)} pairs of layers: {100 * mean(error):.1f} % on average", end=", ")
    print(f"a layer {100 * max(float(row['most_off']) for row in rows):.0f} % at worst", end="; ")
    print(f"hops and bytes equal in {sum(row['same_traffic'] == 'True' for row in rows)}")


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
    "Verdicts": verdicts,
    "Readings": readings,
    "Model and simulator, in turn": agreement_in_turn,
    "Hidden vectors": vectors,
    "Top n": tops,
    "Against the paper": against_the_paper,
    "Most that copies can gain": most_of_copies,
    "Shared in the LLC": shared_in_the_llc,
    "Both over allo": both_over_allo,
    "Later edition": later,
    "By batch": by_batch,
    "By model": by_model,
    "The busiest resource": limits,
    "Model and simulator": agreement,
    "Bound and gradient": bounds,
    "Doubled bandwidth": doubled,
    "Insights 4 to 6": insights,
    "Host": host,
    "Breakdown": breakdown,
    "LLC": llc,
    "H100": h100,
    "Seeds": seeds,
    "Recorded gating": recorded,
    "Sensitivity": sensitivity,
}

if __name__ == "__main__":
    script_options(__doc__).parse_args()
    for title, part in PARTS.items():
        print(title)
        try:
            part()
        except FileNotFoundError as missing:
            print(f"  no table {missing.filename}; make it with study.py")
