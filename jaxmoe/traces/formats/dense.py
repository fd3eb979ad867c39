"""Which rows are layers with experts, in sources that have a row for every layer and zeros in dense ones."""

from collections.abc import Sequence

import numpy as np

from jaxmoe.traces.formats.hints import Hints
from jaxmoe.traces.trace import TraceError


def expert_layers(used: np.ndarray, hints: Hints) -> list[int]:
    """The layers with experts, given which rows have anything but zeros, bool [layer].

    Without a hint they are those rows. Raises `TraceError` where the model has another number of layers, or no
    experts in a row that is used.
    """
    if hints.num_layers not in (None, len(used)):
        raise TraceError(f"has rows of {len(used)} layers, but the model has {hints.num_layers}; use a trace of it")
    layers = np.flatnonzero(used).tolist() if hints.layer_ids is None else list(hints.layer_ids)
    if not layers:
        raise TraceError("has zeros in every layer; record the trace again")
    beyond = [layer for layer in layers if not 0 <= layer < len(used)]
    if beyond:
        raise TraceError(f"has rows of {len(used)} layers, but the model has experts in {beyond}; use a trace of it")
    strange = sorted(set(np.flatnonzero(used).tolist()) - set(layers))
    if strange:
        raise TraceError(f"has choices in layers {strange}, where the model has no experts; use a trace of this model")
    return layers


def with_dense(rows: np.ndarray, layer_ids: Sequence[int]) -> np.ndarray:
    """Rows [some, layer, ...] of layers with experts among zeros, one for every layer up to the last of them."""
    full = np.zeros((rows.shape[0], max(layer_ids) + 1, *rows.shape[2:]), rows.dtype)
    full[:, list(layer_ids)] = rows
    return full
