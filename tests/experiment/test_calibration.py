"""Hidden numbers of a machine are found again in measurements of the event simulator."""

from dataclasses import replace

import equinox as eqx
import numpy as np
import pytest

from jaxmoe.config import build_machine, build_time_model, build_topology, load_hardware, number_at, with_numbers
from jaxmoe.des import fabric_of, replay_traffic
from jaxmoe.experiment.calibration import calibrate, fitted_keys
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.measurements import Crowding, Measurements, read_measured, seconds_of

MACHINE = """
mesh_shape: [3, 3]
die:
  compute_TFLOPs_per_s: 5
  gemm: {kind: tiled, tile_tokens: 16, tile_columns: 64, startup_ns: 1000}
memory:
  - {name: sram, bandwidth_GB_per_s: 5000}
  - {name: hbm, bandwidth_GB_per_s: 1000, latency_ns: 100}
link: {bandwidth_GB_per_s: 50, latency_ns: 100}
router: {switching: cut_through, chunk_B: 4096}
"""
HIDDEN = {
    "die.compute_TFLOPs_per_s": 12.0,
    "die.gemm.startup_ns": 3200.0,
    "memory.hbm.bandwidth_GB_per_s": 760.0,
    "memory.hbm.latency_ns": 410.0,
    "link.bandwidth_GB_per_s": 31.0,
    "link.latency_ns": 240.0,
}
NOISE = 0.03


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    path = tmp_path_factory.mktemp("machine") / "machine.yaml"
    path.write_text(MACHINE)
    return load_hardware(path)


def noisy(seconds, rng):
    return np.array(seconds) * (1 + NOISE * rng.standard_normal(len(seconds)))


def products(rng, count=150):
    """By hand: whole tiles, two FLOPs for each multiplication, and a start."""
    tokens, hidden, columns = (2 ** rng.integers(low, 12, count) for low in (0, 6, 6))
    tiles = np.ceil(tokens / 16) * 16 * np.ceil(columns / 64) * 64
    seconds = 2 * tiles * hidden / 12e12 + 3.2e-6
    return Measurements("gemm", {"tokens": tokens, "hidden": hidden, "columns": columns}, noisy(seconds, rng))


def reads(rng, count=100):
    size = np.geomspace(1e3, 1e8, count)
    return Measurements("memory", {"level": np.ones(count, int), "bytes": size}, noisy(410e-9 + size / 760e9, rng))


def messages(machine, rng, count=150):
    """By the event simulator."""
    fabric = fabric_of(build_topology(with_numbers(machine, HIDDEN)), 4096.0, cut_through=True)
    source = rng.integers(0, 9, count)
    destination = (source + rng.integers(1, 9, count)) % 9
    size = np.geomspace(100, 1e7, count)
    seconds = []
    for start, end, amount in zip(source, destination, size, strict=True):
        traffic = np.zeros((9, 9))
        traffic[start, end] = amount
        seconds.append(replay_traffic(fabric, traffic).completion_s)
    columns = {"source": source, "destination": destination, "bytes": size}
    return Measurements("ping", columns, noisy(seconds, rng))


def all_to_alls(machine, rng, count=30):
    fabric = fabric_of(build_topology(with_numbers(machine, HIDDEN)), 4096.0, cut_through=True)
    size = np.geomspace(1e4, 1e6, count)
    seconds = [replay_traffic(fabric, amount * (1 - np.eye(9))).completion_s for amount in size]
    return Measurements("all_to_all", {"bytes": size}, noisy(seconds, rng))


def told_of(measured, machine, network, crowding):
    return eqx.filter_jit(lambda *made: seconds_of(measured, *made, crowding))(machine, network)


def test_hidden_numbers_are_found_within_two_percent(machine):
    rng = np.random.default_rng(0)
    measured = [products(rng), reads(rng), messages(machine, rng), all_to_alls(machine, rng)]
    found = calibrate(machine, list(HIDDEN), measured, seed=0)
    for number in found.numbers:
        assert number.after == pytest.approx(HIDDEN[number.key], rel=0.02), number
        assert number.known
        assert number.error < 0.02
        assert number_at(found.hardware, number.key) == pytest.approx(number.after, rel=1e-5)
    hidden = with_numbers(machine, HIDDEN)
    told = told_of(measured[-1], build_machine(hidden), build_time_model(hidden), found.crowding)
    assert np.mean(measured[-1].seconds / told) == pytest.approx(1, abs=0.02)
    assert 1 < found.crowding.load < 1.2
    assert max(found.errors(found.after, held_out=True).values()) < 0.04
    assert min(found.errors(found.before, held_out=True).values()) > 0.2


