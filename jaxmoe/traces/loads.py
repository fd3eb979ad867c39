"""Load counts: how many tokens were routed to every expert, where their order is not known."""

from dataclasses import dataclass, replace

import numpy as np

from jaxmoe.traces.chunks import chunks, release
from jaxmoe.traces.trace import MAX_EXPERTS, GatingTrace, TraceError


@dataclass(frozen=True)
class LoadCounts:
    """Tokens routed to each expert. Raises `TraceError` when the parts do not fit together.

    `counts` int64 [window, layer, expert], where a window is a stretch of time, a request or a topic, named by
    `window_name`; `layer_ids` the layers' numbers in the full model, int [layer]; `top_k` experts chosen per
    token, `None` where the source does not say; `facts` are strings about the source.
    """

    counts: np.ndarray
    layer_ids: np.ndarray
    top_k: int | None
    window_name: tuple[str, ...]
    facts: dict[str, str]

    def __post_init__(self) -> None:
        counts, ids = self.counts, self.layer_ids
        if counts.dtype.kind not in "iu":
            raise TraceError(f"counts has type {counts.dtype}, expected whole numbers")
        if counts.ndim != 3 or 0 in counts.shape:
            raise TraceError(f"counts has shape {counts.shape}, expected non-empty [window, layer, expert]")
        if counts.shape[2] > MAX_EXPERTS:
            raise TraceError(f"counts is of {counts.shape[2]} experts, expected at most {MAX_EXPERTS}")
        if ids.dtype.kind not in "iu" or ids.shape != counts.shape[1:2] or len(set(ids.tolist())) < ids.size:
            raise TraceError(
                f"layer_ids is {ids.dtype} of shape {ids.shape}, expected {counts.shape[1]} different whole numbers"
            )
        if counts.dtype.kind == "i" and counts.min() < 0:
            window, layer, expert = np.argwhere(counts < 0)[0]
            raise TraceError(f"counts of layer {ids[layer]}, expert {expert}, window {window} are negative")
        if self.top_k is not None and not 1 <= self.top_k <= counts.shape[2]:
            raise TraceError(f"top_k is {self.top_k}, expected 1 to {counts.shape[2]}, the experts")
        if len(self.window_name) != counts.shape[0]:
            raise TraceError(f"window_name has {len(self.window_name)} names for {counts.shape[0]} windows")
        object.__setattr__(self, "counts", counts.astype(np.int64, copy=False))

    @property
    def num_experts(self) -> int:
        return self.counts.shape[2]

    def total(self) -> "LoadCounts":
        """All windows as one."""
        return replace(self, counts=self.counts.sum(axis=0, keepdims=True), window_name=("all",))


def load_counts(trace: GatingTrace) -> LoadCounts:
    """The loads of a trace, one window. Missing choices count for no expert."""
    counts = np.zeros((trace.experts.shape[1], trace.num_experts), np.int64)
    for part in chunks(trace.experts.shape, 16):
        counts += tally(trace.experts[part], trace.num_experts)
        release(trace.experts)
    return LoadCounts(
        counts=counts[None],
        layer_ids=trace.layer_ids,
        top_k=trace.top_k,
        window_name=("all",),
        facts=trace.facts,
    )


def tally(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """How often each expert was chosen, int64 [layer, expert], in choices int [token, layer, top_k]."""
    layers = experts.shape[1]
    place = experts.astype(np.int64) + 1 + np.arange(layers)[:, None] * (num_experts + 1)
    # The first slot of a layer is for missing choices.
    return np.bincount(place.ravel(), minlength=layers * (num_experts + 1)).reshape(layers, -1)[:, 1:]
