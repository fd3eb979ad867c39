"""A sweep on a Ray cluster of three nodes, one of which is lost on the way."""

import pytest
from pyarrow import dataset
from sweep_keys import DIE, LINK

from jaxmoe.sweep import SweepError, evaluation, read_study, run, run_sweep
from jaxmoe.sweep.cluster import Cluster

AXES = {
    LINK: {"from": 1, "to": 9, "points": 150},
    DIE: [1, 2],
    "strategy": ["tp", "ep_balanced"],
    "exchange": ["own", "rings_3x5"],  # the second cannot be on this mesh
}


@pytest.fixture
def cluster(monkeypatch):
    """Three nodes with a worker each, the first of them with the sweep itself. Skips where there is no Ray."""
    pytest.importorskip("ray", reason="needs ray: pip install '.[ray]'")
    from ray.cluster_utils import Cluster as Nodes

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield nodes
    nodes.shutdown()


def table(folder):
    return dataset.dataset(folder / "points").to_table().sort_by("hash").to_pylist()


@pytest.mark.slow
def test_a_cluster_that_loses_a_node_computes_every_point_once(cluster, study, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "MOST", 10)
    whole, out = tmp_path / "whole", tmp_path / "out"
    for folder in (whole, out):
        folder.mkdir()
    path = study(axes=AXES)
    undisturbed = run_sweep(read_study(path), whole, lambda done, total: None)

    others = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    made, killed = [], []

    def kept(*given):
        made.append(Cluster(*given))
        return made[0]

    def progress(done, total):
        """Once all three nodes have evaluated something, one of the others is killed."""
        if made and not killed and len(made[0].chunks) == 3:
            killed.append((others[0].node_id, done))
            cluster.remove_node(others[0], allow_graceful=False)

    monkeypatch.setattr(run, "Cluster", kept)
    done = run_sweep(read_study(path), out, progress, ray=cluster.address)
    ((lost, before),) = killed
    assert before < 900
    assert done.devices == 3
    assert made[0].chunks[lost] < made[0].chunks.total() == 60  # of 10 points that can be
    assert (done.computed, done.groups) == (len(done.rows), undisturbed.groups)
    one, other = table(whole), table(out)
    assert len(one) == 1200
    assert len({row["hash"] for row in other}) == len(other)
    for row, same in zip(one, other, strict=True):
        for key, value in row.items():
            assert same[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    assert run_sweep(read_study(path), out, lambda done, total: None, ray=cluster.address).computed == 0


def test_without_ray_it_says_what_to_install(study, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxmoe.sweep.cluster.find_spec", lambda name: None)
    with pytest.raises(SweepError, match=r"--ray needs ray; install it with: .*pip install '.*\[ray\]'"):
        run_sweep(read_study(study(axes={LINK: [1]})), tmp_path, lambda done, total: None, ray="local")


@pytest.mark.parametrize(
    ("address", "told"),
    [("nowhere", "expected local, auto"), ("127.0.0.1:1", "no cluster answers there"), ("h:99999999", "no cluster")],
)
def test_an_address_without_a_cluster_is_one_error_in_moments(study, tmp_path, monkeypatch, address, told):
    monkeypatch.setattr("jaxmoe.sweep.cluster.find_spec", lambda name: True)
    with pytest.raises(SweepError, match=told) as error:
        run_sweep(read_study(study(axes={LINK: [1]})), tmp_path, lambda done, total: None, ray=address)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("points"))
