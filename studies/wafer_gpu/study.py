"""Tables of the study of the wafer-scale GPU: `python studies/wafer_gpu/study.py [TABLE ...]`."""

import csv
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from setup import (
    FOLDER,
    MACHINES,
    MODELS,
    POLICIES,
    PROMPT,
    PUBLISHED,
    SETTINGS,
    Case,
    cases,
    double,
    homes,
    machine_of,
    policy_of,
    requests_of,
)

from jaxmoe.des import SliceCosts, SliceWork, replay_slices
from jaxmoe.files import atomic_write
from jaxmoe.policies import Guidance, WaferPolicy, run_policy
from jaxmoe.tune.allocation import Task, allocation_bound, allocation_seconds, tuned_allocation

Row = dict[str, Any]


def measured(model: str, machine: str, policy: WaferPolicy, known: Guidance, first: int = 0) -> Row:
    """Means over the steps from `first` on and all layers: times, bytes, hops, and the busiest of each resource."""
    done = run_policy(policy, machine_of(machine), MODELS[model].costs, known)
    times, traffic, _, held = jax.tree.map(np.asarray, done)
    busy = times.busy
    return {
        "layer_us": times.total[first:].mean() * 1e6,
        "link_us": busy["fetch"]["link"][first:].max(axis=-1).mean() * 1e6,
        "hbm_us": busy["fetch"]["hbm"][first:].max(axis=-1).mean() * 1e6,
        "compute_us": busy["compute"]["node"][first:].max(axis=-1).mean() * 1e6,
        **{name: values[first:].mean() for name, values in traffic.items()},
        "copies": held.max(),
    }


def beside(rows: list[Row], base: Row) -> list[Row]:
    """Rows with their gains over one of them."""
    return [
        row | {"speedup": base["layer_us"] / row["layer_us"], "hop_reduction": base["hops"] / max(row["hops"], 1e-9)}
        for row in rows
    ]


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
    "prefill's map": [("left out", {"prefill": False})],
    "steps counted": [("the last 10", {"first": 10})],
    "popularity": [("even", {"popularity": 0.0}), ("twice as skewed", {"popularity": 2.0})],
    "reuse": [("none", {"reuse": 0.0}), ("twice", {"reuse": 2.0})],
}
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
                own = {name: change[name] for name in ("spare", "eviction", "unlimited", "block") if name in change}
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
        told = SliceCosts(
            *(float(n) for n in (costs.expert_bytes, costs.flops_per_request)), 2, 16.0, 1e-7, 1.1e-7, 3e-8
        )
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
                        work = SliceWork(
                            asked.requests[at].astype(int),
                            asked.home[at],
                            asked.local[at] > 0,
                            asked.copied[at] > 0,
                            np.zeros(asked.requests[at].shape),
                        )
                        replay = replay_slices(machine_of(machine), work, told)
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
                policy = policy_of(model, machine, allocation="allo")
                greedy = policy.allocated(*(jnp.asarray(each) for each in (task.counts, home, local)))
                yield {
                    "model": model,
                    "machine": machine,
                    "batch": batch,
                    "layer": layer,
                    "bound_us": allocation_bound(chip, costs, task) * 1e6,
                    "allo_us": allocation_seconds(chip, costs, np.asarray(greedy), task) * 1e6,
                    "gradient_us": tuned_allocation(chip, costs, task)[1] * 1e6,
                }


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "throughput": throughput,
    "sensitivity": sensitivity,
    "agreement": agreement,
    "bounds": bounds,
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
