"""Which placements are refused, and that plan files keep what they are given."""

import dataclasses
import json

import numpy as np
import pytest

from jaxmoe.placement import Placement, PlanError, check_fits, read_plan, write_plan


def legal(mode="sharded") -> Placement:
    share = np.zeros((2, 3, 4), np.float32)
    share[:, :, 0], share[:, :, 3] = 0.25, 0.75
    return Placement(share, (2, 2), mode, (4, 9), {"model": "small", "seed": 7})


def changed(**fields) -> Placement:
    return dataclasses.replace(legal(), **fields)


def with_share(value) -> np.ndarray:
    share = legal().share.copy()
    share[1, 2, 0] = value
    return share


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"share": np.ones((3, 4), np.float32) / 4}, r"shape \(3, 4\), expected non-empty \[layer, expert, node\]"),
        ({"share": np.zeros((2, 0, 4), np.float32)}, r"shape \(2, 0, 4\), expected non-empty \[layer, expert, node\]"),
        ({"mesh_shape": (-2, -2)}, r"mesh_shape is \[-2, -2\], expected two positive numbers"),
        ({"mesh_shape": (2, 3)}, r"4 nodes but mesh_shape \[2, 3\] has 6"),
        ({"exchange": ("ring",)}, "1 names of exchanges for 2 layers of shares; name one for each layer"),
        ({"exchange": ("ring", "near")}, "exchange is 'near', expected one of lowest_host"),
        ({"layer_ids": (1, 2, 3)}, "3 layer_ids for 2 layers"),
        ({"share": with_share(-0.25)}, "negative or non-finite"),
        ({"share": with_share(np.nan)}, "negative or non-finite"),
        ({"share": with_share(0.35)}, "expert 2 in layer 9 sum to 1.1"),
    ],
)
def test_illegal_placements_are_refused(fields, message):
    with pytest.raises(PlanError, match=message):
        changed(**fields)


def test_memory_of_sharded_and_replicated_experts():
    np.testing.assert_allclose(legal("sharded").memory(100.0), [150, 0, 0, 450])
    np.testing.assert_allclose(legal("replicated").memory(100.0), [600, 0, 0, 600])


def test_check_fits_names_the_fullest_node():
    check_fits(legal(), 1e9, None)
    check_fits(legal(), 1e9, np.array([1.5e9, 0, 0, 4.5e9]))
    with pytest.raises(PlanError, match=r"node 3 needs 4.5 GB .* has 4 GB"):
        check_fits(legal(), 1e9, np.array([1.5e9, 0, 0, 4e9]))
    with pytest.raises(PlanError, match="node 0"):
        check_fits(legal("replicated"), 1e9, np.array([5e9, 1, 1, 7e9]))


@pytest.mark.filterwarnings("error")
def test_check_fits_knows_nodes_without_memory():
    check_fits(legal(), 1e9, np.array([1.5e9, 0, 0, 4.5e9]))
    with pytest.raises(PlanError, match=r"node 0 needs 1.5 GB .* has 0 GB"):
        check_fits(legal(), 1e9, np.array([0, 0, 0, 4.5e9]))
    with pytest.raises(PlanError, match=r"node 3 needs 4.5 GB .* has 0 GB"):
        check_fits(legal(), 1e9, np.zeros(4))


def test_check_fits_tolerates_rounding_on_each_node_for_itself():
    # Node 3 is over by rounding alone; node 0 by a third, though by fewer bytes.
    share = np.array([[[3e-5, 1 - 3e-5]]], np.float32)
    plan = Placement(share, (1, 2), "sharded", (0,))
    with pytest.raises(PlanError):
        check_fits(plan, 1e9, np.array([2e4, 1e9 * (1 - 3e-5) - 5e4]))


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_plan_file_round_trip(tmp_path, mode):
    plan = dataclasses.replace(legal(mode), exchange=("ring", "least_loaded_tree"))
    write_plan(tmp_path / "plan.npz", plan)
    back = read_plan(tmp_path / "plan.npz")
    np.testing.assert_array_equal(back.share, plan.share)
    assert back.share.dtype == np.float32
    assert (back.mesh_shape, back.mode, back.layer_ids, back.meta) == ((2, 2), mode, (4, 9), plan.meta)
    assert back.exchange == ("ring", "least_loaded_tree")
    assert [file.name for file in tmp_path.iterdir()] == ["plan.npz"]


def test_a_plan_of_a_machine_that_is_no_mesh_has_no_shape(tmp_path):
    write_plan(tmp_path / "plan.npz", changed(mesh_shape=None))
    with np.load(tmp_path / "plan.npz") as file:
        assert "mesh_shape" not in file.files
    assert read_plan(tmp_path / "plan.npz").mesh_shape is None


