"""Tables of the study of the wafer-scale GPU: `python studies/wafer_gpu/study.py [TABLE ...] [--only DeepSeek-V3]`.

Tables are made model by model, `throughput` batch by batch too (`--only DeepSeek-V3/512`, a minute). `recorded` needs
recorded gating, in a folder `traces/` under that given with `--shared`.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import insights
import jax
import numpy as np
import turns
from layers import h100, loads, timeline, told, work_of
from recorded import recorded
from runs import (
    BATCHES,
    FOLDER,
    FP8,
    MACHINES,
    MAIN_MACHINES,
    MODELS,
    POLICIES,
    PROMPT,
    PUBLISHED,
    SETTINGS,
    Case,
    Row,
    beside,
    cases,
    double,
    homes,
    homes_in_turn,
    layer_of,
    machine_of,
    measured,
    policy_of,
    requests_of,
    rolled_out,
)

from jaxmoe.des import replay_slices
from jaxmoe.engine import HostLink
from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.files import read_table
from jaxmoe.methods import AllocationTask
from jaxmoe.methods.wafer_gpu.descended_allocation import AssignmentProgram, allocation_seconds
from jaxmoe.methods.wafer_gpu.system import allocation_of


def throughput(model: str, batch: int) -> Iterator[Row]:
    """Fig. 11 and 13: every machine and policy; batches are the first requests of one trace."""
    known = Case(model, requests_of(model, max(BATCHES))[:, :batch]).guidance(SETTINGS["top"])
    for machine in MACHINES:
        rows = [
            {"model": model, "machine": machine, "batch": batch, "policy": name}
            | measured(model, machine, policy_of(model, machine, **changes), known)
            for name, changes in POLICIES.items()
            if name in NEEDED or machine in MAIN_MACHINES
        ]
        yield from beside(rows, rows[0])


NEEDED = ("base", "allo+pred")  # on Dojo-Enhanced, of which V-F alone has figures
SEEDS = (0, 1, 2)  # of the process, the requests and the homes


def seeds(model: str) -> Iterator[Row]:
    """The same with other traces and homes, at 4,096 requests."""
    for seed in SEEDS:
        known = Case(model, requests_of(model, 4096, seed=seed)).guidance(SETTINGS["top"])
        for machine in MAIN_MACHINES:
            home = homes(model, machine_of(machine).num_nodes, seed=seed)
            rows = [
                {"model": model, "machine": machine, "batch": 4096, "policy": name, "seed": seed}
                | measured(model, machine, policy_of(model, machine, home, **POLICIES[name]), known)
                for name in ("base", "pred", "home", "allo", "allo+pred", "base, 3 dies")
            ]
            yield from beside(rows, rows[0])


def later(model: str) -> Iterator[Row]:
    """The machines and FP16 weights of the paper's later edition, with all settings as they are."""
    name, drawn = f"{model}, FP16", requests_of(model)
    for batch in (4096, 8192, 16384):
        known = Case(model, drawn[:, :batch]).guidance(SETTINGS["top"])
        for machine in MAIN_MACHINES:
            rows = [
                {"model": model, "machine": machine, "batch": batch, "policy": policy}
                | measured(name, f"later {machine}", policy_of(name, f"later {machine}", **POLICIES[policy]), known)
                for policy in ("base", "pred", "home", "allo", "allo+pred", "base, 3 dies")
            ]
            yield from beside(rows, rows[0])


def llc(model: str) -> Iterator[Row]:
    """Insight 2 on the faster level: the LLC filled in idle time, with homes dealt at random, and even over layers."""
    for batch in (512, 4096):
        known = Case(model, requests_of(model, 4096)[:, :batch]).guidance(SETTINGS["top"], llc=True)
        for machine in MAIN_MACHINES:
            dies = machine_of(machine).num_nodes
            for placed, home in (("random", homes(model, dies)), ("in turn", homes_in_turn(model, dies))):
                rows = [
                    {"model": model, "machine": machine, "batch": batch, "homes": placed, "policy": name}
                    | measured(model, machine, policy_of(model, machine, home, **POLICIES["allo"], llc=filled), known)
                    for name, filled in (("allo", False), ("allo, LLC", True))
                ]
                yield from beside(rows, rows[0])


