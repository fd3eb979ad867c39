"""Serve requests with engines over time."""

from dataclasses import replace

import numpy as np

from jaxmoe.serving.online.engine import Fleet
from jaxmoe.serving.online.reference import serve_plainly
from jaxmoe.serving.online.requests import Requests
from jaxmoe.serving.online.served import Served
from jaxmoe.serving.online.step_table import StepTable


def serve(
    requests: Requests,
    fleet: Fleet,
    table: StepTable,
    decode_table: StepTable | None = None,
    token_times: bool = False,
    steps: bool = False,
) -> Served:
    """Where and when each request is served by engines whose steps take what `table` says.

    Steps of a decode pool take `decode_table`. Raises `InputError` for requests that can never be served.
    """
    served = serve_plainly(requests, fleet, table, decode_table)
    kept = served if token_times else replace(served, token_starts=np.zeros(0, int), token_times=np.zeros(0))
    return kept if steps else replace(kept, steps=None)
