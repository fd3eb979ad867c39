"""Names of metrics that a study or a search of machines may ask for. Files that name them are read before JAX is.

`jaxmoe.experiment.metrics` says what each is.
"""

SEARCHED = ("bound", "tuned")  # computed where a study names them: they take a search for every machine
ALWAYS = ("total", "p95", "dispatch", "compute", "combine", "utilisation", "communication_share", "busiest")
STATED = ("energy", "energy_per_token", "area", "price")  # of machines that state them
METRICS = ALWAYS + STATED
KNOWN = METRICS + SEARCHED
