"""The door of `import jaxmoe as jm`: arguments of a wrong shape, kind or value give one error that names the axis."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Runs in a process of its own, as users have it: in tests, types are checked before the door is reached.
SCRIPT = """
import json
import jax, jax.numpy as jnp, numpy as np
import jaxmoe as jm

mesh = jm.mesh((2, 4), 50e9, 1e-7)
layer = jm.layer(jm.machine(mesh, 5e12), jm.model("mixtral-8x7b"))
trace = jm.synthetic_trace(256, range(2), 8, 2, skew=0.6, coactivation=0.3, reuse=0.2, seed=0)
other = jm.synthetic_trace(256, range(2), 16, 2, skew=0.6, coactivation=0.3, reuse=0.2, seed=0)
batches, share = jm.sample_batches(trace, 16, 2, seed=1), jm.expert_parallel(trace, mesh)
first = jax.tree.map(lambda leaf: leaf[:1], batches)
one = jax.tree.map(lambda leaf: leaf[0], batches)

class Still(jm.Method):
    share: jax.Array
    def init(self, machine): return jnp.zeros(len(self.share))
    def step(self, machine, state, tokens, last): return state, jm.Decisions(self.share)

run = jm.rollout(Still(share), layer, batches)
CASES = {
    "no layer axis": lambda: jm.evaluate(layer, share[0], batches),
    "another machine's nodes": lambda: jm.evaluate(layer, share[..., :4] * 2, batches),
    "whole numbers": lambda: jm.evaluate(layer, share.astype(int), batches),
    "not divided": lambda: jm.evaluate(layer, share * 2, batches),
    "below 0": lambda: jm.evaluate(layer, share - jnp.eye(8)[0] + jnp.eye(8)[1], batches),
    "fewer layers of batches": lambda: jm.evaluate(layer, share, first),
    "one layer's batches": lambda: jm.evaluate(layer, share, one),
    "a trace for batches": lambda: jm.evaluate(layer, share, trace),
    "more experts": lambda: jm.evaluate(layer, share, jm.sample_batches(other, 16, 2, seed=1)),
    "a machine for a layer": lambda: jm.evaluate(layer.machine, share, batches),
    "flat mesh": lambda: jm.mesh(8, 50e9),
    "sides of a half": lambda: jm.mesh((2.5, 4), 50e9),
    "no bandwidth": lambda: jm.mesh((2, 4), 0),
    "a rate in quotes": lambda: jm.machine(mesh, "5e12"),
    "rates of other nodes": lambda: jm.machine(mesh, np.ones(4)),
    "a shape for a topology": lambda: jm.machine((2, 4), 5e12),
    "a class for a method": lambda: jm.rollout(Still, layer, batches),
    "one step's layers": lambda: jm.rollout(Still(share), layer, one),
    "a trace for steps": lambda: jm.rollout(Still(share), layer, trace),
    "past the last step": lambda: jm.replay(run, step=2),
    "an unknown exchange": lambda: jm.evaluate(layer, share, batches, "least_loded"),
    "an unknown strategy": lambda: jm.place("expert", trace, mesh),
    "a name for a model": lambda: jm.layer(layer.machine, "mixtral-8x7b"),
    "a topology for a machine": lambda: jm.layer(mesh, jm.model("mixtral-8x7b")),
    "batches of no tokens": lambda: jm.sample_batches(trace, 0, 2, seed=1),
    "a text for a path": lambda: jm.read_trace("no_such_trace.npz"),
    "an unknown model": lambda: jm.model("mixtrel-8x7b"),
}
told = {}
for name, case in CASES.items():
    try:
        case()
        told[name] = ["none", ""]
    except Exception as error:
        told[name] = ["InputError" if isinstance(error, jm.InputError) else type(error).__name__, str(error)]
print(json.dumps(told))
"""
WANTED = {
    "no layer axis": ["share has 2 axes", "expected [layer, expert, node]", "share[None]"],
    "another machine's nodes": ["share has 4 nodes on its axis node, but the machine has 8"],
    "whole numbers": ["share is of int32, expected floats"],
    "not divided": ["share sums to 2 over nodes for expert 0 of layer 0", "divide it by"],
    "below 0": ["share has -1, expected parts from 0 to 1"],
    "fewer layers of batches": ["share has 2 layers on its axis layer, but batches have 1"],
    "one layer's batches": ["batches have the axes [2, 16], expected [layer, batch, token]"],
    "a trace for batches": ["batches is a GatingTrace", "jm.sample_batches"],
    "more experts": ["batches choose expert 15, but share has 8 experts"],
    "a name for a model": ["model is a str, expected what jm.model('mixtral-8x7b') makes"],
    "a topology for a machine": ["machine is a Mesh, expected what jm.machine(topology, flops) makes"],
    "batches of no tokens": ["2 batches of 0 tokens are wanted, expected 1 or more of each"],
    "a text for a path": ["no_such_trace.npz: no such trace file; check the path"],
    "a machine for a layer": ["layer is a Machine, expected what jm.layer(machine, model) makes"],
    "flat mesh": ["shape is 8, expected two whole numbers above 0"],
    "sides of a half": ["shape is (2.5, 4), expected two whole numbers above 0"],
    "no bandwidth": ["bandwidth is 0, expected a number above 0"],
    "a rate in quotes": ["flops is '5e12', expected a number above 0"],
    "rates of other nodes": ["flops has the shape (4,), expected one number, or [node] of 8 nodes"],
    "a shape for a topology": ["topology is a tuple, expected a Topology"],
    "a class for a method": ["expected a Method with init and step"],
    "one step's layers": ["steps have the axes [2, 16], expected [layer, step, token]"],
    "a trace for steps": ["steps is a GatingTrace", "jm.sample_batches"],
    "past the last step": ["step is 2, expected one of the 2 of the run"],
    "an unknown exchange": ["least_loded", "least_loaded"],
    "an unknown strategy": ["expert", "ep"],
    "an unknown model": ["mixtrel-8x7b", "mixtral-8x7b"],
}


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """The kind and text of every case's error."""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_case_is_known(told):
    assert set(told) == set(WANTED)


@pytest.mark.parametrize("case", WANTED)
def test_one_clear_error(told, case):
    kind, text = told[case]
    assert kind == "InputError", (kind, text)
    assert [part for part in WANTED[case] if part not in text] == [], text
    assert "\n" not in text
