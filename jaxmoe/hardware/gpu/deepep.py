"""DeepEP's exchanges between GPUs, by what passes the levels of a machine: processors, links of a node, the network.

The normal kernels send a token once to every other node that it has a choice on, and forward it there to each GPU; two
processors are a channel, which carries its tokens in turn. Low-latency kernels send each choice straight to its GPU.
A dispatch has vectors in FP8 with scales, a combine in BF16. Every number is fitted to measurements and is kept as its
logarithm, but for the parts of the rates of links, which are logits: no link is faster than its data sheet.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.hardware.gpu.terms import whole

NETWORK = 50e9  # B/s each way of the adapter of each GPU: 400 Gbit/s
BYTES = {"dispatch": 1 + 4 / 128, "combine": 2.0}  # of a number of a vector: FP8 with a scale for 128, BF16


LEAST = 1e-12  # s, below which a level takes no time


class Links(NamedTuple):
    """Data-sheet rates of a GPU, B/s each way: to the others of its node, and to other nodes."""

    link: Any
    network: Any = NETWORK


class Load(NamedTuple):
    """The load of one GPU in an exchange; all may have any one shape. Counts are means over GPUs.

    Each of its `tokens` has `choices` among `experts`, on so many different GPUs (`gpu_copies`) and `node_copies`
    nodes, its own included. `vector` are its bytes. There are `nodes` of `gpus` each; the normal kernels have so many
    `processors`, while low-latency ones take those of a GPU.
    """

    tokens: Any
    vector: Any
    choices: Any
    experts: Any
    gpu_copies: Any
    node_copies: Any
    nodes: Any
    gpus: Any
    processors: Any


Number = Float[Array, ""]


class NormalKernel(eqx.Module):
    """Seconds of a normal dispatch or combine without its notice.

    `launch`, and `hop` for each doubling of nodes; `first` for each byte of the first vector, and `reach` for each of
    each GPU that it goes to; `fill` until a channel has about `chunk` tokens under way; for each token of a channel
    `gpu_copy` and `gpu_byte` a GPU that it goes to, `node_copy` and `node_byte` a node. `link` and `network` are the
    parts of their rates that are reached, `overlap` how sharply the slowest of the three levels decides.
    """

    launch: Number
    hop: Number
    first: Number
    reach: Number
    fill: Number
    chunk: Number
    gpu_copy: Number
    gpu_byte: Number
    node_copy: Number
    node_byte: Number
    link: Number
    network: Number
    overlap: Number

    def seconds(self, load: Load, links: Links) -> Float[Array, "..."]:
        channel = 2 * load.tokens / load.processors
        to_gpus = load.gpu_copies * (jnp.exp(self.gpu_copy) + jnp.exp(self.gpu_byte) * load.vector)
        to_nodes = load.node_copies * (jnp.exp(self.node_copy) + jnp.exp(self.node_byte) * load.vector)
        inside = load.tokens * load.gpu_copies * (1 - 1 / load.gpus) * load.vector
        outside = load.tokens * load.node_copies * (1 - 1 / load.nodes) * load.vector
        stream = _slowest(
            self.overlap,
            channel * (to_gpus + to_nodes),
            inside / (jax.nn.sigmoid(self.link) * links.link),
            outside / (jax.nn.sigmoid(self.network) * links.network),
        )
        first = (jnp.exp(self.first) + jnp.exp(self.reach) * load.gpu_copies) * load.vector
        start = jnp.exp(self.launch) + jnp.exp(self.hop) * jnp.log2(load.nodes) + first
        return start + jnp.exp(self.fill) * -jnp.expm1(-channel / jnp.exp(self.chunk)) + stream


class Notice(eqx.Module):
    """Seconds until all GPUs of several nodes know how much comes, before a normal dispatch or combine.

    `launch`, and `hop` for each doubling of nodes; up to `late` more that GPUs are apart once they have about `many`
    tokens; `scan` for each token of a channel and node.
    """

    launch: Number
    hop: Number
    late: Number
    many: Number
    scan: Number

    def seconds(self, load: Load, links: Links) -> Float[Array, "..."]:
        apart = jnp.exp(self.late) * -jnp.expm1(-load.tokens / jnp.exp(self.many))
        scanned = 2 * load.tokens / load.processors * load.node_copies * jnp.exp(self.scan)
        return jnp.exp(self.launch) + jnp.exp(self.hop) * jnp.log2(load.nodes) + apart + scanned


class LowLatencyKernel(eqx.Module):
    """Seconds of a low-latency dispatch or combine.

    `launch`, with `expert` for each expert and `crowd` where experts share a processor; with several nodes `away` more,
    and `hop` for each doubling of them; `first` for each byte of the first token's choices. Each of a processor's
    tokens takes `token`, and `token_byte` for the bytes of its choices. `link`, `network` and `overlap` are as in the
    normal kernels. `wait` and `wait_away` tell how far start and stream overlap, within a node and across nodes.
    """

    launch: Number
    expert: Number
    crowd: Number
    away: Number
    hop: Number
    first: Number
    token: Number
    token_byte: Number
    link: Number
    network: Number
    overlap: Number
    wait: Number
    wait_away: Number

    def seconds(self, load: Load, links: Links) -> Float[Array, "..."]:
        several = jnp.where(load.nodes > 1, 1.0, 0.0)
        shared = whole(load.experts, load.processors)  # experts of a processor
        working = whole(load.experts, shared)  # processors
        sent = load.tokens * load.choices * load.vector
        stream = _slowest(
            self.overlap,
            load.tokens / working * (jnp.exp(self.token) + jnp.exp(self.token_byte) * load.choices * load.vector),
            sent / load.nodes * (1 - 1 / load.gpus) / (jax.nn.sigmoid(self.link) * links.link),
            sent * (1 - 1 / load.nodes) / (jax.nn.sigmoid(self.network) * links.network),
        )
        vectors = load.choices * load.vector
        start = jnp.exp(self.launch) + jnp.exp(self.expert) * load.experts + jnp.exp(self.first) * vectors
        start += jnp.where(shared > 1, jnp.exp(self.crowd), 0.0)
        start += several * (jnp.exp(self.away) + jnp.exp(self.hop) * jnp.log2(load.nodes))
        return _longer(1 + jnp.exp(jnp.where(several > 0, self.wait_away, self.wait)), start, stream)


ExchangeKernel = NormalKernel | Notice | LowLatencyKernel


def _slowest(overlap: Number, *seconds: Float[Array, "..."]) -> Float[Array, "..."]:
    return _longer(1 + jnp.exp(overlap), *seconds)


def _longer(power: Float[Array, "..."], *seconds: Float[Array, "..."]) -> Float[Array, "..."]:
    """A norm of times: their sum at power 1, the longest at a high one."""
    logs = jnp.log(jnp.maximum(jnp.stack(jnp.broadcast_arrays(*seconds)), LEAST))
    return jnp.exp(jax.nn.logsumexp(power * logs, axis=0) / power)


# How many different groups of experts a token's choices fall on, where each choice is as likely as another.


@cache
def copies_of(groups: int, experts: int, top_k: int, limit: int | None = None) -> float:
    """The mean number of groups with a choice of a token, of which its gate takes `limit` at most: the best ones."""
    limit = groups if limit is None else min(limit, groups)
    size = experts // groups
    every = math.comb(experts, top_k)

    def exactly(count: int) -> float:
        ways = sum((-1) ** out * math.comb(count, out) * math.comb((count - out) * size, top_k) for out in range(count))
        return math.comb(groups, count) * ways / every

    return sum(min(count, limit) * exactly(count) for count in range(1, groups + 1))
