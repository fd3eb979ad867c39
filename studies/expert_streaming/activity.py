"""What every die does when: a snapshot of one layer (Fig. 13), and how busy arrays are over its time (Fig. 11).

Writes `activity.csv`, `busy.csv`, and `runs/activity.json` for trace viewers:
`python studies/expert_streaming/activity.py`.
Qwen3-30B-A3B with 256 tokens on 2x2, simulated.
"""

import json
from dataclasses import replace
from typing import Any

import numpy as np
from agreement import CONTROL, HERE, Drawn, costs_of, described, machine_of, modelled, slices_of, tokens_of
from jax import numpy as jnp

from jaxmoe.des.streaming import COMPUTE, LOAD, SEND, Services, Stream, stream
from jaxmoe.des.streaming_layer import Slicing, flow_of
from jaxmoe.experiment.table import make_tables, study_options, tables_of

CASE = Drawn((2, 2), 25.6e9, 288e9, 3.2768e12, 8e6, 8)
MODEL, TOKENS, DIES, SEED = "qwen3-30b-a3b", 256, 4, 3
START, LENGTH, BINS = 2e-3, 2e-4, 60
KINDS = {LOAD: "DDR", COMPUTE: "compute", SEND: "send"}


def run(strategy: str) -> Stream:
    """The recorded simulation of a layer."""
    machine, costs = machine_of(CASE), costs_of(MODEL)
    tokens = tokens_of(MODEL, TOKENS, DIES, np.random.default_rng(SEED))
    slices = slices_of(MODEL, CASE.micro_slices, CASE.sram, DIES)
    _, groups, following = modelled(strategy)(machine, slices, jnp.asarray(tokens, jnp.float32))
    slicing = Slicing(8, CASE.sram, CONTROL, matched=strategy == "fse_paired")
    whole = np.ones(tokens.shape, bool)
    flow = flow_of(described(machine, costs), slicing, tokens, np.asarray(groups), np.asarray(following), whole)
    return stream(replace(flow), record=True)


def services_of(found: Stream) -> Services:
    assert found.services is not None
    return found.services


def snapshot() -> list[dict[str, Any]]:
    """Spans of every die and kind in a part of the time, receiving among them."""
    services = services_of(run("fse_paired"))
    rows, events = [], []
    for at in range(len(services.kind)):
        kind, die, begin, end = (column[at] for column in (services.kind, services.die, services.begin, services.end))
        spans = [(KINDS[int(kind)], int(die))]
        if kind == SEND:
            spans.append(("receive", int(services.receiver[at])))
        for name, place in spans:
            events.append(
                {
                    "name": name,
                    "ph": "X",
                    "pid": place,
                    "tid": name,
                    "ts": float(begin * 1e6),
                    "dur": float((end - begin) * 1e6),
                }
            )
            if begin >= START and end <= START + LENGTH:
                rows.append({"die": place, "kind": name, "begin_s": float(begin), "end_s": float(end)})
    (HERE / "runs").mkdir(exist_ok=True)
    (HERE / "runs" / "activity.json").write_text(json.dumps({"traceEvents": events[:2000], "displayTimeUnit": "ms"}))
    return rows


def busy() -> list[dict[str, Any]]:
    """The part of each of so many equal stretches in which the mean array computes."""
    rows = []
    for strategy in ("fse", "fse_paired"):
        found = run(strategy)
        services = services_of(found)
        computing = services.kind == COMPUTE
        edges = np.linspace(0, found.seconds, BINS + 1)
        inside = np.clip(
            np.minimum(services.end[computing], edges[1:, None])
            - np.maximum(services.begin[computing], edges[:-1, None]),
            0,
            None,
        )
        for middle, part in zip((edges[1:] + edges[:-1]) / 2, inside.sum(axis=1) / np.diff(edges) / DIES, strict=True):
            rows.append({"strategy": strategy, "time_s": float(middle), "busy": float(part)})
    return rows


if __name__ == "__main__":
    make_tables(HERE, tables_of({"activity": snapshot, "busy": busy}, digits=6), study_options(__doc__).parse_args())
