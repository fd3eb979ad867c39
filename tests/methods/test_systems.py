"""Systems by name: what they are composed of, and the settings they refuse."""

from dataclasses import replace
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import cases

from jaxmoe.engine import Pipelined
from jaxmoe.methods import (
    METHODS,
    CrossLayer,
    DeploymentSetting,
    FixedAllowance,
    MovingAverage,
    PerfectForecast,
    PreBroadcast,
    StaticForecast,
    StaticPlan,
    UnsuitableSystemError,
    WindowAllowance,
    system_of,
)
from jaxmoe.methods.forecast import Forecast
from jaxmoe.methods.settings import STATEMENTS
from jaxmoe.methods.wafer_gpu.caching import Eviction, Prediction
from jaxmoe.models import ElementBytes, GroupedQueryAttention, MoEModel
from jaxmoe.placement.token_layout import LayoutName
from jaxmoe.registry import UnknownPartError
from jaxmoe.settings import settings_of
from jaxmoe.traces import GatingTrace
from jaxmoe.traces.logits import Logits

LAYERS, EXPERTS = 2, 4


@pytest.fixture
def setting() -> DeploymentSetting:
    """Tokens choose experts 0 and 1 three times, 2 and 3 once, in both layers."""
    rng = np.random.default_rng(0)
    experts = np.repeat([[[0, 1]], [[0, 1]], [[0, 1]], [[2, 3]]], LAYERS, axis=1)
    trace = GatingTrace(experts.astype(np.int16), EXPERTS, np.arange(LAYERS), np.array([0]), None, {})
    return DeploymentSetting(
        share=np.stack([cases.random_share(rng, EXPERTS, 6) for _ in range(LAYERS)]),
        mode="sharded",
        exchange=("lowest_host",) * LAYERS,
        model=cases.layer_model(cases.random_machine(rng, (2, 3))),
        moe=MoEModel("small", 64, 128, EXPERTS, 2, (0, 1), 2),
        bytes=ElementBytes(),
        batch_tokens=8,
        context_tokens=16,
        build_exchange=pytest.fail,
        describe=lambda mode, exchange: pytest.fail(exchange),
        trace=trace,
        history=trace,
    )


def test_unknown_names_are_told_the_known_ones():
    with pytest.raises(
        UnknownPartError, match=r"'hdmoe' \(did you mean hd_moe.*\?\), expected one of static, hd_moe, moentwine"
    ):
        system_of("hdmoe")
    assert [*METHODS][:3] == ["static", "hd_moe", "moentwine"]


def test_static_is_the_plan(setting):
    (run,) = system_of("static").runs(setting).values()
    method = run.method
    assert isinstance(method, StaticPlan)
    np.testing.assert_allclose(method.share, setting.share, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("moving_average", MovingAverage),
        ("static", StaticForecast),
        ("perfect", PerfectForecast),
        ("cross_layer", CrossLayer),
    ],
)
def test_forecasts_by_name(setting, name, kind):
    method = system_of("hd_moe", forecast=name, rate=0.25).method(setting)
    assert isinstance(method, PreBroadcast)
    assert type(method.forecast) is kind
    if name in ("moving_average", "static"):
        np.testing.assert_allclose(method.forecast.frequency[1], [0.375, 0.375, 0.125, 0.125])
    if name == "moving_average":
        assert float(method.forecast.rate) == 0.25


def test_broadcast_and_window(setting):
    fixed = system_of("hd_moe", experts=9).method(setting)
    assert isinstance(fixed.allowance, FixedAllowance)
    assert (fixed.limit, fixed.hidden) == (EXPERTS, True)  # there are no more experts
    charged = system_of("hd_moe", window="last", broadcast="charged").method(setting)
    assert not charged.hidden
    assert isinstance(charged.allowance, WindowAllowance)
    assert [float(size) for size in vars(charged.allowance).values()] == [64, 128, 2, 0, False]
    assert charged.flops_per_token_expert == jnp.asarray(cases.COSTS.flops_per_token_expert)


def test_windows_of_whole_layers_count_attention(setting):
    with pytest.raises(UnsuitableSystemError, match=r"system.window is idle_links .* use window: last"):
        system_of("hd_moe", window="idle_links").method(setting)
    # Two heads of 32: 4 x 64 x 64 weights, and 16 tokens of context with 2 x 64 elements each; two FLOPs a weight and
    # a product. 8 tokens over 6 nodes, the slowest counts.
    attention = GroupedQueryAttention(heads=2, kv_heads=2, head_size=32)
    own = replace(setting, moe=replace(setting.moe, attention=attention))
    flops = 8 / 6 * 2 * (4 * 64 * 64 + 16 * 2 * 64)
    seconds = flops / float(setting.model.machine.die.flops.min())
    for window, idle in (("last_layer", False), ("idle_links", True)):
        allowance = system_of("hd_moe", window=window).method(own).allowance
        assert allowance.idle == idle
        assert float(allowance.attention) == pytest.approx(seconds, rel=1e-5)


def test_settings_that_do_not_suit(setting):
    with pytest.raises(UnsuitableSystemError, match=r"plan is replicated; use a sharded plan"):
        system_of("hd_moe").method(replace(setting, mode="replicated"))
    cut = replace(setting, model=replace(setting.model, schedule=Pipelined(2)))
    with pytest.raises(UnsuitableSystemError, match=r"use the schedule serial"):
        system_of("hd_moe").method(cut)
    assert isinstance(system_of("static").runs(cut)["static"].method, StaticPlan)


@pytest.mark.parametrize(
    ("statement", "setting", "taken"),
    [
        ("hd_moe", "forecast", Forecast),
        ("expert_streaming", "prefetch", Literal["none", Forecast]),
        ("moentwine", "layout", LayoutName),
        ("camoe", "logits", Logits),
        ("wafer_gpu", "prediction", Prediction),
        ("wafer_gpu", "eviction", Eviction),
    ],
)
def test_choices_that_are_stated_are_those_that_are_taken(statement, setting, taken):
    """Statements cannot take them from where they are used, for JAX is there."""
    assert settings_of(STATEMENTS[statement])[setting].choices == get_args(taken)
