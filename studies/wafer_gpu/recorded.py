"""The four policies on recorded gating of smaller models, on Dojo and on a machine scaled to them."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from layers import told, work_of
from runs import MODELS, POLICIES, SETTINGS, Row, beside, homes, machine_of, measured, policy_of, rolled_out

from jaxmoe.des import replay_slices
from jaxmoe.methods import CrossToken, Guidance, WaferPolicy, guide
from jaxmoe.traces import GatingTrace, read_trace, request_batches
from jaxmoe.traces.statistics.counting import count_pairs
from jaxmoe.traces.synthesis import fit_process, sample_trace

FILES = {  # of each model: gating that is decoded, and what the heat map has seen before
    "DeepSeek-V2-Lite": (("intent", "summary"), ("translation", "intent")),
    "GPT-OSS-20B": (("mmlu_test", "gpqa_main"), ("gpqa_main", "mmlu_test")),
}
LAYERS = ((1, 9), (4, 19))  # rows of a trace, two at a time
SEEDS = (0, 1, 2)  # of the homes
# Windows of neighbouring tokens, and their tokens: 96 and 128 requests of an expert in the mean, where memory binds as
# it does on DeepSeek-V3 at 4,096; and 288 and 384.
SIZES = ((1024, 6), (3072, 2))
SHOWN = ("base", "pred", "home", "allo", "allo+pred")
REPLAYED = ((1, 0), (-1, 1))  # steps and layers in the simulator


def recorded(traces: Path, sizes: tuple[tuple[int, int], ...] = SIZES) -> Iterator[Row]:
    """Every size, file, layer pair, machine and deal of homes; also gating of a process fitted to the first layers.

    The larger size is on the scaled machine alone, and as recorded alone.
    """
    for size, (model, files) in itertools.product(sizes, FILES.items()):
        small = size == SIZES[0]
        for (name, before), rows in itertools.product(files, LAYERS):
            own, seen = (_read(traces, model, each, rows) for each in (name, before))
            gatings = {"recorded": own}
            if small and rows == LAYERS[0]:
                with jax.enable_x64(False):
                    gatings["fitted"] = sample_trace(fit_process(own, 0), own.num_tokens, 0)
            for gating, trace in gatings.items():
                known = _guidance(trace, seen, *size)
                about = {"model": model, "trace": name, "requests": size[0], "gating": gating}
                about |= {"layers": f"{rows[0]} and {rows[1]}"}
                for machine in ("dojo_5x5", f"scaled {model}") if small else (f"scaled {model}",):
                    for seed in SEEDS:
                        yield from _compared(about, model, machine, seed, known)


def _read(traces: Path, model: str, name: str, rows: tuple[int, int]) -> GatingTrace:
    return read_trace(traces / model.lower() / f"{name}.npz").select_layers([*rows])


def _guidance(trace: GatingTrace, seen: GatingTrace, requests: int, steps: int) -> Guidance:
    chosen = request_batches(trace, requests, steps, 0)[0].experts
    heatmap = CrossToken(
        jnp.asarray(count_pairs(seen).token_pairs, jnp.float32), min(SETTINGS["top"], trace.num_experts)
    )
    return guide(heatmap, jnp.asarray(chosen))


def _compared(about: Row, model: str, machine: str, seed: int, known: Guidance) -> Iterator[Row]:
    home = homes(model, machine_of(machine).num_nodes, seed=seed)[:2]
    rows = []
    for name in SHOWN:
        policy = policy_of(model, machine, home, **POLICIES[name])
        rows.append(
            about
            | {"machine": machine.split()[0], "seed": seed, "policy": name}
            | measured(model, machine, policy, known)
            | _replayed(model, machine, policy, known)
        )
    yield from beside(rows, rows[0])


def _replayed(model: str, machine: str, policy: WaferPolicy, known: Guidance) -> Row:
    """Some layers in the model and in the simulator, all together, and the most that one is off."""
    costs, chip = MODELS[model].costs, machine_of(machine)
    _, times, (asked, traffic) = rolled_out(model, machine, policy, known)
    names = ("hops", "local_read", "remote_read", "local_write")
    seconds, same = [], True
    for at in REPLAYED:
        replay = replay_slices(chip, work_of(jax.tree.map(lambda leaf, at=at: leaf[at], asked)), told(costs))
        seconds.append((times.total[at], replay.seconds))
        same &= all(float(traffic[each][at]) == getattr(replay, each) for each in names)
    off = max(abs(one / two - 1) for one, two in seconds)
    model_us, simulated_us = (1e6 * sum(each) for each in zip(*seconds, strict=True))
    return {"model_us": model_us, "simulated_us": simulated_us, "most_off": off, "same_traffic": same}
