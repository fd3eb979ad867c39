"""Lists of expert ids as arrays, and the first of them that does not fit."""

from itertools import chain
from typing import Any

import numpy as np

from jaxmoe.traces.formats.source import AGAIN, MOST_DIGITS, shown
from jaxmoe.traces.trace import TraceError


def choices_of(place: str, tokens: Any) -> np.ndarray:
    """A list over tokens of lists of expert ids as int64 [token, top_k]; `place` names it in a `TraceError`."""
    if not isinstance(tokens, list) or not tokens:
        raise TraceError(f"{place} holds {shown(tokens)}, expected a list of tokens")
    _name_misfit(place, tokens, [type(chosen) is list for chosen in tokens], "a list of expert ids")
    top_k = len(tokens[0])
    _name_misfit(place, tokens, [len(chosen) == top_k for chosen in tokens], f"{top_k} expert ids as in token 0")
    # One look at all types is fast; the search runs only when one of them is wrong.
    if set(map(type, chain.from_iterable(tokens))) - {int}:
        whole = [all(type(expert) is int for expert in chosen) for chosen in tokens]
        _name_misfit(place, tokens, whole, "whole numbers")
    try:
        experts = np.asarray(tokens, np.int64)
    except OverflowError:
        raise TraceError(f"{place} holds an expert id of more than 64 bits; {AGAIN}") from None
    check_not_negative(place, experts)
    return experts


def check_not_negative(place: str, experts: np.ndarray) -> None:
    """Raise `TraceError` for the first negative id: -1 stands for a missing choice in npz alone."""
    if (experts < 0).any():
        at = tuple(np.argwhere(experts < 0)[0])
        raise TraceError(f"{place}, token {at[0]} chose expert {experts[at]}, expected 0 or more; {AGAIN}")


def check_rows(row: str, experts: np.ndarray) -> None:
    """Raise `TraceError` for the first negative id in choices [token, layer, top_k]; `row` says what a layer is."""
    for layer in np.flatnonzero((experts < 0).any(axis=(0, 2))):
        check_not_negative(f"{row} {layer}", experts[:, layer])


def layer_number(key: Any) -> int:
    """The layer that a key of a JSON object names."""
    if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= MOST_DIGITS):
        raise TraceError(f"JSON has the key {shown(key)}, expected only layer numbers")
    return int(key)


def stacked_layers(rows: dict[int, np.ndarray]) -> np.ndarray:
    """Arrays [token, top_k] of layers as [token, layer, top_k], layers ascending. Raises where they differ."""
    order = sorted(rows)
    for layer in order:
        if rows[layer].shape != rows[order[0]].shape:
            shapes = "{} tokens with {} experts each".format
            raise TraceError(
                f"layer {layer} has {shapes(*rows[layer].shape)}, but layer {order[0]} has "
                f"{shapes(*rows[order[0]].shape)}; every layer needs the same tokens"
            )
    return np.stack([rows[layer] for layer in order], axis=1)


def _name_misfit(place: str, tokens: list[Any], fits: list[bool], expected: str) -> None:
    """Raise `TraceError` for the first token that does not fit."""
    if not all(fits):
        token = fits.index(False)
        raise TraceError(f"{place}, token {token} is {shown(tokens[token])}, expected {expected}")
