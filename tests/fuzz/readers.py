"""Every reader of the project, each with small valid inputs to damage."""

import base64
import importlib.util
import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import jax.numpy as jnp
import mutations
import numpy as np
import yaml

from jaxmoe.config import load_hardware, load_model, load_scenario
from jaxmoe.config.base import ConfigError
from jaxmoe.config.explain import ConfigSource, Draft
from jaxmoe.config.files import put_file
from jaxmoe.models.moe import ModelError
from jaxmoe.placement import Placement, PlanError, read_plan, write_plan
from jaxmoe.placement.copies import ByDraw, ByHome, Copies, LeastWork
from jaxmoe.traces import GatingTrace, Hints, LoadCounts, TraceError, load_counts, read_any, write_as
from jaxmoe.traces.formats.tensors import write_tensors
from jaxmoe.traces.synthesis import GatingProcess, RequestDeck, read_process, write_process
from jaxmoe.traces.synthesis.process import Preferences

ROOT = Path(__file__).resolve().parents[2]
OWN_ERRORS = (TraceError, PlanError, ConfigError, ModelError)
HINTS = Hints(num_experts=5, top_k=2, layer_ids=(1, 3), num_layers=5)

Files = dict[str, bytes]
"""Contents by path; a lone file is at the path "file" and what ends it."""


@dataclass(frozen=True)
class Reader:
    """Reads what lies at the `entry` of a folder, "" for the folder itself; `lacks` says what keeps it from running."""

    name: str
    inputs: Callable[[], list[Files]]
    read: Callable[[Path, Random], Any]
    entry: str = ""
    lacks: str | None = None

    def damaged(self, rng: Random, inputs: list[Files], others: list[bytes]) -> Files:
        """One of the inputs with damage in one of its files; now and then a file is lost, or is as another is."""
        files = dict(rng.choice(inputs))
        name = rng.choice(sorted(files))
        choice = rng.random()
        if len(files) > 1 and choice < 0.03:
            del files[name]
        elif len(files) > 1 and choice < 0.06:
            files[name] = files[rng.choice(sorted(files))]
        elif name.endswith(".yaml") and choice < 0.7:
            files[name] = damaged_yaml(files[name], rng, others)
        else:
            files[name] = mutations.damaged(files[name], rng, others)
        return files


def trace() -> GatingTrace:
    """Three tokens in two sequences, layers 1 and 3 of a model of five, two of five experts each."""
    choices = np.array([[[0, 1], [2, 3]], [[4, 0], [3, 0]], [[2, 1], [0, 1]]], np.int16)
    rng = np.random.default_rng(0)
    return GatingTrace(
        experts=choices,
        num_experts=5,
        layer_ids=np.array([1, 3]),
        seq_start=np.array([0, 2]),
        is_repeat=np.array([False, True, False]),
        facts={"model": "org/small", "dataset": "mmlu/anatomy"},
        weights=rng.random((3, 2, 2)).astype(np.float16),
        logits=rng.random((3, 2, 5)).astype(np.float32),
        phase=np.array([0, 1, 0], np.int8),
        seq_name=("math", "code"),
    )


