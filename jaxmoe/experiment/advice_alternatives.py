"""Other changes than placement, timed beside the placement that is advised."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmoe.config import build_model
from jaxmoe.engine import Decisions
from jaxmoe.engine.copies import replica_model
from jaxmoe.experiment.advice import Case, Slots, Windows
from jaxmoe.experiment.replica_plans import EXCHANGE, drawn_tokens, served_by
from jaxmoe.network import build_exchange
from jaxmoe.placement.slots import share_of_slots
from jaxmoe.traces import Batch

MOST_LAYERS = 8  # evenly spaced ones, whose mean tells what else could be changed


def alternatives(case: Case, slots: Slots, windows: Windows) -> tuple[dict[str, float], int]:
    """Seconds of a token in the experts of a layer, by the name of what is changed instead of placement.

    Tensor parallelism of all experts over all ranks, results that come back along trees, and a batch twice as large,
    beside experts as numbered and the `slots` advised; all of tokens drawn from the loads. Means over layers, of which
    the number is returned too.
    """
    layer, moe = case.layer(), build_model(case.scenario.model)
    nodes, experts = layer.machine.num_nodes, moe.num_experts
    rows = np.unique(np.linspace(0, len(slots) - 1, MOST_LAYERS).round().astype(int))
    even = jnp.full((experts, nodes), 1 / nodes)
    whole = jnp.asarray(np.eye(nodes)[np.arange(experts) * nodes // experts], jnp.float32)

    def drawn(times: int) -> Batch:
        loads = windows.mean(axis=0)[rows]
        made = [drawn_tokens(row, times * case.tokens, moe.top_k, case.seed) for row in loads]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *made)

    def seconds(batches: Batch, share: Array, exchange: str = EXCHANGE, served: Array | None = None) -> float:
        made = build_exchange(exchange, layer.machine.topology)

        def total(given: tuple[Batch, Array, Array | None]) -> Array:
            batch, share, served = given
            return layer.time(Decisions(share, made, served), batch).total

        shares = jnp.broadcast_to(share, (len(rows), experts, nodes))
        return float(jax.lax.map(total, (batches, shares, served)).mean()) / batches.weight.shape[1]

    once, twice = drawn(1), drawn(2)
    model, advised = replica_model(layer, case.choice), slots[rows]
    served = served_by(model, advised, jax.tree.map(lambda leaf: leaf[:, None], once), experts)[:, 0]
    told = {
        "as numbered": seconds(once, whole),
        "as numbered, along trees": seconds(once, whole, f"{EXCHANGE}_tree"),
        "as numbered, twice the batch": seconds(twice, whole),
        "tensor parallelism over all ranks": seconds(once, even, "ring_both_ways"),
        "as advised": seconds(once, jnp.asarray(share_of_slots(advised, experts, nodes)), served=jnp.asarray(served)),
    }
    return told, len(rows)
