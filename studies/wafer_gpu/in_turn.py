"""What the readings come to, for summary.py: gains of whole experts over base, and counts of verdicts."""

from statistics import mean

from gains import CASE, LARGE, MACHINES, MODELS, Rows, average, gains, key, read, saved, select

from jaxmoe.experiment.claims import counts_of

POLICIES = ("pred", "home", "allo", "allo+pred")


def readings() -> None:
    """Gains over base by slices outstanding and switching, by model and machine; at each batch and in later steps."""
    rows = read("readings")
    first = select(rows, seed="0", steps="some")
    for outstanding, switching in dict.fromkeys((row["outstanding"], row["switching"]) for row in first):
        own = select(first, outstanding=outstanding, switching=switching)
        print(f"  {outstanding}, {switching}, steps {', '.join(dict.fromkeys(row['steps'] for row in own))}")
        _told(own)
        large = mean(gains(select(own, batch="16384"), "allo+pred", "home"))
        print(f"    at 16,384 allo+pred over expert parallelism {large:.2f}")
    whole = select(rows, steps="all")
    for model in dict.fromkeys(row["model"] for row in whole):
        for seed in dict.fromkeys(row["seed"] for row in select(whole, model=model)):
            print(f"  all steps, {model}, seed {seed}")
            _told(select(whole, model=model, seed=seed))
    own = [row for row in select(whole, seed="0") if row["model"] in MODELS]
    for time in ("layer_us", "later_us", "last_us"):
        told = [row | {"layer_us": row[time]} for row in own]
        print(f"  pred over base by {time}: {mean(gains(told, 'pred', 'base')):.2f}", end="; ")
        print(", ".join(f"{model} {mean(gains(select(told, model=model), 'pred', 'base')):.2f}" for model in MODELS))
    for batch in LARGE:
        part = select(own, batch=batch)
        if part:
            ratio = mean(gains(part, "allo+pred", "home")), mean(gains(part, "allo+pred", "allo"))
            print(f"  {batch}: allo+pred over expert parallelism {ratio[0]:.2f}, over allo {ratio[1]:.2f}", end="; ")
            print(f"over base on three dies {mean(gains(part, 'allo+pred', 'base, 3 dies')):.2f}")
    blocks = select(own, batch="4096")
    told = (select(blocks, policy="allo+pred"), select(blocks, policy="base, blocks"))
    slower = average(told[1], "layer_us") / average(told[0], "layer_us")
    print(f"  4096: allo+pred over base by blocks, in turn: {slower:.1f} (of mean times)")


def _told(rows: Rows) -> None:
    for name in (*dict.fromkeys(row["model"] for row in rows), *MACHINES):
        part = "machine" if name in MACHINES else "model"
        own = select(rows, **{part: name})
        told = ", ".join(f"{policy} {mean(gains(own, policy, 'base')):.2f}" for policy in POLICIES)
        hops = ", ".join(f"{policy} {saved(own, policy, 'base'):.1f}" for policy in ("pred", "allo", "allo+pred"))
        print(f"    {name:14} {told}; hops {hops}")


def agreement_in_turn() -> None:
    """Model and simulator where slices are read in turn."""
    rows = read("agreement_in_turn")
    for label, own in (
        ("all", rows),
        *(
            (f"{each} outstanding", select(rows, outstanding=each))
            for each in dict.fromkeys(r["outstanding"] for r in rows)
        ),
    ):
        model, simulated = ([float(row[key]) for row in own] for key in ("model_us", "simulated_us"))
        error = [abs(one / two - 1) for one, two in zip(model, simulated, strict=True)]
        left = sum((one - two) ** 2 for one, two in zip(model, simulated, strict=True))
        r2 = 1 - left / sum((two - mean(simulated)) ** 2 for two in simulated)
        print(f"  {label}: {len(own)} layers, R2 {r2:.5f}, error {100 * mean(error):.2f} %,", end=" ")
        print(f"{100 * max(error):.1f} % at worst")


def vectors() -> None:
    """What hidden vectors would add, beside a layer of allo+pred and of base in turn."""
    turns = select(read("readings"), seed="0", steps="all")
    for row in read("vectors"):
        own = select(turns, **{key: row[key] for key in ("model", "machine", "batch")})
        if own:
            parts = (
                f"{100 * float(row['vectors_us']) / float(select(own, policy=policy)[0]['layer_us']):.0f} % of {policy}"
                for policy in ("base", "allo+pred")
            )
            print(
                f"  {row['model']}, {row['machine']}, {row['batch']}: {float(row['vectors_us']):.0f} µs,",
                ", ".join(parts),
            )


def tops() -> None:
    """What copies gain over base and add to Algorithm 1, by how many experts a row of their map predicts."""
    rows, turns = read("tops"), select(read("readings"), seed="0", steps="all")
    for model, machine, batch, top in dict.fromkeys(key(row, (*CASE, "top")) for row in rows):
        case = {"model": model, "machine": machine, "batch": batch}
        pred, both = (select(rows, **case, top=top, policy=name)[0] for name in ("pred", "allo+pred"))
        base, allo = (select(turns, **case, policy=name)[0] for name in ("base", "allo"))
        time, last = (float(base[part]) / float(pred[part]) for part in ("layer_us", "last_us"))
        print(f"  {model}, {machine}, {batch}, top {top}: pred {time:.2f}, in the last step {last:.2f}, hops", end=" ")
        print(f"{float(base['hops']) / float(pred['hops']):.1f}; both over base", end=" ")
        over = (float(row["layer_us"]) / float(both["layer_us"]) for row in (base, allo))
        print(
            "{:.2f}, over allo {:.3f}, hops".format(*over), f"{float(allo['hops']):.2f} and {float(both['hops']):.2f}"
        )


def verdicts() -> None:
    """Verdicts by reading."""
    rows = read("claims")
    for reading in dict.fromkeys(row["reading"] for row in rows):
        print(f"  {reading}:", ", ".join(f"{count} {kind}" for kind, count in counts_of(rows, reading).items()))
    for claim in dict.fromkeys(row["claim"] for row in rows):
        own = select(rows, claim=claim)
        told = (
            f"{row['reading']} {float(row['here']):.3g}, {row['verdict']}" if row["here"] else row["verdict"]
            for row in own
        )
        print(f"    {claim} ({own[0]['paper']}):", "; ".join(told))
