"""Responses of inference servers that tell which experts every token chose, as JSON or JSON lines.

Where the choices are differs between servers and versions: in a choice of the response, in its `meta_info`,
`sgl_ext` or `sglext`, or bare. A token that was not run has no row, so the last one of a response has none.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmoe.traces.formats.sequences import phases
from jaxmoe.traces.formats.source import shown
from jaxmoe.traces.trace import TraceError

KEY, PROMPT_KEY, START_KEY = "routed_experts", "prompt_routed_experts", "routed_experts_start_len"
_HOLDERS = ("meta_info", "sgl_ext", "sglext")


@dataclass(frozen=True)
class Payload:
    """The choices of one response as its server encodes them, and what else it tells of them.

    `prompt` are those of prompt tokens where they are apart; `start` tokens before the first have no row.
    """

    place: str
    name: str | None
    value: Any
    prompt: Any = None
    start: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def payloads(values: list[Any]) -> list[Payload]:
    """All choices in the values of a JSON file; none where it is of another kind. Raises `TraceError`."""
    records = values[0] if len(values) == 1 and _is_batch(values[0]) else values
    found = [_of_record(f"record {number}", record) for number, record in enumerate(records)]
    if not any(found):
        return []
    if not all(found):
        number = [bool(some) for some in found].index(False)
        raise TraceError(f"record {number} has no {KEY}; ask the server for them in every request")
    return [payload for some in found for payload in some]


def phase_of(payload: Payload, tokens: int) -> np.ndarray | None:
    """Phases of the tokens of a response, int8 [token]; `None` where it does not count its tokens.

    Raises `TraceError` where the counts tell of more or fewer tokens than have rows.
    """
    if payload.prompt_tokens is None or payload.completion_tokens is None:
        return None
    expected = payload.prompt_tokens + max(payload.completion_tokens, 1) - 1
    if tokens != expected:
        raise TraceError(
            f"has choices of {tokens} tokens, but {payload.prompt_tokens} prompt and {payload.completion_tokens} "
            f"completion tokens make {expected}, the last one not run; get the response again"
        )
    return phases(payload.prompt_tokens, tokens)


def _is_batch(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(record, dict) for record in value)


def _of_record(place: str, record: Any) -> list[Payload]:
    """What one response tells, a payload for each of its choices."""
    if isinstance(record, str) or (isinstance(record, list) and record and isinstance(record[0], list)):
        return [Payload(place, None, record)]
    if not isinstance(record, dict):
        return []
    choices = record.get("choices")
    holders = choices if isinstance(choices, list) and choices else [record]
    found = [
        _of_holder(f"{place}, choice {i}" if len(holders) > 1 else place, record, holder)
        for i, holder in enumerate(holders)
    ]
    if any(found) and not all(found):
        raise TraceError(f"{place}: some choices have no {KEY}; ask the server for them in every request")
    return [payload for payload in found if payload is not None]


def _of_holder(place: str, record: dict[str, Any], choice: Any) -> Payload | None:
    parts = [choice] if isinstance(choice, dict) else []
    parts += [part[key] for part in (*parts, record) for key in _HOLDERS if isinstance(part.get(key), dict)]
    holder = next((part for part in parts if part.get(KEY) is not None), None)
    if holder is None:
        return None
    alone = not isinstance(record.get("choices"), list) or len(record["choices"]) == 1
    usage = record["usage"] if isinstance(record.get("usage"), dict) and alone else {}
    facts = {
        key: part[key] for part in (record, usage, *reversed(parts)) for key in _FACTS if part.get(key) is not None
    }
    for key in _FACTS[1:]:
        if key in facts and not (type(facts[key]) is int and facts[key] >= 0):
            raise TraceError(f"{place}: {key} is {shown(facts[key])}, expected a whole number")
    return Payload(
        place,
        facts["id"] if isinstance(facts.get("id"), str) else None,
        holder[KEY],
        record.get(PROMPT_KEY),
        facts.get(START_KEY, 0),
        facts.get("prompt_tokens"),
        facts.get("completion_tokens"),
    )


_FACTS = ("id", START_KEY, "prompt_tokens", "completion_tokens")
