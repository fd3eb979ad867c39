"""Line 1 of the study: gains and hops of every policy beside both editions of the paper, from the tables."""

from collections.abc import Iterable
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


CASE, SENSITIVE = ("model", "machine", "batch"), ("model", "what", "to")  # what tells the rows of a policy apart


def gains(rows: Rows, policy: str, base: str, by: tuple[str, ...] = CASE) -> list[float]:
    """Time of a base over that of a policy, case by case."""
    times = ({key(row, by): float(row["layer_us"]) for row in select(rows, policy=name)} for name in (base, policy))
    own, other = times
    return [own[case] / other[case] for case in own]


def key(row: dict[str, str], by: tuple[str, ...] = CASE) -> tuple[str, ...]:
    return tuple(row[name] for name in by)


def saved(rows: Rows, policy: str, base: str) -> float:
    """Hops of a base over those of a policy, all cases together."""
    own, other = (sum(float(row["hops"]) for row in select(rows, policy=name)) for name in (policy, base))
    return other / own if own else float("inf")


def overheads(rows: Rows) -> dict[tuple[str, str], float]:
    """The host's mean overhead by model and machine, had its fixed cost been fitted on these rows alone."""
    cases = {case: select(rows, model=case[0], machine=case[1]) for case in dict.fromkeys(map(_where, rows))}
    found = {case: average(own, "overhead_percent") for case, own in cases.items()}
    (fitted,) = dict.fromkeys(_where(row) for row in select(rows, fitted="True"))
    return {case: middle(cases[fitted]) / found[fitted] * own for case, own in found.items()}


def _where(row: dict[str, str]) -> tuple[str, str]:
    return row["model"], row["machine"]


def middle(rows: Rows) -> float:
    """The middle of the published range of a case of the host."""
    return (float(rows[0]["published_least"]) + float(rows[0]["published_most"])) / 2


def bound_by_compute(rows: Rows) -> Rows:
    """Those of batches at which compute is the busiest resource of `allo+pred` in every case of the host."""
    cases = {_where(row) for row in rows}
    own = [row for row in select(read("throughput"), policy="allo+pred") if _where(row) in cases]
    others = {row["batch"] for row in own if busiest(row) != "compute_us"}
    return [row for row in rows if row["batch"] not in others]


def busiest(row: dict[str, str]) -> str:
    """The resource of dies that is busy longest."""
    return max(("link_us", "hbm_us", "compute_us"), key=lambda name: float(row[name]))


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


EXPERTS = {"DeepSeek-V3": (256, 3 * 7168 * 2048.0), "Qwen3-235B": (128, 3 * 4096 * 1536.0)}  # and the bytes of one


def shared_in_the_llc() -> None:
    """How many reads base saves where blocks of one expert meet on a die; an expert's last block is half full."""
    for row in select(main_rows(), policy="base"):
        experts, size = EXPERTS[row["model"]]
        reads = (float(row["local_read"]) + float(row["remote_read"])) / size
        blocks = 8 * int(row["batch"]) / 50 + experts / 2
        print(
            f"  {', '.join(key(row))}: {reads:.0f} reads, about {blocks:.0f} blocks, {100 * (1 - reads / blocks):.1f} %"
        )


def both_over_allo() -> None:
    """What copies add to Algorithm 1, and what anything could."""
    rows = main_rows()
    allo, both = select(rows, policy="allo"), select(rows, policy="allo+pred")
    ratio = gains(rows, "allo+pred", "allo")
    most = [float(row["layer_us"]) / float(row["even_us"]) for row in allo]
    print(f"  allo+pred over allo in time: {mean(ratio):.3f} ({min(ratio):.3f} to {max(ratio):.3f})", end="; ")
    tried = gains(read("sensitivity"), "allo+pred", "allo", SENSITIVE)
    print(f"over the rows of sensitivity {min(tried):.3f} to {max(tried):.3f}")
    print(f"  dies evenly busy and every expert read once, over allo: {mean(most):.3f} (to {max(most):.3f})", end="; ")
    print(
        f"at 4,096 and more {mean(value for value, row in zip(most, allo, strict=True) if row['batch'] in LARGE):.3f}"
    )
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


def by_batch() -> None:
    """Speed-up of allo+pred by batch, mean of both machines of Fig. 11."""
    for base in ("base", "base, 3 dies", "home"):
        for model in MODELS:
            own = select(main_rows(), model=model)
            batches = dict.fromkeys(row["batch"] for row in own)
            told = (f"{batch} {mean(gains(select(own, batch=batch), 'allo+pred', base)):.2f}" for batch in batches)
            print(f"  over {base}, {model}:", ", ".join(told))


def by_model() -> None:
    """Each model in its batches: gains and hops of both machines, and what is left to gain beyond Algorithm 1."""
    pairs = (("pred", "base"), ("allo+pred", "base"), ("allo+pred", "home"), ("allo+pred", "allo"))
    for model in MODELS:
        rows = select(main_rows(), model=model)
        for batch in dict.fromkeys(row["batch"] for row in rows):
            own = select(rows, batch=batch)
            told = [f"{name} over {base} {_range(gains(own, name, base))}" for name, base in pairs]
            told += [f"hops, {name} {saved(own, name, 'base'):.1f}" for name in ("pred", "pred, unlimited", *ALLOCATED)]
            left = [float(row["layer_us"]) / float(row["even_us"]) for row in select(own, policy="allo")]
            print(f"  {model}, {batch}: {', '.join(told)}, dies evenly busy over allo {_range(left)}")
        large = [row for row in rows if row["batch"] in LARGE]
        for name, base in (("pred", "base"), ("pred, 3 dies", "base, 3 dies"), *((each, "base") for each in ALLOCATED)):
            times = " and ".join(f"{mean(gains(part, name, base)):.2f}" for part in (rows, large))
            hops = " and ".join(f"{saved(part, name, base):.1f}" for part in (rows, large))
            print(f"    {name} over {base}, all batches and 4,096 and more: {times}, hops {hops}", end="; ")
            by_machine = [mean(gains(select(large, machine=machine), name, base)) for machine in MACHINES]
            print("by machine", ", ".join(f"{each:.2f}" for each in by_machine))


ALLOCATED = ("allo", "allo+pred")


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"