def written(write: Callable[[Path], Any], name: str) -> Files:
    """What is written at a path of this name, a file or a folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(path)
        if path.is_file():
            return {name: path.read_bytes()}
        return {
            file.relative_to(path).as_posix(): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()
        }


def as_format(name: str, *contents: GatingTrace | LoadCounts, entry: str = "folder") -> Callable[[], list[Files]]:
    return lambda: [written(lambda path, some=some: write_as(name, path, some), entry) for some in contents]


def npz_loads() -> LoadCounts:
    counts = np.arange(20).reshape(2, 2, 5)
    return LoadCounts(counts, np.array([1, 3]), 2, ("a", "b"), {"model": "org/small"})


def stored_npz() -> Files:
    """A trace of which the arrays are not compressed, so that they are mapped."""
    file = io.BytesIO()
    np.savez(file, experts=trace().experts, num_experts=5, layer_ids=[1, 3], logits=trace().logits)
    return {"file": file.getvalue()}


def vllm() -> list[Files]:
    lists = trace().experts.tolist()
    file = io.BytesIO()
    np.save(file, trace().experts)
    text = base64.b64encode(file.getvalue())
    choices = [{"index": i, "routed_experts": lists} for i in range(2)]
    apart = {"id": "r", "choices": choices, "prompt_routed_experts": text.decode()}
    usage = {"prompt_tokens": 2, "completion_tokens": 2}
    answer = {"id": "s", "choices": [{"routed_experts": text.decode()}], "usage": usage}
    values = [json.dumps(value).encode() for value in (lists, apart, [answer, answer])]
    return [{"file": content} for content in (text, *values)] + as_format("vllm", trace(), entry="file")()


def sglang() -> list[Files]:
    rows = np.zeros((3, 5, 2), "<i4")
    rows[:, [1, 3]] = trace().experts
    text = base64.b64encode(rows.tobytes())
    meta = {"id": "r", "routed_experts": text.decode(), "routed_experts_start_len": 2}
    usage = {"prompt_tokens": 3, "completion_tokens": 3}
    chat = {"choices": [{"index": 0, "sgl_ext": {"routed_experts": text.decode()}}], "usage": {"prompt_tokens": 3}}
    values = [json.dumps(value).encode() for value in ({"text": "", "meta_info": meta | usage}, [chat, chat])]
    return [{"file": content} for content in (text, *values)]


def recorder() -> list[Files]:
    counts = np.zeros((5, 5), int)  # a row for dense layers, too
    counts[[1, 3]] = npz_loads().total().counts[0]
    text = json.dumps({"logical_count": counts.tolist()}).encode()
    dump = written(lambda path: write_tensors(path, {"rank": 0, "logical_count": counts[None]}), "file")
    return [{"file": text}, dump]


def flame_moe() -> list[Files]:
    """Two iterations with scores; some are compressed, or hold other columns."""
    files = as_format("flame_moe", trace())()
    if importlib.util.find_spec("pyarrow") is None:
        return files
    import pyarrow
    import pyarrow.parquet

    for packing, version in (("gzip", "1.0"), ("none", "2.6"), ("zstd", "2.6")):
        columns = {"indices": pyarrow.array([[0, 1], [2, 3]], pyarrow.list_(pyarrow.int16())), "text": ["a", "b"]}
        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns), file, compression=packing, version=version)
        files.append({"layer_02.parquet": file.getvalue()})
    return files


def tensorrt_choices() -> list[Files]:
    return as_format("tensorrt_llm", replace(trace(), logits=None))()


def plans() -> list[Files]:
    share = np.full((2, 3, 4), 0.25, np.float32)
    plan = Placement(share, (2, 2), "sharded", (4, 9), {"model": "small", "seed": 7})
    published = io.BytesIO()
    np.savez(published, share=share.astype(np.float64), mesh_shape=[2, 2])
    twice = np.repeat(share[:, :, None], 2, axis=2).reshape(len(share), -1, share.shape[2])
    copy_of = np.tile(np.arange(twice.shape[1]) // 2, (len(share), 1))
    numbers = np.ones(len(share))
    rules = (
        ByHome(np.tile(2 * np.arange(share.shape[1])[:, None], (len(share), 1, share.shape[2]))),
        ByDraw(np.full(copy_of.shape, 0.5)),
        LeastWork(numbers, numbers),
    )
    copies = [Placement.of_copies(Copies(copy_of, twice, rule), (2, 2), (4, 9)) for rule in rules]
    written_plans = [written(lambda path, plan=plan: write_plan(path, plan), "file") for plan in (plan, *copies)]
    return [*written_plans, {"file": published.getvalue()}]


def processes() -> list[Files]:
    rng = np.random.default_rng(0)
    layers, experts = 2, 5
    shapes = {"popularity": (), "topics": (3,), "phases": (2,), "first_tokens": (1,), "usual": ()}
    tables = {name: rng.random((*lead, layers, experts), np.float32) for name, lead in shapes.items()}
    tables |= {
        name: rng.random((layers, experts, experts), np.float32) for name in ("from_layer", "from_token", "together")
    }
    requests = RequestDeck(np.array([3, 4]), np.array([1, 2]), np.array([[0], [2]]), 4, 0.5)
    process = GatingProcess(
        Preferences(**{name: jnp.asarray(table) for name, table in tables.items()}),
        requests,
        (1, 3),
        2,
        {"model": "small"},
    )
    return [written(lambda path: write_process(path, process), "file")]


def yaml_files(folder: str) -> list[Files]:
    files = sorted((ROOT / "configs" / folder).glob("*.yaml"))
    return [{"file.yaml": file.read_bytes()} | {base.name: base.read_bytes() for base in bases(file)} for file in files]


def bases(file: Path) -> list[Path]:
    """The base of a file, the base of that, and so on."""
    base = yaml.safe_load(file.read_bytes()).get("base")
    return [] if base is None else [file.with_name(base), *bases(file.with_name(base))]


def scenarios() -> list[Files]:
    """A scenario with the files it names, and one with all in one file."""
    folder = ROOT / "configs"
    named = {"scenarios/file.yaml": (folder / "scenarios" / "quickstart.yaml").read_bytes()}
    whole = yaml.safe_load(named["scenarios/file.yaml"])
    for key, place in (("hardware", "hardware"), ("model", "models"), ("workload", "workloads")):
        name = f"{place}/{whole[key]}.yaml"
        named |= {f"{place}/{file.name}": file.read_bytes() for file in (folder / name, *bases(folder / name))}
        draft = Draft({}, ConfigSource(name, folder))
        put_file(draft, (), folder / name)
        whole[key] = draft.data
    return [named, {"scenarios/file.yaml": yaml.safe_dump(whole).encode()}]


def hugging_face() -> list[Files]:
    """The parts of published files that are read, of four families."""
    mixtral = {"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 64, "num_hidden_layers": 4}
    mixtral |= {"hidden_size": 32, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    mixtral |= {"vocab_size": 100, "tie_word_embeddings": False}
    qwen = mixtral | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16}
    qwen |= {"decoder_sparse_step": 1, "mlp_only_layers": [1]}
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    deepseek = mixtral | latent | {"model_type": "deepseek_v3", "n_routed_experts": 8, "moe_intermediate_size": 16}
    deepseek |= {"first_k_dense_replace": 1, "moe_layer_freq": 1, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
    llama = {"model_type": "llama4", "text_config": mixtral | {"head_dim": 8, "intermediate_size_mlp": 64}}
    return [{"file.json": json.dumps(config).encode()} for config in (mixtral, qwen, deepseek, llama)]


def damaged_yaml(content: bytes, rng: Random, others: list[bytes]) -> bytes:
    """YAML with one place of its data changed, or with a tag, an anchor, a merge or a nesting put in."""
    data = yaml.safe_load(content)
    if rng.random() < 0.7:
        changed = mutations.changed_value(data, rng, others)
        return (
            json.dumps(changed).encode() if rng.random() < 0.5 else yaml.safe_dump(changed, allow_unicode=True).encode()
        )
    lines = content.decode().splitlines()
    at = rng.randrange(len(lines))
    lines[at] = lines[at].partition(":")[0] + ": " + rng.choice(YAML_TEXTS)
    return "\n".join(lines).encode()


_LAUGHS = "[&a [x,x,x,x,x,x,x,x], " + ", ".join(
    f"&{b} [{','.join(['*' + a] * 8)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML_TEXTS = (
    "!!bool x",
    "!!int ''", "!!int x", "!!float x", "!!float ''", "!!timestamp x", "!!binary x", "!!python/object:os.x {}",

    "!!omap [1]", "!!set {a, b}", "!!null x", "2001-99-99", "0001-01-01 00:00:00 +23:59", "0b_", "0x_", "190:20:30",
    ".inf",
    "-.nan", "&a [*a]", "&a {b: *a}", "*missing", "<<: 3", "{<<: [1]}", "{? [1] : 2}", "'", "|", "1e999", "9" * 5000,
    "[" * 500, "[" * 90 + "]" * 90, "{a: " * 400 + "}" * 400, _LAUGHS + "]", "\x00", "\ufeff",
    "{first: 0, count: 100000000000}",
)  # fmt: skip


def _of_trace(path: Path, rng: Random) -> Any:
    return read_any(path, rng.choice((HINTS, HINTS, Hints())))


def _lone(name: str, inputs: Callable[[], list[Files]]) -> Reader:
    return Reader(name, inputs, _of_trace, "file")


def _lacks(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"needs {module}"


READERS = {
    reader.name: reader
    for reader in (
        _lone("npz traces", lambda: [*as_format("npz", trace(), entry="file")(), stored_npz()]),
        _lone("npz loads", as_format("npz", npz_loads(), load_counts(trace()), entry="file")),
        _lone("hd_moe", as_format("hd_moe", trace(), entry="file")),
        Reader("data_movement", as_format("data_movement", trace()), _of_trace),
        Reader("flame_moe", flame_moe, _of_trace, lacks=_lacks("pyarrow")),
        _lone("vllm", vllm),
        _lone("sglang", sglang),
        _lone("sglang recorder", recorder),
        _lone("vllm loads", as_format("vllm", npz_loads(), entry="file")),
        Reader("megatron", as_format("megatron", trace(), replace(trace(), logits=None)), _of_trace),
        Reader("tensorrt_llm counts", as_format("tensorrt_llm", npz_loads()), _of_trace),
        Reader("tensorrt_llm choices", tensorrt_choices, _of_trace),
        Reader("plan", plans, lambda path, _: read_plan(path), "file"),
        Reader("process", processes, lambda path, _: read_process(path), "file"),
        Reader("scenario", scenarios, lambda path, _: load_scenario(path), "scenarios/file.yaml"),
        Reader("hardware", lambda: yaml_files("hardware"), lambda path, _: load_hardware(path), "file.yaml"),
        Reader("model", lambda: yaml_files("models"), lambda path, _: load_model(str(path), "--model"), "file.yaml"),
        Reader("config.json as model", hugging_face, lambda path, _: load_model(str(path), "--model"), "file.json"),
    )
}
