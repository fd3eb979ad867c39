"""A step of an engine from the step of a whole model by fitted kernels, priced once on a grid of batches."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.serving.deployment import DeploymentError
from jaxmoe.serving.gating import ExpertLoadTable
from jaxmoe.serving.online.padding import Padding
from jaxmoe.serving.online.step_table import StepTable, Term
from jaxmoe.serving.step import ModelStep, StepLoad

Sizes = Float[np.ndarray, " G"]
Contexts = Float[np.ndarray, " C"]
HEAD, EXPERTS = "head", "experts"
COMMON = (EXPERTS, "exchange")
ATTENTION = ("decode attention", "prefill attention")
SIZES = np.unique(np.rint(2 ** np.arange(0, 14.01, 0.25)))  # tokens
CONTEXTS = np.array([0.0, *2 ** np.arange(4, 17.01, 0.5)])  # tokens
NONE = Padding()
AT_ONCE = 256  # batches


def step_table(
    step: ModelStep,
    padding: Padding = NONE,
    sizes: Sizes = SIZES,
    contexts: Contexts = CONTEXTS,
    mixed_rows: int | None = None,
) -> StepTable:
    """Seconds of `step`, exact for batches on the grid of `sizes` and `contexts`, from 0, where ranks have equal ones.

    Tokens of a prompt after others of it take what the whole takes longer than these others, and at least what they
    would take alone. `mixed_rows` is for backends that read prompts and decode in one kernel for both: so many rows of
    a tile are computed for each sequence that decodes beside a prompt. Raises `DeploymentError` for a step whose
    kernels overlap, which is no sum over kernels.
    """
    if (overlap := step.deployment.overlap) != "serial":
        raise DeploymentError(
            f"deployment.overlap is {overlap}; requests over time are served by kernels that follow each other. "
            "Leave it out, or set it to serial."
        )
    points, ranks = padding.points(sizes), step.deployment.data
    by_tokens = _parts(step, padding.padded(points))
    own = np.sum([each for name, each in by_tokens.items() if name not in (*ATTENTION, *COMMON, HEAD)], axis=0)
    none_too, decode, prefill = np.array([0.0, *sizes]), _decode(step, sizes, contexts), _prefill(step, sizes, contexts)
    terms = [
        Term("layers", ("tokens",), (points,), own),
        Term("prefill attention", ("prefill", "prefill_context"), (none_too, contexts), prefill),
        Term(HEAD, ("sequences",), (sizes,), _parts(step, sizes)[HEAD]),
    ]
    if mixed_rows is None:
        terms.append(Term("decode attention", ("decoding", "context"), (none_too, contexts), decode))
    else:
        mixed = np.maximum(decode, _mixed(step, mixed_rows, none_too, contexts))
        axes = (np.array([0.0, 1.0, 2.0]), none_too, contexts)
        names = ("prefill", "decoding", "context")
        terms.append(Term("decode attention", names, axes, np.stack([decode, mixed, mixed])))
    terms += [padding.common(name, points, ranks, partial(_common, step, name)) for name in COMMON if name in by_tokens]
    return StepTable(tuple(terms))


def with_gating(
    table: StepTable, step: ModelStep, gating: ExpertLoadTable, padding: Padding = NONE, sizes: Sizes = SIZES
) -> StepTable:
    """The table of `step`, made with the same `padding` and `sizes`, where its experts have other loads."""
    seconds = partial(_common, step, EXPERTS, gating=gating)
    experts = padding.common(EXPERTS, padding.points(sizes), step.deployment.data, seconds)
    return StepTable(tuple(experts if term.name == EXPERTS else term for term in table.terms))


def _common(step: ModelStep, name: str, tokens: Sizes, gating: ExpertLoadTable | None = None) -> Sizes:
    return _parts(step, tokens / step.deployment.data, gating)[name]


def _parts(step: ModelStep, tokens: Sizes, gating: ExpertLoadTable | None = None) -> dict[str, Sizes]:
    """Parts that depend on tokens alone, by tokens of each rank."""
    return _numbers(step, StepLoad(tokens, 1.0), gating)


def _decode(step: ModelStep, decoding: Sizes, contexts: Contexts) -> Float[np.ndarray, "rows contexts"]:
    seconds = _numbers(step, StepLoad(decoding[:, None], np.maximum(contexts, 1.0)))["decode attention"]
    return np.concatenate([np.zeros((1, len(contexts))), seconds])


def _prefill(step: ModelStep, tokens: Sizes, before: Contexts) -> Float[np.ndarray, "rows contexts"]:
    whole = tokens[:, None] + before
    read = _numbers(step, StepLoad(0.0, 1.0, whole, whole))["prefill attention"]
    known = np.maximum(before, 1.0)
    earlier = np.where(before > 0, _numbers(step, StepLoad(0.0, 1.0, known, known))["prefill attention"], 0.0)
    return np.concatenate([np.zeros((1, len(before))), np.maximum(read - earlier, read[:, :1])])


def _mixed(step: ModelStep, rows: int, decoding: Sizes, contexts: Contexts) -> Float[np.ndarray, "rows contexts"]:
    """So many rows of a prompt of each sequence after its context."""
    many = np.maximum(decoding, 1.0)[:, None]
    known = np.maximum(contexts, 1.0)
    whole = known + rows
    long = _numbers(step, StepLoad(0.0, 1.0, many * whole, whole))["prefill attention"]
    short = _numbers(step, StepLoad(0.0, 1.0, many * known, known))["prefill attention"]
    return np.where(decoding[:, None] > 0, long - short, 0.0)


def _numbers(
    step: ModelStep, load: StepLoad, gating: ExpertLoadTable | None = None
) -> dict[str, Float[np.ndarray, "..."]]:
    """Parts of batches, which are priced so many at a time that one program is compiled for all.

    Loads of experts are those of `gating`, or the step's own.
    """
    shape = np.broadcast_shapes(*(np.shape(number) for number in load))
    rows = [np.broadcast_to(np.asarray(number, np.float32), shape).ravel() for number in load]
    count = rows[0].size
    whole = [np.append(row, np.repeat(row[-1:], -count % AT_ONCE)).reshape(-1, AT_ONCE) for row in rows]
    price, loads = _priced(step), step.gating if gating is None else gating
    found = [price(loads, StepLoad(*batch)) for batch in zip(*whole, strict=True)]
    parts = {name: np.concatenate([each[name] for each in found])[:count] for name in found[0]}
    return {name: each.astype(float).reshape(shape) for name, each in parts.items()}


@lru_cache(maxsize=4)
def _priced(step: ModelStep) -> Callable[[ExpertLoadTable, StepLoad], dict[str, Array]]:
    """Parts of a step by loads of its experts, which are no constants of the program."""

    def parts(gating: ExpertLoadTable, load: StepLoad) -> dict[str, Array]:
        found = replace(step, gating=gating).parts(load)
        return {name: jnp.broadcast_to(each, AT_ONCE) for name, each in found.items()}

    return jax.jit(parts)
