"""`jaxmoe sweep` over deployments: each point as `evaluate --phase` tells it, fronts, what is left out, errors."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from kernels_by_hand import kernel_file
from test_evaluate_phase import evaluate, scenario
from test_exchanges import FILE, exchange
from typer.testing import CliRunner

from jaxmoe.cli.app import app
from jaxmoe.config import load_scenario
from jaxmoe.experiment.deployment import deployed
from jaxmoe.experiment.machine_deployment import compared
from jaxmoe.hardware.gpu.deepep import LowLatencyKernel
from jaxmoe.hardware.gpu.deepep_files import write_exchanges
from jaxmoe.hardware.gpu.files import write_kernels
from jaxmoe.sweep.deployment_chunks import Chunks
from jaxmoe.sweep.deployments import NO_ROOM, TOO_FEW, sweep_deployments
from jaxmoe.sweep.study import read_study

__all__ = ["scenario"]  # a fixture
MEMORY = "hardware.die.memory_capacity_GB"
AXES = {
    "deployment.tensor": [1, 2, 3],
    "deployment.data": [1, 2],
    "deployment.expert_ranks": [1, 2],
    "deployment.overlap": ["serial", "two_batches"],
    "deployment.concurrency": [1, 16, 700],
    "deployment.prompt_tokens": [128, 3000],
    MEMORY: [20, 6],
}
SET = {"deployment.processors": 4}
SERVED = ("first_token_s", "per_token_s", "tokens_per_s_user", "tokens_per_s_device", "decoding_sequences_a_rank")


@pytest.fixture
def study(scenario, tmp_path):
    def write(**sections: object) -> Path:
        path = tmp_path / "study.yaml"
        path.write_text(
            yaml.safe_dump({"name": "made up", "scenario": str(scenario), "axes": AXES, "set": SET} | sections)
        )
        return path

    return write


def sweep(*arguments: object):
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


def values_of(row) -> list[str]:
    return [f"{key}={value}" for key, value in ({key: row[key] for key in AXES} | SET).items()]


@pytest.fixture
def found(study):
    return sweep_deployments(read_study(study()), lambda done, total: None)


def test_points_are_what_each_deployment_tells_by_itself(found, scenario):
    sampled = [row for row in found.priced if row["deployment.concurrency"] >= 16][::7]
    assert len(sampled) > 8
    for row in sampled:
        own = deployed(load_scenario(scenario, values_of(row)))
        served = own.serve()
        told = served.first_token, served.per_token, served.tokens_per_s_user()
        told = [*told, served.tokens_per_s_device(own.step), served.decoding]
        assert [row[name] for name in SERVED] == pytest.approx([float(each) for each in told], rel=2e-6)
        assert row["free_B"] == pytest.approx(own.memory.free)
        assert row["most_sequences_a_rank"] == pytest.approx(own.memory.sequences)
        assert row["gpus"] == row["deployment.tensor"] * row["deployment.data"]


def test_a_point_is_what_evaluate_prints(found, scenario, tmp_path):
    row = next(row for row in found.priced if [row[key] for key in AXES] == [2, 2, 2, "two_batches", 16, 3000, 20])
    done = evaluate(
        scenario, "--phase", "decode", "--out", tmp_path / "out", *(f"--set={each}" for each in values_of(row))
    )
    assert done.exit_code == 0, done.output
    served = json.loads((tmp_path / "out" / "summary.json").read_text())["served"]
    assert [row[name] for name in SERVED] == pytest.approx([served[name] for name in SERVED], rel=1e-6)
    assert "the users in flight" in done.output
    assert row["limited_by"] == "the users in flight"


def test_machines_that_the_engine_times_are_points_as_evaluate_tells_them(study, scenario, tmp_path):
    """A switch without measured kernels, by links, plans, requests and lengths; a trace of 64 tokens limits these."""
    plain = {"backend": "sglang", "exchange": "engine", "output_tokens": 64}
    axes = {
        "hardware.link.bandwidth_GB_per_s": [50, 100],
        "system.plan": ["tp", "ep_balanced"],
        "deployment.concurrency": [8, 16, 64],
        "deployment.prompt_tokens": [32, 128],
    }
    path = study(axes=axes, set={"deployment": plain})
    found = sweep_deployments(read_study(path), lambda done, total: None, tmp_path)
    assert len(found.priced) == 16
    assert {row["left_out"] for row in found.rows if row["deployment.concurrency"] == 64} == {
        "deployment.concurrency is 64; expected less than 64, as a step takes 1 of the 64 tokens of workload.trace for "
        "each. Lower it, or take a longer trace"
    }
    for row in found.priced[::5]:
        system = f"system={{name: static, plan: {row['system.plan']}}}"
        given = [system, *(f"{key}={row[key]}" for key in axes if key != "system.plan")]
        own = next(compared(load_scenario(scenario, [f"deployment={json.dumps(plain)}", *given])))
        served = own.serve()
        told = served.first_token, served.per_token, served.tokens_per_s_user()
        told = [*told, served.tokens_per_s_device(own.step), served.decoding]
        assert [row[name] for name in SERVED] == pytest.approx([float(each) for each in told], rel=2e-6)
        assert row["most_sequences_a_rank"] == pytest.approx(own.memory.sequences)
    rates = {
        row["hardware.link.bandwidth_GB_per_s"]: row["tokens_per_s_device"]
        for row in found.priced[:1] + found.priced[-1:]
    }
    assert rates[50] < rates[100]
    again = sweep_deployments(read_study(path), lambda done, total: None, tmp_path)
    assert (again.known_chunks, again.rows) == (8, found.rows)


def test_drafts_are_axes_and_their_acceptance_a_number_of_users(study, scenario):
    axes = {
        "deployment.speculative.tokens": [0, 1, 3],
        "deployment.speculative.acceptance": [0.5, 0.9],
        "deployment.concurrency": [16],
    }
    found = sweep_deployments(read_study(study(axes=axes)), lambda done, total: None)
    assert found.kinds == 3
    assert len(found.fronts) == 2
    for row in found.rows:
        own = deployed(
            load_scenario(scenario, [f"{key}={row[key]}" for key in axes] + [f"{k}={v}" for k, v in SET.items()])
        )
        assert row["per_token_s"] == pytest.approx(float(own.serve().per_token), rel=2e-6)
    none = [row["per_token_s"] for row in found.rows if row["deployment.speculative.tokens"] == 0]
    assert none[0] == pytest.approx(none[1])


def test_what_cannot_be_is_left_out_with_the_reason(found):
    for row in found.rows:
        reason = row["left_out"]
        ranks, gpus = row["deployment.expert_ranks"], row["deployment.tensor"] * row["deployment.data"]
        if row["deployment.tensor"] == 3:
            assert reason.startswith("deployment.tensor is 3; expected a divisor of the 8 heads")
        elif gpus % ranks:
            assert reason.startswith("deployment.expert_ranks is 2; expected a divisor of 1 GPUs")
        elif row["deployment.concurrency"] < row["deployment.data"]:
            assert reason == TOO_FEW
        else:
            assert reason is None
        assert (row.get("tokens_per_s_user") is None) == (reason is not None)
    assert sum(found.left_out.values()) + len(found.priced) == len(found.rows) == 3 * 2 * 2 * 2 * 3 * 2 * 2


def test_lengths_that_do_not_fit_are_left_out_alone(study):
    """0.3 GB are left for sequences of 6 layers' worth of 768 B a token: 128 tokens fit, a million do not."""
    axes = {"deployment.prompt_tokens": [128, 1_000_000], MEMORY: [4.9]}
    found = sweep_deployments(read_study(study(axes=axes)), lambda done, total: None)
    assert [row["left_out"] for row in found.rows] == [None, NO_ROOM]
    few = [row for row in found.rows if row["left_out"] is None]
    assert few[0]["free_B"] / (3 * 2 * 32 * 2 * 160) == pytest.approx(few[0]["most_sequences_a_rank"])


