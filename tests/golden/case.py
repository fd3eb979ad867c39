"""A golden case: what is decided, what it costs, and how both are recorded and compared."""

from collections.abc import Callable
from dataclasses import dataclass

from .store import HERE, WORSE, Arrays, differences, named


@dataclass(frozen=True)
class Case:
    """`decide` makes decisions and tells figures of its own; `price` has figures of stored decisions.

    Without `rules` decisions are drawn, so nothing is decided anew. A case that is `searched` may end a little worse
    than it did, in what deciding tells by names that begin so.
    """

    decide: Callable[[], tuple[Arrays, Arrays]]
    price: Callable[[Arrays], Arrays]
    rules: bool = True
    searched: str = ""


def recorded(case: Case) -> Arrays:
    """Decisions, figures, and what deciding told beside. Raises `ValueError` where deciding and pricing disagree."""
    decisions, told = case.decide()
    figures = case.price(decisions)
    alike = {name for name in told if name in figures}
    off = differences({name: told[name] for name in alike}, {name: figures[name] for name in alike}, 3 * HERE)
    if off:
        raise ValueError("deciding and pricing disagree: " + "; ".join(off))
    beside = {name: told[name] for name in told if name not in alike}
    return named(decisions, "decisions/") | named(figures, "figures/") | named(beside, "told/")


def worse(case: Case, told: Arrays, before: Arrays) -> list[str]:
    """Everything that a search told which is worse than it may be."""
    names = [name for name in before if name.startswith(case.searched)]
    assert names
    sums = {name: (float(told[name].sum()), float(before[name].sum())) for name in names}
    return [f"{name} is {new:.6g}, expected {old:.6g}" for name, (new, old) in sums.items() if new > old * (1 + WORSE)]
