"""Options of XLA with which functions are compiled sooner.

XLA refuses an option that it does not know, so what is of a version is given to the versions that it was tried with.
"""

from typing import Any

import jax

# Loops of many small arrays take a third to a half as long to compile without fusion emitters, and run no slower.
UNFUSED: dict[str, int | bool] = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
# For what runs so shortly that code is not worth optimising.
SOONER: dict[str, int | bool] = {"xla_backend_optimization_level": 0, **UNFUSED}
# For what runs a few dozen times: two thirds of the time to compile, twice the time to run.
LIGHT: dict[str, int | bool] = {"xla_backend_optimization_level": 1, **UNFUSED}
SHORT = 2**19  # entries [layer, batch, token, node]; fewer are evaluated sooner than XLA optimises code for them


def compile_ahead(function: Any, *arguments: Any) -> None:
    """Compile a jitted function for such arguments. Threads that call it later wait for nothing, nor compile twice."""
    function.lower(*arguments).compile()
