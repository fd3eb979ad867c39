"""A sweep over deployments: what users wait for and what a GPU yields, at every point of a study that names them.

Points that differ in nothing but requests are one layout. Layouts of GPUs of a kind, with the same stages and kernels,
are priced together, so that hardly anything is compiled for another layout. A machine that the engine times is a kind
of its own with each number of requests, and each number of tokens of a step a rollout.
"""

import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from jaxtyping import Float

from jaxmoe.config.keys import METHOD, is_of_system
from jaxmoe.errors import InputError
from jaxmoe.experiment.deployment import Deployed
from jaxmoe.experiment.machine_deployment import deployed_anywhere, in_engine
from jaxmoe.experiment.metrics import Row
from jaxmoe.hardware.gpu.deepep_files import read_exchanges
from jaxmoe.hardware.gpu.files import read_kernels
from jaxmoe.serving.kernels import Given
from jaxmoe.serving.memory import DoesNotFitError, cache_bytes
from jaxmoe.serving.step import AbstractStep, ModelStep
from jaxmoe.sweep.analysis import is_efficient
from jaxmoe.sweep.deployment_chunks import Chunks
from jaxmoe.sweep.deployment_prices import REQUESTS, SweptLayout, priced_points
from jaxmoe.sweep.point import Point, comparable
from jaxmoe.sweep.points import Space, SweepError
from jaxmoe.sweep.run import Progress
from jaxmoe.sweep.study import Study

KEYS = (*REQUESTS.values(),)
ASKED = (*KEYS[1:], "deployment.gating_spread")
NO_ROOM = "weights and one sequence do not fit into memory"
TOO_FEW = "there are fewer requests in flight than data-parallel ranks"
LAYERS_ALONE = ("metrics", "layers", "iterations")  # of a study, which say how layers are timed
MEASURES = (
    *("first_token_s", "per_token_s", "tokens_per_s_user", "tokens_per_s_device"),
    *("J_per_million_tokens", "price_per_million_tokens"),
    *("decoding_sequences_a_rank", "gpus", "weights_B", "free_B", "most_sequences_a_rank", "limited_by", "on_front"),
)
Case = tuple[tuple[str, str], ...]
"""Keys and values of what is asked for, the model and its requests: no choice between deployments."""
LEFT_OUT = "left_out"  # the reason, where there are no measures


@dataclass(frozen=True)
class DeploymentSweep:
    """Rows of a study's points, in their order: their values, `MEASURES`, and why one is left out."""

    space: Space
    rows: list[Row]
    kinds: int
    setup_s: float  # to read and check what is deployed
    seconds: float  # in which points were priced, compilation included
    notes: list[str]
    known_chunks: int = 0  # that were in the folder

    @property
    def priced(self) -> list[Row]:
        return [row for row in self.rows if row[LEFT_OUT] is None]

    @property
    def fronts(self) -> dict[Case, list[Row]]:
        """By case, rows that no other one beats in tokens/s of a user and of a GPU, the fastest for a user first."""
        on_front = (row for row in self.priced if row["on_front"])
        return by_case(sorted(on_front, key=lambda row: -row["tokens_per_s_user"]))

    @property
    def left_out(self) -> dict[str, int]:
        """How many points are left out, by the reason, the most frequent first."""
        return dict(Counter(row[LEFT_OUT] for row in self.rows if row[LEFT_OUT] is not None).most_common())


def by_case(rows: Iterable[Row]) -> dict[Case, list[Row]]:
    """Rows by what is asked for; there is one at least, and all have the same keys."""
    found: dict[Case, list[Row]] = {}
    rows = list(rows)
    asked = [key for key in rows[0] if key in ASKED or key.split(".")[0] == "model"]
    for row in rows:
        found.setdefault(tuple((key, str(row[key])) for key in asked), []).append(row)
    return found


def sweep_deployments(study: Study, progress: Progress, folder: Path | None = None) -> DeploymentSweep:
    """Price the deployments of a study, but for chunks that are in the `folder`, where those that are priced are kept.

    Raises `SweepError` where none can be, or the study asks for layers.
    """
    check_deployments(study)
    start = time.perf_counter()
    space = Space(study)
    points = space.points()
    rows: list[Row] = [
        {key: value for key, value in point.values.items() if key not in METHOD} | {LEFT_OUT: None} for point in points
    ]
    layouts = [_with_room(layout, rows) for layout in _layouts(space, points, rows)]
    if not any(len(layout.points) for layout in layouts):
        raise SweepError(f"{space.label}: no deployment can be priced. The first: {_first_reason(space, points, rows)}")
    kinds: dict[Hashable, list[SweptLayout]] = {}
    for layout in layouts:
        kinds.setdefault(layout.kind, []).append(layout)
    setup_s, start = time.perf_counter() - start, time.perf_counter()
    done, total = 0, sum(len(layout.points) for layout in layouts)
    chunks = Chunks(folder)
    for found in priced_points([*kinds.values()], chunks, space.identity.encode()):
        for point, measures in found.items():
            rows[point] |= measures
        done += len(found)
        progress(done, total)
    chunks.end()
    for case in by_case(row for row in rows if row[LEFT_OUT] is None).values():
        _mark_front(case)
    notes = sorted({note for layout in layouts for note in layout.deployed.step.notes})
    return DeploymentSweep(space, rows, len(kinds), setup_s, time.perf_counter() - start, notes, chunks.known)


