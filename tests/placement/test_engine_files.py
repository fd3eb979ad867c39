"""Placement files of serving engines: exact round trips, what the files look like, and what is refused."""

import json
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.placement.copies import ByDraw, Copies
from jaxmoe.placement.engine_files import formats, read_slot_plan, suffix_of_engine, write_slot_plan
from jaxmoe.placement.placement import Placement, PlanError, write_plan
from jaxmoe.placement.slots import SlotPlan, moved
from jaxmoe.traces.formats.source import Hints

LAYERS, EXPERTS, RANKS, ALL_LAYERS = (2, 4), 6, 4, 5
HINTS = Hints(num_experts=EXPERTS, layer_ids=LAYERS, num_layers=ALL_LAYERS)


def row_without_repeats(rng: np.random.Generator, experts: int, ranks: int, per_rank: int) -> np.ndarray:
    """Every expert once, dealt round the ranks, then others that a rank does not have yet."""
    slots = [list(part) for part in np.array_split(rng.permutation(experts), ranks)]
    for held in slots:
        others = np.setdiff1d(np.arange(experts), held)
        held += rng.permutation(others)[: per_rank - len(held)].tolist()
    return np.concatenate([rng.permutation(held) for held in slots])


@st.composite
def plans(draw) -> SlotPlan:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    experts, ranks = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    per_rank = draw(st.integers(-(-experts // ranks), experts))
    all_layers = draw(st.integers(1, 4))
    ids = tuple(sorted(rng.choice(all_layers, draw(st.integers(1, all_layers)), replace=False).tolist()))
    slots = np.stack([row_without_repeats(rng, experts, ranks, per_rank) for _ in ids])
    return SlotPlan(slots, ranks, experts, ids, all_layers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.mark.parametrize("name", formats())
@settings(max_examples=40, deadline=None)
@given(plan=plans())
def test_round_trips_are_exact(folder, name, plan):
    check_round_trip(folder, name, plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", formats())
@settings(max_examples=1000, deadline=None)
@given(plan=plans())
def test_many_round_trips_are_exact(folder, name, plan):
    check_round_trip(folder, name, plan)


def check_round_trip(folder: Path, name: str, plan: SlotPlan) -> None:
    path = folder / f"plan{suffix_of_engine(name)}"
    write_slot_plan(path, name, plan)
    hints = Hints(num_experts=plan.num_experts, layer_ids=plan.layer_ids, num_layers=plan.num_layers)
    read = read_slot_plan(path, hints, plan.ranks)
    assert read.format == name
    np.testing.assert_array_equal(read.plan.slots, plan.slots)
    assert (read.plan.ranks, read.plan.num_experts, read.plan.layer_ids) == (
        plan.ranks,
        plan.num_experts,
        plan.layer_ids,
    )


@pytest.mark.slow
def test_all_recorded_files_are_read_and_converted(folder, shared):
    """One placement of each, to one format in turns; vllm-ascend cannot hold those with an expert twice on a rank."""
    turns, converted = cycle(formats()), dict.fromkeys(formats(), 0)
    for number, path in enumerate(sorted((shared / "reference" / "eplb").glob("*.npz"))):
        with np.load(path) as file:
            names = [key for key in file.files if key.startswith("phy2log_")]
            name = names[number % len(names)].removeprefix("phy2log_")
            slots = file[f"phy2log_{name}"]
        layers, experts, ranks = len(slots), int(slots.max()) + 1, int(name.split("_")[-1])
        hints = Hints(num_experts=experts, layer_ids=tuple(range(3, layers + 3)), num_layers=layers + 3)
        plan = read_slot_plan(Path(f"{path}:{name}"), hints, ranks).plan
        np.testing.assert_array_equal(plan.slots, slots)
        to = next(turns)
        if to == "vllm_ascend" and plan.repeated.any():
            with pytest.raises(PlanError, match="twice, which vllm-ascend cannot hold"):
                write_slot_plan(folder / "twice.json", to, plan)
            continue
        check_round_trip(folder, to, plan)
        converted[to] += 1
    assert min(converted.values()) > 3
    assert sum(converted.values()) > 60


def test_one_of_several_placements_in_a_file(plan, tmp_path):
    write_slot_plan(tmp_path / "a.npz", "eplb", plan)
    with np.load(tmp_path / "a.npz") as arrays:
        first = {f"{key}_first": values for key, values in arrays.items()}
    path = tmp_path / "several.npz"
    np.savez(path, **first, phy2log_second=plan.slots[:, ::-1])
    for name, expected in (("first", plan.slots), ("second", plan.slots[:, ::-1])):
        read = read_slot_plan(Path(f"{path}:{name}"), HINTS, RANKS)
        assert read.format == "eplb"
        np.testing.assert_array_equal(read.plan.slots, expected)
    with pytest.raises(PlanError, match=r"has 2 placements; give one of them, as in .*several.npz:first"):
        read_slot_plan(path, HINTS, RANKS)
    with pytest.raises(PlanError, match=r"several.npz:third: is none of the placements in the file: first, second"):
        read_slot_plan(Path(f"{path}:third"), HINTS, RANKS)


@pytest.fixture
def plan() -> SlotPlan:
    slots = np.array([[0, 1, 2, 3, 4, 5, 0, 1], [5, 4, 3, 2, 1, 0, 2, 3]])
    return SlotPlan(slots, RANKS, EXPERTS, LAYERS, ALL_LAYERS)


def test_sglang_counts_dense_layers_and_allows_one_key(plan, tmp_path):
    write_slot_plan(tmp_path / "a.json", "sglang", plan)
    content = json.loads((tmp_path / "a.json").read_text())
    assert [*content] == ["physical_to_logical_map"]
    rows = content["physical_to_logical_map"]
    assert (len(rows), rows[2], rows[4]) == (ALL_LAYERS, plan.slots[0].tolist(), plan.slots[1].tolist())
    assert rows[0] == [0, 1, 2, 3, 4, 5, 0, 1]  # what the engine starts from
    (tmp_path / "a.json").write_text(json.dumps(content | {"logical_count": [1]}))
    with pytest.raises(PlanError, match=r"logical_count.*SGLang stops; remove it"):
        read_slot_plan(tmp_path / "a.json", HINTS, RANKS)


def test_tensorrt_goes_by_the_number_of_the_layer_and_ascend_by_position(plan, tmp_path):
    write_slot_plan(tmp_path / "a.yaml", "tensorrt_llm", plan)
    content = yaml.safe_load((tmp_path / "a.yaml").read_text())
    assert content["num_slots"] == 8
    assert [*content["initial_global_assignments"]] == [2, 4]
    write_slot_plan(tmp_path / "a.json", "vllm_ascend", plan)
    content = json.loads((tmp_path / "a.json").read_text())
    assert [layer["layer_id"] for layer in content["layer_list"]] == [0, 1]
    assert content["layer_list"][1]["device_list"][3] == {"device_id": 3, "device_expert": [2, 3]}


def test_files_of_one_engine_load_in_the_numbering_of_another(plan, tmp_path):
    first = read_after(plan, "tensorrt_llm", tmp_path)
    second = read_after(first, "sglang", tmp_path)
    third = read_after(second, "vllm_ascend", tmp_path)
    np.testing.assert_array_equal(third.slots, plan.slots)
    assert third.layer_ids == LAYERS


def read_after(plan, name, tmp_path) -> SlotPlan:
    path = tmp_path / f"{name}{suffix_of_engine(name)}"
    write_slot_plan(path, name, plan)
    return read_slot_plan(path, HINTS, RANKS).plan


def test_assignments_that_tensorrt_starts_from(tmp_path):
    (tmp_path / "a.yaml").write_text("num_slots: 8\n")
    read = read_slot_plan(tmp_path / "a.yaml", HINTS, RANKS)
    # Rank r starts at r * 6 // 4: 0, 1, 3, 4.
    assert read.plan.slots[0].tolist() == [0, 1, 1, 2, 3, 4, 4, 5]
    assert "the engine's own at the start" in read.notes[0]


def test_a_rank_with_an_expert_twice_is_told_and_refused_where_the_engine_breaks(tmp_path):
    twice = SlotPlan(np.array([[0, 0, 1, 2]]), 2, 3, (0,), 1)
    assert "1 times a rank has an expert in several slots" in write_slot_plan(tmp_path / "a.npz", "eplb", twice)[-1]
    with pytest.raises(PlanError, match="rank 0 has expert 0 of layer 0 twice, which vllm-ascend cannot hold"):
        write_slot_plan(tmp_path / "a.json", "vllm_ascend", twice)
    assert not (tmp_path / "a.json").exists()


def test_placements_become_slots(tmp_path):
    # Expert 0 on both nodes, in unequal parts; the other node has a slot to spare.
    share = np.array([[[0.75, 0.25], [1, 0], [0, 1], [1, 0]]], np.float32)
    write_plan(tmp_path / "plan.npz", Placement(share, None, "replicated", (3,)))
    read = read_slot_plan(tmp_path / "plan.npz", Hints())
    assert read.plan.slots.tolist() == [[0, 1, 3, 0, 2, 1]]
    assert [note.split(";")[0] for note in read.notes] == [
        "copies of an expert serve unequal parts of its tokens",
        "1 slots that no expert needs hold further copies, since every rank has equally many",
    ]
    write_plan(tmp_path / "plan.npz", Placement(share, None, "sharded", (3,)))
    with pytest.raises(PlanError, match="parts of experts"):
        read_slot_plan(tmp_path / "plan.npz", Hints())


def test_copies_that_are_whole_become_slots(tmp_path):
    # Both experts in each half of four nodes, one node each.
    share = np.eye(4, dtype=np.float32)[None]
    copies = Copies(np.array([[0, 1, 0, 1]]), share, ByDraw(np.full((1, 4), 0.5)))
    write_plan(tmp_path / "plan.npz", Placement.of_copies(copies, None, (2,)))
    read = read_slot_plan(tmp_path / "plan.npz", Hints())
    assert read.plan.slots.tolist() == [[0, 1, 0, 1]]
    assert read.notes == ["slots do not hold the rule by_draw; engines choose among copies by a rule of their own"]
    back = read.plan.placement()
    np.testing.assert_array_equal(back.share, copies.mean_share())
    uneven = Copies(copies.copy_of, share[:, [0, 0, 2, 3]], copies.serving)
    write_plan(tmp_path / "plan.npz", Placement.of_copies(uneven, None, (2,)))
    read = read_slot_plan(tmp_path / "plan.npz", Hints())
    assert read.plan.slots.reshape(4, 2)[[0, 2, 3], 0].tolist() == [0, 0, 1]
    assert "4 slots that no expert needs hold further copies" in read.notes[1]
    cut = Copies(copies.copy_of, np.full((1, 4, 4), 0.25, np.float32), copies.serving)
    write_plan(tmp_path / "plan.npz", Placement.of_copies(cut, None, (2,)))
    with pytest.raises(
        PlanError, match="copy 0, of expert 0 in layer 2, is cut over several nodes, but a slot holds a"
    ):
        read_slot_plan(tmp_path / "plan.npz", Hints())


def test_what_has_to_move(plan):
    after = SlotPlan(plan.slots[:, ::-1].copy(), RANKS, EXPERTS, LAYERS)
    needed = moved(plan, after)
    # In the first layer ranks 0 and 3 have the same two as before, ranks 1 and 2 exchange theirs.
    assert [needed[0, :, rank].nonzero()[0].tolist() for rank in range(RANKS)] == [[], [4, 5], [2, 3], []]
    assert needed[1].sum() == 8
    with pytest.raises(PlanError, match="different ranks, 4 and 2"):
        moved(plan, SlotPlan(plan.slots, 2, EXPERTS, LAYERS))


GOOD = [[0, 1, 2, 3], [3, 2, 1, 0]]
ASCEND = {
    "moe_layer_count": 1,
    "layer_list": [{"layer_id": 0, "device_list": [{"device_expert": [0, 1]}, {"device_expert": [2, 3]}]}],
}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([[0, 1, 2], [0, 1, 2]], "3 slots do not divide among 2 ranks"),
        ([[0, 1, 2, 2], [0, 1, 2, 3]], "no slot of layer 1 holds expert 3"),
        ([[0, 1, 2, -1], [0, 1, 2, 3]], "slot 3 of layer 1 holds expert -1"),
        ([[0, 1, 2, 7], [0, 1, 2, 3]], "holds expert 7, expected 0 to 3"),
        ([[0, 1, 2, 3], [0, 1, 2]], "layers of 3 to 4 slots"),
        ([[0, 1], [0, 1]], "2 slots cannot hold 4 experts"),
        ([GOOD[0]], "has 1 layers with experts, the model 2"),
        ([[0, 1, 2, 1.5], [0, 1, 2, 3]], "has 1.5, expected the number of an expert"),
        ([[0, 1, 2, True], [0, 1, 2, 3]], "has True"),
        ([[], []], "layers of 0 to 0 slots"),
        ({"physical_to_logical_map": GOOD}, "has 2 rows, but the model 3 layers; SGLang counts dense layers"),
        ({"physical_to_logical_map": 3}, "is 3, expected a list of slots for every layer"),
        ({"logical_count": [[1, 2]]}, "no placement of any of eplb, sglang"),
        (ASCEND | {"moe_layer_count": 2}, "moe_layer_count is 2 for 1 layers"),
        (ASCEND | {"layer_list": [{"device_list": [{"device": 1}]}], "moe_layer_count": 1}, "has no device_expert"),
        ({"num_slots": 4, "slots": 3}, "has the key 'slots', which TensorRT-LLM refuses"),
        ({"num_slots": 5, "initial_global_assignments": {"1": GOOD[0]}}, "expected slots by the number of a layer"),
        ({"num_slots": -4}, "num_slots is -4, expected a whole number"),
    ],
)
def test_bad_files_are_refused_with_their_name(content, expected, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match=expected) as caught:
        read_slot_plan(path, Hints(num_experts=4, layer_ids=(1, 2), num_layers=3), 2)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"physical_to_logical_map": [[0, 1', "neither npz nor JSON nor YAML"),
        ("num_slots: 4\ninitial_global_assignments: {1: [0, 1, 2, 3], 5: [0, 1, 2, 3]}", "layer 2 is in the file or"),
        ("num_slots: 5\ninitial_global_assignments: {1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}", "4 slots, num_slots is 5"),
        ("", "the file is empty; get it again"),
        ("{}", "holds nothing; get it again"),
    ],
)
def test_texts_that_are_no_placement(text, expected, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match=expected):
        read_slot_plan(path, Hints(num_experts=4, layer_ids=(1, 2), num_layers=3), 2)


def test_ranks_have_to_be_known_and_agree(plan, tmp_path):
    write_slot_plan(tmp_path / "a.json", "vllm", plan)
    with pytest.raises(PlanError, match="does not state how many ranks share its slots; give --ranks"):
        read_slot_plan(tmp_path / "a.json", HINTS)
    write_slot_plan(tmp_path / "b.json", "vllm_ascend", plan)
    with pytest.raises(PlanError, match="is for 4 ranks, not 2"):
        read_slot_plan(tmp_path / "b.json", HINTS, 2)
    with pytest.raises(PlanError, match="no such file"):
        read_slot_plan(Path("nowhere.json"), HINTS, 2)


def test_eplb_arrays_have_to_agree(plan, tmp_path):
    write_slot_plan(tmp_path / "a.npz", "eplb", plan)
    with np.load(tmp_path / "a.npz") as arrays:
        kept = dict(arrays)
    np.savez(tmp_path / "a.npz", **kept | {"logcnt": kept["logcnt"] + 1})
    with pytest.raises(PlanError, match="logcnt does not count the experts of phy2log"):
        read_slot_plan(tmp_path / "a.npz", HINTS, RANKS)
    np.savez(tmp_path / "a.npz", **kept | {"log2phy": kept["log2phy"][:, ::-1]})
    with pytest.raises(PlanError, match="log2phy does not name the slots"):
        read_slot_plan(tmp_path / "a.npz", HINTS, RANKS)
