"""What a generator without any structure but skew makes of a trace: the baseline that a fit has to beat."""

from jaxmoe.traces.loads import tally
from jaxmoe.traces.statistics.balance import cv
from jaxmoe.traces.synthetic import synthetic_trace
from jaxmoe.traces.trace import GatingTrace

HALVINGS = 12
MOST_SKEW = 4.0
TRIED_TOKENS = 8192


def zipf_trace(trace: GatingTrace, seed: int) -> GatingTrace:
    """A trace of as many tokens whose experts have Zipf popularity; its skew gives the same mean cv of loads."""
    wanted = float(cv(tally(trace.experts, trace.num_experts)).mean())
    few, low, high = min(trace.num_tokens, TRIED_TOKENS), 0.0, MOST_SKEW
    for _ in range(HALVINGS):
        skew = (low + high) / 2
        found = float(cv(tally(_drawn(trace, few, skew, seed).experts, trace.num_experts)).mean())
        low, high = (skew, high) if found < wanted else (low, skew)
    return _drawn(trace, trace.num_tokens, (low + high) / 2, seed)


def _drawn(trace: GatingTrace, tokens: int, skew: float, seed: int) -> GatingTrace:
    return synthetic_trace(
        tokens=tokens,
        layer_ids=trace.layer_ids.tolist(),
        num_experts=trace.num_experts,
        top_k=trace.top_k,
        skew=skew,
        coactivation=0.0,
        reuse=0.0,
        seed=seed,
    )
