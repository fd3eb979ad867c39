"""Regions: each has a copy of every expert, shared or dealt inside, for the tokens that live there."""

import numpy as np
import pytest
from oracles.topologies import mesh

from jaxmoe.hardware import switch
from jaxmoe.placement import PlanError
from jaxmoe.placement.regions import Regions, all_regions, region_copies, regions_named
from jaxmoe.placement.strategies import expert_parallel, in_groups, tensor_parallel

FREQUENCY = np.array([[4.0, 3.0, 2.0, 1.0]])


@pytest.mark.parametrize(
    "regions",
    [Regions((1, 2), "tp"), Regions((4,), "ep"), Regions((2, 2), "hybrid", (1, 2)), Regions((2,), "hybrid", (4,))],
)
def test_names_are_read_back(regions):
    assert regions_named(regions.name) == regions


@pytest.mark.parametrize("name", ["regions_1x2", "regions_0x2_tp", "regions_2_hybrid", "regions_1x2x2_tp", "tp"])
def test_other_names_are_refused(name):
    with pytest.raises(PlanError, match=f"regions are '{name}', expected a name such as regions_1x2_tp"):
        regions_named(name)


def test_halves_of_a_mesh_with_all_experts_cut_over_each():
    copies = region_copies(regions_named("regions_1x2_tp"), FREQUENCY, mesh((2, 2)))
    # Nodes 0 and 2 are the left half, 1 and 3 the right one.
    assert copies.copy_of.tolist() == [[0, 1, 2, 3] * 2]
    np.testing.assert_array_equal(copies.share[0, :4], np.tile([0.5, 0, 0.5, 0], (4, 1)))
    np.testing.assert_array_equal(copies.share[0, 4:], np.tile([0, 0.5, 0, 0.5], (4, 1)))
    assert copies.serving.table[0, 1].tolist() == [1, 5, 1, 5]


def test_experts_are_dealt_to_the_nodes_of_a_region_by_load():
    copies = region_copies(regions_named("regions_1x2_ep"), FREQUENCY, mesh((2, 2)))
    assert copies.share[0].argmax(axis=1).tolist() == [0, 2, 2, 0, 1, 3, 3, 1]


def test_groups_inside_of_a_region():
    copies = region_copies(regions_named("regions_1x2_hybrid_2x1"), FREQUENCY, mesh((4, 2)))
    left, right = [[0, 2], [4, 6]], [[1, 3], [5, 7]]
    hosts = [np.flatnonzero(row).tolist() for row in copies.share[0]]
    assert hosts == [groups[at] for groups in (left, right) for at in (0, 1, 1, 0)]


def test_a_region_of_more_nodes_than_experts_deals_parts_of_nodes():
    copies = region_copies(regions_named("regions_2_ep"), FREQUENCY[:, :2], switch(8, 1.0, 0.0))
    np.testing.assert_array_equal(copies.share[0, 0], [0.5, 0.5, 0, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(copies.share[0, 3], [0, 0, 0, 0, 0, 0, 0.5, 0.5])


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("regions_1x1_tp", lambda f, m: tensor_parallel(*f.shape, m.num_nodes)),
        ("regions_1x1_ep", expert_parallel),
        ("regions_1x1_hybrid_2x1", lambda f, m: in_groups(f, np.arange(8) // 4)),
    ],
)
def test_one_region_is_the_plain_strategy(name, plain):
    copies = region_copies(regions_named(name), FREQUENCY, mesh((4, 2)))
    np.testing.assert_array_equal(copies.share, plain(FREQUENCY, mesh((4, 2))))
    np.testing.assert_array_equal(copies.mean_share(), copies.share)


def test_all_plans_of_a_machine():
    names = [regions.name for regions in all_regions(mesh((2, 4)), 8, 2)]
    inside = ["hybrid_1x2", "hybrid_2x1"]
    assert names == [
        f"regions_{cut}_{each}"
        for cut, groups in (("1x2", inside), ("2x1", ["hybrid_1x2"]))
        for each in ("tp", "ep", *groups)
    ]
    assert [regions.name for regions in all_regions(switch(8, 1.0, 0.0), 8, 4)] == ["regions_4_tp", "regions_4_ep"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "regions_3x1_tp",
            "regions_3x1_tp on this machine: a 4x2 mesh cannot be cut into 3x1 .* x into one of 1, 2, 4",
        ),
        ("regions_3_tp", "regions_3_tp on this machine: needs equal groups of 8 nodes; use one of 1, 2, 4, 8"),
        ("regions_1x2_hybrid_3x1", "the groups of regions_1x2_hybrid_3x1 in a region: a 4x1 mesh cannot be cut"),
        ("regions_2_hybrid_2x1", "rectangles are of a mesh, which these nodes are not; use 2 alone"),
    ],
)
def test_regions_that_do_not_divide_are_refused(name, message):
    with pytest.raises(PlanError, match=message):
        region_copies(regions_named(name), FREQUENCY, mesh((4, 2)))


def test_numbers_of_regions_that_divide_no_machine_are_refused():
    with pytest.raises(PlanError, match="3 regions do not divide a machine of 8 nodes; use one of 1, 2, 4, 8"):
        all_regions(mesh((4, 2)), 8, 3)
