"""How many slots whole experts need so that no copy has more than a die's even part of the work, by topic and for all.

`python studies/generalisation/room.py --shared FOLDER`. An expert with c copies has one with at least 1/c of its
work, wherever copies are. So this many slots are needed for dies that are evenly loaded; that they are enough is not
said.

Takes three seconds.
"""

from pathlib import Path

import numpy as np
from study import DEEPSEEK

from jaxmoe.experiment.table import script_options
from jaxmoe.traces import load_counts, read_trace

DIES, LAYERS = 32, (9, 17)


def slots_needed(work: np.ndarray) -> int:
    """Slots where an expert's largest work of any topic, in even parts of a die, [topic, expert], is divided."""
    return int(np.maximum(np.ceil(work.max(axis=0)), 1).sum())


def main() -> None:
    parser = script_options(__doc__)
    parser.add_argument("--shared", type=Path, required=True)
    folder = parser.parse_args().shared / "traces" / "deepseek-v2-lite"
    seen = [read_trace(folder / f"{topic}.npz").select_layers(list(LAYERS)).halves()[0] for topic in DEEPSEEK]
    counts = np.stack([load_counts(trace).counts[0] for trace in seen])  # [topic, layer, expert]
    work = DIES * counts / counts.sum(axis=2, keepdims=True)
    for row, layer in enumerate(LAYERS):
        alone = [slots_needed(work[[topic], row]) for topic in range(len(DEEPSEEK))]
        print(f"layer {layer}: {alone} slots for {', '.join(DEEPSEEK)}, {slots_needed(work[:, row])} for all topics")


if __name__ == "__main__":
    main()
