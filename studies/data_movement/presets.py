"""Finds the strengths of the presets: those with which drawn traces have the published figures.

    python studies/data_movement/presets.py [MODEL ...]

Prints the strengths to put into `jaxmoe/traces/synthesis/presets.py`, and the figures they lead to.

A preset takes about twenty seconds of one core.
"""

from dataclasses import replace

import numpy as np

from jaxmoe.experiment.table import script_options
from jaxmoe.traces.statistics import count_pairs
from jaxmoe.traces.statistics.concentration import coverage, every_pair, max_over_mean, pairs_above
from jaxmoe.traces.synthesis import PRESETS, sample_trace
from jaxmoe.traces.synthesis.presets import Preset

LAYERS = 20
EVENTS_PER_PAIR = 16  # enough for the most frequent pairs to be the most likely ones
ROUNDS = 14
KNOBS = {
    "popularity": ("load_max_over_mean", 0.6),
    "from_layer": ("layer_pair_coverage_top20", 1.2),
    "from_token": ("token_pair_coverage_top20", 1.2),
    "together": ("coactivation_coverage_top10", 1.5),
}
"""What each strength moves, and by how much it is moved for an error of the logarithm of one."""


def figures(preset: Preset, seed: int) -> dict[str, float]:
    """What a trace of the preset shows, averaged over layers."""
    tokens = EVENTS_PER_PAIR * preset.num_experts**2 // preset.top_k**2
    counts = count_pairs(sample_trace(thin(preset).process(), tokens, seed))
    return {
        "load_max_over_mean": float(max_over_mean(counts.load).mean()),
        "layer_pair_coverage_top20": float(coverage(every_pair(counts.layer_pairs), 0.2).mean()),
        "token_pair_coverage_top20": float(coverage(every_pair(counts.token_pairs), 0.2).mean()),
        "coactivation_coverage_top10": float(coverage(pairs_above(counts.together), 0.1).mean())
        if preset.top_k > 1
        else np.nan,
    }


def thin(preset: Preset) -> Preset:
    """The preset with a few of its layers, from the lowest to the highest."""
    ids = preset.layer_ids
    return replace(preset, layer_ids=ids[:: len(ids) // LAYERS])


def calibrated(preset: Preset) -> Preset:
    """The preset with strengths moved, round by round, towards its targets."""
    for step in range(ROUNDS):
        found = figures(preset, step)
        gain = 1.0 if step < ROUNDS // 2 else 0.4
        moved = {}
        for knob, (figure, step_size) in KNOBS.items():
            target = getattr(preset.targets, figure)
            if target is not None:
                error = np.log(target / found[figure])
                moved[knob] = round(
                    max(0.0, getattr(preset, knob) + gain * step_size * float(np.clip(error, -0.2, 0.2))), 3
                )
        preset = replace(preset, **moved)
        print(step, {name: round(value, 3) for name, value in found.items()}, moved, flush=True)
    return preset


def main() -> None:
    parser = script_options(__doc__)
    parser.add_argument("model", nargs="*", choices=[*PRESETS, []], help="presets to calibrate; all by default")
    for name in parser.parse_args().model or PRESETS:
        preset = calibrated(PRESETS[name])
        print(name, {knob: getattr(preset, knob) for knob in KNOBS}, figures(preset, ROUNDS))


if __name__ == "__main__":
    main()
