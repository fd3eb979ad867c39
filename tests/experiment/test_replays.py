"""Replays of strategies in the event simulator: what several have in common is replayed once."""

from dataclasses import replace

import numpy as np

from jaxmoe.experiment import evaluation
from jaxmoe.experiment.comparison import Replays
from jaxmoe.experiment.inputs import read_inputs
from jaxmoe.experiment.strategies import named_strategies


def test_layers_that_strategies_place_alike_are_replayed_once(scenario, monkeypatch):
    inputs = read_inputs(scenario, None, None, None)
    (one,) = named_strategies(inputs, ["tp"])
    (other,) = named_strategies(inputs, ["ep"])
    share = np.concatenate([one.placement.computed[:1], other.placement.computed[1:]])
    mixed = replace(
        other, name="mixed", placement=replace(other.placement, share=share, exchange=one.placement.exchange)
    )
    calls = []

    def counted(*arguments, **named):
        calls.append(arguments)
        return whole(*arguments, **named)

    whole = evaluation.replay_plan
    monkeypatch.setattr(evaluation, "replay_plan", counted)
    found = Replays(inputs, lambda *told: None).add([one]).add([one, mixed]).found
    assert len(calls) == 3  # both layers of one, and the layer where the other differs
    monkeypatch.undo()
    for each in (one, mixed):
        alone = Replays(inputs, lambda *told: None).add([each]).found[each.name]
        np.testing.assert_array_equal(found[each.name].time.total, alone.time.total)
        np.testing.assert_array_equal(found[each.name].free_running, alone.free_running)
    assert (found["tp"].time.total[0] == found["mixed"].time.total[0]).all()
    assert (found["tp"].time.total[1] != found["mixed"].time.total[1]).any()