CHANGES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "homes": [("in runs", {"home": "runs"}), ("round the dies", {"home": "round"})],
    "max_split": [(f"blocks + {spare}", {"spare": spare}) for spare in (0, 1, 2, 25)],
    "top n": [(str(top), {"top": top}) for top in (2, 8, 128)],
    "eviction": [("least recent", {"eviction": "least_recent"}), ("none", {"eviction": "keep"})],
    "capacity": [("unlimited", {"unlimited": True})],
    "block": [("25", {"block": 25}), ("100", {"block": 100})],
    "base divides an expert over": [(f"{dies} dies", {"split": dies}) for dies in (2, 3, 4, 25)],
    "cost of Algorithm 1": [("reads and compute added up", {"cost": "serial"})],
    "workload at first": [("none", {"begin": "idle"})],
    "order of experts": [("by number", {"order": "number"})],
    "all three, as before": [("", {"cost": "serial", "begin": "idle", "order": "number"})],
    "prefill's map": [("left out", {"prefill": False})],
    "steps counted": [("the last 10", {"first": 10})],
    "popularity": [("even", {"popularity": 0.0}), ("twice as skewed", {"popularity": 2.0})],
    "reuse": [("none", {"reuse": 0.0}), ("twice", {"reuse": 2.0})],
}
TOLD = ("spare", "eviction", "unlimited", "block", "split", "cost", "begin", "order")  # to the policy
SENSITIVE = {"DeepSeek-V3": ("dojo_5x5", 8192), "Qwen3-235B": ("tsmc_sow_3x8", 4096)}


def sensitivity(model: str) -> Iterator[Row]:
    """One assumption changed at a time, where neither memory nor compute alone decides."""
    tried = [("as fixed", "", {}), *((what, to, change) for what, all_ in CHANGES.items() for to, change in all_)]
    machine, batch = SENSITIVE[model]
    for what, to, change in tried:
        trace = {name: change[name] for name in ("popularity", "reuse") if name in change}
        case = Case(model, requests_of(model, batch, **trace))
        known = case.guidance(change.get("top", SETTINGS["top"]), change.get("prefill", True))
        home = homes(model, machine_of(machine).num_nodes, change.get("home", "random"))
        own = {name: value for name, value in change.items() if name in TOLD}
        rows = [
            {"model": model, "machine": machine, "batch": batch, "what": what, "to": to, "policy": name}
            | measured(
                model, machine, policy_of(model, machine, home, **POLICIES[name] | own), known, change.get("first", 0)
            )
            for name in PUBLISHED
        ]
        yield from beside(rows, rows[0])


def agreement(model: str) -> Iterator[Row]:
    """Line 3: model and simulator over policies, machines and batches of 512 and 4,096: three layers of each."""
    costs, drawn = MODELS[model].costs, requests_of(model, 4096)
    for batch in (512, 4096):
        known = Case(model, drawn[:, :batch]).guidance(SETTINGS["top"])
        for machine, name in itertools.product(MACHINES, PUBLISHED):
            policy = policy_of(model, machine, **POLICIES[name])
            _, times, (asked, traffic) = rolled_out(model, machine, policy, known)
            for at in ((0, 0), (1, 2), (19, 3)):  # step, layer
                one = jax.tree.map(lambda leaf, at=at: leaf[at], asked)
                replay = replay_slices(machine_of(machine), work_of(one), told(costs))
                names = ("hops", "local_read", "remote_read", "local_write")
                yield {
                    "model": model,
                    "machine": machine,
                    "batch": batch,
                    "policy": name,
                    "step": at[0],
                    "layer": at[1],
                    "model_us": times.total[at] * 1e6,
                    "simulated_us": replay.seconds * 1e6,
                    "same_traffic": all(float(traffic[each][at]) == getattr(replay, each) for each in names),
                }


@eqx.filter_jit
def allocated(allocation, task):
    """The allocation of a task, compiled once for all tasks."""
    return allocation(task)


seconds_of = eqx.filter_jit(allocation_seconds)


def bounds(model: str) -> Iterator[Row]:
    """Line 5: allocations beside the bound: decode step 10, two layers of every case."""
    for machine in MACHINES:
        where = layer_of(model, machine)
        dies, names = where.machine.num_nodes, ("home", "allo", "gradient", "linear_program")
        own = {name: allocation_of(name, where) for name in names}
        for (batch, case), layer in itertools.product(cases(model), (0, 3)):
            home = homes(model, dies)[layer]
            local = home[:, None] == np.arange(dies)
            chosen = case.experts[layer, :, PROMPT + 10]
            task = AllocationTask(np.bincount(chosen.ravel(), minlength=len(home)), home, local.astype(float))
            given = jax.device_put(task)
            seconds = {name: float(seconds_of(where, allocated(each, given), given)) for name, each in own.items()}
            yield {
                "model": model,
                "machine": machine,
                "batch": batch,
                "layer": layer,
                "bound_us": AssignmentProgram(where).solve(task)[1] * 1e6,
                **{f"{name}_us": each * 1e6 for name, each in seconds.items()},
            }


