"""Engines with continuous batching, how many there are, and how requests are spread over them."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from jaxmoe.errors import InputError
from jaxmoe.serving.online.requests import Requests

Router = Literal["round_robin", "least_loaded"]


class Reserve(NamedTuple):
    """What SGLang keeps free for tokens to come before it reads a prompt, with its defaults.

    A request begins if it fits, with all of its output and a block, into what is free less what is kept: for those that
    decode a ratio of their further tokens, for those that begin with it all of theirs. Of further tokens `most` count
    at most. Once one that waits does not fit, or finds no seat, none is looked at until fewer decode. The ratio is
    `first`, less `decay` for each step that decodes, and `least` at last. Where the next tokens find no room, the
    request with the shortest output so far is retracted (of equals the longest prompt, then the last to be admitted)
    until they do: it waits behind all others and is read anew, but for what the cache has of its prompt. The ratio is
    then that part of their outputs which those left will have after `steps_ahead` more. An engine with nothing to do
    begins anew.

    Source: SGLang's `PrefillAdder`, `retract_decode` and `update_running_batch`, at its defaults. It knows outputs by
    `max_new_tokens`, which is here what a request will have. Its chunks end with whole blocks, here they need not.
    """

    first: float = 0.7
    least: float = 0.098
    decay: float = 0.602 / 600  # from the first to the least in 600 steps
    steps_ahead: int = 20
    most: int = 4096  # tokens


SGLANG = Reserve()


@dataclass(frozen=True)
class Engine:
    """Settings of one engine: `ranks` data-parallel ranks that step together, each with seats, KV blocks and a queue.

    `vllm` reads prompts and decodes in one step, as vLLM's V1 scheduler does. `sglang` reads prompts in steps of their
    own, before anything is decoded, as SGLang does by default, if what it would `reserve` is free. `token_budget` is
    vLLM's `max_num_batched_tokens`, SGLang's `chunked_prefill_size`, of each rank. With `lookahead` a batch is made as
    soon as the step before it begins, as vLLM's asynchronous scheduling does by default: who comes during a step waits
    for the step after the next, and who leaves after a step holds seat and blocks until the next has begun. Raises
    `InputError` for sizes that serve nothing.
    """

    batching: Literal["vllm", "sglang"] = "vllm"
    token_budget: int = 8192  # tokens of a rank in a step; SGLang's decoding is not bound by it
    seats: int = 1024  # requests that a rank runs at a time
    ranks: int = 1
    kv_blocks: int | None = None  # of a rank; none: KV never runs out
    block_tokens: int = 16
    prefix_cache: bool = False
    lookahead: bool = False
    longest: int | None = None  # tokens of a prompt with its output; none: any
    reserve: Reserve = SGLANG

    def __post_init__(self) -> None:
        for name in ("token_budget", "seats", "ranks", "kv_blocks", "block_tokens", "longest"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"engine.{name} is {value}; expected 1 or more")
        if self.prefix_cache and self.kv_blocks is None:
            raise InputError("engine.kv_blocks is not given; expected a size where prefix_cache is on, or turn it off")

    def blocks_of(self, tokens: int) -> int:
        """Whole blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True)
class DecodePool:
    """Engines that only decode: the KV of a prompt comes to them from the engine that read it.

    A transfer takes the latency and its bytes over the rate; transfers do not hold each other up. The engine that read
    the prompt keeps its blocks until the end.
    """

    engine: Engine
    kv_bytes_per_token: float
    bytes_per_s: float  # of a transfer
    latency_s: float = 0.0  # of a transfer
    engines: int = 1
    router: Router = "round_robin"

    def __post_init__(self) -> None:
        _check_pool("decode", self.engines)
        if self.bytes_per_s <= 0:
            raise InputError(f"decode.bytes_per_s is {self.bytes_per_s:g}; expected more than 0")
        for name in ("kv_bytes_per_token", "latency_s"):
            if getattr(self, name) < 0:
                raise InputError(f"decode.{name} is {getattr(self, name):g}; expected 0 or more")

    def seconds_per_token(self) -> float:
        """Seconds for which a token's KV is on its way, beside the latency."""
        return self.kv_bytes_per_token / (self.bytes_per_s)


@dataclass(frozen=True)
class Fleet:
    """`engines` alike behind a router; with a `decode` pool they only read prompts and give the first token.

    `round_robin` takes engines in turn, `least_loaded` that with the least of four times the requests that wait plus
    those that run, as vLLM's balancer does over data-parallel ranks (it sees counts of up to 100 ms ago, here they are
    current); among equals, the next in turn after the last one chosen. So the ranks of an engine are chosen always.
    With `users`, so many requests are in flight at most: when one ends, the next of the list is sent, or as soon as it
    arrives.
    """

    engine: Engine
    engines: int = 1
    router: Router = "round_robin"
    users: int | None = None
    decode: DecodePool | None = None

    def __post_init__(self) -> None:
        _check_pool("fleet", self.engines)
        if self.users is not None and self.users < 1:
            raise InputError(f"fleet.users is {self.users}; expected 1 or more, or leave it out for arrivals alone")

    @property
    def all_engines(self) -> int:
        """Engines, with those of a decode pool."""
        return self.engines + (self.decode.engines if self.decode else 0)

    @property
    def pools(self) -> list[Engine]:
        """An engine of each pool."""
        return [self.engine, *([self.decode.engine] if self.decode else [])]

    @property
    def reserves(self) -> list[Reserve]:
        """What an engine of each pool keeps free: for a single token where it only reads prompts."""
        first = self.engine.reserve
        return [first._replace(most=1), self.decode.engine.reserve] if self.decode else [first]

    def check(self, requests: Requests) -> None:
        """Raise `InputError` for requests that can never be served, and prefixes that blocks do not divide."""
        for key, engine in zip(("engine", "decode.engine"), self.pools, strict=False):
            size = requests.prompt + requests.output
            reads_only = self.decode is not None and key == "engine"
            held = requests.prompt if reads_only else size - 1  # the last token's KV is not needed
            blocks = -(-held // engine.block_tokens)
            if engine.batching == "sglang":  # which keeps more free than that token and a block
                blocks = (held + 1) // engine.block_tokens + 2
            _check_size(size, engine.longest, f"{key}.longest", "tokens")
            _check_size(blocks, engine.kv_blocks, f"{key}.kv_blocks", "blocks")
            if engine.prefix_cache and len(requests.prefix_blocks) and requests.prefix_tokens % engine.block_tokens:
                raise InputError(
                    f"{key}.block_tokens is {engine.block_tokens}; expected a divisor of the {requests.prefix_tokens} "
                    "tokens of a prefix block"
                )


def _check_pool(key: str, engines: int) -> None:
    if engines < 1:
        raise InputError(f"{key}.engines is {engines}; expected 1 or more: an empty pool serves nothing")


def _check_size(needed: np.ndarray, most: int | None, key: str, unit: str) -> None:
    if most is not None and (needed > most).any():
        row = int(np.argmax(needed > most))
        raise InputError(
            f"{key} is {most}, but request {row} needs {needed[row]} {unit} with its output; raise it, or leave out "
            "longer requests"
        )
