"""Names of metrics that a study or a search of machines may ask for. Files that name them are read before JAX is.

`jaxmoe.registry.METRICS` has all others, a user's own too; `jaxmoe.experiment.metrics` says what each is.
"""

from jaxmoe.registry import METRICS

SEARCHED = ("bound", "tuned")  # computed where a study names them: they take a search for every machine
ALWAYS = ("total", "p95", "dispatch", "compute", "combine", "utilisation", "communication_share", "busiest")


def known_metrics() -> tuple[str, ...]:
    """The names of all metrics."""
    return (*METRICS, *SEARCHED)
