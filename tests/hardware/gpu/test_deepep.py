"""DeepEP's exchanges by levels of a machine: copies by hand, limits, monotony, gradients, files."""

import itertools
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.hardware.gpu.deepep import Links, Load, LowLatencyKernel, NormalKernel, Notice, copies_of
from jaxmoe.hardware.gpu.deepep_files import ExchangeFile, KnownExchange, beside, read_exchanges, write_exchanges
from jaxmoe.hardware.gpu.files import KernelFileError

LINKS = Links(450e9, 50e9)
NOTHING = -40.0  # the logarithm of what takes no time
NORMAL = NormalKernel(**{name: jnp.float32(NOTHING) for name in NormalKernel.__dataclass_fields__})
QUICK = LowLatencyKernel(**{name: jnp.float32(NOTHING) for name in LowLatencyKernel.__dataclass_fields__})


def load(**changed) -> Load:
    usual = Load(1024.0, 7168.0, 8.0, 256.0, 6.0, 2.0, 2.0, 8.0, 20.0)
    return Load(*(jnp.asarray(value, jnp.float32) for value in usual._replace(**changed)))


def numbers(kernel, **changed):
    """A kernel with other numbers: parts of rates, and what the others are the logarithms of."""
    logs = {
        name: np.log(value / (1 - value) if name in ("link", "network") else value) for name, value in changed.items()
    }
    return replace(kernel, **{name: jnp.float32(value) for name, value in logs.items()})


@pytest.mark.parametrize(("groups", "experts", "top_k", "limit"), [(2, 4, 2, None), (4, 8, 3, None), (4, 8, 3, 2)])
def test_copies_are_those_of_all_choices_counted(groups, experts, top_k, limit):
    size = experts // groups
    found = []
    for order in itertools.permutations(range(experts), top_k):
        # The gate takes the groups of the best experts, up to the limit.
        reached = dict.fromkeys(expert // size for expert in order)
        found.append(min(len(reached), limit or groups))
    assert copies_of(groups, experts, top_k, limit) == pytest.approx(np.mean(found), rel=1e-12)


def test_the_network_limits_what_leaves_a_node():
    # A token's copy to its own node stays: one of two copies leaves, 1024 of 7168 B at half of 50 GB/s.
    kernel = numbers(NORMAL, network=0.5, link=1 - 1e-6, overlap=1e4)
    assert float(kernel.seconds(load(), LINKS)) == pytest.approx(1024 * 7168 / 25e9, rel=1e-3)
    four = kernel.seconds(load(nodes=4.0, node_copies=4.0), LINKS)
    assert float(four) == pytest.approx(3 * 1024 * 7168 / 25e9, rel=1e-3)


def test_the_link_limits_what_is_sent_within_a_node():
    kernel = numbers(NORMAL, link=0.5, network=0.5, overlap=1e4)
    alone = load(nodes=1.0, node_copies=1.0, gpu_copies=4.0)
    assert float(kernel.seconds(alone, LINKS)) == pytest.approx(1024 * 4 * 7 / 8 * 7168 / 225e9, rel=1e-3)


def test_processors_share_the_tokens_of_a_normal_exchange():
    kernel = numbers(NORMAL, gpu_copy=1e-6, network=0.9, link=0.9, overlap=1e4)
    few, many = (float(kernel.seconds(load(processors=sms), LINKS)) for sms in (4.0, 8.0))
    # Two processors are a channel: 512 tokens of six copies at 1 us each.
    assert few == pytest.approx(512 * 6e-6, rel=1e-3)
    assert many == pytest.approx(few / 2, rel=1e-3)


def test_a_low_latency_exchange_sends_every_choice():
    kernel = numbers(QUICK, network=0.5, link=1 - 1e-6, overlap=1e4, wait=1e4, wait_away=1e4)
    assert float(kernel.seconds(load(), LINKS)) == pytest.approx(1024 * 8 / 2 * 7168 / 25e9, rel=1e-3)
    # Of 160 experts on 132 processors two share one: 80 work, 12.8 tokens each.
    busy = numbers(kernel, token=1e-3)
    shared = float(busy.seconds(load(experts=160.0, processors=132.0), LINKS))
    assert shared == pytest.approx(1024 / 80 * 1e-3, rel=1e-3)


def test_a_notice_counts_hops_and_scans():
    zero = Notice(**{name: jnp.float32(NOTHING) for name in Notice.__dataclass_fields__})
    kernel = numbers(zero, launch=1e-5, hop=2e-5, scan=1e-6)
    told = float(kernel.seconds(load(nodes=4.0), LINKS))
    assert told == pytest.approx(1e-5 + 2 * 2e-5 + 2 * 1024 / 20 * 2 * 1e-6, rel=1e-3)


@pytest.mark.parametrize("kernel", [NORMAL, QUICK])
def test_more_tokens_are_never_cheaper_and_gradients_are_finite(kernel):
    usual = jax.tree.map(lambda _: jnp.float32(-22.0), kernel)
    usual = replace(usual, link=jnp.float32(1.0), network=jnp.float32(1.0), overlap=jnp.float32(1.0))
    tokens = jnp.asarray([1.0, 2, 3, 16, 100, 4096, 131072])
    every = jax.jit(lambda kernel, tokens: kernel.seconds(load()._replace(tokens=tokens), LINKS))
    assert (jnp.diff(every(usual, tokens)) > 0).all()
    slopes = jax.jacfwd(every)(usual, tokens)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))
    faster = usual.seconds(load(), Links(450e9, 100e9))
    assert float(faster) < float(usual.seconds(load(), LINKS))


def test_files_keep_exchanges(tmp_path):
    names = {"side": "combine", "part": "avg_t", "across": "nodes", "version": "1"}
    kernel = numbers(QUICK, launch=1e-5, network=0.9)
    path = tmp_path / beside(tmp_path / "h100.json").name
    assert path.name == "h100_deepep.json"
    write_exchanges(
        path, ExchangeFile("h100_sxm", "a table", LINKS, 132, (KnownExchange(names, kernel, (0.9, 1.1), {"rows": 3}),))
    )
    read = read_exchanges(path)
    (known,) = read.exchanges
    assert (read.links, read.processors, known.names, known.interval, known.told) == (
        LINKS,
        132,
        names,
        (0.9, 1.1),
        {"rows": 3},
    )
    assert float(known.kernel.seconds(load(), LINKS)) == pytest.approx(float(kernel.seconds(load(), LINKS)), rel=1e-3)
    assert eqx.tree_equal(jax.tree.structure(known.kernel), jax.tree.structure(kernel))
    path.write_text("{}")
    with pytest.raises(KernelFileError, match="is no file of exchanges"):
        read_exchanges(path)
