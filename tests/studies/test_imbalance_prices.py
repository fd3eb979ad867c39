"""Prices of imbalance by hand, and experts in slots."""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.experiment.measured_kernels.calibration import KernelFit
from jaxmoe.experiment.measured_kernels.kinds import KINDS
from jaxmoe.experiment.measured_kernels.tables import read_table, write_columns
from jaxmoe.experiment.measured_kernels.token_counts import loads_of, slot_loads
from jaxmoe.hardware.gpu.kernel import Base, FittedKernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "measured"))
from imbalance_prices import by_part, joined, of_copies, of_skew, price_scores

sys.path.pop(0)

ROWS = ("balanced", "power_law_1.2", "power_law_1.2_eplb")


def fit(measured, told, tokens=(64,)):
    """A fit of three distributions for each number of tokens: times by tokens, then distribution."""
    count = len(tokens) * len(ROWS)
    same = {"hidden_size": 64, "inter_size": 64, "topk": 2, "num_experts": 8, "moe_tp_size": 1, "moe_ep_size": 2}
    rows = {name: np.full(count, value) for name, value in same.items()}
    rows |= {"num_tokens": np.repeat(tokens, len(ROWS)), "distribution": np.array(ROWS * len(tokens))}
    none = np.zeros(count, bool)
    seconds, held_out = np.array(measured, float), np.array(told, float)
    kernel = FittedKernel(Base(*(jnp.zeros(size) for size in ((), 3, 1, 1, ()))))
    others = (seconds, held_out, seconds, seconds)  # roofline, held out, base, floor
    return KernelFit(KINDS["wideep_moe"], {}, rows, kernel, seconds, *others, none, none.copy(), True)


def test_prices_are_of_rows_that_differ_in_their_distribution_alone():
    skew, copies = of_skew(fit([2, 6, 3], [2, 5, 4])), of_copies(fit([2, 6, 3], [2, 5, 4]))
    # Of both power laws only the one without EPLB is skew; with it, it is compared to the one without.
    assert (skew.measured.tolist(), skew.told.tolist()) == ([3], [2.5])
    assert (copies.measured.tolist(), copies.told.tolist()) == ([0.5], [0.8])
    assert copies.choices.tolist() == [64 * 2 / 2]


def test_slow_rows_and_rows_that_were_not_held_out_have_no_price():
    slow = fit([2, 6, 3], [2, 5, 4])
    slow.slow[0] = True
    assert len(of_skew(slow).told) == 0
    assert price_scores(of_skew(slow))["error"] == ""
    assert len(of_copies(fit([2, 6, 3], [2, np.nan, 4])).told) == 0


def test_scores_by_hand():
    # Prices 0.5, 2 and 1.05 are told as 0.55, 0.9 and 0.9: 10, 55 and 14 % off; the last is too small to judge.
    found = of_copies(fit([1, 1, 0.5, 1, 1, 2, 1, 1, 1.05], [1, 1, 0.55, 1, 1, 0.9, 1, 1, 0.9], tokens=(64, 128, 256)))
    scores = price_scores(found)
    assert scores["error"] == pytest.approx((10 + 55 + 100 * (1 - 0.9 / 1.05)) / 3, abs=0.1)
    assert (scores["clear"], scores["right_sign"], scores["pairs"]) == (2, 50, 3)
    # The middle one is between 0.5 and 1.05 by logarithms: their geometric mean over 2.
    assert scores["floor"] == pytest.approx(100 * (1 - np.sqrt(0.5 * 1.05) / 2) / np.sqrt(1.5), abs=0.1)


def test_kernels_have_series_of_their_own():
    one = of_copies(fit([1, 1, 0.5], [1, 1, 0.5]))
    both = joined([one, one])
    assert len(set(both.series.tolist())) == 2
    assert price_scores(both)["floor"] == ""
    (row,) = by_part(both, {"ranks": both.ranks})
    assert (row["ranks"], row["pairs"]) == (2, 2)


@pytest.mark.parametrize(("slots", "ranks"), [(64, 4), (64, 16), (72, 8)])
def test_eplb_evens_what_ranks_have_to_do(slots, ranks):
    tokens, experts, top_k = 4096, 64, 8
    even = tokens * top_k / ranks
    skewed = slot_loads(tokens, experts, top_k, ranks, experts, "power_law_1.2")
    packed = slot_loads(tokens, experts, top_k, ranks, slots, "power_law_1.2_eplb")
    assert even - 1 <= packed.slots < skewed.slots
    assert packed.touched <= slots / ranks
    assert packed.heaviest <= tokens
    assert skewed is loads_of(tokens, experts, top_k, ranks, "power_law_1.2")


def test_a_table_with_slots_is_a_kind_of_its_own(tmp_path):
    row = {"num_tokens": 4, "hidden_size": 64, "inter_size": 64, "topk": 2, "num_experts": 8, "moe_tp_size": 1}
    row |= {
        "moe_ep_size": 2,
        "num_slots": 8,
        "moe_dtype": "fp8",
        "framework": "x",
        "op_name": "wideep_moe_eplb",
        "latency": 1,
    }
    row |= {"kernel_source": "z", "distribution": "power_law_1.01_eplb"}
    write_columns(tmp_path / "wideep_moe.csv", {name: np.array([value]) for name, value in row.items()})
    assert read_table(tmp_path / "wideep_moe.csv").kind.name == "wideep_moe"


def test_an_unknown_distribution_of_slots_is_refused():
    with pytest.raises(ValueError, match="balanced"):
        slot_loads(64, 8, 2, 2, 8, "balanced_eplb")
