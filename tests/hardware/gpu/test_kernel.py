"""Kernels of GPUs: the base by hand, what more tokens cost, slopes, and files."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.hardware.gpu.files import (
    KernelFile,
    KernelFileError,
    KnownKernel,
    read_kernels,
    read_own_kernels,
    write_kernels,
)
from jaxmoe.hardware.gpu.fused import FusedGemm, fused_gemm
from jaxmoe.hardware.gpu.kernel import KEPT, Base, FittedKernel, Reach, Residual, Terms, rising_inputs
from jaxmoe.hardware.gpu.sheet import SHEETS, Sheet
from jaxmoe.hardware.gpu.terms import (
    EVEN_TILES,
    TILE_ROWS,
    ExpertLoads,
    Heads,
    all_to_all,
    collective,
    decode,
    even_tile,
    fused_moe,
    prefill,
    product,
)

SHEET = Sheet.of(bandwidth=1e12, bf16=1e14, fp8=2e14, fp4=2e14, processors=10.0, link=1e11)


def numbers(*values: float) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(value, jnp.float32) for value in values)


def drawn_kernel(terms: Terms, seed: int, width: int = 5) -> FittedKernel:
    """A kernel of any numbers, larger than fitted ones."""
    rng = np.random.default_rng(seed)

    def some(*size: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=size), jnp.float32)

    bytes_, tiles = terms.memory.shape[-1], terms.tiles.shape[-1]
    base = Base(jnp.log(jnp.asarray(1e-6)), some(bytes_), some(tiles), jnp.log(1e-7) + some(tiles), some())
    rising = rising_inputs(terms, jnp.zeros(terms.memory.shape[:-1])).shape[-1]
    shape = terms.shape.shape[-1]
    return FittedKernel(
        base,
        Residual(
            rising=some(width, rising) / 3,
            shape=some(width, shape),
            first=some(width),
            joined=some(width, width),
            again=some(width, shape),
            second=some(width),
            out=some(width),
            direct=some(rising) / 10,
            linear=some(shape),
            bias=some(),
        ),
    )


def moe_terms(counts: np.ndarray) -> Terms:
    """Terms of counts [row, expert], each token of one choice."""
    loads = ExpertLoads(
        *(
            jnp.asarray(part, jnp.float32)
            for part in (
                (counts > 0).sum(axis=1),
                counts.sum(axis=1),
                counts.max(axis=1),
                counts.sum(axis=1),
                np.stack([np.ceil(counts / rows).sum(axis=1) for rows in TILE_ROWS], axis=1),
            )
        )
    )
    hidden, inner, experts, top_k = numbers(2048, 512, counts.shape[1], 1)
    return fused_moe(loads, hidden, inner, experts, top_k, 3.0, SHEET, "bfloat16", 2.0, 2.0)


def test_a_base_is_launch_and_the_longer_of_bytes_and_the_best_tile():
    terms = Terms(
        memory=jnp.array([[1e-3, 2e-3]]),
        tiles=jnp.array([[8e-3, 5e-3]]),
        waves=jnp.array([[1.0, 4.0]]),
        sizes=jnp.zeros((1, 1)),
        shape=jnp.zeros((1, 1)),
    )
    log = jnp.log
    # Bytes take twice and once as long as told, tiles as long; a wave takes 1 ms: 4 ms, and the lesser of 9 and 9 ms.
    base = Base(log(1e-3), log(jnp.array([2.0, 1.0])), jnp.zeros(2), log(jnp.full(2, 1e-3)), jnp.asarray(-40.0))
    assert float(base.seconds(terms)[0]) == pytest.approx(1e-3 + 4e-3 + 9e-3)  # one after the other
    longer = Base(base.launch, base.moved, base.filled, base.wave, jnp.asarray(40.0))
    expected = 1e-3 + (4e-3**8 + 9e-3**8) ** (1 / 8)  # the longer, but for a rounded corner
    assert float(longer.seconds(terms)[0]) == pytest.approx(expected)
    assert float(terms.roofline[0]) == pytest.approx(5e-3)


def test_terms_of_a_product_by_hand():
    terms = product(*numbers(130, 256, 64), SHEET, "bfloat16", 2.0, 2.0)
    assert float(terms.memory[0]) == pytest.approx(256 * 64 * 2 / 1e12)
    assert float(terms.memory[1]) == pytest.approx((130 * 64 * 2 + 130 * 256 * 2) / 1e12)
    # Tiles of 128 x 128: two by two, on ten processors one wave, each of a tile's FLOPs at a tenth of the rate.
    assert float(terms.waves[3]) == 1
    assert float(terms.tiles[3]) == pytest.approx(2 * 128 * 128 * 64 / 1e13)
    # Of 16 x 64: nine by four are 36, four waves.
    assert float(terms.waves[0]) == 4


@pytest.mark.parametrize(
    ("rows", "columns", "tall", "wide"),
    [
        (64, 768, 64, 16),  # one wave whatever the tile: the narrowest fills it best
        (512, 768, 64, 48),  # 8 x 16 = 128 of 132, while 32 columns would take two waves
        (1281, 2048, 256, 96),  # 6 x 22, a full wave
        (2048, 2048, 128, 256),  # 16 x 8, as 256 by 128 fills it: the wider comes first
    ],
)
def test_even_tiles_by_hand(rows, columns, tall, wide):
    found = even_tile(*numbers(rows, columns, 132))
    assert (int(found.tall), int(found.wide), int(found.waves)) == (tall, wide, 1)


def test_even_tiles_have_the_fewest_waves_and_the_fullest_last_one():
    rng = np.random.default_rng(0)
    rows, columns = rng.integers(1, 20000, 200), rng.integers(1, 500, 200) * 32
    found = even_tile(*numbers(rows, columns, 132))
    for at, (height, width) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
        blocks = [-(-height // tall) * -(-width // wide) for tall, wide in EVEN_TILES]
        best = min((-(-count // 132), -((count - 1) % 132)) for count in blocks)
        assert (int(found.waves[at]), -((int(found.blocks[at]) - 1) % 132)) == best


def test_terms_of_experts_by_hand():
    counts = np.array([[20, 0, 1, 3]])
    terms = moe_terms(counts)
    assert float(terms.memory[0, 0]) == pytest.approx(3 * 3 * 2048 * 512 * 2 / 1e12)  # three experts are read
    # Tiles of 16 x 64: two, one, one rows of tiles; 16 of them up and gate, 32 down; 7 and 13 waves.
    assert float(terms.waves[0, 1]) == 7 + 13
    assert float(terms.tiles[0, 1]) == pytest.approx((7 * 2048 + 13 * 512) * 2 * 16 * 64 * 10 / 1e14)


def test_a_window_bounds_the_keys_that_are_read():
    batch, cached = numbers(4, 1000)
    whole, bounded, wide = (
        decode(batch, cached, Heads(*numbers(8, 2, 128, 128, window)), SHEET, "bfloat16", 2.0)
        for window in (0, 100, 4096)
    )
    assert float(whole.memory[0]) == pytest.approx(4 * 1000 * 2 * 256 * 2 / 1e12)
    assert float(bounded.memory[0]) == pytest.approx(0.1 * float(whole.memory[0]))
    assert float(wide.memory[0]) == float(whole.memory[0])


def test_all_of_a_message_but_a_rank_s_own_part_passes_its_link():
    reduced, gathered = (collective(name, *numbers(8e6, 4), SHEET).memory[0] for name in ("all_reduce", "all_gather"))
    assert (float(reduced), float(gathered)) == pytest.approx((12e6 / 1e11, 6e6 / 1e11))


def test_terms_of_an_all_to_all_by_hand():
    """100 tokens of 1,000 numbers, four choices each, on 16 GPUs, of which a token's are on 3.5."""

    def terms(operation):
        return all_to_all(f"alltoall_{operation}", "fp8", *numbers(100, 1000, 4, 3.5, 16), SHEET)

    sent = 100 * 3.5 * 1000
    there, back, counts = map(terms, ("dispatch", "combine", "prepare"))
    assert float(there.memory[0]) == pytest.approx(sent * 15 / 16 / 1e11)
    assert float(there.memory[1]) == pytest.approx(100 * 4.5 * 1000 / 1e12)
    assert float(there.tiles[0]) == pytest.approx(sent / 16 / 1e11)  # to one other GPU
    assert float(there.waves[0]) == 4  # doublings
    assert float(back.memory[0]) == pytest.approx(2 * float(there.memory[0]))  # results are in BF16
    assert float(back.memory[1]) == pytest.approx(100 * 5 * 2000 / 1e12)  # those of four choices become one
    assert float(counts.memory[0]) == pytest.approx(100 * 3.5 * 32 * 15 / 16 / 1e11)
    assert float(there.shape[0]) == 1  # beyond a node of eight
    assert float(all_to_all("alltoall_dispatch", "fp8", *numbers(100, 1000, 4, 3.5, 8), SHEET).shape[0]) == 0


