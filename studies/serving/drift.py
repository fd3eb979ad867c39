"""Subjects of questions, and which experts they load in two sets of questions of other text."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxmoe.errors import InputError
from jaxmoe.serving.online.topics import TopicShares, read_topics


class Subjects(NamedTuple):
    """Shares of a layer's choices that fall on each expert, by subject, from two sets of questions of other text."""

    planned: TopicShares  # what a plan is made from
    served: TopicShares  # what it serves


def read_subjects(planned: Path, served: Path) -> Subjects:
    """The subjects that both files of loads have, whatever came of their questions."""
    files = [read_topics(path) for path in (planned, served)]
    common = sorted(files[0].keys() & files[1].keys())
    if not common:
        raise InputError(f"{planned} and {served} have no subject in common; give files of one benchmark")
    return Subjects(*(np.stack([each[name] for name in common]) for each in files))
