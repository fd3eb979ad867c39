"""Fig. 5 and Table III: hd_moe's estimates of communication beside our link model and the event simulator."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from cases import BATCH_SIZES, DEEPSEEK, MIXTRAL, Case, inputs_of

from jaxmoe.des import GraphBuilder, add_sends, fabric_of, simulate
from jaxmoe.des.tasks import ring_all_reduce_sends
from jaxmoe.experiment.validation import node_traffic
from jaxmoe.hardware import ring
from jaxmoe.network import Congestion, price_rounds, ring_all_reduce
from jaxmoe.relax import HardMax

KIB, MICRO, GBIT = 1024, 1e-6, 1e9 / 8
# Latency (µs), bandwidth (Gb/s), and the paper's two columns (µs). It gives neither nodes nor bytes.
TABLE_III = ((0.1, 25.0, 673, 668), (5.0, 25.0, 751, 879), (0.0, 20.0, 671, 692))
NODES, PART = 9, 128 * KIB  # rows 1 and 2 are 16 rounds of 128 KiB, which is what an all-reduce over 9 nodes takes


def node_estimates(model: str, shared: Path) -> list[dict]:
    """Random plans of three kinds at all batch sizes on the 4x8 mesh: seconds of one combine."""
    inputs, rows = inputs_of(Case(model, "4x8", "5", "50"), shared), []
    for tokens in BATCH_SIZES:
        seen = node_traffic(inputs, tokens)
        for kind, estimate, link, simulated in zip(
            seen.kind, seen.estimate, seen.link_model, seen.simulated, strict=True
        ):
            row = {"model": model, "kind": kind, "batch_tokens": tokens}
            times = {"node_estimate_s": estimate, "link_model_s": link, "simulated_s": simulated}
            rows.append(row | {name: f"{value:.6e}" for name, value in times.items()})
    return rows


def table_iii(shared: Path) -> list[dict]:
    """Ring all-reduce: the paper's columns, our formula and our simulator."""
    rows = []
    for latency, bandwidth, analytical, astra in TABLE_III:
        network = ring(NODES, bandwidth * GBIT, latency * MICRO)
        rounds = ring_all_reduce(np.arange(NODES), NODES * float(PART), NODES)
        ours = float(price_rounds(Congestion(jnp.asarray(0.0)), network, rounds, HardMax()).seconds)
        fabric = fabric_of(network, None)
        graph = GraphBuilder(fabric.num_links, 0)
        add_sends(graph, ring_all_reduce_sends(range(NODES), NODES * float(PART)), fabric.paths, [()] * NODES)
        simulated = simulate(graph.build(), fabric.rate, fabric.latency).makespan
        rows.append(
            {
                "latency_us": latency,
                "bandwidth_Gb_per_s": bandwidth,
                "paper_analytical_us": analytical,
                "paper_astra_sim_us": astra,
                "formula_us": f"{ours / MICRO:.2f}",
                "simulated_us": f"{simulated / MICRO:.2f}",
            }
        )
    return rows


JOBS = {
    **{
        f"estimates_{model}": lambda shared, model=model: node_estimates(model, shared) for model in (MIXTRAL, DEEPSEEK)
    },
    "table_iii": table_iii,
}
