"""A process that draws gating like that of a model: requests, topics, preferences of tokens; and its files."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import scipy  # imports its submodules when they are first used
from jaxtyping import Array, Float, Int

from jaxmoe.files import atomic_write
from jaxmoe.traces.formats.arrays import read_arrays
from jaxmoe.traces.trace import DECODE, MAX_EXPERTS, PREFILL, GatingTrace, TraceError, tally

# What requests look like: how long they are, how much of them is prompt, and how their topic moves.


@dataclass(frozen=True)
class RequestDeck:
    """Requests to deal from, in the order of their recording. Raises `TraceError` for parts that do not fit.

    `length` in tokens, int [request]; `prompt` how many of them are prefill, int [request], or `None` where not
    known; `topics` the topic of every stretch of `window` tokens, int [request, stretch], of which a request uses
    as many as it needs; `drift` in [0, 1] is how far dealing keeps to the recorded order: 0 shuffles the deck, so
    the mixture of topics is the same all along; 1 keeps it, so the mixture drifts over time as it was recorded.
    """

    length: np.ndarray
    prompt: np.ndarray | None
    topics: np.ndarray
    window: int
    drift: float

    def __post_init__(self) -> None:
        requests = len(self.length)
        if self.length.ndim != 1 or requests == 0 or self.length.min() < 1:
            raise TraceError("a process needs requests of at least one token each")
        if self.topics.ndim != 2 or len(self.topics) != requests or self.topics.min(initial=0) < 0:
            raise TraceError(f"topics has shape {self.topics.shape}, expected [{requests}, stretches] from 0 up")
        if self.window < 1 or self.topics.shape[1] * self.window < self.length.max():
            raise TraceError(f"topics of {self.topics.shape[1]} x {self.window} tokens do not cover every request")
        if self.prompt is not None:
            if self.prompt.shape != self.length.shape:
                raise TraceError(f"prompt has shape {self.prompt.shape}, expected one number for each request")
            if ((self.prompt < 0) | (self.prompt > self.length)).any():
                raise TraceError("prompt holds a number of tokens that its request does not have")
        if not 0 <= self.drift <= 1:
            raise TraceError(f"drift is {self.drift}, expected a number from 0 to 1")

    def deal(self, tokens: int, seed: int) -> "Deal":
        """Draws requests until they have `tokens` tokens; the last is cut short.

        Every request is drawn once before any is drawn again. Raises `TraceError` for fewer than 1 token.
        """
        if tokens < 1:
            raise TraceError(f"tokens is {tokens}, expected at least 1")
        rng = np.random.default_rng((seed, 0))
        deck, place = len(self.length), np.arange(len(self.length)) / len(self.length)
        rounds = -(-tokens // int(self.length.sum()))
        order = [np.argsort(self.drift * place + (1 - self.drift) * rng.random(deck)) for _ in range(rounds)]
        card = np.concatenate(order)
        ends = np.cumsum(self.length[card])
        card = card[: int(np.searchsorted(ends, tokens)) + 1]
        length = self.length[card].copy()
        length[-1] -= length.sum() - tokens
        return Deal(self, card, length)


@dataclass(frozen=True)
class Deal:
    """Requests dealt: `card` says which of the deck, int [request]; `length` how many tokens of it, int [request]."""

    requests: RequestDeck
    card: np.ndarray
    length: np.ndarray

    @property
    def seq_start(self) -> np.ndarray:
        """The first token of every request."""
        return np.cumsum(self.length) - self.length

    def topic(self, request: np.ndarray, position: np.ndarray) -> np.ndarray:
        """The topic of tokens, given by their request and their position in it."""
        return self.requests.topics[self.card[request], position // self.requests.window]

    def phase(self, request: np.ndarray, position: np.ndarray) -> np.ndarray:
        """The phase of tokens, prefill where nothing is known, int8."""
        prompt = self.requests.prompt
        if prompt is None:
            return np.full(request.shape, PREFILL, np.int8)
        return np.where(position < prompt[self.card[request]], PREFILL, DECODE).astype(np.int8)

    def phases(self) -> np.ndarray | None:
        """The phase of every token, int8 [token]; `None` where nothing is known."""
        if self.requests.prompt is None:
            return None
        request = np.repeat(np.arange(len(self.length)), self.length)
        return self.phase(request, np.arange(len(request)) - self.seq_start[request])


# Topics of a recorded trace: stretches of tokens with similar loads, found by clustering.

WINDOW = 64  # tokens: long enough for loads to show, short enough for a topic to change inside a request
MOST_TOPICS = 16
STRETCHES_PER_TOPIC = 8
DIMENSIONS = 32  # of the space to cluster in
RESTARTS = 8


def find_topics(trace: GatingTrace, seed: int) -> np.ndarray:
    """The topic of every token, int [token], alike for stretches of about `WINDOW` tokens of one request.

    Stretches are clustered by their loads in all layers: k-means on the main directions. Loads enter as square
    roots of shares, whose noise is even. Few stretches make few topics.
    """
    length = np.diff(trace.seq_start, append=trace.num_tokens)
    # What is left at the end of a request is too short to tell its topic and goes with the stretch before.
    number = np.maximum(1, np.round(length / WINDOW).astype(int))
    request = np.repeat(np.arange(len(length)), length)
    position = np.arange(trace.num_tokens) - trace.seq_start[request]
    stretch = (np.cumsum(number) - number)[request] + np.minimum(position // WINDOW, number[request] - 1)
    stretches = int(number.sum())
    ends = np.searchsorted(stretch, np.arange(1, stretches))
    loads = np.stack([tally(rows, trace.num_experts) for rows in np.split(trace.experts, ends)])
    different = len(np.unique(loads, axis=0))
    topics = min(MOST_TOPICS, max(1, stretches // STRETCHES_PER_TOPIC), different)
    if topics == 1:
        return np.zeros(trace.num_tokens, int)
    share = np.sqrt(loads / np.maximum(loads.sum(axis=2, keepdims=True), 1)).reshape(stretches, -1)
    left, strength, _ = np.linalg.svd(share - share.mean(axis=0), full_matrices=False)
    points = (left * strength)[:, :DIMENSIONS]
    return _clustered(points, topics, seed)[stretch]


def _clustered(points: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """The best of several k-means runs, int [point]."""
    best, labels = np.inf, np.zeros(len(points), int)
    for restart in range(RESTARTS):
        rng = np.random.default_rng((seed, restart))
        try:
            centres, found = scipy.cluster.vq.kmeans2(points, clusters, minit="++", missing="raise", rng=rng)
        except scipy.cluster.vq.ClusterError:  # a cluster has lost all its points
            continue
        spread = float(((points - centres[found]) ** 2).sum())
        if spread < best:
            best, labels = spread, found
    return labels


# A random process that chooses experts: what a generator of gating is made of.
#
# In every layer a token chooses K different experts one after the other, each with a probability that goes as the
# expert's weight among those not yet chosen. The logarithm of a weight is a sum of
#
# - how popular the expert is in that layer,
# - how the topic of the moment favours it, the phase (prefill or decode), and, for the first tokens of a request, their
#   position (many requests begin with the same words),
# - what each expert that the token chose in the layer before adds (cross-layer relation, Ob1),
# - what each expert that the token before chose in this layer adds (cross-token relation, Ob2),
# - what each expert that the token has already chosen in this layer adds (co-activation, Ob5).
#
# Ob1 to Ob5 are the observations of the wafer-scale study of data movement (III), and the last three terms are its
# heatmaps as log-odds. The process is the distribution of largest entropy with given popularity and pair relations, in
# the order of choice. All of it is ours; no paper gives a generator.


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
        """Log-weights at the first token of a request, in place of `from_token`: its expected sum over the experts that
        an average token chooses."""
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
    groups of neighbouring experts: the groups of the experts drawn first. 1 of 1 is no limit.
    """

    preferences: Preferences
    requests: RequestDeck
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


