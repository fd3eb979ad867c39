"""Fitting a process to a recorded trace."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

from jaxmoe.traces.statistics import TOP_PAIRS, TOP_TOGETHER, PairCounts, count_pairs, coverage, every_pair, pairs_above
from jaxmoe.traces.synthesis.process import WINDOW, GatingProcess, Preferences, RequestDeck, find_topics
from jaxmoe.traces.synthesis.sampling import sample_trace
from jaxmoe.traces.trace import MISSING, PREFILL, GatingTrace, tally

# How likely recorded choices are under preferences, which is what fitting maximises.

OUT = 1e9  # below every log-weight: an expert that is out of the race


class Choices(eqx.Module):
    """Recorded tokens with what they depend on. A missing choice is -1 and counts nowhere."""

    experts: Int[Array, "token layer top_k"]
    before: Int[Array, "token layer top_k"]  # of the token before; anything at position 0
    position: Int[Array, " token"]  # in its request
    topic: Int[Array, " token"]
    phase: Int[Array, " token"]


def log_likelihood(preferences: Preferences, choices: Choices) -> Float[Array, ""]:
    """Mean over tokens of the logarithm of the probability of all their choices, in their order, in nats.

    Group limits are left out: which groups lost is not recorded.
    """
    below = jnp.pad(choices.experts[:, :-1], ((0, 0), (1, 0), (0, 0)), constant_values=MISSING)
    opens = (choices.position == 0)[:, None, None]
    log_weights = jnp.swapaxes(preferences.background(choices.topic, choices.phase, choices.position), 0, 1)
    log_weights += _added(preferences.from_layer, below)
    log_weights += jnp.where(opens, preferences.opening, _added(preferences.from_token, choices.before))
    total, taken = jnp.zeros(()), jnp.zeros(log_weights.shape, bool)
    for chosen in jnp.moveaxis(choices.experts, 2, 0)[..., None]:
        normaliser = jax.nn.logsumexp(jnp.where(taken, -OUT, log_weights), axis=-1, keepdims=True)
        log_weight = jnp.take_along_axis(log_weights, jnp.maximum(chosen, 0), axis=-1)
        total += jnp.where(chosen != MISSING, log_weight - normaliser, 0.0).sum()
        taken |= chosen == jnp.arange(log_weights.shape[2])
        log_weights += _added(preferences.together, chosen)
    return total / len(choices.topic)


def _added(
    table: Float[Array, "layer expert expert"], chosen: Int[Array, "token layer choice"]
) -> Float[Array, "token layer expert"]:
    """Sum of the table rows of chosen experts, which is added to the layer's log-weights; a missing choice adds 0.

    Taking rows is several times as fast as a product with one-hot choices.
    """
    layer = jnp.arange(len(table))[:, None]
    rows = table[layer, jnp.maximum(chosen, 0)]
    return jnp.where((chosen != MISSING)[..., None], rows, 0.0).sum(axis=2)


# Fitting a process to a recorded trace: likelihood first, then the few figures that drawing alone gets wrong.

STEPS = 300
STEPS_PER_CALL = 50
BATCH = 512  # tokens of a step
LEARNING_RATE = 0.05
LONGEST_REQUEST = 2048  # tokens; longer ones are taken for several
FIRST_TOKENS = 32  # of a request that have preferences of their own: prompts often begin alike
MOST_TOKENS = 2**15  # of what is fitted; of a longer trace, requests spread over all of it
CORRECTIONS = 8  # rounds of drawing and correcting

Report = Callable[[str, int, int], None]
"""Called with the stage, the steps done and the steps in all."""


def fit_process(trace: GatingTrace, seed: int, report: Report = lambda *_: None) -> GatingProcess:
    """A process whose traces are like this one.

    Preferences maximise the likelihood of the choices, with a normal prior of unit width on every preference but
    popularity. A drawn trace sees its own choices in place of recorded ones, and errors of one choice are handed
    on to the next; so popularity, the strength of every layer's relations, and how much a token repeats the choices
    of the one before are then corrected until drawn traces have the recorded loads, coverage and reuse.
    """
    trace = _with_short_requests(fitted_part(trace))
    topic = find_topics(trace, seed)
    preferences = _most_likely(trace, topic, seed, report)
    process = GatingProcess(
        preferences=preferences,
        requests=_requests(trace, topic),
        layer_ids=tuple(trace.layer_ids.tolist()),
        top_k=trace.top_k,
        facts={
            "model": f"synthetic, like {trace.facts.get('model', 'a trace of an unnamed model')}",
            "dataset": f"synthetic, like {trace.facts.get('dataset', 'an unnamed dataset')}",
            "source": "synthetic: drawn by jaxmoe from a process fitted to "
            f"{trace.num_tokens} tokens of {trace.facts.get('source', 'an unnamed source')}",
        },
    )
    return _corrected(process, trace, seed, report)


def fitted_part(trace: GatingTrace) -> GatingTrace:
    """Returns the part of a trace that a process is fitted to.

    A trace of more than `MOST_TOKENS` tokens is thinned: every n-th request is kept, after long ones are cut.
    """
    if trace.num_tokens <= MOST_TOKENS:
        return trace
    trace = _with_short_requests(trace)
    request = np.searchsorted(trace.seq_start, np.arange(trace.num_tokens), side="right") - 1
    return trace.select_tokens(np.flatnonzero(request % -(-trace.num_tokens // MOST_TOKENS) == 0))


def _with_short_requests(trace: GatingTrace) -> GatingTrace:
    """The trace with long requests cut."""
    length = np.diff(trace.seq_start, append=trace.num_tokens)
    pieces = -(-length // LONGEST_REQUEST)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of a piece in its request
    names = trace.seq_name and tuple(np.repeat(trace.seq_name, pieces).tolist())
    return replace(trace, seq_start=np.repeat(trace.seq_start, pieces) + number * LONGEST_REQUEST, seq_name=names)


def _requests(trace: GatingTrace, topic: np.ndarray) -> RequestDeck:
    """The requests of the trace, with the topic of each stretch of `WINDOW` tokens."""
    length = np.diff(trace.seq_start, append=trace.num_tokens)
    stretches = -(-int(length.max()) // WINDOW)
    # After its end a request keeps its last topic.
    at = np.minimum(np.arange(stretches) * WINDOW, length[:, None] - 1)
    prompt = None
    if trace.phase is not None:
        prompt = np.add.reduceat((trace.phase == PREFILL).astype(int), trace.seq_start)
    topics = topic[trace.seq_start[:, None] + at]
    request = np.repeat(np.arange(len(length)), length)
    return RequestDeck(length, prompt, topics, WINDOW, drift=_drift(topic, request))


def _drift(topic: np.ndarray, request: np.ndarray) -> float:
    """How much more than any two requests, those that follow each other are of the same topics, from 0 to 1.

    Similarity is the cosine of how many tokens have each topic.
    """
    tokens = np.zeros((int(request[-1]) + 1, int(topic.max()) + 1))
    np.add.at(tokens, (request, topic), 1)
    if len(tokens) < 2:
        return 0.0
    unit = tokens / np.linalg.norm(tokens, axis=1, keepdims=True)
    chance = float((unit @ unit.T)[~np.eye(len(unit), dtype=bool)].mean())
    same = float((unit[1:] * unit[:-1]).sum(axis=1).mean())
    return 0.0 if chance >= 1 else min(1.0, max(0.0, (same - chance) / (1 - chance)))


def _most_likely(trace: GatingTrace, topic: np.ndarray, seed: int, report: Report) -> Preferences:
    """Preferences of largest likelihood and prior, by stochastic gradient ascent (Adam)."""
    choices = _choices(trace, topic)
    start = _starting_point(trace, int(topic.max()) + 1)
    optimiser = _optimiser(STEPS)
    carry = (start, jax.jit(optimiser.init)(start))
    for done in range(0, STEPS, STEPS_PER_CALL):
        report("fit", done, STEPS)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), done), STEPS_PER_CALL)
        carry = _ascend(carry, keys, choices, optimiser.update)
    report("fit", STEPS, STEPS)
    return carry[0]


@cache
def _optimiser(steps: int) -> optax.GradientTransformation:
    """Adam, whose learning rate falls to nothing, so that the last steps average over batches.

    Always the same object, so that a second fit compiles nothing.
    """
    return optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))


def _choices(trace: GatingTrace, topic: np.ndarray) -> Choices:
    length = np.diff(trace.seq_start, append=trace.num_tokens)
    position = np.arange(trace.num_tokens) - np.repeat(trace.seq_start, length)
    phase = np.full(trace.num_tokens, PREFILL) if trace.phase is None else trace.phase
    return Choices(
        experts=jnp.asarray(trace.experts, jnp.int32),
        before=jnp.asarray(np.roll(trace.experts, 1, axis=0), jnp.int32),
        position=jnp.asarray(position, jnp.int32),
        topic=jnp.asarray(topic, jnp.int32),
        phase=jnp.asarray(phase, jnp.int32),
    )


def _starting_point(trace: GatingTrace, topics: int) -> Preferences:
    """Loads alone: popularity as recorded, no relation."""
    load = tally(trace.experts, trace.num_experts)
    layers, experts = load.shape
    # Made by NumPy: JAX would compile every shape.
    pairs = jnp.asarray(np.zeros((layers, experts, experts), np.float32))
    return Preferences(
        # As if every expert had been chosen once more: what was never seen is rare and not impossible.
        popularity=jnp.asarray(np.log((load + 1) / trace.num_tokens), jnp.float32),
        topics=jnp.asarray(np.zeros((topics, layers, experts), np.float32)),
        phases=jnp.asarray(np.zeros((2, layers, experts), np.float32)),
        first_tokens=jnp.asarray(np.zeros((FIRST_TOKENS, layers, experts), np.float32)),
        from_layer=pairs,
        from_token=pairs,
        together=pairs,
        usual=jnp.asarray(load / trace.num_tokens, jnp.float32),
    )


@partial(jax.jit, static_argnames="update")
def _ascend(
    carry: tuple[Preferences, optax.OptState], keys: Key[Array, " step"], choices: Choices, update: Callable
) -> tuple[Preferences, optax.OptState]:
    """Steps on random batches of tokens."""

    def loss(preferences: Preferences, batch: Choices) -> Float[Array, ""]:
        return _prior(preferences) / len(choices.topic) - log_likelihood(preferences, batch)

    def step(
        carry: tuple[Preferences, optax.OptState], key: Key[Array, ""]
    ) -> tuple[tuple[Preferences, optax.OptState], None]:
        preferences, state = carry
        rows = jax.random.randint(key, (BATCH,), 0, len(choices.topic))
        gradient = jax.grad(loss)(preferences, jax.tree.map(lambda leaf: leaf[rows], choices))
        # Facts about the trace, not preferences.
        gradient = eqx.tree_at(lambda p: p.usual, gradient, jnp.zeros_like(preferences.usual))
        change, state = update(gradient, state)
        return (optax.apply_updates(preferences, change), state), None

    return jax.lax.scan(step, carry, keys)[0]


def _prior(preferences: Preferences) -> Float[Array, ""]:
    """Minus the logarithm of a normal prior of unit width, up to a constant."""
    parts = (
        preferences.topics,
        preferences.phases,
        preferences.first_tokens,
        preferences.from_layer,
        preferences.from_token,
        preferences.together,
    )
    return 0.5 * sum((jnp.square(part).sum() for part in parts), start=jnp.zeros(()))


def _corrected(process: GatingProcess, trace: GatingTrace, seed: int, report: Report) -> GatingProcess:
    """The process, shifted until traces drawn from it agree with the recorded one."""
    recorded = count_pairs(trace)
    for done in range(CORRECTIONS):
        report("correct", done, CORRECTIONS)
        # Another seed each time: what is corrected is the process, not one trace of it.
        drawn = count_pairs(sample_trace(process, trace.num_tokens, seed + 1 + done))
        gain = 0.7 if done < CORRECTIONS // 2 else 0.35
        process = replace(process, preferences=_shifted(process.preferences, recorded, drawn, gain))
    report("correct", CORRECTIONS, CORRECTIONS)
    return process


def _shifted(preferences: Preferences, recorded: PairCounts, drawn: PairCounts, gain: float) -> Preferences:
    """One step towards the recorded loads, coverage and reuse."""
    load = gain * np.log((recorded.load + 1) / (drawn.load + 1))
    stretch = {
        # The first layer has no relation to one below: its row stays.
        "from_layer": np.append(0.0, _less(every_pair(recorded.layer_pairs), every_pair(drawn.layer_pairs), TOP_PAIRS)),
        "from_token": _less(every_pair(recorded.token_pairs), every_pair(drawn.token_pairs), TOP_PAIRS),
        "together": _less(pairs_above(recorded.together), pairs_above(drawn.together), TOP_TOGETHER),
    }
    tables = {
        name: np.asarray(getattr(preferences, name)) * (1 + 2 * gain * less[:, None, None]).astype(np.float32)
        for name, less in stretch.items()
    }
    # Reuse r moves with the log-odds of a repetition at a rate of about r (1 - r), at most 1 / 4.
    repeat = gain * 4 * np.nan_to_num(recorded.reuse - drawn.reuse)
    tables["from_token"] += (repeat[:, None, None] * np.eye(load.shape[1])).astype(np.float32)
    tables["popularity"] = np.asarray(preferences.popularity) + load.astype(np.float32)
    return replace(preferences, **{name: jnp.asarray(table) for name, table in tables.items()})


def _less(recorded: np.ndarray, drawn: np.ndarray, share: float) -> np.ndarray:
    """How much less of the drawn pairs are on their most frequent ones than of the recorded, [layer]."""
    return np.nan_to_num(coverage(recorded, share) - coverage(drawn, share))
