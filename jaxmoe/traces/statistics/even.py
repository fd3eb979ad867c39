"""What loads are when nothing but chance makes them unequal."""

import numpy as np
from jaxtyping import Int64


def even_loads(
    choices: Int64[np.ndarray, " layer"], num_experts: int, top_k: int, seed: int
) -> Int64[np.ndarray, "layer expert"]:
    """Loads of tokens that choose `top_k` different experts, all equally likely, independently of each other.

    `choices` is how many there are in each layer; what does not make a whole token makes one of fewer choices. The
    loads are drawn from their exact distribution, expert by expert, without drawing tokens: of the tokens with r
    choices left and n experts to come, each takes the next expert with probability r / n. The same seed gives the
    same loads.
    """
    rng = np.random.default_rng(seed)
    tokens = np.zeros((len(choices), top_k + 1), np.int64)  # tokens by choices left
    tokens[:, top_k] = choices // top_k
    tokens[np.arange(len(choices)), choices % top_k] += choices % top_k > 0
    left = np.arange(top_k + 1)
    loads = np.zeros((len(choices), num_experts), np.int64)
    for expert in range(num_experts):
        # Not above 1: a token cannot have more choices left than there are experts, unless no token is there.
        taken = rng.binomial(tokens, np.minimum(left / (num_experts - expert), 1))
        loads[:, expert] = taken.sum(axis=1)
        tokens -= taken
        tokens[:, :-1] += taken[:, 1:]
    return loads
