"""Processes for models whose traces are not at hand, from what the wafer-scale study of data movement tells of them.

The study gives a few figures of each model (III-B, III-C): which share of all pairs the most frequent 20 % of
cross-layer and cross-token pairs make up, and the most frequent 10 % of co-activated pairs; and how far the busiest
expert is above the mean. A preset is a process with random tables whose few strengths are set so that traces of it
have these figures. It is like the model in these figures alone; which experts are popular, and together, is made up.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxmoe.traces.synthesis.process import GatingProcess, Preferences, RequestDeck
from jaxmoe.traces.trace import TraceError

REQUESTS, WINDOW = 256, 64
TOPICS, TOPIC_STRENGTH = 16, 0.4  # log-weights; about what fits to recorded traces find
STAY = 0.8  # the chance that a stretch keeps the topic of the one before
PROMPT, ANSWER, SPREAD = 256, 384, 0.6  # median tokens, and the width of their logarithms


@dataclass(frozen=True)
class Targets:
    """Target statistics for traces of a preset, as means over layers; `None` where the study gives no value."""

    layer_pair_coverage_top20: float | None
    token_pair_coverage_top20: float | None
    coactivation_coverage_top10: float | None
    load_max_over_mean: float | None
    assumed: tuple[str, ...]  # which of them the study does not give, or gives for another model
    global_cv: float | None = None  # of loads added up over layers, and the mean of each layer's own (camoe, Table 2)
    avg_layer_cv: float | None = None


@dataclass(frozen=True)
class Preset:
    """A model's shape and the strengths of its process: widths of normal log-weights, and how much circles of experts
    that go together favour each other.
    """

    model: str
    num_experts: int
    top_k: int
    layer_ids: range
    targets: Targets
    popularity: float
    from_layer: float
    from_token: float
    together: float
    expert_groups: int = 1
    groups_per_token: int = 1
    shared: float = 0.0  # part of the variance of popularity that experts of one number share over layers

    def process(self, seed: int = 0, layers: int | None = None) -> GatingProcess:
        """The process of this preset, of all layers or the first few. The seed draws its tables and requests."""
        ids = tuple(self.layer_ids)[:layers]
        size = (len(ids), self.num_experts)
        # A generator for each table: the first layers are the same however many there are.
        *own, common = np.random.default_rng(seed).spawn(7)
        rngs, width = iter(own), self.popularity
        alike = _normal(common, self.shared**0.5 * width, (self.num_experts,))
        tables = {  # made by NumPy: JAX would compile every shape
            "popularity": _normal(next(rngs), (1 - self.shared) ** 0.5 * width, size) + alike,
            "topics": _normal(next(rngs), TOPIC_STRENGTH, (size[0], TOPICS, size[1])).swapaxes(0, 1),
            "phases": np.zeros((2, *size), np.float32),
            "first_tokens": np.zeros((1, *size), np.float32),
            "from_layer": _normal(next(rngs), self.from_layer, (*size, self.num_experts)),
            "from_token": _normal(next(rngs), self.from_token, (*size, self.num_experts)) + self._diagonal(size[0]),
            "together": _affinity(next(rngs), self.together, size, self.expert_groups, self.top_k),
            "usual": np.full(size, self.top_k / self.num_experts, np.float32),
        }
        return GatingProcess(
            preferences=Preferences(**{name: jnp.asarray(table) for name, table in tables.items()}),
            requests=_requests(next(rngs)),
            layer_ids=ids,
            top_k=self.top_k,
            expert_groups=self.expert_groups,
            groups_per_token=self.groups_per_token,
            facts={
                "model": f"synthetic, like {self.model}",
                "dataset": "none: synthetic",
                "source": "synthetic: drawn by jaxmoe from a preset with the published figures of "
                f"{self.model}, not recorded from it",
            },
        )

    def _diagonal(self, layers: int) -> np.ndarray:
        """How much a choice speaks for itself at the next token: from nothing in the lowest layer to 1 (Ob2)."""
        depth = np.linspace(0, 1, len(self.layer_ids), dtype=np.float32)[:layers]
        return depth[:, None, None] * np.eye(self.num_experts, dtype=np.float32)


def _normal(rng: np.random.Generator, width: float, shape: tuple[int, ...]) -> np.ndarray:
    return np.float32(width) * rng.standard_normal(shape, np.float32)


def _affinity(rng: np.random.Generator, strength: float, shape: tuple[int, int], groups: int, top_k: int) -> np.ndarray:
    """Log-weights that a chosen expert adds to others of its token, [layer, chosen, other].

    They are `strength` inside random circles of 3 K / 2 experts of one group, and 0 between circles.
    """
    layers, experts = shape
    size = experts // groups
    order = rng.permuted(np.broadcast_to(np.arange(size), (layers, groups, size)), axis=2).reshape(layers, experts)
    group = np.arange(experts) // size
    circle = group * size + order // min(size, 3 * top_k // 2)
    return (strength * (circle[:, :, None] == circle[:, None])).astype(np.float32)


def _requests(rng: np.random.Generator) -> RequestDeck:
    """Requests with a prompt and an answer of log-normal lengths, whose topic moves as a Markov chain."""
    prompt, answer = (
        np.maximum(1, np.exp(np.log(median) + SPREAD * rng.standard_normal(REQUESTS)).astype(int))
        for median in (PROMPT, ANSWER)
    )
    length = prompt + answer
    stretches = -(-int(length.max()) // WINDOW)
    fresh = rng.random((REQUESTS, stretches)) >= STAY
    fresh[:, 0] = True
    since = np.maximum.accumulate(np.where(fresh, np.arange(stretches), 0), axis=1)
    topics = np.take_along_axis(rng.integers(TOPICS, size=fresh.shape), since, axis=1)
    return RequestDeck(length, prompt, topics, WINDOW, drift=0.0)


PRESETS = {
    "deepseek-v3": Preset(
        model="DeepSeek-V3",
        num_experts=256,
        top_k=8,
        layer_ids=range(3, 61),
        targets=Targets(0.45, 0.40, 0.60, 2.5, ("load_max_over_mean",)),
        popularity=0.315,
        from_layer=0.454,
        from_token=0.23,
        together=2.097,
        expert_groups=8,
        groups_per_token=4,
    ),
    "qwen3-235b-a22b": Preset(
        model="Qwen3-235B-A22B",
        num_experts=128,
        top_k=8,
        layer_ids=range(94),
        targets=Targets(0.68, 0.53, 0.80, 2.8, ("token_pair_coverage_top20", "load_max_over_mean")),
        popularity=0.55,
        from_layer=5.2,
        from_token=2.1,
        together=10.5,
    ),
    "llama-4-maverick": Preset(
        model="Llama-4-Maverick",
        num_experts=128,
        top_k=1,
        layer_ids=range(1, 48, 2),
        targets=Targets(0.80, 0.80, None, 12.0, ("load_max_over_mean",)),
        popularity=1.141,
        from_layer=0.631,
        from_token=0.605,
        together=0.0,
    ),
    "qwen3-30b-a3b": Preset(
        model="Qwen3-30B-A3B",
        num_experts=128,
        top_k=8,
        layer_ids=range(48),
        targets=Targets(None, None, None, None, (), global_cv=0.3368, avg_layer_cv=1.5118),
        popularity=1.262,
        from_layer=0.0,
        from_token=0.0,
        together=0.0,
        shared=0.05,
    ),
    "kimi-k2": Preset(
        model="Kimi-K2",
        num_experts=384,
        top_k=8,
        layer_ids=range(1, 61),
        targets=Targets(
            0.55,
            0.50,
            0.70,
            3.0,
            ("token_pair_coverage_top20", "coactivation_coverage_top10", "load_max_over_mean"),
        ),
        popularity=0.599,
        from_layer=0.889,
        from_token=0.661,
        together=3.286,
    ),
}


def preset_process(name: str) -> GatingProcess:
    """The process of the preset of this name. Raises `TraceError` that lists the names for an unknown one."""
    if name not in PRESETS:
        raise TraceError(f"{name!r} is no preset and no file of a process; expected one of {', '.join(PRESETS)}")
    return PRESETS[name].process()