@pytest.mark.parametrize("seed", range(6))
def test_more_tokens_of_one_distribution_are_never_cheaper(seed):
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(16, 0.4))
    counts = np.rint(np.geomspace(4, 20_000, 60)[:, None] * share)
    terms = moe_terms(counts)
    taken = np.asarray(drawn_kernel(terms, seed).seconds(terms))
    assert (np.diff(taken) >= -1e-5 * taken[:-1]).all()
    assert taken[-1] > taken[0]


@pytest.mark.parametrize("seed", range(3))
def test_longer_contexts_and_larger_batches_are_never_cheaper(seed):
    size = jnp.asarray(np.geomspace(1, 4096, 30), jnp.float32)
    (one,), heads = numbers(1), Heads(*numbers(16, 4, 128, 128, 0))
    for terms in (
        prefill(one, size, heads, SHEET, "bfloat16", 2.0),
        prefill(size, 64 * one, heads, SHEET, "bfloat16", 2.0),
        decode(one, size, heads, SHEET, "bfloat16", 2.0),
        decode(size, 100 * one, heads, SHEET, "bfloat16", 2.0),
    ):
        taken = np.asarray(drawn_kernel(terms, seed).seconds(terms))
        assert (np.diff(taken) >= -1e-5 * taken[:-1]).all()


