"""Which experts are popular with which topic (wafer-scale study, Ob4, Fig. 7): loads by topic and their overlap.

A topic is what sequences of one name, load counts of one window, or whole traces have in common.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from jaxmoe.traces.loads import LoadCounts
from jaxmoe.traces.statistics.counting import CHUNK_TOKENS
from jaxmoe.traces.statistics.groups import loads_of_groups
from jaxmoe.traces.statistics.similarity import common_fraction, hottest
from jaxmoe.traces.trace import GatingTrace, TraceError

TOP_EXPERTS = 10  # as the study shows them


@dataclass(frozen=True)
class Topics:
    """How often the tokens of every topic chose each expert, in the layers that all topics have."""

    names: tuple[str, ...]
    layer_ids: np.ndarray
    counts: Int64[np.ndarray, "topic layer expert"]

    @property
    def load(self) -> Float64[np.ndarray, "topic layer expert"]:
        """Loads over the mean of topic and layer, as in Fig. 7a; 0 where there are none."""
        mean = self.counts.mean(axis=-1, keepdims=True)
        return np.divide(self.counts, mean, out=np.zeros(self.counts.shape), where=mean > 0)

    def top(self, count: int = TOP_EXPERTS) -> np.ndarray:
        """The most popular experts of every topic, int [topic, layer, rank] (Fig. 7b)."""
        return hottest(self.counts, count)

    def overlap(self, count: int = TOP_EXPERTS) -> Float64[np.ndarray, "topic topic layer"]:
        """The part of the most popular experts that two topics have in common."""
        top = self.top(count)
        return np.stack([common_fraction(np.broadcast_to(one, top.shape), top) for one in top])


def topics_of_sequences(trace: GatingTrace, chunk_tokens: int = CHUNK_TOKENS) -> Topics:
    """Topics as sequences are named, in the order of their first one.

    Raises `TraceError` when the trace does not name its sequences.
    """
    if trace.seq_name is None:
        raise TraceError("does not name its sequences; it needs the array seq_name")
    names = tuple(dict.fromkeys(trace.seq_name))
    number = {name: index for index, name in enumerate(names)}
    lengths = np.diff(trace.seq_start, append=trace.num_tokens)
    group = np.repeat([number[name] for name in trace.seq_name], lengths)
    return Topics(names, trace.layer_ids, loads_of_groups(trace, group, len(names), chunk_tokens))


def topics_of_windows(loads: LoadCounts) -> Topics:
    """Topics as windows are named; windows of one name are added up."""
    names = tuple(dict.fromkeys(loads.window_name))
    number = {name: index for index, name in enumerate(names)}
    counts = np.zeros((len(names), *loads.counts.shape[1:]), np.int64)
    np.add.at(counts, [number[name] for name in loads.window_name], loads.counts)
    return Topics(names, loads.layer_ids, counts)


def topics_of_files(loads: Mapping[str, LoadCounts]) -> Topics:
    """Topics as files of one model are named, in the layers that all of them have.

    Raises `TraceError` when files differ in their number of experts or have no layer in common.
    """
    first, *others = loads.items()
    for name, other in others:
        if other.num_experts != first[1].num_experts:
            raise TraceError(
                f"{name} has {other.num_experts} experts, {first[0]} has {first[1].num_experts}; "
                "take files of one model"
            )
    common = [layer for layer in first[1].layer_ids.tolist() if all(layer in each.layer_ids for each in loads.values())]
    if not common:
        raise TraceError(f"{', '.join(loads)} have no layer in common; take files of one model")
    rows = [[each.layer_ids.tolist().index(layer) for layer in common] for each in loads.values()]
    counts = [each.counts.sum(axis=0)[row] for each, row in zip(loads.values(), rows, strict=True)]
    return Topics(tuple(loads), np.array(common), np.stack(counts))
