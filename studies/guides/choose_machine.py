# %% [markdown]
# # Choose a machine
#
# Faster links or faster dies: what should the next machine have? This guide times one layer of a small model on nine
# machines, sees what limits each, and reads from the model's slope where one more unit pays most.
#
# Run it whole, `python studies/guides/choose_machine.py`, or cell by cell in an editor that knows `# %%`.

# %%
import equinox as eqx

import jaxmoe as jm

# %% [markdown]
# ## 1. The work
#
# 64 tokens at a time pass one layer with 32 experts, 2 for each token. Eight batches are drawn from a synthetic trace;
# `jm.read_trace(FILE)` reads one of your own.

# %%
model = jm.model("tiny")
trace = jm.synthetic_trace(4096, range(1), num_experts=32, top_k=2, skew=0.5, coactivation=0.2, reuse=0.2, seed=0)
batches = jm.sample_batches(trace, 64, 8, seed=1)


def layer_on(links: float, dies: float) -> jm.Layer:
    """The layer on a 4x4 mesh with so many GB/s a link and TFLOP/s a die."""
    mesh = jm.mesh((4, 4), bandwidth=links * 1e9, latency=1e-7)
    return jm.layer(jm.machine(mesh, flops=dies * 1e12), model, exchange="least_loaded")


# %% [markdown]
# ## 2. Nine machines
#
# Every expert lives on one node. A line tells the mean time of a layer, and which resource is busy longest.

# %%
print("links GB/s  dies TFLOP/s  layer µs  limit")
for links in (1, 10, 100):
    for dies in (2, 10, 50):
        layer = layer_on(links, dies)
        time = jm.evaluate(layer, jm.expert_parallel(trace, layer.machine.topology), batches)
        print(f"{links:10}  {dies:12}  {1e6 * time.total.mean():8.2f}  {time.limit().kind}")

# %% [markdown]
# Dispatch, compute and combine follow each other, so faster links help a little also where compute is busy longest.
#
# ## 3. What does one more per cent buy?
#
# The time is a function that can be differentiated by every number of the machine. `smooth` rounds off its corners.

# %%
layer = layer_on(10, 10)
share = jm.expert_parallel(trace, layer.machine.topology)


def mean_time(layer: jm.Layer) -> object:
    """Mean seconds of a layer, with rounded corners."""
    return jm.evaluate(layer, share, batches, smooth=0.02).total.mean()


time, slope = eqx.filter_value_and_grad(mean_time)(layer)
for name, rate, by_rate in (
    ("links", layer.machine.topology.link_bandwidth, slope.machine.topology.link_bandwidth),
    ("dies", layer.machine.die.flops, slope.machine.die.flops),
):
    print(f"1 % faster {name}: {100 * 0.01 * float((rate * by_rate).sum() / time):+.2f} % time")

# %% [markdown]
# Now change `model` to `jm.model("mixtral-8x7b")`, with 8 experts in the trace. `jaxmoe sweep` does the same for
# thousands of machines with prices, and `jaxmoe tune SCENARIO --hardware SPACE` descends along this slope.
