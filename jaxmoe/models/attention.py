"""The attention of a layer: its sizes, and how many weights they come to."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Query heads in equal groups that share a key and a value head; as many of both is multi-head attention.

    Ainslie et al., "GQA", https://arxiv.org/abs/2305.13245.
    """

    heads: int
    kv_heads: int
    head_size: int

    def parameters(self, hidden_size: int) -> int:
        """Weights of the query, key, value and output projections."""
        return 2 * (self.heads + self.kv_heads) * self.head_size * hidden_size

    @property
    def cache_elements(self) -> int:
        """What is kept of a token of context: its keys and values."""
        return 2 * self.kv_heads * self.head_size

    @property
    def context_products(self) -> int:
        """Multiplications of one token with one of its context: scores, then the weighted sum of values."""
        return 2 * self.heads * self.head_size


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values, and queries where `q_rank` is given, come from short vectors.

    A head compares `nope_size` elements without position and `rope_size` with it; the key's are common to all heads.
    DeepSeek-AI, "DeepSeek-V2", section 2.1, https://arxiv.org/abs/2405.04434.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_size: int
    rope_size: int
    value_size: int

    def parameters(self, hidden_size: int) -> int:
        """Weights of the projections down to the ranks and up again, and of the output."""
        query_size = self.heads * (self.nope_size + self.rope_size)
        query = hidden_size * query_size if self.q_rank is None else self.q_rank * (hidden_size + query_size)
        down = hidden_size * (self.kv_rank + self.rope_size)
        up = self.kv_rank * self.heads * (self.nope_size + self.value_size)
        return query + down + up + self.heads * self.value_size * hidden_size

    @property
    def cache_elements(self) -> int:
        """What is kept of a token of context: its short vector and the common part of its keys."""
        return self.kv_rank + self.rope_size

    @property
    def context_products(self) -> int:
        """Multiplications of one token with one of its context.

        Heads work on the short vectors themselves, the projections up being absorbed into those of queries and
        output: scores over both parts, then the weighted sum of short vectors.
        """
        return self.heads * (2 * self.kv_rank + self.rope_size)


Attention = GroupedQueryAttention | LatentAttention
