"""A gating trace: which experts the tokens of a model really chose."""

from dataclasses import dataclass, replace

import numpy as np


class TraceError(ValueError):
    """A trace that cannot be used, with the reason and the remedy."""


@dataclass(frozen=True)
class GatingTrace:
    """Recorded gating, in token order.

    `experts` int16 [token, layer, top_k]; `layer_ids` the layers' numbers in the full model, int [layer];
    `seq_start` the first token of every sequence, int [sequence]; `is_repeat` marks tokens that run an
    earlier context again, bool [token] or `None`; `facts` are strings about the source.
    """

    experts: np.ndarray
    num_experts: int
    layer_ids: np.ndarray
    seq_start: np.ndarray
    is_repeat: np.ndarray | None
    facts: dict[str, str]

    def __post_init__(self) -> None:
        if self.experts.ndim != 3 or 0 in self.experts.shape:
            raise TraceError(f"experts has shape {self.experts.shape}, expected non-empty [token, layer, top_k]")
        low, high = int(self.experts.min()), int(self.experts.max())
        if low < 0 or high >= self.num_experts:
            raise TraceError(f"expert ids span {low}..{high}, expected 0..{self.num_experts - 1}")
        if self.layer_ids.shape != self.experts.shape[1:2]:
            raise TraceError(f"{len(self.layer_ids)} layer ids for {self.experts.shape[1]} layers")
        if self.is_repeat is not None and self.is_repeat.shape != self.experts.shape[:1]:
            raise TraceError(f"is_repeat marks {len(self.is_repeat)} of {len(self.experts)} tokens")

    @property
    def num_tokens(self) -> int:
        return self.experts.shape[0]

    @property
    def top_k(self) -> int:
        return self.experts.shape[2]

    def without_repeats(self) -> "GatingTrace":
        """The trace without tokens that are marked as re-runs; itself where none is marked."""
        if self.is_repeat is None:
            return self
        kept = np.flatnonzero(~self.is_repeat)
        if kept.size == 0:
            raise TraceError("every token is marked as a repeat; keep repeats or use another trace")
        return self.select_tokens(kept)

    def select_tokens(self, tokens: np.ndarray) -> "GatingTrace":
        """The trace of some tokens, given by ascending index. A sequence starts at its first kept token."""
        starts = np.unique(np.searchsorted(tokens, self.seq_start))
        return replace(
            self,
            experts=self.experts[tokens],
            seq_start=starts[starts < len(tokens)],
            is_repeat=None if self.is_repeat is None else self.is_repeat[tokens],
        )

    def select_layers(self, layer_ids: tuple[int, ...]) -> "GatingTrace":
        """The trace of some layers, in the order given. Raises `TraceError` for a layer it does not have."""
        rows = {int(layer): row for row, layer in enumerate(self.layer_ids)}
        missing = [layer for layer in layer_ids if layer not in rows]
        if missing:
            raise TraceError(f"layers {missing} are not in the trace, which has {sorted(rows)}")
        order = [rows[layer] for layer in layer_ids]
        return replace(self, experts=self.experts[:, order], layer_ids=np.asarray(layer_ids))
