"""The study of buffering under load, on made-up steps: waits that come together pay where steps lack room, else not."""

import sys
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.serving.online.step_table import StepTable, Term

STUDY = Path(__file__).parents[2] / "studies" / "serving"


@pytest.fixture
def buffering(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDY))
    import buffering

    counts = np.array([0.0, 128.0])
    steps = StepTable((Term("experts", ("loaded",), (counts,), counts * 2e-3),))
    monkeypatch.setattr("jaxmoe.experiment.serving_inputs.machine_table", lambda *_: steps)
    monkeypatch.setattr(buffering, "SLACKS", (0.0, 0.2))
    yield buffering
    sys.modules.pop("buffering")


def test_waits_pay_where_they_come_together_and_steps_lack_room(buffering):
    gains = {}
    for come in ("together", "together, room", "apart"):
        none, some = buffering.rows(come, 16, 0)
        assert none["waits_per_token"] == 0
        assert none["over_none"] == 1
        assert 0.15 < some["waits_per_token"] <= 0.2
        assert some["over_none"] == pytest.approx(some["output_tokens_per_s"] / none["output_tokens_per_s"])
        gains[come] = some["over_none"]
    assert gains["together"] > 1.05 > max(gains["apart"], gains["together, room"])
