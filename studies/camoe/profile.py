"""The profiler on simulated networks: what it recovers, section 4.3's four fits, and phase two's samples.

`python studies/camoe/profile.py` writes `profile.csv`, `fits.csv` and `paths.csv`; see README.md.

Table `profile` takes four seconds.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from hops import chained
from setting import HERE, network

from jaxmoe.des import fabric_of
from jaxmoe.experiment.profile_fit import profile_network
from jaxmoe.experiment.profiling import by_simulator, disturbed
from jaxmoe.experiment.table import make_tables, study_options, tables_of
from jaxmoe.network import AlphaBeta
from jaxmoe.network.pairwise import STAGES

SIZES = np.geomspace(1e3, 64e6, 32).tolist()
ABOVE = np.geomspace(2e6, 64e6, 8).tolist()  # above the bursts of 0.25 and 1.25 MB
TOKENS = [128 * (1 + step) for step in range(8)]  # of 4.3
VECTOR = 4096.0  # B
SEEDS = range(3)
PAPER = {  # 4.3: ms and ms/B
    ("dispatch", 0, 1): (2.5480, 5.5823e-6),
    ("dispatch", 1, 2): (2.9142, 8.4092e-7),
    ("combine", 0, 1): (0.9744, 5.5532e-6),
    ("combine", 1, 2): (0.9454, 8.0976e-7),
}
AWAY = ~np.eye(4, dtype=bool)


def with_bursts(topology):
    """The token buckets of A.3: 2 Mbit where the rate is 1500 Mbit/s, else 10 Mbit."""
    burst = np.where(np.asarray(topology.link_bandwidth) < 1e9, 2e6 / 8, 10e6 / 8)
    return replace(topology, link_burst=jnp.asarray(burst, jnp.float32))


def table(topology, values) -> np.ndarray:
    """What a link has, by pair."""
    made = np.zeros((4, 4))
    made[tuple(topology.link_ends.T)] = np.asarray(values, float)
    return made


def recovered() -> list[dict]:
    """Largest and mean errors of alpha and beta."""
    top = network()
    delay, slowness = table(top, top.link_latency), table(top, 1 / np.asarray(top.link_bandwidth, float))
    plain, bucket = (by_simulator(fabric_of(each, None)) for each in (top, with_bursts(top)))
    burst = table(top, with_bursts(top).link_burst)
    cases = [("no noise", plain, SIZES, delay), ("token buckets", bucket, ABOVE, delay - burst * slowness)]
    cases += [(f"noise, seed {seed}", disturbed(plain, 0.05, 0.02, seed), SIZES, delay) for seed in SEEDS]
    rows = []
    for name, measure, sizes, alpha in cases:
        found = profile_network(4, sizes, measure)
        for phase, profile in (("one", found.baseline), ("two", found.refined)):
            errors = {
                label: 100 * np.abs(made[:, AWAY] / true[AWAY] - 1)
                for label, made, true in (("alpha", profile.alpha, alpha), ("beta", profile.beta, slowness))
            }
            row = {"case": name, "phase": phase}
            for label, error in errors.items():
                row |= {f"{label}_max_percent": float(error.max()), f"{label}_mean_percent": float(error.mean())}
            row |= {"samples": len(found.alone) if phase == "one" else len(found.contended)}
            row |= {"samples_for_every_edge": int((found.alone.phase > 0).sum())}
            rows.append(row)
    return rows


def four_fits() -> list[dict]:
    """The fits of 4.3 with token buckets and without, at the paper's sizes."""
    top = network()
    rows = []
    sizes = [tokens * VECTOR for tokens in TOKENS]
    for name, each in (("without buckets", top), ("token buckets", with_bursts(top))):
        found = profile_network(4, sizes, by_simulator(fabric_of(each, None))).baseline
        for (phase, source, destination), (alpha, beta) in PAPER.items():
            at = (STAGES.index(phase), source, destination)
            rows.append(
                {
                    "network": name,
                    "phase": phase,
                    "source": source,
                    "destination": destination,
                    "alpha_ms": 1e3 * float(found.alpha[at]),
                    "beta_ms_per_B": 1e3 * float(found.beta[at]),
                    "paper_alpha_ms": alpha,
                    "paper_beta_ms_per_B": beta,
                    "delay_ms": 1e3 * float(table(top, top.link_latency)[source, destination]),
                    "rate_ms_per_B": 1e3 / float(table(top, top.link_bandwidth)[source, destination]),
                }
            )
    return rows


def gpu_paths() -> list[dict]:
    """Fig. 3: write latency between GPUs by path. 429 and 8,325 ns are the paper's; the two between are assumed."""

    def hops(*latencies: float) -> float:
        rate = jnp.full((1, 1), 1 / 50e9)
        return float(chained([AlphaBeta(jnp.full((1, 1), each), rate) for each in latencies]).alpha[0, 0])

    nvlink, switch, host = 429e-9, 900e-9, 2775e-9
    paths = {
        "NVLink": (hops(nvlink), 429),
        "NVLink over another GPU": (hops(nvlink, nvlink), ""),
        "PCIe switch (assumed)": (hops(switch, switch), ""),
        "host path": (hops(host, host, host), 8325),
    }
    return [{"path": name, "alpha_ns": 1e9 * alpha, "paper_ns": stated} for name, (alpha, stated) in paths.items()]


if __name__ == "__main__":
    make_tables(
        HERE,
        tables_of({"profile": recovered, "fits": four_fits, "paths": gpu_paths}, digits=6),
        study_options(__doc__).parse_args(),
    )
