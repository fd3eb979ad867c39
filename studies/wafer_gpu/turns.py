"""The readings of the machine and of base: whole experts, and slices that dies read in turn."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from layers import told, work_of
from runs import (
    FP8,
    FP16,
    MAIN_MACHINES,
    MODELS,
    POLICIES,
    SETTINGS,
    Case,
    Row,
    even_seconds,
    homes,
    layer_of,
    machine_of,
    policy_of,
    requests_of,
    rolled_out,
)

from jaxmoe.des import replay_slices
from jaxmoe.engine import Fetches, FetchLayer
from jaxmoe.network.loads import link_loads


class Reading(NamedTuple):
    """How many slices a die has outstanding, `None` for a stream, and how links pass them on."""

    outstanding: int | None
    switching: str

    @property
    def told(self) -> Row:
        return {"outstanding": "stream" if self.outstanding is None else self.outstanding, "switching": self.switching}

    def layer(self, model: str, machine: str) -> FetchLayer:
        """A layer of a model on a machine, under this reading."""
        return replace(layer_of(model, machine), outstanding=self.outstanding, switching=self.switching)


IN_TURN = Reading(1, "store_and_forward")
READINGS = (
    IN_TURN,
    *(Reading(outstanding, "store_and_forward") for outstanding in (2, 4)),
    *(Reading(outstanding, "cut_through") for outstanding in (1, 2, None)),
)
WHOLE = {"split": 1}  # base computes every expert whole, on the die whose turn it is
POLICIES_IN_TURN = {
    "base": POLICIES["base"] | WHOLE,
    "pred": POLICIES["pred"] | WHOLE,
    "home": POLICIES["home"],
    "allo": POLICIES["allo"],
    "allo+pred": POLICIES["allo+pred"],
    "base, 3 dies": POLICIES["base, 3 dies"],
    "base, blocks": POLICIES["base"],
}
EVERY = ("base", "pred", "home", "allo", "allo+pred")  # of these all readings
FP16_DIES = "later"  # dies of the later edition


@eqx.filter_jit
def _priced(layer: FetchLayer, fetches: Fetches) -> Float[Array, "step layer"]:
    return jax.lax.map(jax.vmap(lambda asked: layer.time(asked).total), fetches)


def readings(model: str, seed: int, batch: int) -> Iterator[Row]:
    """Microseconds of a layer: of the first reading in all steps, the last ten and the last one; of all in some steps.

    Of other seeds than the first, and of FP16 weights, the first reading alone, and blocks at the smallest batch alone,
    for what the recurrence takes.
    """
    known = Case(model, requests_of(model, max(BATCHES_IN_TURN), seed=seed)[:, :batch]).guidance(SETTINGS["top"])
    most = READINGS if seed == 0 and model in FP8 else ()
    policies = {name: each for name, each in POLICIES_IN_TURN.items() if batch == SMALLEST or name != "base, blocks"}
    for machine in MAIN_MACHINES:
        own = machine if model in FP8 else f"{FP16_DIES} {machine}"
        home = homes(model, machine_of(own).num_nodes, seed=seed)
        even = even_seconds(own, model, known).mean()
        for name, changes in policies.items():
            _, _, (asked, traffic) = rolled_out(model, own, policy_of(model, own, home, **changes), known)
            some = jax.tree.map(lambda leaf: leaf[SOME], asked)
            tried = [("all", IN_TURN, asked), *(("some", each, some) for each in most if name in EVERY)]
            for steps, reading, fetches in tried:
                seconds = np.asarray(_priced(reading.layer(model, own), fetches))
                yield {
                    "model": model,
                    "seed": seed,
                    "batch": batch,
                    "machine": machine,
                    "policy": name,
                    **reading.told,
                    "steps": steps,
                    "layer_us": seconds.mean() * 1e6,
                    "later_us": seconds[len(seconds) // 2 :].mean() * 1e6,
                    "last_us": seconds[-1].mean() * 1e6,
                    "even_us": even * 1e6,
                    **{each: values.mean() for each, values in traffic.items()},
                }


SMALLEST, *_ = BATCHES_IN_TURN = (4096, 8192, 16384)
SOME = slice(4, None, 5)  # steps
CASES = [
    *itertools.product(FP8, (0,), BATCHES_IN_TURN),
    *itertools.product(FP16, (0,), (4096, 16384)),
    *itertools.product(FP8, (1,), (4096,)),
]


TOPS = (32, 64, 128)  # experts that a row of the heat map predicts; the text has "the top n"
COPYING = ("pred", "allo+pred")


def tops(model: str, batch: int) -> Iterator[Row]:
    """What copies, by how many experts a row predicts: all of the model, at the smallest batch also fewer.

    Base and `allo` of whole experts in turn, which have no copies, are those of `readings`.
    """
    case = Case(model, requests_of(model, max(BATCHES_IN_TURN))[:, :batch])
    every = MODELS[model].experts
    fewer = [top for top in TOPS if top < every and batch == SMALLEST]
    for machine, top in itertools.product(MAIN_MACHINES, (*fewer, every)):
        known = case.guidance(top)
        for name in COPYING:
            policy = policy_of(model, machine, **POLICIES_IN_TURN[name])
            _, _, (asked, traffic) = rolled_out(model, machine, policy, known)
            seconds = np.asarray(_priced(IN_TURN.layer(model, machine), asked))
            yield {
                "model": model,
                "machine": machine,
                "batch": batch,
                "policy": name,
                "top": top,
                "layer_us": seconds.mean() * 1e6,
                "last_us": seconds[-1].mean() * 1e6,
                **{each: values.mean() for each, values in traffic.items()},
            }


TOP_CASES = [*itertools.product(FP8, BATCHES_IN_TURN)]
PLACES = ((0, 0), (1, 2), (19, 3))  # steps and layers in the simulator


def agreement(model: str) -> Iterator[Row]:
    """Model and simulator under every reading in turn, over policies and machines, at 512 and 4,096 requests."""
    drawn = requests_of(model, 4096)
    costs = told(MODELS[model].costs)
    for batch, machine in itertools.product((512, 4096), MAIN_MACHINES):
        known = Case(model, drawn[:, :batch]).guidance(SETTINGS["top"])
        for name in ("base", "pred", "allo+pred", "base, blocks"):
            _, _, (asked, _) = rolled_out(model, machine, policy_of(model, machine, **POLICIES_IN_TURN[name]), known)
            chosen = jax.tree.map(lambda leaf: np.stack([leaf[at] for at in PLACES])[None], asked)
            for reading in (each for each in READINGS if each.outstanding is not None):
                seconds = np.asarray(_priced(reading.layer(model, machine), chosen))[0]
                through = reading.switching == "cut_through"
                for at, (step, layer) in enumerate(PLACES):
                    work = work_of(jax.tree.map(lambda leaf, at=at: leaf[0, at], chosen))
                    chip = machine_of(machine)
                    replay = replay_slices(chip, work, costs, outstanding=reading.outstanding, cut_through=through)
                    yield {
                        "model": model,
                        "machine": machine,
                        "batch": batch,
                        "policy": name,
                        **reading.told,
                        "step": step,
                        "layer": layer,
                        "model_us": seconds[at] * 1e6,
                        "simulated_us": replay.seconds * 1e6,
                    }


HIDDEN = {"DeepSeek-V3": 7168, "Qwen3-235B": 4096}
TOP_K = 8
IN_BYTES, OUT_BYTES = 1.0, 2.0  # of an element: FP8 on its way to an expert, FP16 on its way back


def vectors(model: str) -> Iterator[Row]:
    """What the paper leaves out: hidden vectors of requests that are computed on other dies than their tokens' own.

    Tokens live evenly on all dies, and dies compute evenly many requests: seconds of the busiest link, there and back.
    """
    for machine, batch in itertools.product(MAIN_MACHINES, BATCHES_IN_TURN):
        topology, dies = machine_of(machine).topology, machine_of(machine).num_nodes
        requests = jnp.full((dies, dies), batch * TOP_K / dies**2)
        carried = link_loads(topology, requests) * HIDDEN[model]
        seconds = float((carried / topology.link_rate).max()) * (IN_BYTES + OUT_BYTES)
        yield {"model": model, "machine": machine, "batch": batch, "vectors_us": seconds * 1e6}