def test_what_cannot_be_told_apart_is_named(machine):
    rng = np.random.default_rng(1)
    stated = with_numbers(machine, {"router.efficiency": 0.9})
    unmeasured = ["die.compute_TFLOPs_per_s", "memory.hbm.latency_ns"]
    keys = ["link.bandwidth_GB_per_s", "router.efficiency", "link.latency_ns", *unmeasured]
    found = {each.key: each for each in calibrate(stated, keys, [messages(machine, rng)], seed=0).numbers}
    assert found["link.bandwidth_GB_per_s"].alike == ("router.efficiency",)
    assert not found["router.efficiency"].known
    product = found["link.bandwidth_GB_per_s"].after * found["router.efficiency"].after
    assert product == pytest.approx(31, rel=0.02)
    assert found["link.latency_ns"].known
    for key in unmeasured:
        assert (found[key].known, found[key].alike, found[key].after) == (False, (), number_at(machine, key))


@pytest.mark.slow
def test_stated_errors_are_those_of_repeated_fits(machine):
    """The standard error of bandwidth against the spread over fits to fresh noise."""
    keys = ["memory.hbm.bandwidth_GB_per_s", "memory.hbm.latency_ns"]
    fits = [calibrate(machine, keys, [reads(np.random.default_rng(seed))], seed=0).numbers for seed in range(12)]
    for index in range(2):
        spread = np.std([np.log(fit[index].after) for fit in fits], ddof=1)
        assert np.mean([fit[index].error for fit in fits]) == pytest.approx(spread, rel=0.6)


def test_an_all_to_all_takes_its_load_and_its_path(machine):
    """By hand: the longest path of a 3x3 mesh has 4 hops, its busiest link 6 messages."""
    built, sizes = build_machine(machine), np.array([1e5, 1e6])
    measured = Measurements("all_to_all", {"bytes": sizes}, sizes)
    load, path = 6 * sizes / 50e9, 4 * 100e-9
    for crowding in (Crowding(), Crowding(1.2, 0.5)):
        told = told_of(measured, built, build_time_model(machine), crowding)
        assert told == pytest.approx(crowding.load * load + crowding.path * path, rel=1e-5)


def test_each_kind_has_noise_of_its_own(machine):
    """Rough products do not make the memory's numbers uncertain, nor good reads those of products sure."""
    rng = np.random.default_rng(3)
    rough, exact = products(rng), reads(rng)
    rough = replace(rough, seconds=rough.seconds * (1 + 0.06 * rng.standard_normal(len(rough))))
    exact = replace(exact, seconds=(410e-9 + exact.columns["bytes"] / 760e9) * (1 + 2e-3 * rng.standard_normal(100)))
    of = {
        key: {each.key: each.error for each in calibrate(machine, [*HIDDEN][:4], given, seed=0).numbers}
        for key, given in {"both": [rough, exact], "rough": [rough], "exact": [exact]}.items()
    }
    for key in [*HIDDEN][:4]:
        alone = of["rough" if key.startswith("die") else "exact"][key]
        assert of["both"][key] == pytest.approx(alone, rel=0.1)
    assert of["both"]["die.compute_TFLOPs_per_s"] > 5 * of["both"]["memory.hbm.bandwidth_GB_per_s"]


def test_outliers_hardly_count(machine):
    rng = np.random.default_rng(2)
    clean = reads(rng)
    late = replace(clean, seconds=clean.seconds * np.where(rng.random(len(clean)) < 0.05, 8, 1))
    keys = ["memory.hbm.bandwidth_GB_per_s"]
    found = calibrate(with_numbers(machine, {"memory.hbm.latency_ns": 410.0}), keys, [late], seed=0)
    assert found.numbers[0].after == pytest.approx(760, rel=0.02)


def test_by_default_all_stated_speeds_are_fitted(machine):
    assert set(fitted_keys(machine)) == {*HIDDEN, "memory.sram.bandwidth_GB_per_s"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bytes,time\n1,2\n", "has the columns bytes, time; write a line .* bytes, seconds .all_to_all."),
        ("bytes,seconds\n", "has no measurements"),
        ("bytes,seconds\n1e3,-1\n", "line 2: seconds is '-1', expected a finite number above 0"),
        ("bytes,seconds\n1e3\n", "line 2: seconds is None"),
        ("source,destination,bytes,seconds\n0,9,1,1\n", "line 2: destination is '9', expected a node from 0 to 8"),
        ("source,destination,bytes,seconds\n3,3,1,1\n", "from a node to itself"),
        ("level,bytes,seconds\nl1,1,1\n", "line 2: level is 'l1', expected one of sram, hbm"),
        ("tokens,hidden,columns,seconds\n1,2,x,1\n", "columns is 'x'"),
    ],
)
def test_wrong_files_are_named(machine, tmp_path, text, message):
    path = tmp_path / "measured.csv"
    path.write_text(text)
    with pytest.raises(OptionError, match=message):
        read_measured(path, machine)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["link.width"], "--fit link.width: the machine states no such number; it states die.compute"),
        (["link"], "--fit link: the machine states no such number"),
        (["router.endpoint_latency_ns"], "is 0; give a first guess above 0 with --set router.endpoint_latency_ns="),
        (["die.compute_TFLOPs_per_s"], "nothing measured depends on die.compute_TFLOPs_per_s"),
    ],
)
def test_keys_that_cannot_be_fitted_are_named(machine, keys, message):
    with pytest.raises(OptionError, match=message):
        calibrate(machine, keys, [reads(np.random.default_rng(0))], seed=0)
