"""What a layer takes: seconds of every stage by name, busy seconds of every resource, and the total.

One type for the model and the event simulator.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

STAGES = ("dispatch", "compute", "combine")  # in the order in which a layer has them


class LayerTime(eqx.Module):
    """Seconds. `vmap` adds leading axes to everything, such as layers and batches; arrays are of JAX or NumPy.

    `busy[stage][kind]` is how long every resource of a kind is busy in a stage: `node` for compute and memory, `link`
    and `port` for the network.
    """

    stages: dict[str, Any]  # [*lead]
    busy: dict[str, dict[str, Any]]  # [*lead, resource]
    total: Any  # [*lead]

    @property
    def dispatch(self) -> Any:
        return self.stages["dispatch"]

    @property
    def compute(self) -> Any:
        return self.stages["compute"]

    @property
    def combine(self) -> Any:
        return self.stages["combine"]

    @property
    def communication(self) -> Any:
        return self.dispatch + self.combine

    @property
    def node_time(self) -> Any:
        """Busy seconds of every node in compute."""
        return self.busy["compute"]["node"]

    @property
    def dispatch_link_time(self) -> Any:
        return self.busy["dispatch"]["link"]

    @property
    def combine_link_time(self) -> Any:
        return self.busy["combine"]["link"]

    @property
    def link_time(self) -> Any:
        """Busy seconds of every link in dispatch and combine together."""
        return self.dispatch_link_time + self.combine_link_time

    @property
    def mean(self) -> Any:
        """Mean total over batches, the last leading axis."""
        return self.total.mean(axis=-1)

    @property
    def p95(self) -> Any:
        """95th percentile of the total over batches, the last leading axis."""
        return (np if isinstance(self.total, np.ndarray) else jnp).quantile(self.total, 0.95, axis=-1)

    def first_batches(self, count: int) -> "LayerTime":
        """Times [layer, batch] of the first batches; busy times that are means over batches stay as they are."""
        stages = {name: seconds[..., :count] for name, seconds in self.stages.items()}
        return LayerTime(stages, self.busy, self.total[..., :count])

    def as_numpy(self) -> "LayerTime":
        """The same as float64 NumPy arrays."""
        return jax.tree.map(lambda leaf: np.asarray(leaf, float), self)
