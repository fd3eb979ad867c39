"""Layouts of a sweep over deployments, and their times: those of a kind are priced together, in chunks of one size."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmoe.experiment.deployment import Deployed
from jaxmoe.experiment.metrics import Row
from jaxmoe.serving.closed_loop import LIMITS, Users, limits, loop_of, wait
from jaxmoe.serving.costs import joules_of_steps
from jaxmoe.serving.merged import kind_of, merged
from jaxmoe.serving.step import AbstractStep, ModelStep
from jaxmoe.sweep.deployment_chunks import Chunks
from jaxmoe.threads import side_by_side

# Numbers of points that are users' alone, by the field of `Users`: layouts have no use for them.
REQUESTS = {
    "concurrency": "deployment.concurrency",
    "prompt": "deployment.prompt_tokens",
    "output": "deployment.output_tokens",
    "acceptance": "deployment.speculative.acceptance",
}
MOST_AT_ONCE = 4096  # rows of a chunk


@dataclass(frozen=True, eq=False)
class SweptLayout:
    """A deployment and the requests of its points: arrays [point]."""

    deployed: Deployed[AbstractStep]
    identity: bytes  # of its values and of the files that these name
    points: Int[np.ndarray, " point"]
    requests: Float[np.ndarray, "point request"]
    sequences: Float[np.ndarray, " point"]

    @property
    def kind(self) -> Hashable:
        step = self.deployed.step
        if not isinstance(step, ModelStep):
            return id(step)
        file = step.kernels.file
        return id(file.kernels), file.system, step.model, kind_of(self.deployed.deployment)


def priced_points(kinds: Sequence[Sequence[SweptLayout]], chunks: Chunks, study: bytes) -> Iterator[Mapping[int, Row]]:
    """Measures by point, a chunk at a time, on all cores; chunks have one size, so that they share what is compiled.

    `study` is what all have in common, for the identity of a chunk.
    """
    most = max(sum(len(layout.points) for layout in kind) for kind in kinds)
    size = min(MOST_AT_ONCE, 2 ** int(np.ceil(np.log2(most))))

    def price(chunk: _Chunk) -> Mapping[int, Row]:
        given = chunk.of_row, chunk.requests, chunk.sequences
        layouts = (chunk.kind[at].identity for at in dict.fromkeys(chunk.of_row.tolist()))
        identity = (study, *layouts, *map(np.ndarray.tobytes, given))
        found = chunks.columns(identity, partial(_measured, chunk.kind, *given))
        rows = zip(*found.values(), strict=True)
        return {at: dict(zip(found, row, strict=True)) for at, row in zip(chunk.points.tolist(), rows, strict=True)}

    return side_by_side(price, (chunk for kind in kinds for chunk in _chunks(kind, size)))


class _Chunk(NamedTuple):
    """Rows of a kind that are priced together, and the place of the layout of each."""

    kind: Sequence[SweptLayout]
    of_row: Int[np.ndarray, " row"]
    points: Int[np.ndarray, " row"]
    requests: Float[np.ndarray, "row request"]
    sequences: Float[np.ndarray, " row"]


def _chunks(kind: Sequence[SweptLayout], size: int) -> Iterator[_Chunk]:
    """All rows of a kind, so many at a time; the last one of them fills the last chunk up."""
    of_row = np.concatenate([np.full(len(layout.points), at) for at, layout in enumerate(kind)])
    points, requests, sequences = (
        np.concatenate([getattr(layout, name) for layout in kind]) for name in ("points", "requests", "sequences")
    )
    for start in range(0, len(points), size):
        part = np.minimum(np.arange(start, start + size), len(points) - 1)
        yield _Chunk(kind, of_row[part], points[part], requests[part], sequences[part])


def _measured(
    kind: Sequence[SweptLayout],
    of_row: Int[np.ndarray, " row"],
    requests: Float[np.ndarray, "row request"],
    sequences: Float[np.ndarray, " row"],
) -> dict[str, list[object]]:
    """Columns of measures of rows of a kind."""
    first, all_deployed = kind[0].deployed, [layout.deployed for layout in kind]
    steps = [each.step for each in all_deployed]
    gpus = [step for step in steps if isinstance(step, ModelStep)]
    step = merged(gpus, of_row) if gpus else steps[0]
    users = Users(**dict(zip(REQUESTS, jnp.asarray(requests.T, jnp.float32), strict=True)))
    served = wait(loop_of(step, users, jnp.asarray(sequences, jnp.float32), first.backend), first.overheads)
    ranks = np.array([each.deployment.data for each in all_deployed])[of_row]
    limited = limits(served.decoding, requests[:, 0] / ranks, first.backend)
    found = {
        "first_token_s": served.first_token,
        "per_token_s": served.per_token,
        "tokens_per_s_user": served.tokens_per_s_user(),
        "tokens_per_s_device": served.tokens_per_s_device(step),
        "decoding_sequences_a_rank": served.decoding,
        "gpus": np.array([each.deployment.devices for each in all_deployed])[of_row],
        "weights_B": np.array([each.memory.experts + each.memory.other_weights for each in all_deployed])[of_row],
    }
    rooms = {
        "free_B": np.array([each.memory.free for each in all_deployed])[of_row],
        "most_sequences_a_rank": sequences,
    }
    rates = np.asarray(found["tokens_per_s_device"])
    costs = [each.costs for each in all_deployed]
    joules = None if gpus else joules_of_steps(step, users, jnp.asarray(sequences, jnp.float32), first.backend)
    columns: dict[str, list[object]] = {
        "J_per_million_tokens": _given([each.joules(1.0) for each in costs], of_row, rates)
        if joules is None
        else np.asarray(joules).tolist(),
        "price_per_million_tokens": _given([each.price(1.0) for each in costs], of_row, rates),
    }
    columns |= {name: np.asarray(column).tolist() for name, column in found.items()}
    for name, room in rooms.items():  # endless on a machine whose memory is not told
        columns[name] = [size if math.isfinite(size) else None for size in room.tolist()]
    return columns | {"limited_by": [LIMITS[at] for at in limited]}


def _given(
    of_one: Sequence[float | None], of_row: Int[np.ndarray, " row"], rates: Float[np.ndarray, " row"]
) -> list[object]:
    """Cost of a million tokens at each rate, from that at one a second of each layout; `None` where not given."""
    each = np.array([np.nan if cost is None else cost for cost in of_one])[of_row] / rates
    return [None if math.isnan(cost) else cost for cost in each.tolist()]
