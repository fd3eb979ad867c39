"""A gating trace: which experts the tokens of a model really chose."""

from dataclasses import dataclass, replace

import numpy as np

MAX_EXPERTS = 2**15  # ids are int16


class TraceError(ValueError):
    """A trace that cannot be used, with the reason and the remedy."""


@dataclass(frozen=True)
class GatingTrace:
    """Recorded gating, in token order. Raises `TraceError` when the parts do not fit together.

    `experts` int16 [token, layer, top_k], column 0 the strongest choice, no expert twice in one choice;
    `layer_ids` the layers' numbers in the full model, int [layer]; `seq_start` the first token of every
    sequence, ascending from 0, int [sequence]; `is_repeat` marks tokens that run an earlier context again,
    bool [token] or `None`; `facts` are strings about the source.
    """

    experts: np.ndarray
    num_experts: int
    layer_ids: np.ndarray
    seq_start: np.ndarray
    is_repeat: np.ndarray | None
    facts: dict[str, str]

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise TraceError(f"num_experts is {self.num_experts}, expected 1 to {MAX_EXPERTS}")
        self._check_types()
        self._check_shapes()
        self._check_choices()
        # After the check, so that no id can wrap around.
        object.__setattr__(self, "experts", self.experts.astype(np.int16, copy=False))

    def _check_types(self) -> None:
        for name in ("experts", "layer_ids", "seq_start"):
            array = getattr(self, name)
            if array.dtype.kind not in "iu":
                raise TraceError(f"{name} has type {array.dtype}, expected whole numbers")
        if self.is_repeat is not None and self.is_repeat.dtype != bool:
            raise TraceError(f"is_repeat has type {self.is_repeat.dtype}, expected bool")

    def _check_shapes(self) -> None:
        if self.experts.ndim != 3 or 0 in self.experts.shape:
            raise TraceError(f"experts has shape {self.experts.shape}, expected non-empty [token, layer, top_k]")
        tokens, layers, _ = self.experts.shape
        if self.layer_ids.shape != (layers,):
            raise TraceError(f"layer_ids has shape {self.layer_ids.shape}, expected ({layers},), one id per layer")
        if len(set(self.layer_ids.tolist())) < layers:
            raise TraceError(f"layer_ids names a layer twice: {self.layer_ids.tolist()}")
        if self.is_repeat is not None and self.is_repeat.shape != (tokens,):
            raise TraceError(f"is_repeat has shape {self.is_repeat.shape}, expected ({tokens},), one mark per token")
        start = self.seq_start
        if start.ndim != 1 or start[:1].tolist() != [0] or start[-1] >= tokens or (start[1:] <= start[:-1]).any():
            raise TraceError(f"seq_start must be a list that ascends from 0 and stays below {tokens}, the tokens")

    def _check_choices(self) -> None:
        if self.experts.min() < 0 or self.experts.max() >= self.num_experts:
            at = np.argwhere((self.experts < 0) | (self.experts >= self.num_experts))[0]
            raise TraceError(
                f"{self._place(at)} chose expert {self.experts[tuple(at)]}, expected 0..{self.num_experts - 1}; "
                "use the model that the trace is of"
            )
        ordered = np.sort(self.experts, axis=2)
        twice = ordered[..., 1:] == ordered[..., :-1]
        if twice.any():
            at = np.argwhere(twice)[0]
            raise TraceError(f"{self._place(at)} chose expert {ordered[tuple(at)]} twice; a token chooses it once")

    def _place(self, at: np.ndarray) -> str:
        return f"layer {self.layer_ids[at[1]]}, token {at[0]}"

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
