"""A step on a machine of any kind, against figures worked out by hand."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.engine import EvenPart, EvenParts, LayerTime, price_in_turn
from jaxmoe.engine.times import ATTENTION, EXPERTS
from jaxmoe.hardware import Die, Energy, Machine, fully_connected
from jaxmoe.models import GroupedQueryAttention, MoEModel, SharedExperts
from jaxmoe.serving.closed_loop import BACKENDS, Users
from jaxmoe.serving.costs import DeviceCosts, joules_of_steps
from jaxmoe.serving.deployment import Deployment
from jaxmoe.serving.machine_step import Context, MachineStep, SystemLayers, context_of
from jaxmoe.serving.step import StepLoad

# Two nodes of 50 FLOP/s. Of five layers four have experts.
MACHINE = Machine(fully_connected(2, 1.0, 0.0), Die(jnp.full(2, 50.0)), energy=Energy(compute=jnp.asarray(3.0)))
MODEL = MoEModel(
    name="by hand",
    hidden_size=16,
    expert_size=8,
    num_experts=4,
    top_k=2,
    num_layers=5,
    moe_layer_ids=(1, 2, 3, 4),
    dense_size=8,
    shared_experts=SharedExperts(1, 8),
    attention=GroupedQueryAttention(heads=2, kv_heads=1, head_size=8, window=8, windowed_layers=2),
)


def part(flops: float) -> EvenPart:
    return EvenPart(*(jnp.asarray(number) for number in (flops, 0.0, 0.0)))


def layer(attention: float = 0.0) -> LayerTime:
    stages = {"attention": attention, "compute": 0.5}
    blocks = ((ATTENTION, ("attention",)), (EXPERTS, ("compute",)))
    busy = {name: {} for name in stages}
    return LayerTime({k: np.asarray(v) for k, v in stages.items()}, busy, np.asarray(0.5 + attention), {}, {}, blocks)


def step(time: LayerTime, with_shared: bool = False) -> MachineStep:
    beside = EvenParts(MACHINE, attention=part(100.0), dense=part(20.0), shared=part(40.0))
    layers = SystemLayers("own", lambda tokens, context: time, with_shared)
    return MachineStep(MODEL, Deployment("sglang", tensor=2), layers, lambda context: beside, part(10.0))


def test_layers_and_what_every_token_passes_beside_them():
    # 10 tokens over two nodes of 50 FLOP/s: attention 10 s, dense 2, shared 4, head 1; four layers of 0.5 s.
    found = step(layer()).parts(StepLoad(10.0, 4.0))
    assert {name: float(seconds) for name, seconds in found.items()} == pytest.approx(
        {"attention": 10.0, "compute": 2.0, "dense": 2.0, "shared": 4.0, "head": 1.0}
    )
    # 10 tokens of 170 FLOP, 3 J each.
    assert float(step(layer()).time(StepLoad(10.0, 4.0)).total_energy) == pytest.approx(5100.0)


def test_what_a_layer_has_is_not_counted_twice():
    """A layer with attention leaves that of the dense layer, a fifth of all; one with shared experts leaves none."""
    found = step(layer(attention=0.25), with_shared=True).parts(StepLoad(10.0, 4.0))
    assert {name: float(seconds) for name, seconds in found.items()} == pytest.approx(
        {"attention": 1.0, "compute": 2.0, "attention of dense layers": 2.0, "dense": 2.0, "head": 1.0}
    )


def test_a_step_may_be_its_layers_alone():
    """No dense layers, no shared experts, no head, and attention in the time of a layer."""
    own = step(layer(attention=0.25))
    none = EvenParts(MACHINE, attention=part(100.0), dense=part(0.0), shared=part(0.0))
    model = replace(MODEL, num_layers=4, moe_layer_ids=(0, 1, 2, 3), shared_experts=None)
    own = replace(own, model=model, beside=lambda context: none, head=part(0.0))
    assert float(own.seconds(StepLoad(10.0, 4.0))) == pytest.approx(4 * 0.75)


def test_drafts_are_passes_of_a_layer_more():
    # A pass of 20 tokens: 0.5 s of its layer, attention of one of five layers 4 s, shared experts 2 s; one for a head.
    drafting = replace(step(layer()), deployment=Deployment("sglang", tensor=2, drafted=1))
    verified = StepLoad(10.0, 4.0, queries=2.0)
    first = float(drafting.seconds(verified)) - float(step(layer()).seconds(verified))
    assert first == pytest.approx(0.5 + 4.0 + 2.0 + 1.0)
    # A further one of 10 tokens: half of that beside the layer.
    drafting = replace(step(layer()), deployment=Deployment("sglang", tensor=2, drafted=3))
    assert float(drafting.seconds(verified) - step(layer()).seconds(verified)) == pytest.approx(
        first + 2 * (0.5 + 2.0 + 1.0 + 1.0)
    )


def test_a_prompt_is_answered_once():
    # 8 of 16 tokens of a prompt: half of an answer, and one at least passes the head.
    found = step(layer()).parts(StepLoad(0.0, 1.0, prefilled=8.0, prompt=16.0))
    assert float(found["head"]) == pytest.approx(0.1)
    found = step(layer()).parts(StepLoad(0.0, 1.0, prefilled=80.0, prompt=16.0))
    assert float(found["head"]) == pytest.approx(0.5)


def test_steps_of_any_shape_are_those_of_each():
    own = step(layer())
    tokens = np.array([[1.0, 2.0, 40.0]])
    assert own.seconds(StepLoad(tokens, 4.0)).shape == (1, 3)
    each = [float(own.seconds(StepLoad(count, 4.0))) for count in tokens[0]]
    assert own.seconds(StepLoad(tokens, 4.0))[0].tolist() == each


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_joules_of_a_token_are_its_part_of_decoding_and_of_reading(backend):
    # Of 10 sequences: 170 FLOP a token of 3 J each; a prompt of 20 tokens of 160 FLOP, and 10 of one answer, for 5.
    users = Users(10.0, 20.0, 5.0)
    joules = joules_of_steps(step(layer()), users, 40.0, BACKENDS[backend])
    assert float(joules) == pytest.approx(1e6 * (3 * 170 + 3 * (20 * 160 + 10) / 5))
    silent = replace(MACHINE, energy=None)
    beside = EvenParts(silent, attention=part(100.0), dense=part(20.0), shared=part(40.0))
    assert joules_of_steps(replace(step(layer()), beside=lambda _: beside), users, 40.0, BACKENDS[backend]) is None


def test_a_board_and_its_hours():
    # 1,000 tokens a second: a million take 1,000 s.
    costs = DeviceCosts(power=700.0, hour=3.6)
    assert (costs.joules(1000.0), costs.price(1000.0)) == pytest.approx((700_000.0, 1.0))
    assert (DeviceCosts().joules(1000.0), DeviceCosts().price(1000.0)) == (None, None)


CONTEXTS = {
    # Three layers see all of 20 tokens, two the last 8: 15.2 on average.
    "decode": (StepLoad(4.0, 20.0), Context(20.0, 15.2)),
    "speculative": (StepLoad(4.0, 20.0, queries=2.0), Context(20.0, 7.6)),
    "whole prompts": (StepLoad(0.0, 1.0, prefilled=40.0, prompt=5.0), Context(2.5, 1.0)),
    # A chunk of 4 of 12 reads 8 tokens on average.
    "chunks": (StepLoad(0.0, 1.0, prefilled=4.0, prompt=12.0), Context(6.0, 2.0)),
    "both": (StepLoad(5.0, 20.0, prefilled=5.0, prompt=5.0), Context(11.25, 8.1)),
    "none": (StepLoad(0.0, 1.0), Context(1.0, 1.0)),
}


@pytest.mark.parametrize("case", CONTEXTS)
def test_what_a_token_attends_to_and_what_is_read_for_it(case):
    load, expected = CONTEXTS[case]
    assert context_of(MODEL, load) == pytest.approx(tuple(expected))


def test_layers_in_turn_add_up():
    found = price_in_turn([(3, layer(attention=1.0)), (2, layer())])
    assert float(found.total) == pytest.approx(3 * 1.5 + 2 * 0.5)
    assert found.order == ("attention", "compute")
    assert float(found.stages["attention"]) == pytest.approx(3.0)
