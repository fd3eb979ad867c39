"""Serving over time on a machine that the engine times: seconds of its steps, and experts that tokens choose."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.config import Scenario
from jaxmoe.config.serving import BufferingConfig
from jaxmoe.engine import LayerTime
from jaxmoe.engine.times import ATTENTION
from jaxmoe.experiment.deployment import Deployed
from jaxmoe.experiment.inputs import Inputs, OptionError, inputs_of
from jaxmoe.experiment.machine_deployment import deployed_on_machine, experts_timed
from jaxmoe.serving.machine_step import HEAD, MachineStep
from jaxmoe.serving.online.buffering import RequestBuffering
from jaxmoe.serving.online.step_table import StepTable, Term
from jaxmoe.serving.step import StepLoad
from jaxmoe.traces import Batch, GatingTrace, load_counts

SIZES = 2.0 ** np.arange(14)  # tokens
CONTEXTS = np.array([0.0, *2.0 ** np.arange(5, 18)])  # tokens
COUNTS = 9  # numbers of experts of a table
DRAWS = 4  # batches of each number of tokens and experts
MOST_TOKENS = 2**16  # of a trace that requests choose experts from
BESIDE = ("dense", "shared")  # what every token passes beside the layers of a system
SYSTEM = "expert_streaming"


def grid_of(most: int) -> Float[np.ndarray, " G"]:
    """Numbers of tokens of a table for steps of up to `most`."""
    return SIZES[: np.searchsorted(SIZES, most) + 1]


def machine_table(
    scenario: Scenario, own: Deployed[MachineStep], sizes: Float[np.ndarray, " G"], by_experts: bool
) -> StepTable:
    """Seconds of a step, exact for these numbers of tokens in steps that only decode or only read prompts.

    What the experts take is a mean over batches of the trace, by the tokens that pass them and, `by_experts`, by how
    many experts these choose. More tokens than the grid or the trace has take what its last slope says.
    """
    inputs = inputs_of(scenario)
    sizes = sizes[sizes <= inputs.trace.num_tokens]
    contexts = CONTEXTS[: np.searchsorted(CONTEXTS, sum(own.users[1:])) + 1]
    none_too, step, attends = np.array([0.0, *sizes]), own.step, _attention(scenario)
    times = [step.time(StepLoad(size, 1.0)) for size in sizes]
    beside = np.array([sum(_stage(time, name) for name in BESIDE) for time in times])
    head = np.array([_stage(time, HEAD) for time in times])
    alone = np.array([attends(StepLoad(size, 1.0)) for size in sizes])
    decoding = [[attends(StepLoad(size, max(each, 1.0))) for each in contexts] for size in sizes]
    # So a chunk's mean token attends to the context and half of the chunk, and reads both once for the chunk.
    reading = [[attends(StepLoad(0.0, 1.0, size, size + 2 * each)) for each in contexts] for size in sizes]
    terms = [
        Term("attention", ("tokens",), (none_too,), np.array([0.0, *alone])),
        Term("context", ("decoding", "context"), (none_too, contexts), _more(decoding, alone)),
        Term("prefill context", ("prefill", "prefill_context"), (none_too, contexts), _more(reading, alone)),
        Term("beside", ("tokens",), (none_too,), np.array([0.0, *beside])),
        Term(HEAD, ("sequences",), (none_too,), np.array([0.0, *head])),
    ]
    if by_experts:
        return StepTable((*terms, expert_term(inputs, sizes)))
    total = np.array([float(time.total) for time in times])
    experts = total - alone - beside - head
    return StepTable((*terms, Term("experts", ("routed",), (none_too,), np.array([0.0, *experts]))))


def expert_term(inputs: Inputs, sizes: Float[np.ndarray, " G"]) -> Term:
    """Seconds of the experts of all layers, by the tokens that pass them and how many experts these choose."""
    timed, rng = experts_timed(inputs), np.random.default_rng(0)
    popularity = load_counts(inputs.trace).counts[0] + 1.0
    experts, top_k = popularity.shape[1], inputs.moe.top_k
    counts = np.unique(np.rint(np.geomspace(top_k, experts, COUNTS)))
    values = np.zeros((len(sizes) + 1, len(counts)))
    for row, tokens in enumerate(sizes.astype(int).tolist(), 1):
        for column, count in enumerate(counts.astype(int).tolist()):
            if count > tokens * top_k:  # more than they can choose; numbers of tokens between two sizes may
                values[row, column:] = values[row, column - 1] * counts[column:] / counts[column - 1]
                break
            chosen = _chosen(popularity, tokens, count, top_k, rng)
            values[row, column] = expert_seconds(timed(_batch(chosen)), len(inputs.moe.moe_layer_ids))
    return Term("experts", ("routed", "loaded"), (np.array([0.0, *sizes]), counts), values)


def expert_seconds(time: LayerTime, layers: int) -> float:
    """Seconds of the experts of so many layers, of which those of `time` are some."""
    attention = sum(np.asarray(time.stages[name]) for name in dict(time.blocks).get(ATTENTION, ()))
    return layers * float(np.mean(time.total - attention))


def buffering_of(scenario: Scenario, asked: BufferingConfig, requests: int, seed: int) -> RequestBuffering:
    """When requests wait: each chooses the experts of a stretch of `workload.trace`, in all of its layers."""
    whole = scenario.evaluation.model_copy(update={"layers": None})
    trace: GatingTrace = inputs_of(scenario.model_copy(update={"evaluation": whole})).trace
    experts = np.asarray(trace.experts[:MOST_TOKENS], np.int16)
    first = np.random.default_rng([seed, 6]).integers(0, len(experts), requests)
    return RequestBuffering(experts, first, trace.num_experts, asked.slack, asked.least_tokens)


def check_buffering(scenario: Scenario) -> None:
    """Raise `OptionError` for a system that loads no experts in every step, or whose requests wait by themselves."""
    system = scenario.system
    strategy = getattr(system, "strategy", "")
    if system.name != SYSTEM:
        raise OptionError(
            f"serving.buffering is given, but system.name is {system.name}, whose experts stay where they are; "
            f"expected {SYSTEM}, which loads them in every step. Leave one of them out"
        )
    if strategy == "fse_buffered":
        raise OptionError(
            "serving.buffering is given, but system.strategy is fse_buffered, which is for closed batches; expected "
            "fse_paired, whose requests serving.buffering makes wait"
        )


def _attention(scenario: Scenario) -> Callable[[StepLoad], float]:
    """Seconds of attention, which does not depend on gating: one layer, once, stands for all."""
    evaluation = scenario.evaluation
    first = evaluation.layers or tuple(scenario.model.moe_layer_ids.ids)
    brief = evaluation.model_copy(update={"layers": first[:1], "iterations": 1})
    step = deployed_on_machine(scenario.model_copy(update={"evaluation": brief})).step

    def seconds(load: StepLoad) -> float:
        return sum(float(each) for name, each in step.time(load).stages.items() if name.startswith(ATTENTION))

    return seconds


def _stage(time: LayerTime, name: str) -> float:
    return float(time.stages[name]) if name in time.stages else 0.0


def _more(whole: list[list[float]], alone: Float[np.ndarray, " G"]) -> Float[np.ndarray, "rows contexts"]:
    """Seconds that contexts add, none for no tokens."""
    added = np.maximum(np.array(whole) - alone[:, None], 0.0)
    return np.concatenate([np.zeros((1, added.shape[1])), added])


def _chosen(
    popularity: Float[np.ndarray, "layers experts"], tokens: int, count: int, top_k: int, rng: np.random.Generator
) -> Int[np.ndarray, "layers draws tokens top_k"]:
    """Choices by popularity among `count` experts that are drawn by it, each of which is chosen at least once."""
    found = np.empty((len(popularity), DRAWS, tokens, top_k), np.int32)
    for own, each in zip(found, popularity, strict=True):
        for choices in own:
            kept = rng.choice(len(each), count, replace=False, p=each / each.sum())
            scores = np.log(each[kept]) + rng.gumbel(size=(tokens, count))
            choices[:] = kept[np.argpartition(-scores, top_k - 1)[:, :top_k]]
            _cover(choices, kept)
    return found


def _cover(choices: Int[np.ndarray, "tokens top_k"], kept: Int[np.ndarray, " count"]) -> None:
    """Give every expert a choice, of the experts that have most."""
    for expert in np.setdiff1d(kept, choices):
        loads = np.bincount(choices.ravel(), minlength=kept.max() + 1)
        free = ~(choices == expert).any(axis=1)
        rows, slots = np.nonzero(free[:, None] & (loads[choices] > 1))
        most = np.argmax(loads[choices[rows, slots]])
        choices[rows[most], slots[most]] = expert


def _batch(chosen: Int[np.ndarray, "layers draws tokens top_k"]) -> Batch:
    none = np.zeros(chosen.shape, np.float32)
    ones = np.ones(chosen.shape[:-1], np.float32)
    return Batch(jnp.asarray(chosen), jnp.zeros(ones.shape), jnp.asarray(none), jnp.asarray(ones))
