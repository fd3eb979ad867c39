"""Fields of a config.json by their meaning: the names that publishers use, and names that say the same otherwise."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxmoe.models.moe import ModelError

MOST_LAYERS = 10_000  # a hundred times what models have
REMEDY = "use the config.json that was published with the model"
TEXT = ("text_config", "llm_config", "language_config", "language_model", "thinker_config")  # beside other parts
DEEPEST = 3  # sections inside of each other
OTHER_PARTS = re.compile(r"vision|visual|audio|speech|image|video|vae|talker|code2wav|quantization|rope|projector")


def how_to_tell(key: str, value: str = "NUMBER") -> str:
    """The remedy where no field tells a key of the model; commands with --model have no --set."""
    override = shlex.quote(f"model.{key}={value}")
    return f"write {key}: {value} in a YAML file with base: THIS_FILE, or give a scenario --set {override}"


@dataclass(frozen=True)
class Meaning:
    """Fields of one meaning: `names` in use, then `alike` but for `unlike` as patterns, then `last` names."""

    key: str  # of a model in YAML, for messages and what was given otherwise
    what: str
    names: tuple[str, ...]
    alike: str = ""
    unlike: str = ""
    last: tuple[str, ...] = ()


HIDDEN_SIZE = Meaning(
    "hidden_size",
    "the length of a token's hidden vector",
    ("hidden_size", "d_model", "n_embd", "model_dim", "hidden_dim", "dim"),
    alike=r"^(hidden|model|embed(ding)?|token|residual)_?(size|dim|width|length)$",
)
NUM_LAYERS = Meaning(
    "num_layers",
    "the number of layers",
    ("num_hidden_layers", "n_layers", "num_layers", "n_layer", "num_decoder_layers"),
    alike=r"^(num|n|number_of|count_of)_[a-z_]*(layers|blocks)$|^(layers|blocks|depth)$",
    unlike=r"dense|moe|expert|mtp|nextn|predict|skip|hash|first|sparse|attn|attention|window|shared",
)
NUM_EXPERTS = Meaning(
    "num_experts",
    "the number of routed experts, which a dense model does not have",
    ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts"),
    alike=r"(num|^n_|count|routed|total).*experts?|experts?.*(num|count|total)",
    unlike=r"shared|per_|tok|top|activ|chosen|select|used|group|layer|size|dim|width|zero|null|copy",
)
TOP_K = Meaning(
    "top_k",
    "the number of experts that a token chooses",
    (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_top_k",
        "moe_k",
        "experts_per_token",
        "num_selected_experts",
        "moe_router_topk",
    ),
    alike=r"experts?_(per|for)_(each_|a_)?tok|(activ|chosen|select|used).*experts?|experts?_(activ|chosen|select|used)"
    r"|(expert|moe|router).*top_?k|top_?k_experts?",
    unlike=r"group|shared",
)
EXPERT_SIZE = Meaning(
    "expert_size",
    "the intermediate size of one routed expert",
    ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size", "moe_inter_dim"),
    alike=r"(expert|moe).*(intermediate|inter|inner|ffn|hidden|width|size|dim)",
    unlike=r"shared|num|layer|dense|latent|router|gate|group|head|capacity",
    last=("intermediate_size", "ffn_hidden_size", "ffn_dim"),
)
DENSE_SIZE = Meaning(
    "dense_size",
    "the intermediate size of a dense layer",
    ("intermediate_size_mlp", "dense_intermediate_size"),
    alike=r"dense.*(intermediate|inner|ffn|hidden|width|size|dim)",
    last=("intermediate_size", "ffn_hidden_size", "ffn_dim", "inter_dim"),
)
SHARED_COUNT = Meaning(
    "shared_experts",
    "the number of shared experts",
    ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    alike=r"(num|^n_|count).*shared.*expert|shared_experts?(_count|_num)?$",
)
SHARED_SIZE = Meaning(
    "shared_experts",
    "the intermediate size of one shared expert",
    ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    alike=r"shared.*(intermediate|inner|ffn|hidden|width|size|dim)",
)
DENSE_FIRST = Meaning(
    "moe_layer_ids",
    "the number of dense layers before the first with experts",
    ("first_k_dense_replace", "num_dense_layers", "n_dense_layers", "moe_layer_num_skipped"),
    alike=r"first.*dense|dense_layers$",
)
HEADS = Meaning(
    "attention",
    "the number of attention heads",
    ("num_attention_heads", "n_heads", "num_heads", "n_head"),
    alike=r"^(num|n|number_of)_[a-z_]*heads$|^(attention_|attn_|query_)?heads$",
    unlike=r"kv|key|value|index|linear|mamba|ssm",
)
KV_HEADS = Meaning(
    "attention",
    "the number of key and value heads",
    ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_n_heads", "multi_query_group_num", "num_query_groups"),
    alike=r"(kv|key_value|key_and_value).*heads?$|heads?_kv$",
    unlike=r"linear",
)
HEAD_SIZE = Meaning(
    "attention",
    "the length of one head",
    ("head_dim", "attention_head_dim", "kv_channels", "head_size"),
    alike=r"^(attention_|attn_|query_)?head_(dim|size|width|length)$",
)
VOCABULARY = Meaning(
    "vocabulary_size",
    "the number of tokens in the vocabulary",
    ("vocab_size", "vocabulary_size", "padded_vocab_size", "n_vocab"),
    alike=r"vocab.*(size|tokens|num)|^(num|n)_vocab",
)
GROUPS = Meaning("expert_groups", "the number of groups of experts", ("n_group", "num_expert_group"))
GROUPS_PER_TOKEN = Meaning("groups_per_token", "the number of groups of a token", ("topk_group", "num_limited_groups"))
MEANINGS = (
    HIDDEN_SIZE,
    NUM_LAYERS,
    NUM_EXPERTS,
    TOP_K,
    EXPERT_SIZE,
    DENSE_SIZE,
    SHARED_COUNT,
    SHARED_SIZE,
    DENSE_FIRST,
    HEADS,
    KV_HEADS,
    HEAD_SIZE,
    VOCABULARY,
    GROUPS,
    GROUPS_PER_TOKEN,
)


@dataclass
class Fields:
    """Checked access to the fields of a config.json. `given`: keys of the model that are written elsewhere.

    `read` gathers what was read: by the meaning's key, the fields.
    """

    values: dict[str, tuple[str, Any]]  # by name: where it is in the file, and its value
    given: Mapping[str, Any] = field(default_factory=dict)
    read: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: dict[str, Any], given: Mapping[str, Any]) -> "Fields":
        """All fields by name: of the text model, then from the top of the file, then of sections for its blocks."""
        return cls(_flat(config, ""), given)

    def number(self, meaning: Meaning, least: int = 1, most: int | None = None) -> int | None:
        """The whole number of this meaning, `None` where no field has it. Raises `ModelError` for another value."""
        if type(self.given.get(meaning.key)) is int:
            return max(self.given[meaning.key], least)  # whether it is right is checked where it was written
        found = self._named(meaning)
        if found is None:
            return None
        path, value = found
        self.read.setdefault(meaning.key, []).append(path)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]  # the same in every layer
        # A boolean is an int to Python.
        if type(value) is not int or value < least or (most is not None and value > most):
            told = how_to_tell(meaning.key) if isinstance(value, list) else REMEDY
            within = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ModelError(f"{path} is {shown(found[1])}, expected a whole number {within}; {told}")
        return value

    def required(self, meaning: Meaning, most: int | None = None) -> int:
        """The whole number of this meaning. Raises `ModelError` that asks for it where no field has it."""
        number = self.number(meaning, most=most)
        if number is None:
            names = ", ".join((*meaning.names, *meaning.last))
            raise ModelError(
                f"no field tells {meaning.what}; looked for {names}, and names alike; {how_to_tell(meaning.key)}"
            )
        return number

    def named(self, key: str, name: str, least: int = 1) -> int | None:
        """The whole number in the field of this very name, for a key of the model; `None` where there is none."""
        return self.number(Meaning(key, name, (name,)), least)

    def flag(self, key: str, name: str) -> bool:
        """True or false, for a key of the model; false if it is missing."""
        value = self.noted(key, name)
        if not isinstance(value, bool | None):
            raise ModelError(f"{self.path(name)} is {shown(value)}, expected true or false; {REMEDY}")
        return bool(value)

    def value(self, name: str) -> Any:
        """The field of this very name as it is, `None` where there is none."""
        return self.values.get(name, ("", None))[1]

    def path(self, name: str) -> str:
        """Where a field is in the file."""
        return self.values[name][0]

    def layers(self, key: str, name: str, num_layers: int) -> list[int] | None:
        """A list of layer numbers, for a key of the model; `None` if it is missing or null."""
        layers = self.noted(key, name)
        if isinstance(layers, str) and re.fullmatch(r"[\d, ]+", layers):
            layers = [int(number) for number in layers.replace(",", " ").split()]
        if layers is None:
            return None
        if not isinstance(layers, list) or any(type(n) is not int or not 0 <= n < num_layers for n in layers):
            expected = f"a list of layer numbers below {num_layers}"
            raise ModelError(f"{self.path(name)} is {shown(layers)}, expected {expected}; {REMEDY}")
        return layers

    def by_layer(self, key: str, name: str, num_layers: int) -> list[Any] | None:
        """A list with an entry for every layer, for a key of the model; `None` if there is no list of that name."""
        if not isinstance(self.value(name), list):
            return None
        entries: list[Any] = self.noted(key, name)
        if len(entries) < num_layers:
            expected = f"a list of {num_layers} entries, one for each layer"
            raise ModelError(f"{self.path(name)} is {shown(entries)}, expected {expected}; {REMEDY}")
        return entries[:num_layers]

    def noted(self, key: str, name: str) -> Any:
        """The field of this very name, which is noted as read for a key of the model."""
        if self.value(name) is not None:
            self.read.setdefault(key, []).append(self.path(name))
        return self.value(name)

    def _named(self, meaning: Meaning) -> tuple[str, Any] | None:
        """Path and value of the first name in use, or of the only one alike. Raises `ModelError` for several."""
        for name in meaning.names:
            if self.value(name) is not None:
                return self.values[name]
        alike = self._alike(meaning)
        if len({json.dumps(value) for _, value in alike}) > 1:
            paths = " and ".join(path for path, _ in alike)
            raise ModelError(f"{paths} could each be {meaning.what}; {how_to_tell(meaning.key)}")
        if alike:
            return alike[0]
        return next((self.values[name] for name in meaning.last if self.value(name) is not None), None)

    def _alike(self, meaning: Meaning) -> list[tuple[str, Any]]:
        if not meaning.alike:
            return []
        return [
            (path, value)
            for name, (path, value) in self.values.items()
            if type(value) is int
            and re.search(meaning.alike, name)
            and not (meaning.unlike and re.search(meaning.unlike, name))
        ]


def _flat(section: Mapping[str, Any], above: str) -> dict[str, tuple[str, Any]]:
    """Fields by name with their path; what stands nearer to the text model goes first."""
    parts = {key: value for key, value in section.items() if isinstance(value, dict) and not OTHER_PARTS.search(key)}
    if above.count(".") >= DEEPEST:
        parts = {}
    fields = {key: (f"{above}{key}", value) for key, value in section.items()}
    for key, part in parts.items():
        inner = _flat(part, f"{above}{key}.") if key in TEXT or key.endswith("_config") else {}
        stated = {name: entry for name, entry in inner.items() if key in TEXT and entry[1] is not None}
        fields = inner | fields | stated
    return fields


def shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:  # parsed a few levels nearer to the limit than this is
        return "nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."