def test_slopes_by_every_number_are_those_of_finite_differences():
    terms = moe_terms(np.array([[20, 0, 1, 3], [900, 100, 30, 4]]))
    kernel = drawn_kernel(terms, 3)
    leaves, tree = jax.tree.flatten(kernel)

    def total(leaves) -> jax.Array:
        return jnp.log(jax.tree.unflatten(tree, leaves).seconds(terms)).sum()

    with jax.enable_x64(True):
        leaves = [jnp.asarray(np.asarray(leaf), jnp.float64) for leaf in leaves]
        slopes = jax.grad(total)(leaves)
        for place, leaf in enumerate(leaves):
            at = (0,) * leaf.ndim
            step = 1e-5
            moved = [
                float(total([*leaves[:place], leaf.at[at].add(sign * step), *leaves[place + 1 :]])) for sign in (1, -1)
            ]
            assert float(slopes[place][at]) == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-3, abs=1e-7)


def test_a_residual_of_nothing_leaves_the_base():
    terms = moe_terms(np.array([[20, 0, 1, 3]]))
    kernel = drawn_kernel(terms, 0)
    nothing = jax.tree.map(jnp.zeros_like, kernel.residual)
    passed = FittedKernel(
        kernel.base, Residual(**{**vars(nothing), "direct": nothing.direct.at[0].set((1 - KEPT) ** 0.5)})
    )
    assert float(passed.seconds(terms)[0]) == pytest.approx(float(kernel.base.seconds(terms)[0]), rel=1e-5)


def known(terms: Terms) -> KnownKernel:
    names = {"moe_dtype": "bfloat16", "tiles": "", "framework": "sglang", "op_name": "moe", "kernel_source": "fused"}
    kernel = replace(drawn_kernel(terms, 1), reach=Reach(*numbers(-2.0, 2.0)))
    return KnownKernel("moe", names, kernel, [(0.0, 0.9, 1.2), (100.0, 0.95, 1.1)], {"rows": 3})


def test_a_residual_goes_no_further_than_its_reach():
    terms = moe_terms(np.array([[20, 0, 1, 3], [900, 100, 30, 4]]))
    kernel = drawn_kernel(terms, 1)
    base, whole = kernel.base.seconds(terms), kernel.seconds(terms)
    near = replace(kernel, reach=Reach(*numbers(0.0, 0.1))).seconds(terms)
    np.testing.assert_allclose(near, np.clip(whole, base, base * np.exp(0.1)), rtol=1e-5)
    far = replace(kernel, reach=Reach(*numbers(-50.0, 50.0))).seconds(terms)
    np.testing.assert_allclose(far, whole, rtol=1e-6)


