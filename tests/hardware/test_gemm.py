"""What products take beyond their FLOPs: whole tiles and start-ups by hand, measured times, and their files."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases
from oracles.arrays import floats
from oracles.compilations import compilations
from oracles.layer import Tokens, visited_nodes

from jaxmoe.engine import LayerCosts, expert_work
from jaxmoe.hardware import Die, Machine, fully_connected
from jaxmoe.hardware.kernels import GemmError, MeasuredGemm, TiledGemm, read_gemm_table
from jaxmoe.network import replicated_visits, sharded_visits
from jaxmoe.relax import HardSupport

VISITS = {"sharded": sharded_visits, "replicated": replicated_visits}


def tiled(rows: float, columns: float, startup: float = 0.0) -> TiledGemm:
    return TiledGemm(*(jnp.asarray(number, float) for number in (rows, columns, startup)))


def seconds(gemm, rows, part, present=1.0, flops=1.0, columns=44.0, gemms=3.0) -> float:
    """Of one expert on one node; by default a token and whole expert takes a second."""
    numbers = (jnp.asarray(number, jnp.float32) for number in (rows, part, present, flops, columns, gemms))
    return float(seconds_of(gemm, *numbers))


seconds_of = eqx.filter_jit(lambda gemm, *numbers: gemm.seconds(*numbers))


@pytest.mark.parametrize(
    ("rows", "part", "expected"),
    [
        (1, 1, 128 / 44),  # 44 columns cost 128
        (5, 1, 5 * 128 / 44),
        (5, 0.25, 5 * 128 / 44),  # so do 11
        (0, 1, 0),
        (5, 0, 0),
    ],
)
def test_columns_are_computed_in_whole_tiles(rows, part, expected):
    assert seconds(tiled(1, 128), rows, part) == pytest.approx(expected, rel=1e-6)


def test_rows_are_computed_in_whole_tiles():
    assert seconds(tiled(16, 1), 1, 1) == pytest.approx(16)
    assert seconds(tiled(16, 1), 16, 1) == pytest.approx(16)
    assert seconds(tiled(16, 1), 17, 0.5) == pytest.approx(32 * 0.5)


def test_parts_that_are_whole_tiles_but_for_rounding_are_not_raised():
    third = float(np.float32(1) / np.float32(3))
    assert seconds(tiled(1, 128), 1, third, columns=384.0) == pytest.approx(128 / 384, rel=1e-6)
    assert seconds(tiled(1, 128), 1, 1 - third, columns=384.0) == pytest.approx(256 / 384, rel=1e-6)


def test_every_product_of_an_expert_that_is_present_starts_up():
    assert seconds(tiled(1, 1, 0.5), 2, 0.5) == pytest.approx(2 * 0.5 + 3 * 0.5)
    assert seconds(tiled(1, 1, 0.5), 0, 0, present=0) == 0


def test_gradients_pass_as_if_nothing_were_rounded():
    rows, one, columns, gemms = (jnp.asarray(number) for number in (5.0, 1.0, 44.0, 3.0))
    slope = jax.jit(jax.grad(lambda part: tiled(1, 128).seconds(rows, part, one, one, columns, gemms)))(0.3)
    assert float(slope) == pytest.approx(5.0, rel=1e-6)


GRID = MeasuredGemm(jnp.asarray([1.0, 4.0]), jnp.asarray([10.0, 20.0, 40.0]), jnp.asarray([[1.0, 2, 6], [3, 8, 12]]))


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (1, 10, 1),
        (4, 40, 12),
        (2.5, 10, 2),
        (1, 30, 4),
        (2.5, 15, 0.25 * (1 + 2 + 3 + 8)),
        (2, 35, (2 * (0.25 * 2 + 0.75 * 6) + (0.25 * 8 + 0.75 * 12)) / 3),
        (0.5, 5, 1),  # below the first
        (0.5, 30, 4),
    ],
)
def test_measured_times_are_interpolated_in_both(rows, columns, expected):
    assert seconds(GRID, rows, columns / 40, columns=40.0) == pytest.approx(expected, rel=1e-6)


def test_an_expert_that_is_not_computed_takes_no_measured_time():
    assert seconds(GRID, 0, 0, present=0) == 0


def test_a_table_of_one_point_is_constant():
    one = MeasuredGemm(jnp.asarray([4.0]), jnp.asarray([10.0]), jnp.asarray([[7.0]]))
    assert seconds(one, 2, 0.5) == 7


@pytest.mark.parametrize("mode", VISITS)
def test_nodes_compute_expert_by_expert(mode):
    rng = np.random.default_rng(3)
    share = cases.random_share(rng, 4, 5)
    tokens = cases.random_tokens(rng, 12, 4, 2, missing=True)
    machine = Machine(fully_connected(5, 1.0, 0.0), Die(jnp.asarray(rng.uniform(1, 2, 5), float), tiled(4, 16, 0.5)))

    @jax.jit
    def computed(share, batch):
        costs = LayerCosts(*(jnp.asarray(number) for number in (1.0, 1.0, 1.0, 2.0, 44.0, 3.0)))
        return expert_work(VISITS[mode](share, batch, HardSupport()), costs, HardSupport()).computing(machine)

    measured = computed(jnp.asarray(share, float), cases.batch(tokens))
    np.testing.assert_allclose(measured, tiled_seconds(share, tokens, mode, np.asarray(machine.die.flops)), rtol=1e-5)


def tiled_seconds(share: np.ndarray, tokens: Tokens, mode: str, flops: np.ndarray) -> list[float]:
    """Tiles of 4 tokens and 16 of 44 columns, 2 FLOP of a token and expert, three start-ups of half a second."""
    count = np.zeros(share.shape)
    for token, weight in enumerate(tokens.weight):
        for expert, hosts in zip(tokens.experts[token], visited_nodes(share, tokens, token, mode), strict=True):
            for node in hosts:
                count[expert, node] += weight
    times = [0.0] * share.shape[1]
    for expert, node in np.argwhere(count > 0):
        columns = 44 * (share[expert, node] if mode == "sharded" else 1)
        tiles = np.ceil(count[expert, node] / 4) * np.ceil(columns / 16 - 1e-9)
        times[node] += 4 * 16 * tiles * 2 / 44 / flops[node] + 3 * 0.5
    return times


def written(tmp_path, text: str | bytes):
    path = tmp_path / "gemm.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


WHOLE = "tokens,columns,seconds\n4,20,3e-6\n1,10,1e-6\n1,20,2e-6\n4,10,2.5e-6\n"


def test_a_table_is_read_whatever_the_order_of_its_lines(tmp_path):
    gemm = read_gemm_table(written(tmp_path, WHOLE), 4.0, 20.0)
    assert gemm.rows.tolist() == [1, 4]
    assert gemm.columns.tolist() == [10, 20]
    np.testing.assert_allclose(gemm.table, [[1e-6, 2e-6], [2.5e-6, 3e-6]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens,seconds\n1,1\n", "has no lines with the columns tokens, columns, seconds; write them in its first"),
        ("", "has no lines with the columns"),
        ("tokens,columns,seconds\n", "has no lines with the columns"),
        ("tokens,columns,seconds\n1,10,1\n4,20,1\n1,20,2\n", "has no time for 4 tokens and 10 columns; measure every"),
        (WHOLE.replace("4,", "3,"), "goes up to 3 tokens, but this run needs up to 4; measure larger ones"),
        (WHOLE.replace(",20", ",19"), "goes up to 19 columns, but this run needs up to 20; measure larger ones"),
        (WHOLE.replace("1e-6", "-1e-6"), r"line 3 is \['1', '10', '-1e-6'\], expected three numbers above zero"),
        (WHOLE.replace("4,20", "0,20"), "line 2 is .* expected three numbers above zero"),
        (WHOLE.replace("3e-6", "soon"), "line 2 is .* expected three numbers above zero"),
        (WHOLE.replace("3e-6", "nan"), "line 2 is .* expected three numbers above zero"),
        (WHOLE + "8\n", "line 6 is .* expected three numbers above zero"),
        (b"\x93NUMPY\x01\x00\xff\xfe", "cannot be read as a CSV file"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(GemmError, match=message) as raised:
        read_gemm_table(path, 4.0, 20.0)
    assert str(raised.value).startswith(f"{path}: ")


def test_a_point_that_is_measured_twice_is_refused(tmp_path):
    with pytest.raises(GemmError, match="has two times for 1 tokens and 10 columns; keep one"):
        read_gemm_table(written(tmp_path, WHOLE + "1,10,5e-6\n"), 4.0, 20.0)


def test_a_file_that_is_absent_is_refused(tmp_path):
    with pytest.raises(GemmError, match="cannot be read as a CSV file"):
        read_gemm_table(tmp_path / "absent.csv", 4.0, 20.0)


def test_plain_numbers_do_not_compile_anew():
    timed = eqx.filter_jit(
        lambda gemm: gemm.seconds(jnp.ones(4), jnp.ones(4), jnp.ones(4), jnp.asarray(1e9), *floats([128.0, 3.0])).sum()
    )
    timed(TiledGemm(16.0, 32.0, 1e-6))
    with compilations() as compiled:
        timed(TiledGemm(8.0, 64.0, 2e-6))
    assert not compiled
