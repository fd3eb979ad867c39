"""Transfers of one stage as arrays: what they pass, whose readiness and which others they wait for."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.des.paths import Paths
from jaxmoe.des.rows import Rows, rows_by
from jaxmoe.des.tasks import GraphBuilder


@dataclass(frozen=True)
class Transfers:
    """Messages or parts of them. Each waits only for earlier ones."""

    paths: Rows  # servers of each
    size: Float[np.ndarray, " transfer"]  # B
    sender: Int[np.ndarray, " transfer"]  # node that has to be ready first; -1: none
    receiver: Int[np.ndarray, " transfer"]  # node that has something when it is finished; -1: none
    after: Rows  # for each the numbers of those it waits for

    def __len__(self) -> int:
        return len(self.size)


def messages(
    paths: Paths,
    source: Int[np.ndarray, " message"],
    destination: Int[np.ndarray, " message"],
    size: Float[np.ndarray, " message"],
) -> Transfers:
    """Messages that wait for their source alone."""
    return Transfers(paths.between(source, destination), size, source, destination, no_rows(len(size)))


def no_rows(count: int) -> Rows:
    """So many rows without items."""
    return Rows(np.zeros(count + 1, np.int64), np.zeros(0, np.int64))


def add_transfers(graph: GraphBuilder, transfers: Transfers, ready: Rows) -> Rows:
    """Add them to `graph`; `ready` has for every node the tasks after which it may send.

    Returns for every node the tasks that deliver to it.
    """
    sending = np.flatnonzero(transfers.sender >= 0)
    released = ready.take(transfers.sender[sending])
    waiting = np.concatenate([sending[released.owner], transfers.after.owner])
    awaited = np.concatenate([released.items, graph.num_tasks + transfers.after.items])
    tasks = graph.transfers(transfers.paths, transfers.size, rows_by(waiting, awaited, len(transfers)))
    delivers = transfers.receiver >= 0
    return rows_by(transfers.receiver[delivers], tasks[delivers], len(ready))
