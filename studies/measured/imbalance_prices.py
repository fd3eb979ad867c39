"""The price of imbalance: how much longer a kernel takes under one distribution of tokens than under another.

Pairs of rows differ in their distribution, or in it and in the slots of experts, and in nothing else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmoe.experiment.measured_kernels.calibration import KernelFit
from jaxmoe.experiment.measured_kernels.kinds import grouped
from jaxmoe.experiment.measured_kernels.token_counts import BALANCED, EVEN, known_distribution

CLEAR = 1.1  # from which factor on, either way, a sign is judged
ALIKE = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "num_tokens")


class Prices(NamedTuple):
    """Seconds of rows over those of the rows that they are compared to, [pair], as measured and as told.

    `told` is of shapes that the kernel was not fitted to. `choices` are those of a rank in the mean, `after` the
    next pair with more tokens in a series, or -1.
    """

    measured: Float[np.ndarray, " pair"]
    told: Float[np.ndarray, " pair"]
    choices: Float[np.ndarray, " pair"]
    ranks: Float[np.ndarray, " pair"]
    distribution: np.ndarray
    series: Int[np.ndarray, " pair"]

    def where(self, pairs: Bool[np.ndarray, " pair"]) -> "Prices":
        return Prices(*(part[pairs] for part in self))


def of_skew(fit: KernelFit) -> Prices:
    """Power laws over balanced tokens."""
    return _prices(fit, lambda name: "balanced" if known_distribution(name) and name not in EVEN else None)


def of_copies(fit: KernelFit) -> Prices:
    """Experts that EPLB put in slots over experts in their order, under the same power law."""
    return _prices(fit, lambda name: name.removesuffix(BALANCED) if name.endswith(BALANCED) else None)


def _prices(fit: KernelFit, to: Callable[[str], str | None]) -> Prices:
    rows = fit.rows
    distribution = np.asarray(rows["distribution"])
    _, code = grouped(rows, ALIKE)
    usable = ~fit.slow & ~fit.repeated & np.isfinite(fit.held_out)
    base = {(code[row], distribution[row]): row for row in np.flatnonzero(usable)}
    found = [
        (row, base[code[row], to(distribution[row])])
        for row in np.flatnonzero(usable)
        if (code[row], to(distribution[row])) in base
    ]
    at, other = np.array(found, int).reshape(-1, 2).T
    names = [*(name for name in ALIKE if name != "num_tokens"), *({"num_slots"} & set(rows)), "distribution"]
    return Prices(
        fit.measured[at] / fit.measured[other],
        fit.held_out[at] / fit.held_out[other],
        np.asarray(rows["num_tokens"] * rows["topk"] / rows["moe_ep_size"], float)[at],
        np.asarray(rows["moe_ep_size"], float)[at],
        distribution[at],
        grouped(rows, names)[1][at],
    )


def joined(prices: Iterable[Prices]) -> Prices:
    """All pairs, each kernel's series its own."""
    parts = list(prices)
    starts = np.cumsum([0, *(1 + part.series.max(initial=0) for part in parts)])
    parts = [part._replace(series=part.series + start) for part, start in zip(parts, starts[:-1], strict=True)]
    return Prices(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def price_scores(prices: Prices) -> dict[str, object]:
    """Errors of told prices, per cent, how often the sign is right where it is clear, and the floor.

    The floor is the error of a pair between its neighbours in its series, by logarithms, over what their own scatter
    adds to it: what no model can be below.
    """
    off = np.abs(prices.told / prices.measured - 1)
    clear = np.abs(np.log(prices.measured)) > np.log(CLEAR)
    right = (np.log(prices.told) * np.log(prices.measured) > 0)[clear]
    between = np.array(list(_between(prices)))
    return {
        "pairs": len(off),
        "error": _percent(off),
        "median": _percent(off, np.median),
        "floor": _percent(np.abs(between) / np.sqrt(1.5)),
        "clear": int(clear.sum()),
        "right_sign": _percent(right),
        "measured_price": float(np.median(prices.measured)) if len(off) else "",
        "told_price": float(np.median(prices.told)) if len(off) else "",
    }


def _percent(parts: np.ndarray, of=np.mean) -> object:
    return float(f"{100 * of(parts):.3g}") if len(parts) else ""


def _between(prices: Prices) -> Iterator[float]:
    """How far each pair is from the middle of its neighbours in the order of tokens."""
    order = np.lexsort((prices.choices, prices.series))
    for before, at, after in zip(order, order[1:], order[2:], strict=False):
        if prices.series[before] == prices.series[at] == prices.series[after]:
            x = np.log(prices.choices[[before, at, after]])
            part = (x[1] - x[0]) / (x[2] - x[0])
            low, middle, high = np.log(prices.measured[[before, at, after]])
            yield float(np.exp((1 - part) * low + part * high - middle) - 1)


def by_part(prices: Prices, columns: Mapping[str, np.ndarray]) -> Iterator[dict[str, object]]:
    """Scores of the parts that have a value of each column alike."""
    groups, group = grouped(columns, list(columns))
    for index, values in enumerate(groups):
        yield dict(zip(columns, values, strict=True)) | price_scores(prices.where(group == index))
