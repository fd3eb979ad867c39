"""What all tables of this study start from: model, network, experts, tokens, and what an all-to-all costs there."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.config import build_model, build_topology, load_hardware, load_model
from jaxmoe.methods.camoe.gate import GateProblem, standard_scores, time_proxy, unbiased_copies
from jaxmoe.network import alpha_beta
from jaxmoe.network.pairwise import AllToAll, same_models
from jaxmoe.traces import GatingTrace
from jaxmoe.traces.synthesis import PRESETS, sample_trace

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = build_model(load_model(str(ROOT / "configs" / "models" / "qwen3-30b-a3b.yaml"), "model"))
EXPERTS, TOP_K, LAYERS = MODEL.num_experts, MODEL.top_k, len(MODEL.moe_layer_ids)
ELEMENT = 2.0  # B, FP16
COUNT = PROBABILITY = 4.0  # B of a count of tokens, and of a routing probability: not stated
STRENGTHS = (0.0, 0.05, 0.10, 0.15, 0.20, 0.25)

# Calibrated, each on one figure: see README.md. Popularity of experts is calibrated in the preset.
TOKENS_PER_NODE = 1523  # on the mean of 177.56 ms without bias
LOGIT_SCALE = 1.31  # on the mean at lambda 0.25


def network(name: str = "camoe_4nodes"):
    """A machine's network."""
    return build_topology(load_hardware(ROOT / "configs" / "hardware" / f"{name}.yaml"))


def costs(topology, experts: int = EXPERTS, hidden: int = MODEL.hidden_size) -> AllToAll:
    """Eq. 9 with alpha and beta of hops."""
    vector = hidden * ELEMENT
    sizes = (experts * COUNT, vector + PROBABILITY, vector)
    return AllToAll(same_models(alpha_beta(topology)), *(jnp.asarray(size, jnp.float32) for size in sizes))


def contiguous(nodes: int, layers: int = LAYERS, experts: int = EXPERTS) -> jax.Array:
    """Experts on nodes in equal runs, as ones, [layer, expert, node]."""
    one = np.repeat(np.eye(nodes, dtype=np.float32), experts // nodes, axis=0)
    return jnp.asarray(np.broadcast_to(one, (layers, *one.shape)))


def tokens(count: int, seed: int, preset: str = "qwen3-30b-a3b", layers: int | None = None) -> GatingTrace:
    """A synthetic trace with logits of unit scale."""
    return sample_trace(PRESETS[preset].process(layers=layers), count, seed, logits=1.0)


def problem(
    trace: GatingTrace,
    first: int,
    count: int,
    topology,
    nodes_tokens: int = TOKENS_PER_NODE,
    scale: float = LOGIT_SCALE,
) -> GateProblem:
    """A batch of the trace, successive tokens on successive nodes; fewer tokens stand for a whole batch."""
    nodes = topology.num_nodes
    logits = scale * np.moveaxis(trace.logits[first : first + count], 1, 0)
    return GateProblem(
        exchange=costs(topology),
        topology=topology,
        logits=jnp.asarray(logits, jnp.float32),
        source=jnp.asarray(np.arange(count) * nodes // count, jnp.int32),
        share=contiguous(nodes, len(logits), logits.shape[2]),
        weight=jnp.asarray(nodes * nodes_tokens / count, jnp.float32),
        top_k=trace.top_k,
    )


def scores_of(problem: GateProblem, own: str = "counted") -> jax.Array:
    """Scores of every layer by an unbiased pass, [layer, source, node]."""
    return jax.vmap(lambda copies: standard_scores(time_proxy(problem.exchange, copies), own))(unbiased_copies(problem))