def test_a_file_of_kernels_reads_back(tmp_path):
    terms = moe_terms(np.array([[20, 0, 1, 3]]))
    path = tmp_path / "kernels.json"
    write_kernels(path, KernelFile("h100_sxm", "a table", SHEET, (known(terms),)))
    read = read_kernels(path)
    (kernel,) = read.of_kind("moe")
    assert (read.system, kernel.names) == ("h100_sxm", known(terms).names)
    assert float(kernel.fitted.seconds(terms)[0]) == pytest.approx(
        float(known(terms).fitted.seconds(terms)[0]), rel=1e-2
    )
    low, high = kernel.interval(np.array([5.0, 100.0]))
    assert (low.tolist(), high.tolist()) == ([0.9, 0.95], [1.2, 1.1])


def test_a_file_has_the_kernels_of_the_one_that_it_is_like(tmp_path):
    terms = moe_terms(np.array([[20, 0, 1, 3]]))
    moe, own, others = known(terms), *(replace(known(terms), kind="nccl", told={"rows": rows}) for rows in (1, 2))
    joined = replace(SHEET, node=4, domain=72)
    write_kernels(tmp_path / "other.json", KernelFile("h100_sxm", "a table", SHEET, (moe, others)))
    write_kernels(tmp_path / "own.json", KernelFile("gb200", "a table", joined, (own,), "other.json"))
    found = read_kernels(tmp_path / "own.json")
    assert (found.system, found.sheet.node, found.sheet.domain, SHEET.domain) == ("gb200", 4, 72, 8)
    assert [kernel.told["rows"] for kernel in found.of_kind("nccl")] == [1]
    assert found.of_kind("moe")[0].names == moe.names
    assert found.of_kind("moe")[0].told == {"measured_on": "h100_sxm", **moe.told}
    (alone,) = read_own_kernels(tmp_path / "own.json").kernels
    assert alone.kind == "nccl"


def test_a_file_that_is_none_says_so(tmp_path):
    path = tmp_path / "kernels.json"
    path.write_text('{"format": 1}')
    with pytest.raises(KernelFileError, match=r"is no file of kernels .*; write one with jaxmoe calibrate"):
        read_kernels(path)
    path.write_text('{"format": 7}')
    with pytest.raises(KernelFileError, match="has format 7, expected 1; calibrate the machine anew"):
        read_kernels(path)


def test_a_fused_kernel_times_a_node_as_its_table_does(tmp_path):
    counts = np.array([[20, 0, 1, 3]])
    terms = moe_terms(counts)
    gemm = FusedGemm(known(terms).fitted, SHEET, jnp.asarray(1e14), jnp.asarray(1.0), "bfloat16")
    rows = jnp.asarray(counts.T, jnp.float32)
    ones = jnp.ones_like(rows)
    rate = jnp.asarray([1e14 / (2 * 3 * 2048 * 512)])  # tokens a second through an expert
    taken = gemm.node_seconds(rows, ones, ones, rate, jnp.asarray(512.0), jnp.asarray(3.0))
    assert float(taken[0]) == pytest.approx(float(gemm.kernel.seconds(terms)[0]), rel=1e-4)
    more, absent = (jnp.pad(part, ((0, 4), (0, 0))) for part in (rows, ones))  # experts that the node does not have
    padded = gemm.node_seconds(more, absent, absent, rate, jnp.asarray(512.0), jnp.asarray(3.0))
    assert float(padded[0]) == pytest.approx(float(taken[0]), rel=1e-6)
    elsewhere = jnp.concatenate([rows, 1 + 9 * rows])  # whose tokens other nodes compute
    padded = gemm.node_seconds(elsewhere, absent, absent, rate, jnp.asarray(512.0), jnp.asarray(3.0))
    assert float(padded[0]) == pytest.approx(float(taken[0]), rel=1e-6)
    assert float(gemm.node_seconds(0 * rows, ones, ones, rate, jnp.asarray(512.0), jnp.asarray(3.0))[0]) == 0
    path = tmp_path / "kernels.json"
    write_kernels(path, KernelFile("h100_sxm", "a table", SHEET, (known(terms),)))
    with pytest.raises(KernelFileError, match="has no fused MoE kernel vllm/bfloat16; it has sglang/bfloat16/fused"):
        fused_gemm(path, "vllm", "bfloat16", None, None, 1e14, 8.0)


def test_every_sheet_is_in_physical_order():
    for sheet in (Sheet.of(*values) for values in SHEETS.values()):
        assert float(sheet.bf16) < float(sheet.fp8) <= float(sheet.fp4)
        assert float(sheet.link) < float(sheet.bandwidth)
        assert sheet.domain % sheet.node == 0
