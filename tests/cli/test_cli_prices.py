"""Plans with a table of link prices on the command line, and a table of another machine."""

import json

import numpy as np
import pytest
from small_plan import LAYERS, some_shares

from jaxmoe.placement import Placement, write_plan
from jaxmoe.placement.exchange import PriceTable


def write(path, price):
    table = PriceTable(price.astype(np.float32), np.full(len(price), 0.5, np.float32))
    plan = Placement(some_shares(), (2, 2), "sharded", LAYERS, exchange=("priced", "priced_visited"), prices=table)
    write_plan(path, plan)
    return path


@pytest.fixture
def plans(tmp_path):
    """The same shares at a price of 1 of every link, and with those along x all but closed."""
    dear = np.ones((2, 8))
    dear[:, :4] = 50.0
    return write(tmp_path / "plain.npz", np.ones((2, 8))), write(tmp_path / "dear.npz", dear)


def test_model_and_simulator_go_by_the_plans_prices(run, scenario, plans, out):
    given = (text for plan in plans for text in ("--plan", plan))
    result = run("validate", scenario, "--set", "workload.batch_tokens=64", *given, "--out", out)
    assert result.exit_code == 0, result.output
    told = json.loads((out / "summary.json").read_text())["strategies"]
    assert told["dear"]["exchange"] == ["priced", "priced_visited"]
    assert told["dear"]["batch_tokens"] != told["plain"]["batch_tokens"]
    for each in (told["plain"], told["dear"]):
        for trial in each["batch_tokens"].values():
            assert trial["agreement"]["total"]["mean_abs_error_percent"] < 2


def test_a_plan_under_prices_beside_the_usual_placements(run, scenario, plans, out):
    result = run("evaluate", scenario, "--plan", plans[0], "--plan", plans[1], "--out", out)
    assert result.exit_code == 0, result.output
    told = json.loads((out / "summary.json").read_text())["strategies"]
    assert told["dear"]["mean"]["total_s"] > told["plain"]["mean"]["total_s"]
    assert told["dear"]["mean"]["des_total_s"] == pytest.approx(told["dear"]["mean"]["des_model_total_s"], rel=0.02)


def test_the_static_system_goes_by_them(run, scenario, plans, out):
    seen = []
    for name, plan in zip(("plain", "dear"), plans, strict=True):
        system = ("--set", "system.name=static", "--set", "workload.batch_tokens=64")
        folder = out.parent / name
        result = run("simulate", scenario, *system, "--plan", plan, "--iterations", 2, "--replay", 1, "--out", folder)
        assert result.exit_code == 0, result.output
        seen.append(json.loads((folder / "summary.json").read_text())["runs"]["static"])
        assert seen[-1]["agreement"]["mean_abs_error_percent"] < 2
    assert seen[0] != seen[1]


def test_a_table_of_another_machine_is_refused(run, scenario, tmp_path, out):
    plan = write(tmp_path / "other.npz", np.ones((2, 10)))
    result = run("evaluate", scenario, "--plan", plan, "--out", out)
    assert result.exit_code != 0
    assert "other.npz: exchange priced has prices of 10 links, but the machine has 8" in " ".join(result.output.split())
    assert not out.exists()
