# %% [markdown]
# # Place experts for a serving cluster
#
# You serve a Mixture-of-Experts model on several ranks (GPUs). Some experts get far more tokens than others, so some
# ranks work while the rest wait. This guide places copies of busy experts, and writes the file that an engine loads.
#
# Run it whole, `python studies/guides/place_experts.py`, or cell by cell in an editor that knows `# %%`.

# %%
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import jaxmoe as jm
from jaxmoe.traces import write_trace

kept = TemporaryDirectory(prefix="jaxmoe-guide-")  # gone when this script ends
folder = Path(kept.name)


def jaxmoe(*arguments: object) -> str:
    """What the command `jaxmoe` prints with these arguments."""
    command = [sys.executable, "-m", "jaxmoe", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


# %% [markdown]
# ## 1. Which experts do tokens choose?
#
# Record this in your engine (`studies/replicas/RECORDING.md` tells how). Here a trace is drawn instead: 4,096 tokens of
# four layers of Mixtral, each of which chooses 2 of 8 experts, the popular ones more often.

# %%
trace = jm.synthetic_trace(4096, range(4), num_experts=8, top_k=2, skew=0.8, coactivation=0.3, reuse=0.2, seed=0)
write_trace(folder / "trace.npz", trace)

# %% [markdown]
# ## 2. Place the copies
#
# Each of 4 ranks has room for 3 experts of a layer: 12 slots, of which 8 hold the experts and 4 hold copies.

# %%
given = [folder / "trace.npz", "--slots", 12, "--ranks", 4, "--model", "mixtral-8x7b"]
print(jaxmoe("plan", "place", *given, "--to", "sglang", "--out", folder / "placed"))

# %% [markdown]
# The table tells how even the ranks are: `max/mean` is the work of the busiest rank over the mean. The closer to 1, the
# less the others wait. Programs read the same from `summary.json`:

# %%
summary = json.loads((folder / "placed" / "summary.json").read_text())
written = Path(summary["written"]["path"])
print(f"for the engine: {written.name}, {written.stat().st_size} B")

# %% [markdown]
# ## 3. Look at it again, and change something
#
# `plan show` reads a file of any engine. Try 16 slots in step 2, or `--to vllm_ascend`.

# %%
print(jaxmoe("plan", "show", written, "--ranks", 4))
