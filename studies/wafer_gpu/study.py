"""Tables of the study of the wafer-scale GPU: `python studies/wafer_gpu/study.py [TABLE ...]`."""

import csv
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import insights
import jax
import jax.numpy as jnp
import numpy as np
from runs import (
    FOLDER,
    MACHINES,
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
    machine_of,
    measured,
    policy_of,
    requests_of,
)

from jaxmoe.des import SliceCosts, SliceWork, replay_slices
from jaxmoe.files import atomic_write
from jaxmoe.latency import FetchCosts, Fetches, HostLink, LayerTime
from jaxmoe.policies import AllocationCosts, run_policy
from jaxmoe.tune.allocation import Task, allocation_bound, allocation_seconds, tuned_allocation


def throughput() -> Iterator[Row]:
    """Fig. 11 and 13: every model, machine, batch and policy."""
    for model in MODELS:
        for batch, case in cases(model):
            known = case.guidance(SETTINGS["top"])
            for machine in MACHINES:
                rows = [
                    {"model": model, "machine": machine, "batch": batch, "policy": name}
                    | measured(model, machine, policy_of(model, machine, **changes), known)
                    for name, changes in POLICIES.items()
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
SENSITIVE = (("DeepSeek-V3", "dojo_5x5"), ("Qwen3-235B", "tsmc_sow_3x8"))


def sensitivity() -> Iterator[Row]:
    """One assumption changed at a time, at batches of 512 and 4,096."""
    tried = [("as fixed", "", {}), *((what, to, change) for what, all_ in CHANGES.items() for to, change in all_)]
    for model, machine in SENSITIVE:
        for what, to, change in tried:
            trace = {name: change[name] for name in ("popularity", "reuse") if name in change}
            drawn = requests_of(model, 4096, **trace)
            for batch in (512, 4096):
                case = Case(model, drawn[:, :batch])
                known = case.guidance(change.get("top", SETTINGS["top"]), change.get("prefill", True))
                home = homes(model, machine_of(machine).num_nodes, change.get("home", "random"))
                own = {name: value for name, value in change.items() if name in TOLD}
                rows = [
                    {"model": model, "machine": machine, "batch": batch, "what": what, "to": to, "policy": name}
                    | measured(
                        model,
                        machine,
                        policy_of(model, machine, home, **POLICIES[name] | own),
                        known,
                        change.get("first", 0),
                    )
                    for name in PUBLISHED
                ]
                yield from beside(rows, rows[0])


def agreement() -> Iterator[Row]:
    """Line 3: model and simulator over policies, machines and batches of 512 and 4,096: three steps, two layers."""
    for model in MODELS:
        costs = MODELS[model].costs
        for batch, case in cases(model):
            if batch not in (512, 4096):
                continue
            known = case.guidance(SETTINGS["top"])
            for machine in MACHINES:
                for name in PUBLISHED:
                    policy = policy_of(model, machine, **POLICIES[name])
                    done = run_policy(policy, machine_of(machine), costs, known)
                    times, traffic, asked, _ = jax.tree.map(np.asarray, done)
                    for step, layer in ((0, 0), (1, 4), (19, 7)):
                        at = (step, layer)
                        one = jax.tree.map(lambda leaf, at=at: leaf[at], asked)
                        replay = replay_slices(machine_of(machine), work_of(one), told(costs))
                        names = ("hops", "local_read", "remote_read", "local_write")
                        yield {
                            "model": model,
                            "machine": machine,
                            "batch": batch,
                            "policy": name,
                            "step": step,
                            "layer": layer,
                            "model_us": times.total[at] * 1e6,
                            "simulated_us": replay.seconds * 1e6,
                            "same_traffic": all(float(traffic[each][at]) == getattr(replay, each) for each in names),
                        }


@eqx.filter_jit
def allocated(policy, *task):
    return policy.allocation(*task)


def bounds() -> Iterator[Row]:
    """Line 5: Algorithm 1 and the gradient beside the bound: decode step 10, two layers of every case."""
    for model in MODELS:
        costs = MODELS[model].costs
        for batch, case in cases(model):
            for machine, layer in itertools.product(MACHINES, (0, 5)):
                chip = machine_of(machine)
                dies = chip.num_nodes
                home = homes(model, dies)[layer]
                local = home[:, None] == np.arange(dies)
                chosen = case.experts[layer, :, PROMPT + 10]
                task = Task(np.bincount(chosen.ravel(), minlength=len(home)), home, local.astype(float))
                policy = policy_of(model, machine, **POLICIES["allo"])
                greedy = allocated(policy, *(jnp.asarray(each) for each in (task.counts, home, local)))
                yield {
                    "model": model,
                    "machine": machine,
                    "batch": batch,
                    "layer": layer,
                    "bound_us": allocation_bound(chip, costs, task) * 1e6,
                    "allo_us": allocation_seconds(chip, costs, np.asarray(greedy), task) * 1e6,
                    "gradient_us": tuned_allocation(chip, costs, task)[1] * 1e6,
                }


def doubled() -> Iterator[Row]:
    """Line 7: D2D of twice the bandwidth, with Algorithm 1's allocation as it was, and made anew."""
    for model in MODELS:
        costs = MODELS[model].costs
        drawn = requests_of(model, 1024)
        for batch, machine in itertools.product((512, 1024), MACHINES):
            chip = machine_of(machine)
            faster = eqx.tree_at(lambda m: m.topology.link_bandwidth, chip, chip.topology.link_bandwidth * 2)
            policy, all_homes = policy_of(model, machine, **POLICIES["allo"]), homes(model, chip.num_nodes)
            anew = eqx.tree_at(lambda p: p.allocation.costs, policy, AllocationCosts.of(faster, costs))
            for layer, home in enumerate(all_homes):
                local = home[:, None] == np.arange(chip.num_nodes)
                counts = np.bincount(drawn[layer, :batch, PROMPT + 10].ravel(), minlength=len(home))
                task = Task(counts, home, local.astype(float))
                given = [jnp.asarray(each) for each in (counts, home, local)]
                plan, other = (np.asarray(allocated(each, *given)) for each in (policy, anew))
                yield {
                    "model": model,
                    "machine": machine,
                    "batch": batch,
                    "layer": layer,
                    "allo_us": allocation_seconds(chip, costs, plan, task) * 1e6,
                    "kept_us": allocation_seconds(faster, costs, plan, task) * 1e6,
                    "anew_us": allocation_seconds(faster, costs, other, task) * 1e6,
                }


FITTED = ("DeepSeek-V3", "dojo_5x5")  # where the host's fixed cost is calibrated
PUBLISHED_OVERHEAD = {  # percent, V-F
    ("DeepSeek-V3", "dojo_5x5"): (5.2, 6.4),
    ("Qwen3-235B", "dojo_5x5"): (11.1, 14.2),
    ("DeepSeek-V3", "dojo_enhanced_5x5"): (19.3, 23.8),
    ("Qwen3-235B", "dojo_enhanced_5x5"): (42.0, 51.6),
}
PCIE = 64e9  # B/s, PCIe 5.0 x16; not stated


def host() -> Iterator[Row]:
    """Fig. 14, from the table of throughput: what the way to the host adds to `allo+pred`.

    The fixed cost makes the mean over batches that of the published range on the fitted case alone.
    """
    with (FOLDER / "throughput.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["policy"] == "allo+pred"]
    own = [float(row["layer_us"]) for row in rows if (row["model"], row["machine"]) == FITTED]
    link = HostLink(PCIE, 0.0)
    table_us = {model: float(link.seconds(known.experts, 25)) * 1e6 for model, known in MODELS.items()}
    wanted = np.mean(PUBLISHED_OVERHEAD[FITTED]) / 100
    fixed_us = wanted / np.mean(1 / np.array(own)) - table_us[FITTED[0]]
    for row in rows:
        where = row["model"], row["machine"]
        if where in PUBLISHED_OVERHEAD:
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
            }


SHOWN = ("DeepSeek-V3", "dojo_5x5", 4096, 19, 4)  # model, machine, batch, step, layer of the pictures


def shown(name: str) -> tuple[LayerTime, Fetches]:
    """One layer of a policy: what the model says of it, and who fetched what."""
    model, machine, batch, *at = SHOWN
    known = Case(model, requests_of(model)[:, :batch]).guidance(SETTINGS["top"])
    policy = policy_of(model, machine, **POLICIES[name])
    times, _, asked, _ = run_policy(policy, machine_of(machine), MODELS[model].costs, known)
    return jax.tree.map(lambda leaf: np.asarray(leaf[tuple(at)]), (times, asked))


def loads() -> Iterator[Row]:
    """Busy times of every link, HBM channel and die in one layer under the four policies."""
    for name in PUBLISHED:
        busy = shown(name)[0].busy
        for kind, stage in (("link", "fetch"), ("hbm", "fetch"), ("node", "compute")):
            for number, seconds in enumerate(busy[stage][kind]):
                yield {"policy": name, "kind": kind, "number": number, "busy_us": seconds * 1e6}


def timeline() -> Iterator[Row]:
    """When dies, HBM channels and links are busy in the event simulator, in the same layer under `allo+pred`."""
    model, machine, *_ = SHOWN
    chip, asked = machine_of(machine), shown("allo+pred")[1]
    run = replay_slices(chip, work_of(asked), told(MODELS[model].costs), record=True).run
    assert run.services is not None
    links, dies = chip.topology.num_links, chip.num_nodes
    servers = {"link": 0, "hbm": links + dies, "node": links + 2 * dies + 3}
    for kind, first in servers.items():
        for number in range(links if kind == "link" else dies):
            own = run.services.server == first + number
            for begin, end in merged(run.services.begin[own] * 1e6, run.services.end[own] * 1e6):
                yield {"kind": kind, "number": number, "begin_us": begin, "end_us": end}


def merged(begin: np.ndarray, end: np.ndarray, gap: float = 0.5) -> Iterator[tuple[float, float]]:
    """Stretches of one server, those with less than a gap between them as one."""
    order = np.argsort(begin)
    starts, ends = begin[order], np.maximum.accumulate(end[order])
    cut = np.flatnonzero(starts[1:] > ends[:-1] + gap) + 1
    for part in np.split(np.arange(len(starts)), cut):
        if len(part):
            yield starts[part[0]], ends[part[-1]]


def work_of(asked: Fetches) -> SliceWork:
    """A layer as the simulator takes it."""
    none = np.zeros(asked.requests.shape)
    return SliceWork(asked.requests.astype(int), asked.home, asked.local > 0, asked.copied > 0, none)


def told(costs: FetchCosts) -> SliceCosts:
    """Costs as the simulator takes them."""
    numbers = (costs.request_bytes, costs.hit, costs.miss, costs.write)
    return SliceCosts(
        float(costs.expert_bytes), float(costs.flops_per_request), int(costs.slices), *map(float, numbers)
    )


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "throughput": throughput,
    "sensitivity": sensitivity,
    "agreement": agreement,
    "bounds": bounds,
    "doubled": doubled,
    "insights": insights.tables,
    "host": host,
    "loads": loads,
    "timeline": timeline,
}


def main(names: list[str]) -> None:
    for name in names or TABLES:
        start = time.perf_counter()
        with double():
            rows = [{key: _short(value) for key, value in row.items()} for row in TABLES[name]()]
        with atomic_write(FOLDER / f"{name}.csv") as aside, aside.open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)
        print(f"{name}: {len(rows)} rows in {time.perf_counter() - start:.0f} s", flush=True)


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float | np.floating) else value


if __name__ == "__main__":
    main(sys.argv[1:])
