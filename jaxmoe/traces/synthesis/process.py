"""A random process that chooses experts: what a generator of gating is made of.

In every layer a token chooses K different experts one after the other, each with a probability that goes as the
expert's weight among those not yet chosen. The logarithm of a weight is a sum of

- how popular the expert is in that layer,
- how the topic of the moment favours it, the phase (prefill or decode), and, for the first tokens of a request, their
  position (many requests begin with the same words),
- what each expert that the token chose in the layer before adds (cross-layer relation, Ob1),
- what each expert that the token before chose in this layer adds (cross-token relation, Ob2),
- what each expert that the token has already chosen in this layer adds (co-activation, Ob5).

Ob1 to Ob5 are the observations of the wafer-scale study of data movement (III), and the last three terms are its
heatmaps as log-odds. The process is the distribution of largest entropy with given popularity and pair relations,
in the order of choice. All of it is ours; no paper gives a generator.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.traces.synthesis.requests import Requests
from jaxmoe.traces.trace import MAX_EXPERTS, TraceError


class Preferences(eqx.Module):
    """Log-weights, dimensionless. Rows of the square tables are what was chosen before, columns what it adds to."""

    popularity: Float[Array, "layer expert"]
    topics: Float[Array, "topic layer expert"]
    phases: Float[Array, "2 layer expert"]  # prefill, decode
    first_tokens: Float[Array, "position layer expert"]  # of a request; later ones have none
    from_layer: Float[Array, "layer expert expert"]  # the first layer has none before it: its table is not used
    from_token: Float[Array, "layer expert expert"]
    together: Float[Array, "layer expert expert"]
    # The part of tokens that choose an expert: stands in for the token before the first of a request.
    usual: Float[Array, "layer expert"]

    @property
    def opening(self) -> Float[Array, "layer expert"]:
        """What `from_token` adds at the first token of a request: its mean over usual tokens."""
        return jnp.einsum("le,lef->lf", self.usual, self.from_token)

    def background(
        self, topic: Int[Array, " lane"], phase: Int[Array, " lane"], position: Int[Array, " lane"]
    ) -> Float[Array, "layer lane expert"]:
        """The log-weights that do not depend on choices, of tokens at a position of their request."""
        last = len(self.first_tokens) - 1
        first = jnp.where((position <= last)[:, None, None], self.first_tokens[jnp.minimum(position, last)], 0.0)
        return self.popularity[:, None] + jnp.swapaxes(self.topics[topic] + self.phases[phase] + first, 0, 1)

    def first_layers(self, count: int) -> "Preferences":
        """Those of the first layers alone."""
        second = {"topics", "phases", "first_tokens"}  # whose second axis is the layer
        parts = {part.name: np.asarray(getattr(self, part.name)) for part in fields(self)}
        kept = {name: part[:, :count] if name in second else part[:count] for name, part in parts.items()}
        return Preferences(**{name: jnp.asarray(part) for name, part in kept.items()})


@dataclass(frozen=True)
class GatingProcess:
    """A generator of gating traces. Raises `TraceError` when the parts do not fit together.

    Group-limited routing (DeepSeek-V3) lets a token choose only from `groups_per_token` of `expert_groups` equal
    groups of neighbouring experts: those of the first experts to win. 1 of 1 is no limit.
    """

    preferences: Preferences
    requests: Requests
    layer_ids: tuple[int, ...]
    top_k: int
    facts: dict[str, str]
    expert_groups: int = 1
    groups_per_token: int = 1

    def __post_init__(self) -> None:
        layers, experts = self.preferences.popularity.shape
        if len(self.layer_ids) != layers:
            raise TraceError(f"the process has {layers} layers, but {len(self.layer_ids)} layer ids")
        if len(set(self.layer_ids)) < layers:
            raise TraceError(f"layer_ids names a layer twice: {list(self.layer_ids)}")
        if not 1 <= experts <= MAX_EXPERTS:
            raise TraceError(f"the process has {experts} experts, expected 1 to {MAX_EXPERTS}")
        if self.expert_groups < 1 or experts % self.expert_groups:
            raise TraceError(f"expert_groups is {self.expert_groups}, expected a divisor of the {experts} experts")
        allowed = experts // self.expert_groups * self.groups_per_token
        if not 1 <= self.groups_per_token <= self.expert_groups or not 1 <= self.top_k <= allowed:
            raise TraceError(
                f"a token chooses {self.top_k} experts from {self.groups_per_token} of {self.expert_groups} groups of "
                f"{experts // self.expert_groups}; raise groups_per_token or lower top_k"
            )
        if int(self.requests.topics.max()) >= len(self.preferences.topics):
            raise TraceError(
                f"requests name topic {self.requests.topics.max()}, but the process has {len(self.preferences.topics)}"
            )

    @property
    def num_experts(self) -> int:
        return self.preferences.popularity.shape[1]

    def up_to(self, layer_ids: Iterable[int]) -> "GatingProcess":
        """The process without the layers above all of these: no choice depends on layers above it, so what is drawn
        for those left stays the same. With a layer that it does not have, the whole process."""
        there = {layer: row for row, layer in enumerate(self.layer_ids)}
        count = 1 + max(there.get(layer, len(there) - 1) for layer in layer_ids)
        return replace(self, preferences=self.preferences.first_layers(count), layer_ids=self.layer_ids[:count])
