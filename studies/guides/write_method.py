# %% [markdown]
# # Write a method
#
# A method decides at run time: which weights travel, before which step. This guide writes one, times it beside a plan
# that never changes, and lets the event simulator, which shares no formula with the model, check it.
#
# Run it whole, `python studies/guides/write_method.py`, or cell by cell in an editor that knows `# %%`.

# %%
import jax
import jax.numpy as jnp

import jaxmoe as jm
from jaxmoe.methods import StaticPlan

# %% [markdown]
# ## 1. A layer, and steps of tokens

# %%
machine = jm.machine(jm.mesh((2, 4), bandwidth=50e9, latency=1e-7), flops=5e12)
layer = jm.layer(machine, jm.model("mixtral-8x7b"), exchange="least_loaded", chunk_bytes=8192)
trace = jm.synthetic_trace(4096, range(2), num_experts=8, top_k=2, skew=0.9, coactivation=0.3, reuse=0.2, seed=0)
steps = jm.sample_batches(trace, 64, 8, seed=1)
share = jm.expert_parallel(trace, machine.topology)  # [layer, expert, node]: which part of an expert a node computes

# %% [markdown]
# ## 2. The method
#
# `init` gives the state before the first step. `step` sees the state and the tokens of a step, and returns the next
# state and its decisions. This one counts choices, and before each step copies the expert that was hottest so far to
# all nodes. `most` is how many experts such a movement may have.


# %%
class Hottest(jm.Method):
    """Before every step, the expert that was hottest so far is copied to all nodes."""

    share: jax.Array

    def init(self, machine: jm.Machine) -> jax.Array:
        """No choices are counted yet, [layer, expert]."""
        return jnp.zeros(self.share.shape[:2])

    def step(
        self, machine: jm.Machine, seen: jax.Array, tokens: jm.Batch, last: object
    ) -> tuple[jax.Array, jm.Decisions]:
        """Counts the choices of a step, and copies what was hottest before it."""
        hottest = jax.nn.one_hot(seen.argmax(axis=1), seen.shape[1])  # [layer, expert]
        sent = hottest[..., None] * jnp.ones(machine.num_nodes)
        counts = jax.vmap(lambda batch: batch.choices(seen.shape[1]).sum(axis=0))(tokens)
        return seen + counts, jm.Decisions(self.share, movements=(jm.Movement(sent, most=1),))


# %% [markdown]
# ## 3. Run it beside the plan that never changes

# %%
run = jm.rollout(Hottest(share), layer, steps)
fixed = jm.rollout(StaticPlan(share), layer, steps)
print("step  hottest µs  fixed µs")  # both layers together
for number, (moving, staying) in enumerate(zip(run.time.total.sum(1), fixed.time.total.sum(1), strict=True)):
    print(f"{number:4}  {1e6 * moving:10.1f}  {1e6 * staying:8.1f}")

# %% [markdown]
# Copying pays only where it costs less than it saves: that is for the method to weigh, and here it does not.
#
# ## 4. Let the simulator check a step

# %%
replayed = jm.replay(run, step=3)
print("model, µs:    ", 1e6 * run.time.total[3])  # of each layer
print("simulator, µs:", 1e6 * (replayed.seconds + replayed.movement))

# %% [markdown]
# Now let `step` copy nothing where the hottest expert has less than half of all choices.
# `jm.METHODS.register("hottest", Hottest)` makes it a system that scenarios name
# (`jaxmoe/README.md`, "Your own method").
