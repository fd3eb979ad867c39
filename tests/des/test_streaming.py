"""Micro-slices that flow: the figures of expert_streaming_fse_dp worked by hand, and what holds of every flow."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.arrays import full

from jaxmoe.des.buffers import BufferError
from jaxmoe.des.description import LayerDescription, Memory
from jaxmoe.des.fabric import fabric_of, paths_of, rows_of
from jaxmoe.des.streaming import COMPUTE, LOAD, SEND, Flow, Stream, stream
from jaxmoe.des.streaming_layer import Slicing, flow_of
from jaxmoe.hardware import Mesh

DIES = 4


def ring(needed: np.ndarray) -> np.ndarray:
    """The next die with tokens, round 0, 1, 2, ...; [expert, die]."""
    dies = needed.shape[1]
    ahead = (np.arange(dies)[:, None] + np.arange(1, dies + 1)) % dies
    return (np.arange(dies) + 1 + needed[:, ahead].argmax(axis=-1)) % dies


def flow(places: list[tuple[int, int]], needed: np.ndarray, held: bool, load: float = 4.0, **rules: object) -> Flow:
    """Micro-slices as (expert, die); computing and sending one take 1, no two transfers share a link."""
    expert, origin = np.array(places).T
    experts, dies = needed.shape
    settings = {
        "group": np.arange(experts),
        "following": ring(needed),
        "compute": np.ones((experts, dies)),
        "load": np.full(dies, load),
        "latency": np.zeros(dies),
        "channel": np.arange(dies),
        "send": np.ones((dies, dies)),
        "paths": rows_of([()] * dies**2),
        "capacity": np.full(dies, 64),
    }
    return Flow(expert, origin, np.full(len(expert), held), needed=needed, **(settings | rules))


def sliced(experts: int, each: int) -> list[tuple[int, int]]:
    """So many micro-slices of every expert on every die, in turns."""
    return [(expert, die) for _ in range(each) for expert in range(experts) for die in range(DIES)]


EVERYWHERE = np.ones((1, DIES), bool)


def computed(run: Stream, flow: Flow, die: int) -> list[tuple[float, int, int]]:
    """Begin, expert, and the die that the micro-slice comes from, of all that a die computes."""
    services = run.services
    assert services is not None
    mine = (services.kind == COMPUTE) & (services.die == die)
    which = services.slice[mine]
    return list(
        zip(services.begin[mine].tolist(), flow.expert[which].tolist(), flow.origin[which].tolist(), strict=True)
    )


def test_fig_4a_slice_by_slice():
    # A die computes its own four, then the four of each neighbour; while it computes one it sends it and gets one.
    case = flow(sliced(1, 4), EVERYWHERE, held=True, newest_first=False)
    run = stream(case, record=True)
    assert [origin for _, _, origin in computed(run, case, 0)] == [0] * 4 + [3] * 4 + [2] * 4 + [1] * 4
    assert run.seconds == 16
    # Four slots and one that fills, for twelve steps; then nothing comes any more: 4, 3, 2, 1.
    np.testing.assert_allclose(run.buffers.mean(16.0), (12 * 5 + 4 + 3 + 2 + 1) / 16)
    np.testing.assert_array_equal(run.buffers.peak, 5)


def test_fig_4b_the_newest_at_once():
    # Every micro-slice goes round before the die takes up its next.
    case = flow(sliced(1, 4), EVERYWHERE, held=True)
    run = stream(case, record=True)
    assert [origin for _, _, origin in computed(run, case, 0)] == [0, 3, 2, 1] * 4
    assert run.seconds == 16
    # In each round of four steps: what is left of its own, one that goes round, and one that fills but for the last.
    rounds = [5 + 5 + 5 + 4, 4 + 4 + 4 + 3, 3 + 3 + 3 + 2, 2 + 2 + 2 + 1]
    np.testing.assert_allclose(run.buffers.mean(16.0), sum(rounds) / 16)


def test_fig_4b_loaded_as_it_goes_needs_half_of_4a():
    # A load takes as long as a round: one slot fills from DDR, one is computed, one fills from the neighbour.
    run = stream(flow(sliced(1, 4), EVERYWHERE, held=False))
    assert run.seconds == 4 + 16
    np.testing.assert_array_equal(run.buffers.peak, 3)
    # Four steps with one slot; three rounds of 3, 3, 3, 2; the last without a load: 2, 2, 2, 1.
    np.testing.assert_allclose(run.buffers.mean(20.0), (4 + 3 * 11 + 7) / 20)
    before = (12 * 5 + 4 + 3 + 2 + 1) / 16
    assert (run.buffers.mean(20.0) < 0.55 * before).all()


def test_fig_6_loads_of_a_pair_keep_the_array_busy():
    # A load takes four steps, in which a die computes its own micro-slice of one expert and three of its neighbours.
    both = np.ones((2, DIES), bool)
    case = flow(sliced(2, 4), both, held=False, group=np.zeros(2, int))
    run = stream(case, record=True)
    assert run.seconds == 4 + 32
    turn = [(expert, origin) for expert in (0, 1) for origin in (0, 3, 2, 1)]
    steps = computed(run, case, 0)
    assert [begin for begin, _, _ in steps] == [*range(4, 36)]
    assert [(expert, origin) for _, expert, origin in steps] == turn * 4
    np.testing.assert_array_equal(run.buffers.peak, 3)


def test_fig_7a_an_expert_held_evenly():
    run = stream(flow(sliced(1, 1), EVERYWHERE, held=True))
    assert run.seconds == 4
    np.testing.assert_array_equal(run.compute_busy, 4)


def test_fig_7b_an_expert_held_unevenly():
    # M1 and M2 on die 0, M3 on die 1, M4 on die 2.
    case = flow([(0, 0), (0, 0), (0, 1), (0, 2)], EVERYWHERE, held=True)
    run = stream(case, record=True)
    services = run.services
    assert services is not None
    steps = {
        (begin, die): which + 1
        for kind, die, which, begin in zip(
            services.kind.tolist(), services.die.tolist(), services.slice.tolist(), services.begin.tolist(), strict=True
        )
        if kind == COMPUTE
    }
    assert [steps.get((0, die)) for die in range(4)] == [1, 3, 4, None]
    assert [steps.get((1, die)) for die in range(4)] == [2, 1, 3, 4]  # die 0 received nothing: rule 2
    assert [steps.get((2, die)) for die in range(4)] == [4, 2, 1, 3]
    assert [steps.get((3, die)) for die in range(4)] == [3, 4, 2, 1]
    assert [steps.get((4, die)) for die in range(4)] == [None, None, None, 2]
    assert run.seconds == 5


def test_fig_7c_three_experts_along_their_own_trajectories():
    needed = np.array([[1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 0, 1]], bool)
    case = flow([(0, 0), (1, 2), (2, 1), (2, 1)], needed, held=True)
    run = stream(case, record=True)
    assert computed(run, case, 0) == [(0, 0, 0), (1, 1, 2)]
    assert computed(run, case, 1) == [(0, 2, 1), (1, 0, 0), (2, 2, 1)]  # what is received comes before its own
    assert computed(run, case, 2) == [(0, 1, 2), (2, 0, 0)]
    # At 2 both die 1 and die 2 want to send to die 3, which receives one at a time.
    assert computed(run, case, 3) == [(1, 2, 1), (3, 2, 1), (4, 0, 0)]
    assert run.seconds == 5


def test_a_die_without_tokens_only_passes_on():
    needed = np.array([[1, 0, 0, 0]], bool)
    run = stream(flow([(0, 2)], needed, held=False))
    assert run.seconds == 4 + 1 + 1  # load, send, compute
    np.testing.assert_array_equal(run.compute_busy, [1, 0, 0, 0])


def test_rule_5_loads_where_there_is_most_room():
    # Die 0 loads twice. The first is with die 0 and on its way to die 1 when the second begins, so that goes to die 2.
    needed = np.array([[1, 1, 1, 0]], bool)
    places = [(0, 0), (0, 0)]
    run = stream(flow(places, needed, held=False, balanced=True, load=0.5), record=True)
    services = run.services
    assert services is not None
    assert services.die[services.kind == LOAD].tolist() == [0, 2]


def test_algorithm_1_takes_the_first_expert_for_an_idle_die():
    # Expert 0 keeps die 0 busy for long. Expert 1 is also of die 0, expert 2 of die 1, which is idle.
    needed = np.array([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]], bool)
    compute = np.array([[9.0], [1.0], [1.0]]) * np.ones((3, DIES))
    places = [(0, 0), (1, 0), (2, 0)]
    one = np.zeros(DIES, int)

    def order(matched: bool) -> list[int]:
        case = flow(places, needed, False, load=1.0, compute=compute, channel=one, matched=matched)
        services = stream(case, record=True).services
        assert services is not None
        return case.expert[services.slice[services.kind == LOAD]].tolist()

    assert order(False) == [0, 1, 2]
    assert order(True) == [0, 2, 1]


def random_flow(seed: int, dies: int, capacity: int, **rules: object) -> Flow:
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(1, 7))
    needed = rng.random((experts, dies)) < 0.6
    needed[:, rng.integers(dies)] = True
    places = [(e, int(rng.integers(dies))) for e in range(experts) for _ in range(rng.integers(1, 9))]
    shape = (2, dies // 2)
    return flow(
        places,
        needed,
        held=False,
        compute=rng.uniform(0, 4, (experts, dies)),
        load=1.0,
        send=rng.uniform(0.1, 3, (dies, dies)),
        paths=paths_of(Mesh.uniform(1.0, 0.0, shape=shape)).rows,
        capacity=np.full(dies, capacity),
        group=rng.integers(0, 3, experts),
        **rules,
    )


@given(
    seed=st.integers(0, 2**20),
    dies=st.sampled_from([2, 4, 6]),
    extra=st.integers(0, 3),
    newest=st.booleans(),
    balanced=st.booleans(),
    matched=st.booleans(),
    in_turn=st.booleans(),
)
def test_all_is_computed_once_within_the_buffers(seed, dies, extra, newest, balanced, matched, in_turn):
    # At the stated minimum of slots, one for every die, nothing ever comes to a halt.
    case = random_flow(
        seed, dies, dies + extra, newest_first=newest, balanced=balanced, matched=matched, in_turn=in_turn
    )
    run = stream(case, record=True)
    services = run.services
    assert services is not None
    done = np.zeros((len(case.expert), dies), int)
    computes, sends, loads = (services.kind == kind for kind in (COMPUTE, SEND, LOAD))
    np.add.at(done, (services.slice[computes], services.die[computes]), 1)
    np.testing.assert_array_equal(done, case.needed[case.expert])
    np.testing.assert_array_equal(np.sort(services.slice[loads]), np.arange(len(case.expert)))  # each once from DDR
    assert run.loaded == len(case.expert)
    assert run.events == len(services.kind)
    assert (run.buffers.peak <= case.capacity).all()
    # One server does one thing at a time.
    for die in range(dies):
        for mine in (
            computes & (services.die == die),
            sends & (services.die == die),
            sends & (services.receiver == die),
        ):
            begin, end = np.sort(services.begin[mine]), np.sort(services.end[mine])
            assert (begin[1:] >= end[:-1] - 1e-12).all()
    # Nothing is computed on a die before it is there.
    for which in range(len(case.expert)):
        own = services.slice == which
        loaded = services.end[own & loads].item()
        assert services.begin[own & (computes | sends)].min() >= loaded - 1e-12
    assert stream(case).seconds == run.seconds


def test_too_few_slots_are_told_before_the_run():
    with pytest.raises(BufferError, match=r"buffer has 3 slots, .* expert 0 pass 4 dies"):
        flow(sliced(1, 4), EVERYWHERE, held=False, capacity=np.full(DIES, 3))


def test_a_halt_is_told_with_the_state_of_the_buffers():
    case = flow(sliced(1, 4), EVERYWHERE, held=False)
    object.__setattr__(case, "capacity", np.array([3, 4, 4, 4]))  # past the check
    with pytest.raises(BufferError, match=r"computations are left; slots in use: .* of 3 on die 0"):
        stream(case)


# A layer laid out as a flow.


def layer(channels: int = DIES) -> LayerDescription:
    links = 8
    mesh = Mesh(full(links, 8.0), full(links, 0.0), shape=(2, 2))
    memory = Memory(
        np.full(channels, 2.0), np.zeros(channels), np.zeros(DIES, int) if channels < DIES else np.arange(DIES)
    )
    return LayerDescription(
        fabric_of(mesh, None, True), np.full(DIES, 10.0), 1.0, 1.0, 64.0, 160.0, "replicated", memory=(memory,)
    )


TOKENS = np.array([[1, 1, 1, 1], [2, 0, 0, 0], [0, 0, 0, 0]])


def laid_out(slicing: Slicing, description: LayerDescription | None = None, **changes: object) -> Flow:
    given = {
        "tokens": TOKENS,
        "groups": np.array([[1, 0], [2, -1]]),
        "following": ring(TOKENS > 0),
        "loading": np.ones(TOKENS.shape, bool),
    }
    return flow_of(layer() if description is None else description, slicing, **(given | changes))


def test_a_layer_is_cut_for_its_dies():
    case = laid_out(Slicing(2, 100.0, control=0.5))
    # Eight micro-slices of 8 B: 4 s of DDR, 1 s of a link; 160 FLOP of a token in eight parts at 10 FLOP/s are 2 s.
    assert np.bincount(case.expert).tolist() == [8, 8]
    np.testing.assert_allclose(case.load, 4.5)
    np.testing.assert_allclose(case.send[0, 1], 1.5)
    np.testing.assert_allclose(case.compute[0], 2.5)
    np.testing.assert_allclose(case.compute[1], [4.5, 0, 0, 0])
    assert case.capacity.tolist() == [12] * DIES
    # Rounds: every die one of expert 0 and one of expert 1, as the group says: 1 first.
    assert case.expert[:8].tolist() == [1] * 4 + [0] * 4
    assert case.origin[:8].tolist() == [0, 1, 2, 3] * 2
    run = stream(case)
    assert run.loaded * 8 == 2 * 64  # bytes of DDR: each expert with tokens once
    np.testing.assert_allclose(run.compute_busy, [8 * 2.5 + 8 * 4.5, 20, 20, 20])


def test_the_first_load_of_a_channel_waits_for_its_latency():
    slow = replace(layer(), memory=(replace(layer().memory[0], latency=np.array([1.0, 0, 0, 2])),))
    services = stream(laid_out(Slicing(2, 100.0), slow), record=True).services
    assert services is not None
    ends = [np.sort(services.end[(services.kind == LOAD) & (services.die == die)])[:2].tolist() for die in range(DIES)]
    assert ends == [[5, 9], [4, 8], [4, 8], [6, 10]]


def test_dies_with_tokens_may_load_alone():
    case = laid_out(Slicing(2, 100.0), loading=TOKENS > 0)
    assert set(case.origin[case.expert == 1].tolist()) == {0}
    assert np.bincount(case.origin[case.expert == 0]).tolist() == [2] * 4


def test_bad_input_is_one_clear_error():
    with pytest.raises(BufferError, match="a micro-slice has 8 B, but a die's buffer 7 B"):
        laid_out(Slicing(2, 7.0))
    with pytest.raises(BufferError, match="micro_slices is 0"):
        Slicing(0, 7.0)
    wrong = np.where(np.eye(3, DIES, dtype=bool), 9, ring(TOKENS > 0))
    with pytest.raises(ValueError, match=r"trajectory of expert 0 leads from die 0 to die 9, expected one of 0..3"):
        laid_out(Slicing(2, 100.0), following=wrong)
    with pytest.raises(ValueError, match="no channel"):
        laid_out(Slicing(2, 100.0), replace(layer(), memory=()))
    with pytest.raises(ValueError, match="expert 1 has tokens but is in no group"):
        laid_out(Slicing(2, 100.0), groups=np.array([[0]]))


def test_what_is_held_of_a_layer_is_not_loaded_again():
    # Of expert 0 every die has one of its two micro-slices, of expert 1 die 3 alone has both.
    held = np.array([[1, 1, 1, 1], [0, 0, 0, 2], [0, 0, 0, 0]])
    case = laid_out(Slicing(2, 100.0), held=held)
    assert np.bincount(case.expert[case.held]).tolist() == [4, 2]
    assert case.origin[case.held & (case.expert == 1)].tolist() == [3, 3]
    run = stream(case)
    assert run.loaded == 16 - 6
    np.testing.assert_allclose(run.load_busy, [3 * 4, 3 * 4, 3 * 4, 1 * 4])
    assert run.seconds < stream(laid_out(Slicing(2, 100.0))).seconds


def test_dies_may_share_a_channel():
    run = stream(laid_out(Slicing(2, 100.0), layer(channels=1)))
    np.testing.assert_allclose(run.load_busy, 16 * 4.0)
