"""Tables of link prices in plans and their files, and which are refused."""

from dataclasses import replace

import numpy as np
import pytest

from jaxmoe.placement import Placement, PlanError, read_plan, write_plan
from jaxmoe.placement.exchange import PricedLinks, PriceTable

PRICE = np.arange(16, dtype=np.float32).reshape(2, 8) / 4
SOFTNESS = np.array([0.5, 2.0], np.float32)


def plan(**fields) -> Placement:
    share = np.full((2, 3, 4), 0.25, np.float32)
    usual = {"exchange": ("priced_visited", "ring"), "prices": PriceTable(PRICE, SOFTNESS)}
    return Placement(share, (2, 2), "sharded", (4, 9), **(usual | fields))


def test_plan_file_round_trip(tmp_path):
    write_plan(tmp_path / "plan.npz", plan())
    with np.load(tmp_path / "plan.npz") as file:
        assert (file["exchange_price"].dtype, file["exchange_softness"].dtype) == (np.float32, np.float32)
        assert file["format"] == 2
    back = read_plan(tmp_path / "plan.npz")
    np.testing.assert_array_equal(back.prices.price, PRICE)
    np.testing.assert_array_equal(back.prices.softness, SOFTNESS)
    write_plan(tmp_path / "plan.npz", plan(prices=None))
    assert read_plan(tmp_path / "plan.npz").prices is None


def test_layers_take_their_own_prices_where_their_exchange_takes_any():
    priced = PricedLinks("visited", tuple(PRICE[0].tolist()), 0.5)
    assert plan().exchanges() == (priced, "ring")
    assert plan().exchanges("priced") == (
        replace(priced, meeting="any"),
        PricedLinks("any", tuple(PRICE[1].tolist()), 2.0),
    )
    assert plan().exchanges("least_loaded") == ("least_loaded",) * 2
    assert plan(prices=None).exchanges() == ("priced_visited", "ring")
    second = plan(exchange=("ring", "priced")).of_layers([1])
    assert second.exchanges() == (PricedLinks("any", tuple(PRICE[1].tolist()), 2.0),)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"exchange_price": -PRICE}, "plan.npz: exchange priced has a price of -0.25, expected finite ones of 0 or"),
        ({"exchange_price": np.full((2, 8), np.nan)}, "plan.npz: exchange priced has a price of nan"),
        ({"exchange_price": PRICE[0]}, r"plan.npz: exchange_price is float32 of shape \(8,\), expected floats \[layer"),
        ({"exchange_price": PRICE[:1], "exchange_softness": SOFTNESS[:1]}, "exchange_price is of 1 layers, but share"),
        (
            {"exchange_softness": SOFTNESS[:1]},
            r"exchange_softness is float32 of shape \(1,\), expected a float for each",
        ),
        ({"exchange_softness": -SOFTNESS}, "exchange priced has a softness of -0.5, expected one above 0"),
        ({"exchange_softness": None}, "plan.npz: has exchange_price and no exchange_softness; write the plan again"),
    ],
)
def test_bad_tables_are_refused(tmp_path, changed, message):
    write_plan(tmp_path / "plan.npz", plan())
    with np.load(tmp_path / "plan.npz") as file:
        arrays = {**file} | changed
    np.savez(tmp_path / "plan.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(PlanError, match=message):
        read_plan(tmp_path / "plan.npz")
