"""The scan over steps against the compiled simulator, and its gradients against differences of it."""

from functools import partial

import jax
import numpy as np
import pytest
from online_scenarios import drawn_table

from jaxmoe.serving.online.engine import Engine, Fleet
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.scan import Scanned, ScanRequests, seconds_of, serve_by_scan
from jaxmoe.serving.online.served import Served
from jaxmoe.serving.online.simulate import serve
from jaxmoe.serving.online.step_table import StepTable

COUNT, STEPS, PREFIX = 12, 120, 4


def drawn(seed: int) -> Requests:
    """Requests of any arrival, so that none comes just as a step begins; some prompts begin with one of two texts."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, 3, COUNT)
    return Requests(
        np.sort(rng.uniform(0, rng.choice([0.05, 1.0]), COUNT)),
        rng.integers(5, 40, COUNT),
        rng.integers(1, 9, COUNT),
        np.cumsum([0, *(texts > 0)]),
        texts[texts > 0],
        PREFIX,
    )


def served_by(requests: Requests, table: StepTable, budget: int, seats: int) -> Served:
    engine = Engine(token_budget=budget, seats=seats, kv_blocks=1000, block_tokens=PREFIX, prefix_cache=True)
    return serve(requests, Fleet(engine), table, token_times=True)


@partial(jax.jit, static_argnums=(0, 3, 4))
@partial(jax.vmap, in_axes=(None, None, 0, None, None))
def scanned(table: StepTable, values: tuple, arrivals: ScanRequests, budget: int, seats: int) -> Scanned:
    return serve_by_scan(arrivals, seconds_of(table, values), budget, seats, STEPS)


def arrivals_of(requests: list[Requests], served: list[Served]) -> ScanRequests:
    return ScanRequests(
        *(np.stack([getattr(each, name) for each in requests]) for name in ("arrival", "prompt", "output")),
        np.stack([each.cached for each in served]).astype(np.int64),
    )


@pytest.mark.parametrize(("budget", "seats"), [(12, 3), (40, 8)])
def test_every_token_as_compiled(budget, seats):
    table = drawn_table(np.random.default_rng(1))
    requests = [drawn(seed) for seed in range(100)]
    served = [served_by(each, table, budget, seats) for each in requests]
    assert sum((each.cached > 0).sum() for each in served) > 100
    with jax.enable_x64(True):
        values = tuple(term.values for term in table.terms)
        found = jax.device_get(scanned(table, values, arrivals_of(requests, served), budget, seats))
    for row, expected in enumerate(served):
        np.testing.assert_allclose(found.first_token[row], expected.first_token, 0, 1e-6)
        np.testing.assert_allclose(found.finish[row], expected.finish, 0, 1e-6)
        request, step = np.nonzero(found.tokens[row].T)
        np.testing.assert_array_equal(np.bincount(request), requests[row].output)
        np.testing.assert_allclose(found.ends[row, step], expected.token_times, 0, 1e-6)


def test_gradients_are_differences_of_the_compiled():
    budget, seats, change = 12, 3, 1e-7
    table, requests = drawn_table(np.random.default_rng(1)), drawn(3)
    served = served_by(requests, table, budget, seats)

    def mean_latency(values: tuple) -> jax.Array:
        each = scanned(table, values, arrivals_of([requests], [served]), budget, seats)
        return (each.finish[0] - requests.arrival).mean()

    with jax.enable_x64(True):
        gradient = jax.device_get(jax.grad(mean_latency)(tuple(np.asarray(term.values) for term in table.terms)))
    checked = 0
    for index, term in enumerate(table.terms):
        for place in np.argwhere(np.abs(gradient[index]) > 0.1)[:3]:
            changed = term.values.copy()
            changed[tuple(place)] += change
            terms = (*table.terms[:index], term._replace(values=changed), *table.terms[index + 1 :])
            after = served_by(requests, StepTable(terms), budget, seats)
            slope = (after.finish - served.finish).mean() / change
            assert gradient[index][tuple(place)] == pytest.approx(slope, rel=1e-4)
            checked += 1
    assert checked >= 10


def test_steps_that_do_not_suffice_leave_requests_unserved():
    with jax.enable_x64(True):
        arrivals = ScanRequests(np.array([0.0, 1, np.inf]), *np.full((2, 3), 2), np.zeros(3, int))
        served, longer = (
            jax.device_get(serve_by_scan(arrivals, lambda features: features[0] * 0 + 1.0, 8, 4, steps))
            for steps in (2, 9)
        )
    assert list(served.finish) == [2, -1, -1]
    assert list(longer.finish) == [2, 3, -1]
    assert list(longer.ends) == [1, 2, 3, 3, 3, 3, 3, 3, 3]
