"""The figures by which traces are compared and generators judged, of every layer and on average.

Beside each figure stands its baseline: what it is when the structure it measures is taken away. With skewed
loads a baseline alone is large; what a trace has to tell is the difference.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from jaxmoe.traces.statistics import concentration
from jaxmoe.traces.statistics.concentration import coverage, even_loads, every_pair, pairs_above
from jaxmoe.traces.statistics.counting import PairCounts
from jaxmoe.traces.trace import LoadCounts

Figures = dict[str, Float64[np.ndarray, " layer"]]

TOP_PAIRS, TOP_TOGETHER = 0.2, 0.1  # of all possible pairs, as in the wafer-scale study


@dataclass(frozen=True)
class Summary:
    """Figures by name, [layer] each; NaN where a layer has none.

    - `load_max_over_mean`, `load_cv`: how unequal the loads of experts are. Baseline: as many tokens that choose
      different experts evenly and independently (`even_loads`).
    - `token_pair_coverage_top20`: the share of all (expert of a token, expert of the next) on the most frequent 20 %
      of the E x E possible pairs. Baseline: every token followed by one taken at random (`count_shuffled`).
    - `layer_pair_coverage_top20`: the same of (expert in this layer, expert in the next), with the same baseline;
      the last layer has none.
    - `coactivation_coverage_top10`: the share of all pairs that one token chose on the most frequent 10 % of the
      E (E - 1) / 2 possible ones; none with one choice per token. Baseline: the sum of p_i p_j over the 10 % of pairs
      i < j where it is largest, with p the share of the load. All pairs i < j have a sum of less than a half, so this
      baseline is no coverage; `coactivation_coverage_top10_independent` is, the same over the sum of all pairs i < j.
    - `token_reuse`: the part of its experts that a token has in common with the one before, with the baseline of
      token pairs; none where no token follows another.
    """

    layer_ids: np.ndarray
    figures: Figures

    def mean(self) -> dict[str, float | None]:
        """Mean over the layers that have the figure; `None` where none has."""
        return {name: _mean(values) for name, values in self.figures.items()}

    def report(self) -> dict[str, Any]:
        """The mean, and every layer, as JSON can hold them."""
        return by_layer(self.layer_ids, self.figures)


def by_layer(layer_ids: np.ndarray, figures: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Figures [layer] on average and of every layer, as JSON can hold them.

    What does not exist is `None`: a NaN, and what a figure of steps from layer to layer lacks at its end.
    """
    return {"mean": {name: _mean(values) for name, values in figures.items()}, "layers": _layers(layer_ids, figures)}


def summarise(layer_ids: np.ndarray, top_k: int, counts: PairCounts, shuffled: PairCounts, seed: int) -> Summary:
    """The figures of a trace from its counts, those of its shuffled tokens, and a seed for even loads."""
    measured = load_figures(counts.load) | pair_figures(counts)
    baseline = load_figures(even_loads(counts.load.sum(axis=1), counts.load.shape[1], top_k, seed))
    baseline |= pair_figures(shuffled)
    product, independent = _independent_pairs(counts.load, top_k)
    baseline["coactivation_coverage_top10"] = product
    baseline = {f"{name}_baseline": values for name, values in baseline.items()}
    return Summary(layer_ids, measured | baseline | {"coactivation_coverage_top10_independent": independent})


def summarise_loads(loads: LoadCounts, seed: int) -> Summary:
    """The figures of loads alone. Where `top_k` is not known, the baseline's tokens choose one expert each."""
    load = loads.counts.sum(axis=0)
    even = even_loads(load.sum(axis=1), loads.num_experts, loads.top_k or 1, seed)
    baseline = {f"{name}_baseline": values for name, values in load_figures(even).items()}
    return Summary(loads.layer_ids, load_figures(load) | baseline)


def load_figures(load: Int64[np.ndarray, "layer expert"]) -> Figures:
    """The figures of a `Summary` that loads alone have, without baselines."""
    return {"load_max_over_mean": concentration.max_over_mean(load), "load_cv": concentration.cv(load)}


def pair_figures(counts: PairCounts) -> Figures:
    """Those that pairs have, without baselines."""
    layer_pairs = coverage(every_pair(counts.layer_pairs), TOP_PAIRS)
    return {
        "token_pair_coverage_top20": coverage(every_pair(counts.token_pairs), TOP_PAIRS),
        "layer_pair_coverage_top20": np.append(layer_pairs, np.nan),
        "coactivation_coverage_top10": coverage(pairs_above(counts.together), TOP_TOGETHER),
        "token_reuse": counts.reuse,
    }


def _independent_pairs(load: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest 10 % of products of load shares, added up; and the same over the sum of all."""
    if top_k == 1:
        none = np.full(len(load), np.nan)
        return none, none
    total = load.sum(axis=1, keepdims=True)
    share = np.divide(load, total, out=np.full(load.shape, np.nan), where=total > 0)
    products = pairs_above(share[:, :, None] * share[:, None, :])
    part = coverage(products, TOP_TOGETHER)
    return part * products.sum(axis=1), part


def _mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else None


def _layers(layer_ids: np.ndarray, figures: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    return [
        {"layer_id": int(layer)} | {name: _number(values, row) for name, values in figures.items()}
        for row, layer in enumerate(layer_ids)
    ]


def _number(values: np.ndarray, row: int) -> float | None:
    return float(values[row]) if row < len(values) and np.isfinite(values[row]) else None
