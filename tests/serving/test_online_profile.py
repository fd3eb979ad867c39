"""Kernel profiles: a step by hand from two points of each kernel, and tables that are not as they should be."""

from pathlib import Path

import numpy as np
import pytest

from jaxmoe.errors import InputError
from jaxmoe.models import GroupedQueryAttention, MoEModel
from jaxmoe.serving.deployment import Deployment
from jaxmoe.serving.online.from_profile import profile_table
from jaxmoe.serving.online.padding import Padding, graph_sizes
from jaxmoe.serving.online.profile import read_profile
from jaxmoe.serving.online.step_table import FEATURES, StepTable

KERNELS = ("embedding", "layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
ATTENTION = """prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
0,0,1,100,5
0,0,1,200,7
0,0,3,100,9
0,0,3,200,15
16,0,0,0,10
24,0,0,0,21
32,0,0,0,30
16,0,1,100,20
16,0,1,200,30
32,0,1,100,40
32,0,1,200,60"""
SKEW = """pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha,n_samples
0,n<=3,sr<=5%,kvB<=1k,kp=0,0.5,2
0,n<=3,sr<=15%,kvB<=1k,kp=0,0.9,1
0,n<=1,sr<=5%,kvB<=1k,kp=0,0.1,1
16,n<=3,sr<=5%,kvB<=1k,kp=0,0.3,1
16,n>3,sr<=5%,kvB<=1k,kp=0,7,1"""
TABLES = {
    # Every kernel takes 1 µs for a token and 2 µs for 101; the head and the sampler 10 µs for one sequence, 20 for 11.
    "dense.csv": [
        "layer,tokens,time_us",
        *(f"{name},{tokens},{time}" for name in (*KERNELS, "final_layernorm") for tokens, time in ((1, 1), (101, 2))),
    ],
    "per_sequence.csv": [
        "layer,sequences,time_us",
        *(f"{name},{count},{time}" for name in ("lm_head", "sampler") for count, time in ((1, 10), (11, 20))),
    ],
    "attention.csv": ATTENTION.splitlines(),
    "moe.csv": ["tokens,activated_experts,time_us", "2,2,100", "2,4,200", "6,2,300", "6,4,400"],
    "skew_fit.csv": SKEW.splitlines(),
}
DENSE = MoEModel(
    name="dense",
    hidden_size=64,
    expert_size=128,
    num_experts=1,
    top_k=1,
    moe_layer_ids=(),
    num_layers=2,
    dense_size=128,
    attention=GroupedQueryAttention(8, 4, 8),
    vocabulary_size=100,
)
EXPERTS = MoEModel(
    name="experts",
    hidden_size=64,
    expert_size=32,
    num_experts=8,
    top_k=2,
    moe_layer_ids=(0, 1),
    num_layers=2,
    attention=GroupedQueryAttention(8, 4, 8),
    vocabulary_size=100,
)


def written(folder: Path, **changed: list[str] | None) -> Path:
    """A profile with some of its tables changed, or left out."""
    (folder / "bf16" / "tp1").mkdir(parents=True)
    (folder / "bf16" / "meta.yaml").write_text("model: made/up\n")
    for name, lines in (TABLES | {f"{name}.csv": lines for name, lines in changed.items()}).items():
        if lines is not None:
            (folder / "bf16" / "tp1" / name).write_text("\n".join(lines) + "\n")
    return folder


def without_ffn() -> list[str]:
    return [line for line in TABLES["dense.csv"] if not line.startswith(("gate", "act", "down"))]


def ranks(*each: dict[str, float]) -> np.ndarray:
    """Features of ranks; what is over all of them is filled in."""
    features = np.array([[rank.get(name, 0.0) for name in FEATURES] for rank in each])
    tokens = features[:, FEATURES.index("tokens")]
    features[:, FEATURES.index("all_tokens")], features[:, FEATURES.index("most_tokens")] = tokens.sum(), tokens.max()
    return features


def no_exchange(operation: str, bytes_: np.ndarray) -> np.ndarray:
    return np.zeros_like(bytes_)


def table(folder: Path, model: MoEModel = DENSE, deployment: Deployment | None = None, **more):
    exchange = more.pop("collective", no_exchange)
    return profile_table(read_profile(folder, 1), model, deployment or Deployment("vllm"), exchange, **more)


def test_a_step_by_hand(tmp_path):
    """Two layers of eight kernels between both of their points, the same once before and after, attention, the head."""
    step = table(written(tmp_path))
    found = step.seconds(ranks({"tokens": 51, "sequences": 6, "decoding": 2, "context": 150, "longest": 150}))
    assert found == pytest.approx((2 * 8 * 1.5 + 2 * 1.5 + 2 * (5 + 7 + 9 + 15) / 4 + 2 * 15) * 1e-6)


def test_tokens_of_prompts_beside_those_that_decode(tmp_path):
    """A chunk of 24 beside one sequence of 100 lies between chunks of 16 and 32, alone it was measured."""
    step = table(written(tmp_path, skew_fit=None))
    both = {"tokens": 25, "sequences": 1, "prefill": 24}
    beside = step.seconds(ranks(both | {"decoding": 1, "context": 100, "longest": 100}))
    alone = step.seconds(ranks(both))
    assert beside - alone == pytest.approx(2 * (30 - 21) * 1e-6)
    one = step.seconds(ranks({"tokens": 1, "prefill": 1, "decoding": 1, "context": 200, "longest": 200}))
    none = step.seconds(ranks({"tokens": 1, "decoding": 1, "context": 200, "longest": 200}))
    assert one - none == pytest.approx(2 * (30 - 7) * 1e-6)  # the kernel that reads prompts, too


def test_the_longest_context_counts_as_far_as_was_measured(tmp_path):
    """Half of the way for three sequences: the median of 0.5, twice, and 0.9."""
    folder = written(tmp_path)
    features = ranks({"tokens": 3, "decoding": 3, "context": 100, "longest": 200})
    skewed, equal = (table(folder, skew=skew).seconds(features) for skew in (True, False))
    assert skewed - equal == pytest.approx(2 * 0.5 * (15 - 9) * 1e-6)
    two = ranks({"tokens": 2, "decoding": 2, "context": 100, "longest": 200})
    # 0.3 of the way and 0.5 of it are between what was measured for one sequence and for three.
    skewed, equal = (table(folder, skew=skew).seconds(two) for skew in (True, False))
    assert skewed - equal == pytest.approx(2 * (0.1 * 2 + 0.5 * 6) / 2 * 1e-6)


def test_experts_and_exchanges_are_of_all_ranks(tmp_path):
    """Eight tokens of two ranks: four for each half of the experts, nearly all of which are chosen."""
    folder = written(tmp_path, dense=without_ffn())
    asked = []

    def collective(operation: str, bytes_: np.ndarray) -> np.ndarray:
        asked.append(operation)
        return bytes_ * 1e-9

    step = table(folder, EXPERTS, Deployment("vllm", 1, 2, 2), collective=collective)
    terms = {term.name: term for term in step.terms}
    alone = {name: StepTable((term,)) for name, term in terms.items()}
    batch = ranks({"tokens": 1}, {"tokens": 101})
    chosen = 4 * (1 - 0.75**102)
    assert alone["experts"].seconds(batch) == pytest.approx(
        2 * (100 * chosen / 2 + 200 * 51 / 4 - 100) * 1e-6, rel=0.02
    )
    assert alone["exchange"].seconds(batch) == pytest.approx(2 * 2 * 102 * 64 * 2 * 1e-9)
    assert set(asked) == {"all_gather", "reduce_scatter"}
    assert alone["layers"].seconds(batch) == pytest.approx((2 * 5 * 2 + 2 * 2) * 1e-6)  # the slowest rank's


def test_few_tokens_are_padded_to_the_next_graph(tmp_path):
    """Of one rank its own, of two both to that of the fullest."""
    padding = Padding((1, 2, 4, 8))
    step = table(written(tmp_path), padding=padding)
    seconds = {count: step.seconds(ranks({"tokens": count})) for count in (3, 4, 5, 8, 9, 51)}
    plain = table(tmp_path)
    assert seconds[3] == seconds[4] == pytest.approx(plain.seconds(ranks({"tokens": 4})))
    assert seconds[5] == pytest.approx(plain.seconds(ranks({"tokens": 8})))
    for count in (8, 9, 51):
        assert seconds[count] == pytest.approx(plain.seconds(ranks({"tokens": count})))


def test_ranks_are_padded_alike():
    term = Padding((1, 2, 4)).common("exchange", np.array([1.0, 2.0, 3.0, 4.0, 5.0, 10.0]), 2, lambda tokens: tokens)
    step = StepTable((term,))
    assert step.seconds(ranks({"tokens": 3}, {"tokens": 1})) == pytest.approx(8)
    assert step.seconds(ranks({"tokens": 5}, {"tokens": 1})) == pytest.approx(6)
    assert step.seconds(ranks({"tokens": 9}, {"tokens": 9})) == pytest.approx(18)


def test_sizes_that_vllm_captures():
    assert graph_sizes(4) == (1, 2, 4, 8)
    assert graph_sizes(128)[-3:] == (240, 248, 256)
    assert graph_sizes(1024)[-1] == 512


WRONG = {
    "no such cut": ({}, 2, "tp2: no such folder; measured are tp1"),
    "no table": ({"attention": None}, 1, "attention.csv: no such file"),
    "no rows": ({"attention": TABLES["attention.csv"][:1]}, 1, "attention.csv: has no rows"),
    "no column": ({"dense": ["layer,tokens", "embedding,1"]}, 1, "has no column time_us"),
    "no number": ({"dense": [*TABLES["dense.csv"], "o_proj,7,fast"]}, 1, "line 20: time_us is 'fast'; expected a time"),
    "no time": ({"dense": [*TABLES["dense.csv"], "o_proj,7,0"]}, 1, "time_us is '0'; expected a time above 0"),
    "less than none": ({"dense": [*TABLES["dense.csv"], "o_proj,-7,1"]}, 1, "tokens is '-7'; expected a number from 0"),
    "no prompts": ({"attention": TABLES["attention.csv"][:5]}, 1, "prefill_chunk is 0 in all rows"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_profile_is_told(case, tmp_path):
    changed, tensor, message = WRONG[case]
    with pytest.raises(InputError) as told:
        read_profile(written(tmp_path, **changed), tensor)
    assert message in str(told.value)


def test_a_folder_that_is_no_profile(tmp_path):
    with pytest.raises(InputError, match="has no meta"):
        read_profile(tmp_path, 1)
    (written(tmp_path) / "bf16" / "meta.yaml").write_text("variant: bf16\n")
    with pytest.raises(InputError, match="has no key model"):
        read_profile(tmp_path, 1)


def test_a_profile_of_another_model(tmp_path):
    folder = written(tmp_path)
    with pytest.raises(InputError, match="act_fn, which experts does not have"):
        table(folder, EXPERTS)
    lines = [line for line in TABLES["dense.csv"] if not line.startswith("o_proj")]
    (folder / "bf16" / "tp1" / "dense.csv").write_text("\n".join(lines))
    with pytest.raises(InputError, match="has no kernel o_proj"):
        table(folder)


def test_experts_that_a_profile_cannot_have(tmp_path):
    folder = written(tmp_path, dense=without_ffn(), moe=None)
    with pytest.raises(InputError, match=r"has no moe.csv"):
        table(folder, EXPERTS)
    folder = written(tmp_path / "other", dense=without_ffn())
    with pytest.raises(InputError, match="expert_ranks is 1; expected 2"):
        table(folder, EXPERTS, Deployment("vllm", 1, 2, 1))
    with pytest.raises(InputError, match=r"tensor is 2 and deployment\.data 2; expected 1 for one"):
        table(folder, EXPERTS, Deployment("vllm", 2, 2, 4))