# Files of processes: `process.npz`, the arrays of a `GatingProcess` under their own names.

VERSION = 1
PREFERENCES = tuple(field.name for field in fields(Preferences))
SQUARE = ("from_layer", "from_token", "together")
NUMBERS = ("top_k", "expert_groups", "groups_per_token")
REQUIRED = {*PREFERENCES, *NUMBERS, "length", "request_topics", "window", "drift", "layer_ids", "facts"}


def write_process(path: Path, process: GatingProcess) -> None:
    """Write a process; an older file of that name is replaced at once, or not at all."""
    requests = process.requests
    arrays: dict[str, Any] = {
        "process_version": VERSION,
        **{name: np.asarray(getattr(process.preferences, name), np.float32) for name in PREFERENCES},
        "length": requests.length,
        "request_topics": requests.topics,
        "window": requests.window,
        "drift": float(requests.drift),
        "layer_ids": np.asarray(process.layer_ids),
        **{name: getattr(process, name) for name in NUMBERS},
        "facts": json.dumps(process.facts),
    }
    if requests.prompt is not None:
        arrays["prompt"] = requests.prompt
    with atomic_write(path) as aside, aside.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_process(path: Path) -> GatingProcess:
    """Read a process. Raises `TraceError` with the file's name for anything else."""
    if not path.exists():
        raise TraceError(f"{path}: no such file; check the path")
    try:
        return _process(read_arrays(path))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def _process(arrays: dict[str, np.ndarray]) -> GatingProcess:
    missing = sorted(REQUIRED - arrays.keys())
    if missing:
        remedy = "fit a process to this trace" if "experts" in arrays else "write it again"
        raise TraceError(f"is no process, it has no {', '.join(missing)}; {remedy} with jaxmoe trace fit")
    version = arrays.get("process_version")
    if version is None or version.tolist() != VERSION:
        raise TraceError(f"is of version {version}, expected {VERSION}; fit the process again")
    _check(arrays)
    return GatingProcess(
        preferences=Preferences(**{name: jnp.asarray(np.asarray(arrays[name], np.float32)) for name in PREFERENCES}),
        requests=RequestDeck(
            arrays["length"],
            arrays.get("prompt"),
            arrays["request_topics"],
            int(arrays["window"]),
            float(arrays["drift"]),
        ),
        layer_ids=tuple(arrays["layer_ids"].tolist()),
        facts=_facts(arrays["facts"]),
        **{name: int(arrays[name]) for name in NUMBERS},
    )


