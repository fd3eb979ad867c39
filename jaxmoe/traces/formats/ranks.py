"""Folders with a file for each rank."""

import re
from pathlib import Path

from jaxmoe.traces.formats.source import Source
from jaxmoe.traces.trace import TraceError


def by_rank(source: Source, pattern: str) -> list[tuple[str, Path]]:
    """Files whose name in the folder matches, the rank in the first group, by rank.

    Raises `TraceError` where a rank from 0 to the last is missing.
    """
    ranks = {int(re.sub(pattern, r"\1", name)): (name, file) for name, file in source.matching(pattern).items()}
    missing = sorted(set(range(max(ranks) + 1)) - ranks.keys())
    if missing:
        raise TraceError(f"misses the files of ranks {missing} of {max(ranks) + 1}; get them, too")
    return [ranks[rank] for rank in sorted(ranks)]
