"""Unlike GPUs inside a node (2.2.1, Fig. 3): what the profiler finds of their paths, and what the biased gate saves.

`python studies/camoe/unlike.py` writes `unlike_paths.csv` and `unlike.csv`, in a minute of one core. Costs are those of
paths as they were profiled. Two pairs share the host's links, which Eq. 9 does not know: so the same traffic is priced
by congestion and replayed in the event simulator.
"""

from collections.abc import Iterator
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from setting import HERE, STRENGTHS, TOKENS_PER_NODE, network, problem, scores_of, tokens

from jaxmoe.des import fabric_of, replay_traffic
from jaxmoe.experiment.profile_fit import profile_network
from jaxmoe.experiment.profiling import by_simulator
from jaxmoe.experiment.table import make_tables, study_options, tables_of
from jaxmoe.methods.camoe.gate import GateProblem, biased, biased_choices, on_experts
from jaxmoe.network import AlphaBeta, Congestion
from jaxmoe.network.pairwise import STAGES, AllToAll, same_models

NAME, CHUNK, LAYERS, SEED = "camoe_unlike_gpus", 65536.0, 4, 0
SIZES = np.geomspace(1e3, 64e6, 32).tolist()
KINDS = {(0, 1): "NVLink", (0, 2): "NVLink over another GPU", (2, 3): "PCIe switch", (0, 3): "host"}


def profiled() -> AlphaBeta:
    """Alpha and beta of all pairs as the profiler has them of the dispatch, whose stages are all alike here."""
    found = profile_network(4, SIZES, by_simulator(fabric_of(network(NAME), CHUNK, True))).baseline
    at = STAGES.index("dispatch")
    return AlphaBeta(jnp.asarray(found.alpha[at], jnp.float32), jnp.asarray(found.beta[at], jnp.float32))


def paths() -> Iterator[dict]:
    """A pair of each kind."""
    found = profiled()
    for pair, kind in KINDS.items():
        yield {"path": kind, "alpha_ns": 1e9 * float(found.alpha[pair]), "GB_per_s": 1e-9 / float(found.beta[pair])}


@eqx.filter_jit
def copies_of(batch: GateProblem, bias: jax.Array) -> jax.Array:
    """Copies of vectors that a biased gate sends, [layer, source, node]."""

    def layer(logits: jax.Array, own: jax.Array, share: jax.Array) -> jax.Array:
        chosen = biased_choices(biased(logits, own, batch.source), batch.top_k, None, batch.capacity)
        by_source = jax.ops.segment_sum(chosen, batch.source, batch.num_nodes)
        return batch.weight * by_source @ share

    return jax.vmap(layer)(batch.logits, bias, batch.share)


def saved() -> list[dict]:
    """The all-to-all by lambda: by Eq. 9, by congestion and in the simulator, means of the layers."""
    top, count = network(NAME), 4 * TOKENS_PER_NODE
    fabric = fabric_of(top, CHUNK, True)
    batch = problem(tokens(count, SEED, layers=LAYERS), 0, count, top)
    batch = replace(batch, exchange=replace(batch.exchange, models=same_models(profiled())))
    shared: AllToAll = replace(batch.exchange, models=same_models(Congestion(jnp.asarray(CHUNK), True)))
    scores, made = scores_of(batch), []
    for strength in STRENGTHS:
        sent = copies_of(batch, on_experts(-strength * scores, batch.share))
        seen = []
        for copies in sent:
            stages = batch.exchange.traffic(copies).values()
            seen.append(
                sum(replay_traffic(fabric, np.asarray(each, float), "shuffled").completion_s for each in stages)
            )
        times = {
            "eq9": np.mean([float(batch.exchange.total(top, copies)) for copies in sent]),
            "congestion": np.mean([float(shared.total(top, copies)) for copies in sent]),
            "simulated": np.mean(seen),
        }
        row: dict[str, float] = {"lambda": strength}
        for name, seconds in times.items():
            first = made[0][f"{name}_ms"] if made else 1e3 * seconds
            row |= {f"{name}_ms": 1e3 * seconds, f"{name}_change_percent": 100 * (1e3 * seconds / first - 1)}
        made.append(row)
    return made


if __name__ == "__main__":
    make_tables(
        HERE, tables_of({"unlike_paths": paths, "unlike": saved}, digits=6), study_options(__doc__).parse_args()
    )
