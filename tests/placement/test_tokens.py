"""Token layouts: the paper's 4x4 case by hand, every mesh up to 12 x 12, and what is refused."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.hardware.cuts import grid_ring, has_unit_ring
from jaxmoe.hardware.networks import hop_counts, link_ends
from jaxmoe.placement.token_layout import (
    LAYOUTS,
    TokenLayoutError,
    custom_layout,
    hierarchical_layout,
    links_inside_domains,
    successive_layout,
    token_layout,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "studies" / "moentwine"))
from layouts import average_hops, domain_area, overlapping_domains, ring_step_hops

sys.path.pop(0)

SIDES = list(itertools.product(range(2, 13), repeat=2))


CASES = [((x, y), tp) for x, y in SIDES for tp in range(1, x * y + 1) if x * y % tp == 0]
some = st.sampled_from(CASES)


def test_domains_of_the_papers_mesh():
    # moentwine IV-A and IV-B1: 2.7 hops and boxes of 3x3 that all overlap; half the hops and 2x2 that do not.
    baseline, er = (token_layout(name, (4, 4), 4) for name in ("baseline", "er"))
    assert average_hops(baseline) == pytest.approx(8 / 3)
    assert average_hops(er) == pytest.approx(4 / 3)
    assert domain_area(baseline).tolist() == [9] * 4
    assert domain_area(er).tolist() == [4] * 4
    assert len(overlapping_domains(baseline)) == 6
    assert overlapping_domains(er) == []


def test_groups_of_the_papers_mesh():
    baseline, er = (token_layout(name, (4, 4), 4) for name in ("baseline", "er"))
    assert baseline.group.reshape(4, 4).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]
    assert baseline.domain.reshape(4, 4).tolist() == [[0, 1, 0, 1], [2, 3, 2, 3]] * 2
    # The same the other way round (Fig. 8c).
    assert er.domain.tolist() == baseline.group.tolist()
    assert er.group.tolist() == baseline.domain.tolist()
    assert set(ring_step_hops(baseline).ravel()) == {1}
    assert set(ring_step_hops(er).ravel()) == {2}


def test_the_nearest_members_of_the_baseline_are_two_hops_away():
    assert average_hops(token_layout("baseline", (4, 4), 4, fetch="nearest")) == 2.0


def test_nearest_fetching_crosses_domains():
    layout = token_layout("er", (8, 8), 4, fetch="nearest")
    assert (layout.domain[layout.fetch] != layout.domain).any()
    assert average_hops(layout) < average_hops(token_layout("er", (8, 8), 4))


def test_domains_of_some_meshes_do_not_overlap_under_er():
    some = [case for case in CASES if case[1] > 1][::40]
    assert all(overlapping_domains(token_layout("er", *case)) == [] for case in some)


@pytest.mark.slow
def test_domains_never_overlap_under_er():
    # TP = 1 leaves one domain; without it there are 774 meshes and groups.
    several = [case for case in CASES if case[1] > 1]
    assert len(several) == 774
    assert {a * b for a in (1, 2, 3, 6) for b in (1, 2, 4)} == {tp for shape, tp in CASES if shape == (6, 4)}
    assert all(overlapping_domains(token_layout("er", *case)) == [] for case in several)


def test_a_ring_step_takes_the_longer_side_of_a_tile():
    for shape, tp in CASES:
        layout = token_layout("er", shape, tp)
        tile = [len(np.unique(side)) for side in np.unravel_index(np.flatnonzero(layout.domain == 0), shape)]
        cut = shape[0] // tile[0], shape[1] // tile[1]
        steps = ring_step_hops(layout)
        assert tile[0] * tile[1] * tp == shape[0] * shape[1]
        if not has_unit_ring(*cut):
            assert steps.max() <= max(2 * max(tile), sum(tile))
        elif tp > 1:
            sides = [side for side, tiles in zip(tile, cut, strict=True) if tiles > 1]
            assert steps.max() == max(sides)


def hop_by_hop(shape, source, destination):
    """Where messages on XY paths are at first and after every hop; those that have arrived stay there."""
    (x, y), (to_x, to_y) = np.divmod(source, shape[1]), np.divmod(destination, shape[1])
    moments = [source]
    while (moments[-1] != destination).any():
        y = np.where(x == to_x, y + np.sign(to_y - y), y)
        x = x + np.sign(to_x - x)
        moments.append(x * shape[1] + y)
    return np.array(moments)


def test_rings_never_meet_on_a_link_hop_by_hop():
    # IV-B2: "time-staggered, so there is no link conflict". All messages of a step move one hop a round.
    wafers = [("her", ((8, 8), tp, wafer)) for wafer in ((4, 4), (8, 4), (4, 2)) for tp in (2, 4, 8)]
    kept = 0
    for name, case in [("er", case) for case in CASES] + wafers:
        layout = token_layout(name, *case)
        shape, ring = layout.shape, layout.ring
        sides = [len(np.unique(side)) for side in np.unravel_index(np.flatnonzero(layout.domain == 0), shape)]
        cut = shape[0] // sides[0], shape[1] // sides[1]
        if layout.tp == 1 or (name == "er" and not has_unit_ring(*cut)):
            continue
        kept += 1
        ways = [(ring.ravel(), np.roll(ring, -1, axis=1).ravel())]
        moves = [hop_by_hop(shape, *way) for way in (ways if layout.tp == 2 else [*ways, ways[0][::-1]])]
        assert len(moves[0]) - 1 == ring_step_hops(layout).max()
        for before, after in zip(np.hstack(moves)[:-1], np.hstack(moves)[1:], strict=True):
            links = before[before != after] * layout.num_nodes + after[before != after]
            assert len(np.unique(links)) == len(links)
    assert kept > 400


def test_grids_without_a_unit_ring():
    # 6x6 with TP 3 (a line of tiles) and 9 (3x3): a step of two tiles, or one that is diagonal.
    for tp, longest in ((3, 4), (9, 4)):
        steps = ring_step_hops(token_layout("er", (6, 6), tp))
        assert (steps == 2).any()
        assert steps.max() == longest


@given(st.integers(1, 9), st.integers(1, 9))
def test_rings_through_grids(across, along):
    ring = grid_ring(across, along)
    assert sorted(ring.tolist()) == list(range(across * along))
    hops = hop_counts((across, along))[ring, np.roll(ring, -1)]
    assert hops.max() <= (1 if has_unit_ring(across, along) else 2)
    if min(across, along) > 1:
        assert (hops > 1).sum() <= 1


@given(some, st.sampled_from(["baseline", "er"]), st.sampled_from(["domain", "nearest"]))
def test_every_device_has_one_place_and_fetches_from_members(case, name, fetch):
    shape, tp = case
    layout, nodes = token_layout(name, shape, tp, fetch=fetch), np.arange(shape[0] * shape[1])
    assert sorted(layout.ring.ravel().tolist()) == nodes.tolist()
    assert (layout.group[layout.ring] == np.arange(layout.num_groups)[:, None]).all()
    assert (layout.group[layout.fetch] == np.arange(layout.num_groups)[:, None]).all()
    # A domain has one member of every group; a member keeps what it has.
    assert (np.bincount(layout.domain * layout.num_groups + layout.group) == 1).all()
    assert (layout.fetch[layout.group, nodes] == nodes).all()
    hops = hop_counts(shape)
    if fetch == "domain":
        assert (layout.domain[layout.fetch] == layout.domain).all()
    else:
        least = hops[layout.ring].min(axis=1)
        assert (hops[layout.fetch, nodes] == least).all()


@given(st.sampled_from([((4, 4), (2, 2), 4), ((8, 8), (4, 4), 2), ((12, 6), (6, 6), 9), ((4, 12), (4, 4), 8)]))
def test_every_wafer_holds_all_tokens_under_her(case):
    shape, wafer, tp = case
    layout = token_layout("her", shape, tp, wafer)
    nodes = np.arange(layout.num_nodes)
    assert (layout.domain[layout.parts] == layout.domain).all()
    assert (layout.domain[layout.ring] == layout.domain[layout.ring[:, :1]]).all()
    # Parts of a group are at different devices, and each device has one part of one group of every wafer.
    assert all(len(set(parts[:, node])) == tp for parts in layout.parts for node in (0, nodes[-1]))
    held = np.bincount(layout.parts[:, :, 0].ravel(), minlength=len(nodes))
    wafers = layout.domain.max() + 1
    assert set(held[layout.domain == layout.domain[0]]) == {wafers}
    assert held.sum() == layout.num_groups * tp
    assert sorted(layout.wafer_rings.ravel().tolist()) == nodes.tolist()
    full = token_layout("her", shape, tp, wafer, all_gather=True)
    assert average_hops(full) <= average_hops(layout)
    assert (full.fetch[full.group, nodes] == nodes).all()


def test_without_the_all_gather_parts_come_from_all_members():
    layout = token_layout("er", (4, 4), 4, all_gather=False)
    assert layout.parts.shape == (4, 4, 16)
    assert (layout.parts == layout.ring[:, :, None]).all()
    # Rows 0..3 lie 0, 1, 2, 3 apart: mean 1.25 along each side, over 15 of 16 that are not the device itself.
    assert average_hops(layout) == pytest.approx(2.5 * 16 / 15)
    assert layout.domain.max() == 0


def test_slices_go_round_rings_of_a_domain():
    layout = token_layout("esp", (6, 6), 4)
    assert layout.sliced
    rings = layout.slice_rings
    assert (layout.domain[rings] == np.arange(4)[:, None]).all()
    assert hop_counts((6, 6))[rings, np.roll(rings, -1, axis=1)].max() == 2  # 3x3 devices
    rings = token_layout("esp", (4, 4), 4).slice_rings
    assert hop_counts((4, 4))[rings, np.roll(rings, -1, axis=1)].max() == 1


def test_links_between_and_inside_domains():
    ends = link_ends((4, 4))
    inside = links_inside_domains(token_layout("er", (4, 4), 4), ends)
    assert inside.sum() == 4 * 8  # of 48 links
    assert not links_inside_domains(token_layout("baseline", (4, 4), 4), ends).any()


def test_any_mapping_has_domains_of_equal_places():
    er = token_layout("er", (4, 4), 4)
    same = custom_layout((4, 4), er.ring)
    assert average_hops(same) == average_hops(er)
    assert (same.fetch == er.fetch).all()


def test_devices_of_switches_are_in_successive_groups():
    layout = successive_layout(4, 8, 4)
    assert layout.group.tolist() == np.repeat(np.arange(8), 4).tolist()
    assert layout.fetch[1].tolist() == [4, 5, 6, 7] * 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: token_layout("er", (4, 4), 5), "does not divide the 16 devices of 4x4; use one of 1, 2, 4, 8, 16"),
        (lambda: token_layout("baseline", (3, 2), 0), "use one of 1, 2, 3, 6"),
        (lambda: token_layout("her", (8, 4), 32, (4, 4)), "16 devices of 4x4; use one of 1, 2, 4, 8, 16"),
        (lambda: token_layout("ring", (4, 4), 4), "expected one of baseline, er, her"),
        (lambda: token_layout("er", (4, 4), 4, fetch="far"), "expected one of domain, nearest"),
        (lambda: token_layout("her", (4, 4), 4, (2, 2), fetch="nearest"), "use domain"),
        (lambda: token_layout("her", (4, 4), 4, (3, 2)), "3x2 do not tile a mesh of 4x4"),
        (lambda: custom_layout((2, 2), np.array([[0, 1], [1, 3]])), "device 1 stands more than once"),
        (lambda: custom_layout((2, 2), np.array([[0, 1], [2, 4]])), "names devices 0..4; the mesh has 0..3"),
        (lambda: custom_layout((2, 2), np.array([[0, 1]])), "device 2 is missing"),
        (lambda: successive_layout(4, 8, 3), "does not divide the 8 devices of a cluster; use one of 1, 2, 4, 8"),
    ],
)
def test_wrong_layouts_are_refused(call, message):
    with pytest.raises(TokenLayoutError, match=message):
        call()


def test_every_name_makes_a_layout():
    assert {token_layout(name, (4, 4), 4, (2, 2)).name for name in LAYOUTS} == set(LAYOUTS)


def test_blocks_on_every_wafer_have_rings_of_one_hop():
    # Where tokens are scattered over a wafer, entwined rings bring nothing: devices fetch from all of it anyway.
    er = token_layout("her", (8, 8), 4, (4, 4))
    blocks = hierarchical_layout((8, 8), token_layout("baseline", (4, 4), 4))
    assert average_hops(blocks) == average_hops(er)
    assert (ring_step_hops(blocks).max(), ring_step_hops(er).max()) == (1, 2)
    with pytest.raises(TokenLayoutError, match="3x3 do not tile"):
        hierarchical_layout((8, 8), token_layout("er", (3, 3), 3))