def check_deployments(study: Study) -> None:
    """Raise `SweepError` for what a study of deployments has no use for."""
    config = study.config
    for key in LAYERS_ALONE:
        if key in config.model_fields_set:
            raise SweepError(
                f"{study.path}: {key} is given beside axes of deployments, which have whole steps; drop it"
            )
    for key in (*config.axes, *config.set, *config.derived):
        if key in METHOD:
            raise SweepError(
                f"{study.path}: {key} is given beside axes of deployments, whose experts lie by expert_ranks, or on "
                f"machines without measured kernels by system.plan and costs.exchange; drop it"
            )


# What is deployed.


def _layouts(space: Space, points: Sequence[Point], rows: list[Row]) -> Iterator[SweptLayout]:
    """Layouts that can be; points of the others get the reason."""
    alike: dict[Hashable, list[int]] = {}
    chosen = [key for key in rows[0] if key not in KEYS]
    for at, row in enumerate(rows):
        alike.setdefault(tuple(map(comparable, map(row.__getitem__, chosen))), []).append(at)
    read = cache(read_kernels), cache(read_exchanges)
    told: dict[int, str] = {}  # files of exchanges, of which few are common to all
    systems = [key for key in chosen if is_of_system(key)]

    def exchanges_of(step: AbstractStep) -> str:
        file = step.deepep if isinstance(step, ModelStep) else None
        if id(file) not in told:
            # The text of a file leaves out the numbers of kernels.
            numbers = [vars(each.kernel) for each in file.exchanges] if file else []
            told[id(file)] = repr((file, numbers))
        return told[id(file)]

    asked = np.array([[row.get(key, np.nan) for row in rows] for key in KEYS], float).T  # where it is an axis
    contexts = _context(*np.nan_to_num(asked[:, 1:3]).T)
    todo = list(alike.items())
    while todo:
        same, places = todo.pop(0)
        shortest = places[int(contexts[places].argmin())]
        try:
            scenario = space.scenario(points[shortest].values)
            if in_engine(scenario) and len(parts := _by_requests(places, asked[:, 0])) > 1:
                todo = [(same, part) for part in parts] + todo
                continue
            own = deployed_anywhere(scenario, *read)
        except InputError as error:
            reason = NO_ROOM if isinstance(error, DoesNotFitError) else str(error)
            _leave_out(rows, places, reason)
            continue
        if systems and isinstance(own.step, ModelStep):
            raise SweepError(
                f"{space.label}: {systems[0]} is given beside axes of deployments on GPUs, whose experts lie by "
                "expert_ranks; drop it, or take deployment.exchange engine"
            )
        stated = [getattr(own.users, name) for name in REQUESTS]
        requests = np.where(np.isnan(asked[places]), stated, asked[places])
        identity = repr((same, points[shortest].content, exchanges_of(own.step))).encode()
        yield SweptLayout(own, identity, np.array(places), requests, _sequences(own, requests))


def _by_requests(places: Sequence[int], concurrency: Float[np.ndarray, " point"]) -> list[list[int]]:
    """Places by their requests in flight, which say how much of a trace is left for prompts."""
    found: dict[str, list[int]] = {}
    for at in places:
        found.setdefault(str(concurrency[at]), []).append(at)
    return [*found.values()]


def _sequences(own: Deployed, requests: Float[np.ndarray, "point request"]) -> Float[np.ndarray, " point"]:
    """Sequences that a rank has memory for, of the lengths of each point."""
    contexts, which = np.unique(_context(requests[:, 1], requests[:, 2]), return_inverse=True)
    sizes = [_cache_bytes(own, float(context)) for context in contexts]
    return np.array([replace(own.memory, cache_per_sequence=size).sequences for size in sizes])[which]


def _cache_bytes(own: Deployed, context: float) -> float:
    """Keys and values of a sequence of so many tokens on a device; nodes of a machine have equal parts of them."""
    model = own.step.model
    if isinstance(own.step, ModelStep):
        return cache_bytes(model, own.deployment, context)
    known = float(_context(own.users.prompt, own.users.output))
    return own.memory.cache_per_sequence * model.context_read(context) / model.context_read(known)


def _context(prompt: Given, output: Given) -> Given:
    """Tokens of a sequence on average."""
    return prompt + output / 2


def _with_room(layout: SweptLayout, rows: list[Row]) -> SweptLayout:
    """The layout without points that do not fit, or that leave ranks without a request, which get the reason."""
    fits, enough = layout.sequences >= 1, layout.requests[:, 0] >= layout.deployed.deployment.data
    _leave_out(rows, layout.points[~fits].tolist(), NO_ROOM)
    _leave_out(rows, layout.points[fits & ~enough].tolist(), TOO_FEW)
    kept = fits & enough
    points, requests, sequences = (array[kept] for array in (layout.points, layout.requests, layout.sequences))
    return replace(layout, points=points, requests=requests, sequences=sequences)


def _leave_out(rows: list[Row], places: Iterable[int], reason: str) -> None:
    for at in places:
        rows[at] |= dict.fromkeys(MEASURES) | {LEFT_OUT: reason}


def _first_reason(space: Space, points: Sequence[Point], rows: Sequence[Row]) -> str:
    """Why the first point is left out, with the remedy."""
    try:
        deployed_anywhere(space.scenario(points[0].values))
    except InputError as error:
        return str(error)
    return rows[0][LEFT_OUT]


def _mark_front(rows: list[Row]) -> None:
    """Say which rows of a case are on its front; of equal ones that with the shortest wait for a first token."""
    rows = sorted(rows, key=lambda row: row["first_token_s"])
    costs = -np.array([[row["tokens_per_s_user"], row["tokens_per_s_device"]] for row in rows])
    unique, shortest = np.unique(costs, axis=0, return_index=True)
    chosen = {*shortest[is_efficient(unique)].tolist()}
    for at, row in enumerate(rows):
        row["on_front"] = at in chosen
