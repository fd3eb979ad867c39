"""Whole steps, the engine's time against a replay launch by launch, and gradients against finite differences."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels_by_hand import SHEET
from test_step import GROUPED, LATENT, step_of

from jaxmoe.des import StepLaunch, replay_step
from jaxmoe.engine import AbstractSchedule, Launch, Overlap, Stage, TwoBatches, price_alike
from jaxmoe.engine.stage import chained
from jaxmoe.experiment.step_replay import replay_of
from jaxmoe.relax import HardMax
from jaxmoe.serving.step import StepLoad

# The replay by hand.


def test_an_exchange_slows_what_runs_beside_it():
    """4 s of kernels beside 2 s of an exchange that holds a quarter: 1.5 s of them are done, 2.5 s are left."""
    run = replay_step([StepLaunch("exchange", "network", 2.0, held=0.25), StepLaunch("kernel", "nodes", 4.0)])
    assert run.end.tolist() == [2.0, 4.5]


def test_kernels_that_end_first_leave_the_exchange_alone():
    run = replay_step([StepLaunch("exchange", "network", 2.0, held=0.5), StepLaunch("kernel", "nodes", 0.5)])
    assert run.end.tolist() == [2.0, 1.0]


def test_launches_wait_for_others_and_for_their_queue():
    run = replay_step(
        [
            StepLaunch("one", "nodes", 1.0),
            StepLaunch("there", "network", 3.0, (0,)),
            StepLaunch("two", "nodes", 1.0, (1,)),
            StepLaunch("three", "nodes", 1.0),  # behind "two" in its queue, though it waits for nobody
        ]
    )
    assert run.begin.tolist() == [0.0, 1.0, 4.0, 5.0]
    assert run.seconds == 6.0


def test_a_queue_that_waits_for_what_is_behind_is_told():
    with pytest.raises(ValueError, match="one wait for launches behind them"):
        replay_step([StepLaunch("one", "nodes", 1.0, (1,)), StepLaunch("two", "nodes", 1.0)])


# Model against replay.

LAYOUTS = [
    {"tensor": 2},
    {"data": 2, "expert_ranks": 2},
    {"data": 2, "expert_ranks": 2, "overlap": "shared_beside_dispatch"},
    {"data": 2, "expert_ranks": 2, "overlap": "shared_beside_dispatch", "processors": 5},
    {"tensor": 2, "overlap": "two_batches", "processors": 0},
    {"data": 2, "expert_ranks": 2, "overlap": "two_batches", "processors": 0},
    {"data": 2, "expert_ranks": 2, "overlap": "two_batches", "processors": 5},
    {"data": 4, "expert_ranks": 4, "overlap": "two_batches", "processors": 9},
    {"data": 2, "expert_ranks": 2, "overlap": "two_batches", "processors": 5, "drafted": 1},
    {"data": 2, "expert_ranks": 2, "overlap": "shared_beside_dispatch", "processors": 5, "drafted": 3},
]
DECODING = np.array([8.0, 512.0, 0.0, 16.0])
CONTEXT = np.array([500.0, 2000.0, 1.0, 200.0])
PREFILLED = np.array([0.0, 0.0, 8192.0, 1024.0])


def test_the_model_agrees_with_the_replay():
    """Both are exact here: fixed queues leave nothing to the fluid sharing of processors but its sum in a window."""
    told, replayed = [], []
    for model in (GROUPED, LATENT):
        for layout in LAYOUTS:
            step = step_of(model, **layout)
            queries = step.deployment.queries
            told += np.asarray(step.seconds(StepLoad(DECODING, CONTEXT, PREFILLED, 512.0, queries))).tolist()
            loads = zip(DECODING, CONTEXT, PREFILLED, strict=True)
            replayed += [replay_of(step, StepLoad(*load, 512.0, queries)).seconds for load in loads]
    told, replayed = np.array(told), np.array(replayed)
    assert len(told) == 80
    assert np.abs(told / replayed - 1).max() < 0.005
    assert 1 - ((told - replayed) ** 2).sum() / ((replayed - replayed.mean()) ** 2).sum() > 0.999


def test_what_overlaps_is_not_slower_than_its_parts_nor_quicker_than_its_longest_server():
    batch = StepLoad(256.0, 2000.0)
    hooked, held = (
        step_of(data=2, expert_ranks=2, overlap="two_batches", processors=processors) for processors in (0, 5)
    )
    parts = hooked.parts(batch)
    exchange, every = float(parts["exchange"]), float(sum(parts.values()))
    assert max(exchange, every - exchange) < float(hooked.seconds(batch)) < every
    assert float(held.parts(batch)["experts"]) > float(parts["experts"])  # on half of the processors
    assert float(held.parts(batch)["exchange"]) == pytest.approx(exchange)


def priced(
    seconds: dict[str, tuple[str, float, float]], repeat: int, schedule: AbstractSchedule | None = None
) -> float:
    """Seconds of two batches through so many layers of these stages: server, seconds, and processors held."""
    stages = chained(
        Stage(name, Launch(jnp.asarray(time), on, jnp.asarray(held)), repeat=repeat)
        for name, (on, time, held) in seconds.items()
    )
    machine = step_of().kernels.machine
    return float(price_alike(machine, schedule or TwoBatches(), stages, HardMax()).total)


def test_two_batches_by_hand():
    """One layer: c of the first, c beside n, n alone; what n holds of processors comes on top of c."""
    stages = {"c": ("nodes", 3.0, 0.0), "n": ("network", 2.0, 0.5)}
    assert priced(stages, 1) == pytest.approx(3 + max(2, 3 + 1) + 2)
    assert priced(stages, 2) == pytest.approx(3 + 3 * (3 + 1) + 2)
    assert priced({"c": ("nodes", 0.5, 0.0), "n": ("network", 2.0, 0.5)}, 2) == pytest.approx(0.5 + 4 * 2)


def test_the_limit_of_many_batches_counts_what_exchanges_hold():
    stages = {"c": ("nodes", 3.0, 0.0), "n": ("network", 2.0, 0.5)}
    assert priced(stages, 2, Overlap()) == pytest.approx(2 * max(2, 3 + 1))


@pytest.mark.parametrize("held", [0.0, 0.3, 0.9])
def test_two_batches_that_share_processors_agree_with_the_replay(held):
    rng = np.random.default_rng(0)
    for _ in range(8):
        a, d, x, b = rng.uniform(0.1, 2, 4)
        stages = {"a": ("nodes", a, 0.0), "d": ("network", d, held), "x": ("nodes", x, 0.0), "b": ("network", b, 0.0)}
        layer = [("a", "nodes", a, 0.0), ("d", "network", d, held), ("x", "nodes", x, 0.0), ("b", "network", b, 0.0)]
        launches: list[StepLaunch] = []
        last: list[tuple[int, ...]] = [(), ()]
        for half in [layer[:2], layer[2:]] * 5:
            for part in (0, 1):
                for name, queue, seconds, share in half:
                    launches.append(StepLaunch(name, queue, seconds, last[part], share))
                    last[part] = (len(launches) - 1,)
        assert priced(stages, 5) == pytest.approx(replay_step(launches).seconds, rel=1e-5)


# Gradients.

NUMBERS = ("bandwidth", "bf16", "fp8", "fp4", "link")  # processors come in whole waves, whose gradients are not rounded


@pytest.mark.parametrize("overlap", ["serial", "two_batches", "shared_beside_dispatch"])
def test_the_gradient_of_tokens_a_second_is_their_slope(overlap):
    """By every number of the data sheet; those of other precisions have none."""

    def rate(factors):
        sheet = replace(SHEET, **{name: getattr(SHEET, name) * factors[at] for at, name in enumerate(NUMBERS)})
        step = step_of(sheet=sheet, data=2, expert_ranks=2, overlap=overlap, processors=2)
        return 2 * 200.0 / step.seconds(StepLoad(200.0, 2000.0))

    slope = jax.grad(rate)(jnp.ones(len(NUMBERS)))
    for at in range(len(NUMBERS)):
        step = 0.01 * jnp.eye(len(NUMBERS))[at]
        around = float(rate(1 + step) - rate(1 - step)) / 0.02
        assert float(slope[at]) == pytest.approx(around, rel=0.02, abs=1e-4 * float(rate(jnp.ones(len(NUMBERS)))))
    assert slope[0] > 0
    assert slope[1] > 0
    assert slope[2] == slope[3] == 0
