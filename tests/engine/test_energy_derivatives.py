"""Derivatives of energy by all numbers of a machine, against central differences, in double precision."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.derivatives import check_slopes

from jaxmoe.hardware import Energy
from jaxmoe.relax import SmoothMax, SoftSupport


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["lowest_host", "corner_host_split_tree"])
def test_slopes_by_the_numbers_of_the_machine_and_by_shares(rule):
    rng = np.random.default_rng(5)
    machine = cases.as_machine(cases.random_machine(rng, (2, 2), memory=True))
    batch = cases.batch(cases.random_tokens(rng, 6, 3, 2))
    numbers = {
        "compute": jnp.asarray(0.3),
        "memory": jnp.asarray(2.0),
        "links": jnp.asarray(rng.uniform(1, 9, machine.topology.num_links)),
        "idle": jnp.asarray(11.0),
        "bandwidth": machine.topology.link_bandwidth.astype(float),
        "flops": machine.die.flops.astype(float) / 1e3,  # so that compute is the longer
        "share": jnp.asarray(cases.random_share(rng, 3, 4)) + 0.05,
    }

    def energies(given):
        known = Energy(given["compute"], {"memory": given["memory"]}, {"link": given["links"]}, given["idle"])
        changed = eqx.tree_at(
            lambda m: (m.topology.link_bandwidth, m.die.flops), machine, (given["bandwidth"], given["flops"])
        )
        model = cases.model_on(dataclasses.replace(changed, energy=known), "sharded", rule)
        share = given["share"] / given["share"].sum(axis=1, keepdims=True)
        found = model(share, batch, None, SmoothMax(0.1), SoftSupport(0.1)).energy
        return jnp.stack([found[name] for name in ("compute", "memory", "link", "idle")])

    compute, memory, link, idle = check_slopes(energies, numbers)
    assert compute >= {"compute"}
    assert not compute & {"bandwidth", "flops", "links", "memory", "idle"}
    assert memory == {"memory", "share"}
    assert link == {"links", "share"}
    assert idle == {"idle", "bandwidth", "flops", "share"}
