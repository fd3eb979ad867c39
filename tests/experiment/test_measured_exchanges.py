"""Measured exchanges of DeepEP: what is refused, fits of made-up machines, predictions."""

from pathlib import Path

import numpy as np
import pytest

from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.measured_kernels.exchange_fit import exchange_file, exchange_scores, fit_exchanges
from jaxmoe.experiment.measured_kernels.exchange_tables import even_load, exchange_table, is_exchange
from jaxmoe.experiment.measured_kernels.prediction import predict_exchanges
from jaxmoe.experiment.measured_kernels.tables import read_folder, read_table, write_columns

HERE = Path("made_up.parquet")
SIZES = (16, 64, 256, 1024, 4096, 16384)


def low_latency(**changed) -> dict[str, np.ndarray]:
    """A made-up fabric: 20 us, then what leaves the node at 45 GB/s."""
    rows = [(nodes, tokens) for nodes in (2, 4) for tokens in SIZES]
    nodes, tokens = (np.array(part) for part in zip(*rows, strict=True))
    count = len(rows)
    sent = tokens * 8 * 7168 * (1 - 1 / nodes) / 45e9 * 1e6
    columns = {"node_num": nodes, "hidden_size": np.full(count, 7168), "num_token": tokens}
    columns |= {"num_topk": np.full(count, 8), "num_experts": np.full(count, 256)}
    columns |= {"op_name": np.full(count, "ll"), "version": np.full(count, "1")}
    columns |= {"dispatch_avg_t_us": 20 + sent * (1 + 4 / 128), "combine_avg_t_us": 20 + 2 * sent}
    return columns | {name: np.full(count, value) for name, value in changed.items()}


def normal() -> dict[str, np.ndarray]:
    """Made-up processors: 30 us, and 3 us for each token of a channel; the notice takes 25 us."""
    rows = [(sms, tokens) for sms in (4, 8, 16) for tokens in SIZES]
    sms, tokens = (np.array(part) for part in zip(*rows, strict=True))
    same = {"node_num": 2, "hidden_size": 7168, "num_topk": 8, "num_experts": 256, "op_name": "normal", "version": "1"}
    columns = {"num_token": tokens, **{name: np.full(len(rows), value) for name, value in same.items()}}
    for side in ("dispatch", "combine"):
        columns |= {f"{side}_sms": sms, f"{side}_transmit_us": 30 + 3 * tokens * 2 / sms}
        columns |= {f"{side}_notify_us": np.full(len(rows), 25.0)}
    return columns


def test_a_fabric_is_found_again_and_told_at_more_nodes():
    fits = fit_exchanges([exchange_table(HERE, low_latency())], "h100_sxm")
    for row in exchange_scores(fits):
        assert row["fit"] < 3
        assert row["network_of_rate"] == pytest.approx(90, abs=4)
    eight = {name: column[:1] for name, column in low_latency(node_num=8, num_token=4096).items()}
    found, notes = predict_exchanges(exchange_table(HERE, eight, timed=False), exchange_file("h100_sxm", fits))
    told = found["predicted_dispatch_avg_t_us"][0]
    assert told == pytest.approx(20 + 4096 * 8 * 7168 * (1 + 4 / 128) * 7 / 8 / 45e9 * 1e6, rel=0.05)
    assert found["predicted_low_dispatch_avg_t_us"] <= told <= found["predicted_high_dispatch_avg_t_us"]
    assert notes == []


def test_processors_that_were_left_out_are_told():
    fits = fit_exchanges([exchange_table(HERE, normal())], "h100_sxm")
    scores = {(row["side"], row["part"]): row for row in exchange_scores(fits)}
    assert scores["dispatch", "transmit"]["held_out"] < 8
    assert scores["dispatch", "notify"]["fit"] < 3
    # Within a node nothing was measured.
    alone = normal() | {"node_num": np.ones(18)}
    with pytest.raises(OptionError, match="h100_sxm has no dispatch of DeepEP's normal kernels on one node; remove"):
        predict_exchanges(exchange_table(HERE, alone), exchange_file("h100_sxm", fits))


def test_a_link_is_the_same_both_ways():
    """Within a node a combine is bound by links at half of their rate; a dispatch, by its processors, tells nothing."""
    columns = normal() | {"node_num": np.ones(18)}
    reached = even_load("combine", 1, 7168, 8, 256, 1, 8).gpu_copies
    columns["combine_transmit_us"] = 30 + columns["num_token"] * reached * 7 / 8 * 2 * 7168 / 225e9 * 1e6
    columns["dispatch_transmit_us"] = 30 + columns["num_token"] * 30 / columns["dispatch_sms"]
    combine, dispatch = exchange_scores(fit_exchanges([exchange_table(HERE, columns)], "h100_sxm"))
    assert (combine["side"], dispatch["side"]) == ("combine", "dispatch")
    assert combine["link_of_rate"] == pytest.approx(50, abs=5)
    assert dispatch["link_of_rate"] == pytest.approx(combine["link_of_rate"], abs=2)


def test_choices_stay_on_four_nodes():
    load = even_load("combine", 4096, 7168, 8, 256, 8, 24)
    assert (load.vector, load.nodes) == (14336, 8)
    assert 3.9 < load.node_copies < 4
    assert load.gpu_copies == even_load("combine", 4096, 7168, 8, 128, 4, 24).gpu_copies


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_token": -1}, r"num_token is -1 in row 1; remove what is not above 0"),
        ({"num_token": "many"}, r"the column num_token has a value that is no number; write numbers"),
        ({"op_name": "fast"}, r"op_name is fast; expected normal or ll in all rows"),
        ({"num_experts": 100}, r"num_experts is no multiple of the GPUs, 8 a node in row 1; correct or remove"),
        ({"num_topk": 257}, r"num_topk is above num_experts in row 1; correct or remove"),
        ({"num_topk": 2.5}, r"num_topk, num_experts or node_num is no whole number in row 1; correct or remove"),
    ],
)
def test_wrong_tables_are_refused(changed, message):
    with pytest.raises(OptionError, match=message):
        exchange_table(HERE, low_latency(**changed))


def test_missing_columns_are_named():
    columns = {name: column for name, column in low_latency().items() if name != "num_topk"}
    with pytest.raises(OptionError, match="lacks num_topk of a table of DeepEP; add what is missing"):
        exchange_table(HERE, columns)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_another_unit_is_noticed(factor):
    columns = low_latency()
    columns |= {name: columns[name] * factor for name in ("dispatch_avg_t_us", "combine_avg_t_us")}
    with pytest.raises(OptionError, match="times as long in combine_avg_t_us as their bytes on the data sheet's links"):
        fit_exchanges([exchange_table(HERE, columns)], "h100_sxm")


def test_one_size_alone_tells_nothing():
    columns = {name: column[:1] for name, column in low_latency().items()}
    with pytest.raises(OptionError, match="has one size alone on nodes; measure more of them"):
        fit_exchanges([exchange_table(HERE, columns)], "h100_sxm")
    with pytest.raises(OptionError, match="has no rows"):
        exchange_table(HERE, {name: column[:0] for name, column in columns.items()} | {"op_name": ["ll"]})


def test_a_table_of_exchanges_is_no_table_of_kernels(tmp_path):
    assert is_exchange(low_latency())
    assert not is_exchange({"m": 1, "latency": 2})
    write_columns(tmp_path / "wideep_deepep_ll_perf.parquet", low_latency())
    assert read_folder(tmp_path) == []
    with pytest.raises(OptionError, match="is of DeepEP's exchanges, not of kernels"):
        read_table(tmp_path / "wideep_deepep_ll_perf.parquet")
