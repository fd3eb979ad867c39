"""One layer at a time, in the event simulator: busy resources, a timeline, and single experts on two H100."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
from runs import (
    CONFIGS,
    FP8,
    MODELS,
    POLICIES,
    PUBLISHED,
    SETTINGS,
    Case,
    Row,
    machine_of,
    policy_of,
    requests_of,
    rolled_out,
)

from jaxmoe.config import build_machine, load_hardware
from jaxmoe.des import FetchedSliceCosts, SliceWork, replay_slices
from jaxmoe.engine import FetchCosts, Fetches, LayerTime
from jaxmoe.hardware import Machine

SHOWN = ("Qwen3-235B", "dojo_5x5", 4096, 19, 3)  # model, machine, batch, step, layer of the pictures


def shown(name: str) -> tuple[LayerTime, Fetches]:
    """One layer of a policy: what the model says of it, and who fetched what."""
    model, machine, batch, *at = SHOWN
    known = Case(model, requests_of(model)[:, :batch]).guidance(SETTINGS["top"])
    policy = policy_of(model, machine, **POLICIES[name])
    _, times, (asked, _) = rolled_out(model, machine, policy, known)
    return jax.tree.map(lambda leaf: leaf[tuple(at)], (times, asked))


def loads() -> Iterator[Row]:
    """Busy times of every link, HBM channel and die in one layer under the four policies."""
    for name in PUBLISHED:
        busy = shown(name)[0].busy
        for kind, stage in (("link", "fetch"), ("hbm", "fetch"), ("node", "compute")):
            for number, seconds in enumerate(busy[stage][kind]):
                yield {"policy": name, "kind": kind, "number": number, "busy_us": seconds * 1e6}


def timeline() -> Iterator[Row]:
    """When dies, HBM channels and links are busy in the event simulator, in the same layer under `pred`."""
    model, machine, *_ = SHOWN
    chip, asked = machine_of(machine), shown("pred")[1]
    run = replay_slices(chip, work_of(asked), told(MODELS[model].costs), record=True).run
    assert run.services is not None
    links, dies = chip.topology.num_links, chip.num_nodes
    servers = {"link": 0, "hbm": links + dies, "node": links + 2 * dies + 3}
    for kind, first in servers.items():
        for number in range(links if kind == "link" else dies):
            own = run.services.server == first + number
            for begin, end in merged(run.services.begin[own] * 1e6, run.services.end[own] * 1e6):
                yield {"kind": kind, "number": number, "begin_us": begin, "end_us": end}


H100 = {  # published rates of one H100 SXM: dense FP8, HBM3, NVLink one way
    "mesh_shape": [1, 2],
    "die.compute_TFLOPs_per_s": 1979,
    "memory": "[{name: llc, bandwidth_GB_per_s: 10000, capacity_GB: 0.05}, {name: hbm, bandwidth_GB_per_s: 3350, "
    "latency_ns: 300, capacity_GB: 80}]",
    "link.bandwidth_GB_per_s": 450,
}


def h100() -> Iterator[Row]:
    """Fig. 12 as far as the text goes: the simulator beside H100's published rates, an expert and a copy at a time."""
    overrides = [f"{key}={value}" for key, value in H100.items()]
    chip = build_machine(load_hardware(CONFIGS / "hardware" / "dojo_5x5.yaml", overrides))
    hbm, link, flops = (
        float(each[0]) for each in (chip.memory[-1].bandwidth, chip.topology.link_bandwidth, chip.die.flops)
    )
    for model, requests in itertools.product(FP8, 4 ** np.arange(8)):
        costs = MODELS[model].costs
        seconds = lone(chip, told(costs), 0, int(requests))
        rate = max(float(costs.expert_bytes) / hbm, int(requests) * float(costs.flops_per_request) / flops)
        yield {"kind": f"expert of {model}", "amount": requests, "simulated_us": seconds * 1e6, "rate_us": rate * 1e6}
    for size in 4096.0 * 4 ** np.arange(11):
        seconds = lone(chip, replace(told(MODELS["DeepSeek-V3"].costs), expert_bytes=size, flops_per_request=0.0), 1, 1)
        rate = max(size / link, size / hbm)
        yield {"kind": "copy", "amount": size, "simulated_us": seconds * 1e6, "rate_us": rate * 1e6}


def lone(chip: Machine, costs: FetchedSliceCosts, die: int, requests: int) -> float:
    """Seconds of one expert of die 0, computed on a die."""
    plan = requests * (np.arange(2) == die).astype(int)[None]
    none = np.zeros((1, 2))
    return replay_slices(chip, SliceWork(plan, np.array([0]), np.array([[True, False]]), none > 0, none), costs).seconds


def merged(begin: np.ndarray, end: np.ndarray, gap: float = 0.5) -> Iterator[tuple[float, float]]:
    """Stretches of one server, those with less than a gap between them as one."""
    order = np.argsort(begin)
    starts, ends = begin[order], np.maximum.accumulate(end[order])
    cut = np.flatnonzero(starts[1:] > ends[:-1] + gap) + 1
    for part in np.split(np.arange(len(starts)), cut):
        if len(part):
            yield starts[part[0]], ends[part[-1]]


def work_of(asked: Fetches) -> SliceWork:
    """A layer as the simulator takes it."""
    none = np.zeros(asked.requests.shape)
    return SliceWork(asked.requests.astype(int), asked.home, asked.local > 0, asked.copied > 0, none)


def told(costs: FetchCosts) -> FetchedSliceCosts:
    """Costs as the simulator takes them."""
    numbers = (costs.request_bytes, costs.hit, costs.miss, costs.write)
    return FetchedSliceCosts(
        float(costs.expert_bytes), float(costs.flops_per_request), int(costs.slices), *map(float, numbers)
    )
