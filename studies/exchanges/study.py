"""Model against event simulator: every exchange on every kind of network.

Writes `agreement.csv`, a line for each case, and `copies.csv`, of exchanges that choose by congestion or by prices with
copies of experts, and prints the agreement by group: `python studies/exchanges/study.py`. `--only torus` makes the
lines of a network alone.

Each table takes about 12 minutes of one core, `copies --only torus/1` half a minute.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import copies
import jax
import jax.numpy as jnp
import numpy as np
from setting import (
    CHUNK,
    EXPERTS,
    FLOPS,
    NETWORKS,
    NODES,
    SEED,
    TIMES,
    VECTOR,
    WEIGHTS,
    WORK,
    gating,
    model_on,
    network,
)

from jaxmoe.des import Fabric, LayerDescription, fabric_of
from jaxmoe.des.layer import replay_layer
from jaxmoe.experiment.table import Table, make_tables, study_options
from jaxmoe.experiment.validation import agreement
from jaxmoe.hardware import AbstractTopology
from jaxmoe.network import build_exchange
from jaxmoe.placement import expert_parallel_balanced
from jaxmoe.placement.exchange import HOMES, exchange_of
from jaxmoe.placement.strategies import filled_in_order
from jaxmoe.traces import sample_batches

TOKENS = (32, 128, 512)
FIELDS = ("network", "latency_and_ports", "switching", "exchange", "tokens", "plan")


@dataclass(frozen=True)
class Case:
    """A network with one way of switching; its fabric serves all exchanges."""

    network: str
    topology: AbstractTopology
    slow: bool  # latency and ports
    cut_through: bool
    fabric: Fabric

    def fields(self, exchange: str, tokens: int, plan: str) -> dict[str, object]:
        switching = "cut_through" if self.cut_through else "store_and_forward"
        return dict(zip(FIELDS, (self.network, self.slow, switching, exchange, tokens, plan), strict=True))


def cases(name: str) -> Iterator[Case]:
    """With and without latency and ports, stored and forwarded or cut through."""
    for slow in (False, True):
        topology = network(name, slow)
        for cut_through in (False, True):
            yield Case(name, topology, slow, cut_through, fabric_of(topology, CHUNK, cut_through))


def exchanges(topology: AbstractTopology) -> list[str]:
    """All that suit the network."""
    mesh = topology.grid is not None
    routes = ("", "_tree", "_cross_tree", "_split_tree") if mesh else ("", "_tree")
    groups = ("rings_2x2", "rings_2x2_both_ways", "rings_1x4_both_ways") if mesh else ("rings_4", "rings_4_both_ways")
    return [home + route for home in HOMES for route in routes] + ["reduce_scatter", "ring", "ring_both_ways", *groups]


def plans(trace_experts: np.ndarray) -> dict[str, np.ndarray]:
    """Whole experts by load, experts cut where a node is full, and experts over the whole machine."""
    frequency = np.bincount(trace_experts.ravel(), minlength=EXPERTS).astype(float)
    rng, even = np.random.default_rng(SEED), np.full(NODES, 1 / NODES)
    order = rng.permutation(EXPERTS), rng.permutation(NODES)
    return {
        "ep": expert_parallel_balanced(frequency[None], NODES)[0],
        "full_nodes": filled_in_order(frequency / frequency.sum(), even, *order).astype(np.float32),
        "tp": np.full((EXPERTS, NODES), 1 / NODES, np.float32),
    }


def lines(name: str) -> Iterator[dict[str, object]]:
    """One line for each case of a network, exchange, batch size and plan."""
    for case in cases(name):
        yield from lines_of(case)


def lines_of(case: Case) -> Iterator[dict[str, object]]:
    trace = gating()
    for exchange in exchanges(case.topology):
        model = model_on(case.topology, build_exchange(exchange, case.topology), case.cut_through)
        layer = description_of(case, exchange)
        for tokens in TOKENS:
            batch = jax.tree.map(lambda leaf: leaf[0, 0], sample_batches(trace, tokens, 1, SEED))
            for plan, share in plans(trace.experts).items():
                if plan == "tp" and tokens == TOKENS[-1] and not model.exchange.groups:
                    continue  # half a million messages, all alike
                told, seen = (
                    model(jnp.asarray(share), batch),
                    replay_layer(layer, share, jax.tree.map(np.asarray, batch)),
                )
                simulated = seen.stages["dispatch"] + seen.stages["combine"]
                times = (float(told.communication), simulated, float(told.total), seen.total_s)
                yield case.fields(exchange, tokens, plan) | dict(zip(TIMES, times, strict=True))


def description_of(case: Case, exchange: str) -> LayerDescription:
    numbers = (VECTOR, VECTOR, WEIGHTS, WORK)
    return LayerDescription(case.fabric, np.full(NODES, FLOPS), *numbers, "sharded", exchange_of(exchange))


def summarise(rows: list[dict[str, str]], by: str | None = None) -> None:
    """Print the agreement of totals and of communication, over all rows or by the values of a field."""
    for value in dict.fromkeys(row[by] for row in rows) if by else ("all",):
        chosen = [row for row in rows if by is None or row[by] == value]
        text = f"{by or ''} {value}: {len(chosen)} cases"
        for what in ("total", "communication"):
            told, seen = (np.array([float(r[f"{who}_{what}_s"]) for r in chosen]) for who in ("model", "simulated"))
            figures = agreement(told, seen)
            text += f", {what} R2 {figures['r2']:.5f}, mean error {figures['mean_abs_error_percent']:.2f} %"
        print(text)


if __name__ == "__main__":
    all_but_graph = [(name,) for name in NETWORKS if name != "graph"]
    tables = [
        Table("agreement", lines, all_but_graph, ("network",), (*FIELDS, *TIMES)),
        Table("copies", copies.lines, [*product(NETWORKS, copies.COPIES)], copies.KEY, (*copies.FIELDS, *TIMES)),
    ]
    made = make_tables(Path(__file__).parent, tables, study_options(__doc__).parse_args())
    for field in (None, *FIELDS) if "agreement" in made else ():
        summarise(made["agreement"], field)
    if "copies" in made:
        print(copies.summary(made["copies"]))