def _check(arrays: dict[str, np.ndarray]) -> None:
    """Raise `TraceError` for an array that has not the type and shape it should have."""
    size = arrays["popularity"].shape
    if len(size) != 2 or 0 in size:
        raise TraceError(f"popularity has shape {size}, expected non-empty [layer, expert]")
    floats = dict.fromkeys(PREFERENCES, size) | dict.fromkeys(SQUARE, (*size, size[1])) | {"drift": ()}
    floats |= {"topics": (*arrays["topics"].shape[:1], *size), "phases": (2, *size)}
    floats |= {"first_tokens": (max(1, *arrays["first_tokens"].shape[:1]), *size)}
    counts = dict.fromkeys((*NUMBERS, "window"), ()) | {"layer_ids": size[:1]}
    # Requests check how these fit together.
    counts |= {"length": (arrays["length"].size,), "request_topics": arrays["request_topics"].shape}
    if "prompt" in arrays:
        counts["prompt"] = arrays["prompt"].shape
    for kinds, kind, shapes in (("f", "finite numbers", floats), ("iu", "whole numbers", counts)):
        for name, shape in shapes.items():
            array = arrays[name]
            if array.shape != shape or array.dtype.kind not in kinds or not np.isfinite(array).all():
                raise TraceError(f"{name} is {array.dtype} of shape {array.shape}, expected {kind} of shape {shape}")


def _facts(text: np.ndarray) -> dict[str, str]:
    try:
        return {str(name): str(fact) for name, fact in dict(json.loads(str(text))).items()}
    except (ValueError, TypeError, RecursionError):
        raise TraceError(f"facts is {str(text)[:40]!r}, expected a JSON object") from None
