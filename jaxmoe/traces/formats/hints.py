"""What a file may leave open about the model that its trace is of."""

from dataclasses import dataclass

from jaxmoe.traces.trace import TraceError


@dataclass(frozen=True)
class Hints:
    """Facts about the model, used where a file does not state them; `None` is not known.

    `layer_ids` are the layers with routed experts as numbered in the full model, which has `num_layers` layers,
    dense ones counted. `num_experts` must agree with a file that states it.
    """

    num_experts: int | None = None
    top_k: int | None = None
    layer_ids: tuple[int, ...] | None = None
    num_layers: int | None = None

    def agreed_experts(self, stated: int | None) -> int | None:
        """The number of experts that file and caller agree on, `None` when neither knows."""
        if None not in (stated, self.num_experts) and stated != self.num_experts:
            raise TraceError(
                f"is of a model with {stated} experts, not {self.num_experts}; use a trace of the same model"
            )
        return self.num_experts if stated is None else stated


def lacks(what: str, option: str) -> TraceError:
    """The error for a hint that a file cannot be read without."""
    return TraceError(f"does not state {what}; give {option}, or --model")
