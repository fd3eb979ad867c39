"""`jaxmoe network profile` on the four nodes of camoe and on a table of measurements."""

import csv
import json

import numpy as np
import pytest

from jaxmoe.cli.network_profile import _report
from jaxmoe.network.pairwise import Profile


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_a_machine_is_profiled_and_its_timings_give_the_same_again(run, configs, tmp_path):
    machine, out = configs / "hardware" / "camoe_4nodes.yaml", tmp_path / "out"
    done = run("network", "profile", machine, "--sizes", "1e4,1e6,1e8", "--set", "router.chunk_B=null", "--out", out)
    assert done.exit_code == 0, done.output
    with (out / "profile.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    slow = next(row for row in rows if (row["phase"], row["source"], row["destination"]) == ("combine", "2", "0"))
    assert float(slow["alpha_s"]) == pytest.approx(560e-6, rel=1e-3)
    assert 1 / float(slow["beta_s_per_B"]) == pytest.approx(0.1875e9, rel=1e-3)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["samples"], summary["contended_samples"]) == (3 * 12 * 3, 2 * 4 * 3)
    assert (out / "fits.png").stat().st_size > 1000
    again = run("network", "profile", out / "timings.csv", "--out", tmp_path / "again")
    assert again.exit_code == 0, again.output
    found = json.loads((tmp_path / "again" / "summary.json").read_text())["pairs"]
    assert found[0]["alpha_s"] == pytest.approx(650e-6, rel=1e-3)


def test_errors_that_few_samples_do_not_tell_are_null():
    """JSON has no infinity."""
    known, unknown, count = np.full((3, 2, 2), 1e-6), np.full((3, 2, 2), np.inf), np.full((3, 2, 2), 3)
    for pair in _report(Profile(known, known, unknown, known, count)):
        assert (pair["alpha_error_s"], pair["beta_error_s_per_B"]) == (None, 1e-6)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [("1e4,1.1e4", "cannot tell alpha from beta"), ("much", "expected bytes such as"), ("0,1", "above 0")],
)
def test_sizes_that_do_not_tell_are_one_clear_error(run, configs, tmp_path, sizes, message):
    machine = configs / "hardware" / "camoe_4nodes.yaml"
    done = run("network", "profile", machine, "--sizes", sizes, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_bursts_are_warned_of(run, configs, tmp_path):
    machine, plain = tmp_path / "bursts.yaml", (configs / "hardware" / "camoe_4nodes.yaml").read_text()
    machine.write_text(plain.replace("one_way: true", "one_way: true, burst_B: 1.25e6"))
    done = run("network", "profile", machine, "--sizes", "2e6,8e6,32e6", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "negative" in done.output


def test_options_of_simulated_times_do_not_go_with_measured_ones(run, tmp_path):
    (tmp_path / "timings.csv").write_text("source,destination,phase,bytes,seconds\n")
    done = run(
        "network", "profile", tmp_path / "timings.csv", "--noise", 0.1, "--sizes", "1e3", "--out", tmp_path / "o"
    )
    assert done.exit_code == 2
    assert "--sizes, --noise is for simulated times" in " ".join(done.output.split())
