"""Whether experts that a prompt chose are those that the answer chooses (wafer-scale study, Ob3, Fig. 6)."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int

from jaxmoe.traces.statistics.counting import CHUNK_TOKENS, Report, count_pairs
from jaxmoe.traces.statistics.heatmaps import conditional
from jaxmoe.traces.statistics.similarity import spearman, spearman_of_heatmaps
from jaxmoe.traces.trace import DECODE, PREFILL, GatingTrace, TraceError

BLOCK_TOKENS = 64  # long enough that few steps lead from block to block


@dataclass(frozen=True)
class PhaseAgreement:
    """Spearman's rho of prefill and decode; NaN where a phase has nothing to rank.

    Of the loads of a layer, of its heatmap from token to token, and of its heatmap to the next layer row.
    """

    load: Float64[np.ndarray, " layer"]
    token_heatmap: Float64[np.ndarray, " layer"]
    layer_heatmap: Float64[np.ndarray, " step"]


def phase_agreement(
    trace: GatingTrace,
    phase: Int[np.ndarray, " token"],
    report: Report | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> PhaseAgreement:
    """How alike the tokens of both phases are. Steps from one phase to the other belong to neither.

    `phase` is that of the trace, or another one. Raises `TraceError` when it lacks prefill or decode.
    """
    for kind, name in ((PREFILL, "prefill"), (DECODE, "decode")):
        if not (phase == kind).any():
            raise TraceError(f"has no {name} token to compare with the other phase")
    prefill, decode = (
        count_pairs(trace, report, only=phase == kind, chunk_tokens=chunk_tokens) for kind in (PREFILL, DECODE)
    )
    return PhaseAgreement(
        spearman(prefill.load, decode.load),
        spearman_of_heatmaps(conditional(prefill.token_pairs), conditional(decode.token_pairs)),
        spearman_of_heatmaps(conditional(prefill.layer_pairs), conditional(decode.layer_pairs)),
    )


def shuffled_phases(phase: Int[np.ndarray, " token"], seed: int) -> Int[np.ndarray, " token"]:
    """Phases dealt anew: with them, `phase_agreement` is that of two samples of one and the same thing.

    The phases are cut into blocks of 64 consecutive tokens and the blocks put in random order, so each phase keeps
    its number of tokens and nearly all of its steps. The same seed gives the same order.
    """
    blocks = np.array_split(phase, math.ceil(len(phase) / BLOCK_TOKENS))
    order = np.random.default_rng(seed).permutation(len(blocks))
    return np.concatenate([blocks[block] for block in order])
