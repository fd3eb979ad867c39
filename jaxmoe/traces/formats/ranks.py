"""Folders with a file for each rank."""

import re
from itertools import islice
from pathlib import Path

from jaxmoe.traces.formats.source import Source
from jaxmoe.traces.trace import TraceError


def by_rank(source: Source, pattern: str) -> list[tuple[str, Path]]:
    """Files whose name in the folder matches, the rank in the first group, by rank.

    Raises `TraceError` where a rank from 0 to the last is missing.
    """
    ranks = {int(re.sub(pattern, r"\1", name)): (name, file) for name, file in source.matching(pattern).items()}
    if len(ranks) <= max(ranks):
        missing = islice((rank for rank in range(max(ranks)) if rank not in ranks), 8)
        raise TraceError(f"misses the files of ranks {list(missing)} of {max(ranks) + 1}; get them, too")
    return [ranks[rank] for rank in sorted(ranks)]