def test_an_older_plan_states_no_exchange(tmp_path):
    np.savez(tmp_path / "plan.npz", share=legal().share, mesh_shape=[2, 2], mode="sharded", layer_ids=[4, 9], meta="{}")
    assert read_plan(tmp_path / "plan.npz").exchange == ()


def test_writing_replaces_an_older_plan(tmp_path):
    path = tmp_path / "plan.npz"
    write_plan(path, legal())
    write_plan(path, changed(layer_ids=(0, 1)))
    assert read_plan(path).layer_ids == (0, 1)


def test_plan_file_has_the_arrays_of_the_contract(tmp_path):
    write_plan(tmp_path / "plan.npz", legal())
    with np.load(tmp_path / "plan.npz") as file:
        assert set(file.files) == {"share", "mesh_shape", "mode", "exchange", "layer_ids", "meta", "format"}
        assert (file["share"].dtype, file["share"].shape) == (np.float32, (2, 3, 4))
        assert file["mesh_shape"].tolist() == [2, 2]
        assert json.loads(str(file["meta"])) == {"model": "small", "seed": 7}


def test_published_layout_is_sharded_and_takes_default_layers(tmp_path):
    np.savez(tmp_path / "published.npz", share=legal().share.astype(np.float64), mesh_shape=[2, 2])
    plan = read_plan(tmp_path / "published.npz", default_layer_ids=(5, 6))
    assert (plan.mode, plan.layer_ids, plan.meta) == ("sharded", (5, 6), {})
    assert read_plan(tmp_path / "published.npz", default_layer_ids=(5, 6, 7)).layer_ids == (0, 1)
    assert read_plan(tmp_path / "published.npz").layer_ids == (0, 1)


def test_unreadable_files_are_named(tmp_path):
    path = tmp_path / "plan.npz"
    with pytest.raises(PlanError, match=r"plan.npz: no such plan file"):
        read_plan(path)
    write_plan(path, legal())
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:length])
        with pytest.raises(PlanError, match=r"plan.npz: not a readable npz"):
            read_plan(path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"mesh_shape": [2, 2]}, "has no share"),
        ({"share": legal().share, "exchange": ["near", "ring"]}, r"plan.npz: exchange is 'near'"),
        ({"share": legal().share / 2, "mesh_shape": [2, 2]}, "sum to 0.5, expected 1"),
        (
            {"share": legal().share, "mesh_shape": [4]},
            r"mesh_shape is int64 of shape \(1,\), expected whole numbers of shape \(2,\)",
        ),
        ({"share": legal().share, "mesh_shape": [2, 2], "mode": "both"}, "both"),
        ({"share": legal().share, "mesh_shape": [2.0, 2.0]}, "mesh_shape is float64"),
        ({"share": legal().share.astype(str), "mesh_shape": [2, 2]}, "share is <U"),
        ({"share": legal().share, "mesh_shape": [2, 2], "meta": "{"}, "plan.npz: meta is not JSON"),
        ({"share": legal().share, "mesh_shape": [2, 2], "meta": "[1]"}, "meta is .*expected a JSON object"),
        ({"share": legal().share, "mesh_shape": [2, 2], "layer_ids": [1]}, "1 layer_ids for 2 layers"),
    ],
)
def test_files_that_are_no_plan_say_why(tmp_path, arrays, message):
    np.savez(tmp_path / "plan.npz", **arrays)
    with pytest.raises(PlanError, match=message):
        read_plan(tmp_path / "plan.npz")


def damaged_npz(path):
    """A zip whose compressed share is damaged, while its directory is whole."""
    write_plan(path, legal())
    data = bytearray(path.read_bytes())
    start = 30 + int.from_bytes(data[26:28], "little") + int.from_bytes(data[28:30], "little")
    data[start] = 0xFF  # a block of a type that does not exist
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "write",
    [
        damaged_npz,
        lambda path: np.savez(path, share=np.float32(1), mesh_shape=[2, 2]),
        lambda path: np.save(path.open("wb"), np.ones(3)),
    ],
    ids=["damaged", "scalar share", "npy file"],
)
def test_damaged_files_raise_plan_errors_too(tmp_path, write):
    write(tmp_path / "plan.npz")
    with pytest.raises(PlanError, match=r"plan\.npz"):
        read_plan(tmp_path / "plan.npz")


def test_failed_writing_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        write_plan(tmp_path / "plan.npz", changed(meta={"not JSON": object()}))
    assert list(tmp_path.iterdir()) == []
