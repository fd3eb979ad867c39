"""How long and how wide the gradient tuner searches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TunerSettings:
    """Settings of the gradient tuner. Pairs are the first and the last value of what is annealed."""

    restarts: int = 8  # descents of every layer, from different starts
    steps: int = 600  # of a descent; rounded up to whole segments
    batches_per_step: int = 8
    learning_rate: float = 0.1  # times the temperature of the moment
    sinkhorn_temperature: tuple[float, float] = (1.0, 0.05)
    support_width: tuple[float, float] = (1.0, 0.03)  # of soft hosts, relative to an expert's typical part
    max_temperature: tuple[float, float] = (0.1, 0.02)  # of the smooth maximum, relative
    budget_spread: float = 0.2  # how far a node's work may be from its even part, relatively
    refine_steps: int = 2000  # moves of every chain of local search
    refine_chains: int = 2  # chains of every layer, from its best descents
    refine_batches: int = 64  # that judge a move
    seed: int = 0
    time_limit_s: float | None = None