def test_no_point_beats_one_of_a_front_of_its_case(found):
    for case, front in found.fronts.items():
        ((key, value),) = case
        rows = [row for row in found.priced if str(row[key]) == value]
        for own in front:
            assert not any(
                row["tokens_per_s_user"] >= own["tokens_per_s_user"]
                and row["tokens_per_s_device"] > own["tokens_per_s_device"]
                for row in rows
            )
        users = [row["tokens_per_s_user"] for row in front]
        assert users == sorted(users, reverse=True)
        assert max(row["tokens_per_s_device"] for row in rows) == front[-1]["tokens_per_s_device"]
    assert len(found.fronts) == 2


def test_joules_and_price_are_told_where_given(study):
    axes = {"deployment.tensor": [1, 2], "hardware.die.board_W": [500, None], "deployment.price_per_device_hour": [2]}
    for row in sweep_deployments(read_study(study(axes=axes)), lambda done, total: None).rows:
        rate, power = row["tokens_per_s_device"], row["hardware.die.board_W"]
        assert row["J_per_million_tokens"] == (None if power is None else pytest.approx(1e6 * power / rate))
        assert row["price_per_million_tokens"] == pytest.approx(1e6 * 2 / 3600 / rate)


def test_a_sweep_that_was_stopped_goes_on_and_tells_the_same(study, found, tmp_path):
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep_deployments(read_study(study()), stop, tmp_path)
    before = {*(tmp_path / "chunks").glob("*.parquet")}
    assert before
    whole = sweep_deployments(read_study(study()), lambda done, total: None, tmp_path)
    files = sorted((tmp_path / "chunks").iterdir())
    assert len(before) <= whole.known_chunks  # others were on their way
    assert (len(files), whole.rows) == (found.kinds, found.rows)
    files[0].write_bytes(files[0].read_bytes()[:100])  # as a disk leaves it
    again = sweep_deployments(read_study(study()), lambda done, total: None, tmp_path)
    assert (again.known_chunks, again.rows) == (found.kinds - 1, found.rows)
    assert before <= {*files}


