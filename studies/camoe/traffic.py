"""Eq. 9, the congestion model and the event simulator on the same 500 traffic matrices; and Fig. 5's slow endpoint.

`python studies/camoe/traffic.py` writes `traffic.csv` and `slow_endpoint.csv`. See README.md.
Takes ten seconds of one core.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from setting import HERE, network

from jaxmoe.des import fabric_of, replay_traffic
from jaxmoe.experiment.table import make_tables, study_options, tables_of
from jaxmoe.hardware import AbstractTopology, fully_connected, switch, wafers
from jaxmoe.network import Congestion, alpha_beta
from jaxmoe.relax import HardMax

EACH, SEED = 25, 0
CLASSES = ("uniform", "moe", "hotspot", "permutation", "one_to_all")
VECTOR = 4096.0  # B


@dataclass(frozen=True)
class Case:
    """A network, how it switches, and tokens of a node."""

    topology: AbstractTopology
    chunk: float
    cut_through: bool
    tokens: int


CASES = {
    "camoe_4nodes": Case(network(), 65536.0, False, 1500),
    "switch_8": Case(switch(8, 50e9, 5e-7), 65536.0, True, 1500),
    "spine_leaf": Case(network("spine_leaf"), 65536.0, True, 400),
    "wafer_4x8": Case(wafers((4, 8), (1, 1), 1e12, 1e-7, 1e12, 1e-7), 65536.0, True, 400),
}


def matrix(kind: str, nodes: int, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a dispatch, [source, destination]: about 8 copies of each token but for those that stay."""
    sent = np.zeros((nodes, nodes))
    if kind == "permutation":
        shift = rng.integers(1, nodes)
        sent[np.arange(nodes), (np.arange(nodes) + shift) % nodes] = 8 * tokens
    elif kind == "one_to_all":
        sent[rng.integers(nodes)] = 8 * tokens / nodes * rng.uniform(0.5, 1.5, nodes)
    else:
        popular = {"uniform": np.ones(nodes), "moe": rng.lognormal(0, 0.3, nodes), "hotspot": np.ones(nodes)}[kind]
        if kind == "hotspot":
            popular[rng.integers(nodes)] = 4
        sent = rng.poisson(8 * tokens * popular / popular.sum(), (nodes, nodes)).astype(float)
    np.fill_diagonal(sent, 0)
    return sent * VECTOR


def matrices() -> Iterator[dict]:
    """A line for each matrix."""
    for name, case in CASES.items():
        fabric = fabric_of(case.topology, case.chunk, case.cut_through)
        order = "shuffled" if case.cut_through else "staggered"
        pairs, links = (
            alpha_beta(case.topology, case.cut_through),
            Congestion(jnp.asarray(case.chunk), case.cut_through),
        )
        models = {
            label: eqx.filter_jit(lambda sent, model=model, case=case: model(case.topology, sent).total(HardMax()))
            for label, model in (("eq9", pairs), ("congestion", links))
        }
        for kind in CLASSES:
            rng = np.random.default_rng([SEED, CLASSES.index(kind), case.topology.num_nodes])
            for number in range(EACH):
                sent = matrix(kind, case.topology.num_nodes, case.tokens, rng)
                told = {f"{label}_s": float(model(jnp.asarray(sent, jnp.float32))) for label, model in models.items()}
                seen = replay_traffic(fabric, sent, order, seed=number).completion_s
                yield {"network": name, "class": kind, "matrix": number} | told | {"simulated_s": seen}


def slow_endpoint() -> Iterator[dict]:
    """Fig. 5: eight nodes of which one receives more slowly; and all others at twice their rate."""
    base, nodes, rate = fully_connected(8, 10e9, 1e-5), 8, 10e9
    for slowdown in (1, 2, 4, 8):
        for others in (1, 2):
            ejection = np.full(nodes, others * rate)
            ejection[0] = rate / slowdown
            network = replace(
                base,
                link_bandwidth=base.link_bandwidth * others,
                injection_bandwidth=jnp.full(nodes, others * rate),
                ejection_bandwidth=jnp.asarray(ejection, jnp.float32),
            )
            sent = np.full((nodes, nodes), 1500 * VECTOR)
            np.fill_diagonal(sent, 0)
            seen = replay_traffic(fabric_of(network, 65536.0), sent).completion_s
            model = float(Congestion(jnp.asarray(65536.0))(network, jnp.asarray(sent, jnp.float32)).total(HardMax()))
            yield {"slowdown": slowdown, "others": others, "simulated_ms": 1e3 * seen, "congestion_ms": 1e3 * model}


def traffic() -> list[dict]:
    """All matrices; errors by class are printed."""
    made = [*matrices()]
    print(f"{len(made)} matrices; error against the simulator in %, mean (mean absolute)")
    for name in CASES:
        for kind in CLASSES:
            some = [row for row in made if row["network"] == name and row["class"] == kind]
            text = f"{name:13} {kind:12}"
            for label in ("eq9", "congestion"):
                error = np.array([100 * (row[f"{label}_s"] / row["simulated_s"] - 1) for row in some])
                text += f"  {label} {error.mean():+7.2f} ({np.abs(error).mean():.2f})"
            print(text)
    return made


if __name__ == "__main__":
    make_tables(
        HERE,
        tables_of({"traffic": traffic, "slow_endpoint": slow_endpoint}, digits=6),
        study_options(__doc__).parse_args(),
    )
