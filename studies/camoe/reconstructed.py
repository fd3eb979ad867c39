"""Rule and gradient on recorded choices of DeepSeek-V2-Lite, whose logits are reconstructed from its gate weights.

`python studies/camoe/reconstructed.py` writes `reconstructed.csv`; see README.md. Chosen logits are exact; how the
unchosen experts divide what is left is assumed.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from gradient import MARGIN, figures
from setting import ROOT, network, problem, scores_of, write_rows

from jaxmoe.traces import read_trace
from jaxmoe.traces.logits import reconstruct_logits
from jaxmoe.tune.gate_bias import GateSettings, Limits, descend, start, within

LAYER_IDS, STRENGTHS, PARTS, PART, BATCH = [1, 6, 11, 16, 21, 26], (0.1, 0.2), 4, 1024, 4096
TRAINING, OTHER = "summary", "translation"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="folder of traces/")
    folder = parser.parse_args().shared / "traces" / "deepseek-v2-lite"
    if not folder.is_dir():
        sys.exit(f"{folder}: no such folder; give the folder of traces/ with --shared")
    seen, other = (
        reconstruct_logits(read_trace(folder / f"{name}.npz").select_layers(LAYER_IDS)).trace
        for name in (TRAINING, OTHER)
    )
    top = network()
    training = [problem(seen, at * PART, PART, top, scale=1.0) for at in range(PARTS)]
    batches = {
        "training": training,
        "unseen": [problem(seen, PARTS * PART, BATCH, top, scale=1.0)],
        "other_topics": [problem(other, 0, BATCH, top, scale=1.0)],
    }
    share, rows = training[0].share, []
    scores = jnp.stack([scores_of(each) for each in training]).mean(axis=0)
    for strength in STRENGTHS:
        lost = figures(training, -strength * scores, share)
        limits = Limits(MARGIN * (1 - lost["retained"]), MARGIN * lost["avg_layer_kl"])
        found = descend(training, limits, GateSettings(steps=60), start("table", scores, strength))
        kept = within(training, limits, found.bias, found.share)
        for form, bias in (("rule", -strength * scores), ("table", jnp.asarray(kept))):
            for name, problems in batches.items():
                rows.append({"lambda": strength, "form": form, "tokens": name} | figures(problems, bias, share))
                print({k: round(v, 5) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    write_rows("reconstructed", rows)


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")

    main()