def test_a_chunk_with_a_bit_that_is_wrong_is_made_anew(tmp_path):
    right = {"per_token_s": [np.pi, np.e, np.sqrt(2)]}  # a page has their bytes as they are
    assert Chunks(tmp_path).columns([b"a"], lambda: right) == right
    (path,) = (tmp_path / "chunks").iterdir()
    number = np.float64(np.e).tobytes()
    path.write_bytes(path.read_bytes().replace(number, number[:-2] + bytes([number[-2] ^ 1]) + number[-1:], 1))
    again = Chunks(tmp_path)
    assert (again.columns([b"a"], lambda: right), again.known) == (right, 0)
    assert (again.columns([b"a"], dict), again.known) == (right, 1)


@pytest.mark.parametrize("key", ["deployment.concurrency", "deployment.overlap", "model.hidden_size"])
def test_chunks_of_another_study_are_not_taken(study, tmp_path, key):
    few = {"deployment.tensor": [1, 2], "deployment.concurrency": [16]}
    other = {"deployment.concurrency": [32], "deployment.overlap": ["two_batches"], "model.hidden_size": [512]}[key]
    for values in (few, few | {key: other}):
        done = sweep_deployments(read_study(study(axes=values)), lambda done, total: None, tmp_path)
        alone = sweep_deployments(read_study(study(axes=values)), lambda done, total: None)
        assert (done.known_chunks, done.rows) == (0, alone.rows)


