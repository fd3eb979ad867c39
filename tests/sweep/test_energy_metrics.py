"""Energy, area and price as metrics of a sweep: as `jaxmoe evaluate` has them, and where nothing is stated."""

import numpy as np
import pytest
from sweep_keys import DIE, LINK

from jaxmoe.experiment import score, standard_strategies
from jaxmoe.experiment.inputs import inputs_of
from jaxmoe.registry import METRICS
from jaxmoe.sweep import SweepError
from jaxmoe.sweep.analysis import elasticities, pareto

BYTE, IDLE = "hardware.link.energy_pJ_per_B", "hardware.die.idle_W"
PRICES = {"hardware.die.price": 7, "hardware.die.price_per_TFLOPs_per_s": 2}


def test_energies_are_those_of_an_evaluation_and_prices_are_plain(space, sweep):
    sections = {
        "axes": {BYTE: [5.0, 50.0], DIE: [1.0, 2.0], "strategy": ["ep_balanced"]},
        "set": {IDLE: 3} | PRICES,
        "metrics": ["energy", "energy_per_token", "price"],
    }
    done, made = sweep(**sections), space(**sections)
    assert done.groups == done.compiles == 1
    for point, row in zip(done.points, done.rows, strict=True):
        inputs = inputs_of(made.scenario(point.values))
        (usual,) = (each for each in standard_strategies(inputs) if each.name == "ep_balanced")
        energy = score(inputs, usual, inputs.evaluation_batches).total_energy.mean()
        assert row["energy_J"] == pytest.approx(energy, rel=1e-5)
        assert row["energy_per_token_J"] == pytest.approx(energy / 8, rel=1e-5)  # tokens of a batch
        assert row["machine_price"] == pytest.approx(4 * (7 + 2 * row[DIE]))  # four dies
        assert row["area_mm2"] is None
    assert done.best("energy")[BYTE] == 5
    front = pareto(done.rows, ["total", "price"])
    assert {row[DIE] for row in front} == {1, 2}
    (note,) = done.notes
    assert "counts nothing" in note
    assert "die.energy_pJ_per_FLOP" in note


def test_elasticity_of_a_price_by_hand(space):
    """Of 4 x (7 + 2 x 3.5), half goes with the rate; links cost nothing."""
    made = space(axes={DIE: [3.5], LINK: [10.0], "strategy": ["tp"]}, set=PRICES)
    (answer,) = elasticities(made, made.points(), lambda done, total: None)
    assert answer.values[0, list(METRICS).index("price")] == pytest.approx([0.5, 0], abs=1e-6)
    assert np.isnan(answer.values[0, list(METRICS).index("energy")]).all()


@pytest.mark.parametrize(("name", "part"), [("energy_per_token", "energy"), ("area", "area"), ("price", "price")])
def test_a_metric_that_no_machine_states_is_one_clear_error(sweep, name, part):
    with pytest.raises(
        SweepError, match=rf"the metric {name} is wanted, but no machine .* any {part}; write .*hardware"
    ):
        sweep(axes={LINK: [5, 10], "strategy": ["tp"]}, metrics=["total", name])


@pytest.mark.slow
def test_a_metric_that_some_machines_state_is_a_note_for_the_others(sweep):
    done = sweep(axes={BYTE: [None, 5.0], "strategy": ["tp"]}, metrics=["total", "energy"])
    without, having = done.rows
    assert without["energy_J"] is None
    assert having["energy_J"] > 0
    assert "1 point: no energy_J, for the machine states no energy" in done.notes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hardware", "kind"),
    [
        ({"kind": "clusters", "clusters": 2, "nodes_per_cluster": 2, "uplink": {"bandwidth_GB_per_s": 3}}, "uplink"),
        (
            {"kind": "wafers", "wafer_shape": [2, 1], "grid": [1, 2], "border": {"bandwidth_GB_per_s": 3}},
            "border",
        ),
    ],
    ids=["clusters", "wafers"],
)
def test_energies_of_every_kind_of_link_are_numbers(sweep, hardware, kind):
    """Twice the energy of a byte is twice the energy, for nothing else is stated."""
    whole = hardware | {"die": {"compute_TFLOPs_per_s": 1}, "link": {"bandwidth_GB_per_s": 10}}
    key = f"hardware.{kind}.energy_pJ_per_B"
    done = sweep(axes={"hardware": [whole], key: [2.0, 4.0], "strategy": ["tp"]}, metrics=["energy"])
    assert done.groups == 1
    first, second = (row["energy_J"] for row in done.rows)
    assert second == pytest.approx(2 * first) != 0
