"""The controller of a biased gate: it watches times, probes links when they are off, and renews the bias (camoe 3.4).

The paper names it in one sentence: lambda from observed against predicted time, and sparse probes of predicted
bottlenecks. The rule is ours: while a stage takes longer or shorter than predicted, pairs are probed, those of the
longest predicted time first, until the times agree again; and one pair after another is probed now and then, for a link
that has become faster slows nothing down.
"""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.methods.camoe.gate import OwnNode, gate_bias
from jaxmoe.network.pairwise import AllToAll
from jaxmoe.network.time_models import AlphaBeta
from jaxmoe.relax import as_number


class Observed(eqx.Module):
    """What an iteration told: copies sent, seconds of dispatch and combine, and of probes, 0 where none was sent."""

    copies: Float[Array, "node node2"]
    dispatch: Float[Array, ""]
    combine: Float[Array, ""]
    probes: Float[Array, "node node2"]


class ControlState(eqx.Module):
    """What the controller believes and wants.

    `slowness` is how many times as long a byte takes as it was profiled, `probe` marks pairs to probe in the next
    iteration, and `probed` those probed since times went wrong.
    """

    slowness: Float[Array, "node node2"]
    strength: Float[Array, ""]
    misfits: Int[Array, ""]  # iterations in a row whose times were not as predicted
    probe: Bool[Array, "node node2"]
    probed: Bool[Array, "node node2"]
    iteration: Int[Array, ""]


class GateController(eqx.Module):
    """Keeps alpha and beta of a profile, and lambda, up to date; `exchange` has the profile's `AlphaBeta`.

    `copies` are those of an unbiased pass. Times off by more than `tolerance` for `patience` iterations raise the
    alarm; then `width` pairs are probed in every iteration, with messages of `probe_bytes`. Every `period` iterations
    one pair is probed in any case. Lambda is `strength` times observed over predicted time, at most `most` times, and
    moves by `rate` of the difference.
    """

    exchange: AllToAll
    copies: Float[Array, "node node2"]
    share: Float[Array, "expert node"]
    strength: Float[Array, ""] = eqx.field(converter=as_number)
    tolerance: Float[Array, ""] = eqx.field(default=0.15, converter=as_number)
    rate: Float[Array, ""] = eqx.field(default=0.2, converter=as_number)
    most: Float[Array, ""] = eqx.field(default=1.5, converter=as_number)
    probe_bytes: Float[Array, ""] = eqx.field(default=1e6, converter=as_number)
    patience: int = eqx.field(static=True, default=3)
    width: int = eqx.field(static=True, default=2)
    period: int = eqx.field(static=True, default=50)
    own: OwnNode = eqx.field(static=True, default="counted")

    def init(self) -> ControlState:
        """The profile as it is."""
        nodes = self.share.shape[1]
        none = jnp.zeros((nodes, nodes), bool)
        zero = jnp.zeros((), jnp.int32)
        return ControlState(jnp.ones((nodes, nodes)), jnp.asarray(self.strength), zero, none, none, zero)

    def believed(self, state: ControlState) -> AllToAll:
        """The all-to-all with seconds per byte as they are now believed to be."""
        models = dict(self.exchange.models)
        for name in ("dispatch", "combine"):
            model = models[name]
            assert isinstance(model, AlphaBeta)
            models[name] = replace(model, beta=model.beta * state.slowness)
        return replace(self.exchange, models=models)

    def bias(self, state: ControlState) -> Float[Array, "node expert"]:
        """The bias for the next iteration."""
        return gate_bias(self.believed(state), self.copies, self.share, state.strength, self.own)

    def step(self, state: ControlState, seen: Observed) -> ControlState:
        """Learn from an iteration, and say what to probe in the next."""
        state = self._learnt(state, seen.probes)
        predicted = self._pair_seconds(state, seen.copies)
        observed = jnp.stack([seen.dispatch, seen.combine])
        expected = predicted.max(axis=(1, 2))
        ratio = observed / expected
        misfit = (jnp.abs(ratio - 1) > self.tolerance).any()
        misfits = jnp.where(misfit, state.misfits + 1, 0)
        alarm = misfits >= self.patience
        probed = jnp.where(misfit, state.probed | (seen.probes > 0), False)
        probed = jnp.where((probed | self._own).all(), False, probed)  # all were tried: begin again
        sought = self._longest(jnp.where(probed, -1, predicted.max(axis=0))) & alarm
        wanted = self.strength * jnp.clip(observed.sum() / expected.sum(), 1, self.most)
        iteration = state.iteration + 1
        return ControlState(
            slowness=state.slowness,
            strength=state.strength + self.rate * (wanted - state.strength),
            misfits=misfits,
            probe=sought | self._in_turn(iteration),
            probed=probed,
            iteration=iteration,
        )

    @property
    def _own(self) -> Bool[Array, "node node2"]:
        return jnp.eye(self.share.shape[1], dtype=bool)

    def _learnt(self, state: ControlState, probes: Float[Array, "node node2"]) -> ControlState:
        """Beliefs with what probes took: what is beyond alpha is of the bytes."""
        model = self.exchange.models["dispatch"]
        assert isinstance(model, AlphaBeta)
        per_byte = jnp.where(self._own, 1, model.beta) * self.probe_bytes
        found = jnp.maximum((probes - model.alpha) / per_byte, 1e-3)
        return replace(state, slowness=jnp.where(probes > 0, found, state.slowness))

    def _pair_seconds(self, state: ControlState, copies: Float[Array, "node node2"]) -> Float[Array, "2 node node2"]:
        """Predicted seconds of every pair in dispatch, and in combine as it is sent back."""
        believed = self.believed(state)
        traffic, seconds = believed.traffic(copies), []
        for name in ("dispatch", "combine"):
            model, sent = believed.models[name], jnp.where(self._own, 0, traffic[name])
            assert isinstance(model, AlphaBeta)
            seconds.append(jnp.where(sent > 0, model.alpha + model.beta * sent, 0))
        return jnp.stack(seconds)

    def _longest(self, seconds: Float[Array, "node node2"]) -> Bool[Array, "node node2"]:
        least = jax.lax.top_k(seconds.ravel(), self.width)[0][-1]
        return (seconds >= least) & (seconds > 0) & ~self._own

    def _in_turn(self, iteration: Int[Array, ""]) -> Bool[Array, "node node2"]:
        """One pair after another, every `period` iterations."""
        nodes = self.share.shape[1]
        turn = (iteration // self.period) % (nodes * (nodes - 1))
        source, step = turn // (nodes - 1), turn % (nodes - 1)
        row = jnp.arange(nodes)
        this = (row[:, None] == source) & (row == (source + 1 + step) % nodes)
        return this & (iteration % self.period == 0)