def doubled(model: str) -> Iterator[Row]:
    """Line 7: D2D of twice the bandwidth, with Algorithm 1's allocation as it was, and made anew."""
    drawn = requests_of(model, 4096)
    for batch, machine in itertools.product((1024, 4096), MACHINES):
        own, dies = layer_of(model, machine), machine_of(machine).num_nodes
        faster = eqx.tree_at(lambda m: m.machine.topology.link_bandwidth, own, replace_fn=lambda rate: rate * 2)
        allo, anew = (allocation_of("allo", each) for each in (own, faster))
        for layer, home in enumerate(homes(model, dies)):
            local = home[:, None] == np.arange(dies)
            counts = np.bincount(drawn[layer, :batch, PROMPT + 10].ravel(), minlength=len(home))
            task = jax.device_put(AllocationTask(counts, home, local.astype(float)))
            plan, other = (allocated(each, task) for each in (allo, anew))
            seconds = {
                "allo": seconds_of(own, plan, task),
                "kept": seconds_of(faster, plan, task),
                "anew": seconds_of(faster, other, task),
            }
            yield {
                "model": model,
                "machine": machine,
                "batch": batch,
                "layer": layer,
                **{f"{name}_us": float(each) * 1e6 for name, each in seconds.items()},
            }


FITTED = ("DeepSeek-V3", "dojo_5x5")  # where the host's fixed cost is calibrated
PUBLISHED_OVERHEAD = {  # percent, V-F
    ("DeepSeek-V3", "dojo_5x5"): (5.2, 6.4),
    ("Qwen3-235B", "dojo_5x5"): (11.1, 14.2),
    ("DeepSeek-V3", "dojo_enhanced_5x5"): (19.3, 23.8),
    ("Qwen3-235B", "dojo_enhanced_5x5"): (42.0, 51.6),
}
PCIE = 64e9  # B/s, PCIe 5.0 x16; not stated


def host(model: str) -> Iterator[Row]:
    """Fig. 14, from the table of throughput: what the way to the host adds to `allo+pred`.

    The fixed cost makes the mean over batches that of the published range on the fitted case alone.
    """
    rows = [row for row in read_table(FOLDER / "throughput.csv") if row["policy"] == "allo+pred"]
    own = [float(row["layer_us"]) for row in rows if (row["model"], row["machine"]) == FITTED]
    link = HostLink(PCIE, 0.0)
    table_us = {model: float(link.seconds(known.experts, 25)) * 1e6 for model, known in MODELS.items()}
    wanted = np.mean(PUBLISHED_OVERHEAD[FITTED]) / 100
    fixed_us = wanted / np.mean(1 / np.array(own)) - table_us[FITTED[0]]
    for row in rows:
        where = row["model"], row["machine"]
        if where in PUBLISHED_OVERHEAD and row["model"] == model:
            seconds = fixed_us + table_us[row["model"]]
            least, most = PUBLISHED_OVERHEAD[where]
            yield {
                "model": row["model"],
                "machine": row["machine"],
                "batch": int(row["batch"]),
                "fixed_us": fixed_us,
                "overhead_percent": 100 * seconds / float(row["layer_us"]),
                "published_least": least,
                "published_most": most,
                "fitted": where == FITTED,
            }


BY_MODEL: dict[str, Callable[..., Iterator[Row]]] = {
    "seeds": seeds,
    "sensitivity": sensitivity,
    "agreement": agreement,
    "agreement_in_turn": turns.agreement,
    "vectors": turns.vectors,
    "bounds": bounds,
    "doubled": doubled,
    "insights": insights.tables,
    "llc": llc,
    "later": later,
    "host": host,
}
ALONE: dict[str, Callable[[], Iterator[Row]]] = {"loads": loads, "timeline": timeline, "h100": h100}


def precise(rows: Callable[..., Iterator[Row]], *case: Any) -> list[Row]:
    """Rows of a case in double precision."""
    with double():
        return [*rows(*case)]


def tables(traces: Path) -> Iterator[Table]:
    """All tables; that of recorded gating is the last one."""
    models = [(model,) for model in FP8]
    both = [*itertools.product(FP8, BATCHES)]
    yield Table("throughput", partial(precise, throughput), both, ("model", "batch"), digits=6)
    by_case = ("model", "seed", "batch")
    yield Table("readings", partial(precise, turns.readings), turns.CASES, by_case, digits=6)
    yield Table("tops", partial(precise, turns.tops), turns.TOP_CASES, ("model", "batch"), digits=6)
    for name, rows in BY_MODEL.items():
        yield Table(name, partial(precise, rows), models, ("model",), digits=6)
    for name, rows in (ALONE | {"recorded": partial(recorded, traces)}).items():
        yield Table(name, partial(precise, rows), digits=6)


if __name__ == "__main__":
    parser = study_options(__doc__)
    parser.add_argument("--shared", type=Path, default=FOLDER.resolve().parents[2] / "shared", help="has traces/")
    given = parser.parse_args()
    make_tables(FOLDER, [*tables(given.shared / "traces")], given)