def test_chunks_of_other_numbers_of_an_exchange_are_not_taken(study, tmp_path):
    layout = {"tensor": 1, "data": 2, "expert_ranks": 2, "exchange": "deepep_low_latency"}
    path = study(
        axes={"deployment.concurrency": [16]}, set={f"deployment.{key}": value for key, value in layout.items()}
    )
    waits, identities = [], set()
    for launch in (1e-4, 2e-4):
        numbers = {"launch": np.log(launch), "link": 30.0, "network": 30.0}
        kernels = [exchange(side, LowLatencyKernel, "avg_t", "node", **numbers) for side in ("dispatch", "combine")]
        write_exchanges(tmp_path / "kernels_deepep.json", replace(FILE, exchanges=tuple(kernels)))
        done = sweep_deployments(read_study(path), lambda done, total: None, tmp_path)
        waits.append(done.rows[0]["per_token_s"])
        identities.add(done.space.identity)  # by which a sweep of requests tells as well
    assert waits[1] > waits[0]
    assert len(identities) == 2


def test_chunks_of_other_kernels_that_stand_in_are_not_taken(study, tmp_path):
    """The machine's file names another one beside it, whose kernels change."""
    path, file = study(axes={"deployment.concurrency": [16]}), kernel_file()
    write_kernels(tmp_path / "kernels.json", replace(file, kernels=(), like="others.json"))
    waits = []
    for more in (0.0, 1.0):
        others = [
            replace(each, fitted=jax.tree.map(lambda log, more=more: log + more, each.fitted)) for each in file.kernels
        ]
        write_kernels(tmp_path / "others.json", replace(file, kernels=tuple(others)))
        done = sweep_deployments(read_study(path), lambda done, total: None, tmp_path)
        waits.append(done.rows[0]["per_token_s"])
    assert waits[1] > waits[0]


def test_the_command_writes_all_points_and_prints_fronts_in_80_columns(study, tmp_path, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: Path(path).touch())
    done = sweep(study(), "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "front of made up: prompt tokens 128" in done.output
    assert "left out: deployment.tensor is 3" in done.output.replace("\n", " ")
    tables = [line for line in done.stdout.splitlines() if line.startswith(("│", "┃", "└"))]
    assert tables
    assert max(map(len, tables)) <= 80
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"summary.json", "front.png", "deployments.csv", "chunks"}
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    with (tmp_path / "out" / "deployments.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == summary["deployments"] == summary["priced"] + sum(summary["left_out"].values())
    on_front = [row for row in rows if row["on_front"] == "True"]
    assert len(on_front) == sum(len(front["deployments"]) for front in summary["fronts"])
    again = sweep(study(), "--out", tmp_path / "out")
    assert "11 chunks of them were in the folder" in again.output
    page = CliRunner().invoke(app, ["report", str(tmp_path / "out"), "--out", str(tmp_path / "page")])
    assert page.exit_code == 2
    assert "is of a sweep over deployments, which has no page" in page.output.replace("\n", " ")


REFUSED = {
    "strategy": ({"axes": AXES | {"strategy": ["tp"]}}, [], "strategy is given beside axes of deployments"),
    "metrics": ({"metrics": ["total"]}, [], "metrics is given beside axes of deployments"),
    "system": (
        {"axes": {"deployment.tensor": [1], "system.plan": ["tp"]}},
        [],
        "system.plan is given beside axes of deployments on GPUs",
    ),
    "option": ({}, ["--elasticities"], "--elasticities is given"),
    "none": (
        {"axes": {"deployment.tensor": [3]}},
        [],
        "no deployment can be priced. The first: deployment.tensor is 3",
    ),
    "memory": ({"set": {MEMORY: 1}, "axes": {"deployment.tensor": [1]}}, [], "does not fit on 1 GPUs"),
    "key": ({"axes": {"deployment.tensors": [1]}}, [], "deployment.tensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_swept_is_told_before_any_file(study, tmp_path, case):
    sections, options, said = REFUSED[case]
    done = sweep(study(**sections), "--out", tmp_path / "out", *options)
    assert done.exit_code == 2, done.output
    assert said in done.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()
