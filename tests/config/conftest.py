"""A configuration tree of a user's own, outside the project."""

from pathlib import Path

import pytest

FILES = {
    "hardware/mine.yaml": """
mesh_shape: [2, 3]
die: {compute_TFLOPs_per_s: 5, memory_bandwidth_GB_per_s: 400, memory_capacity_GB: 8}
link:
  bandwidth_GB_per_s: 50
  latency_ns: 100
ports: {injection_GB_per_s: 120}
router: {switching: cut_through, chunk_B: null}
links:
  - {from: [0, 1], to: [0, 2], one_way: true, bandwidth_GB_per_s: 25}
  - {from: [1, 0], to: [0, 0], one_way: true, latency_ns: 300}
""",
    "models/small.yaml": """
hidden_size: 64
expert_size: 128
num_experts: 8
top_k: 2
moe_layer_ids: {first: 1, count: 3, step: 2}
""",
    "workloads/plain.yaml": """
batch_tokens: 32
trace: {kind: synthetic, tokens: 256, skew: 1e-3}
""",
    "scenarios/one.yaml": """
hardware: mine
model: small
workload: plain
costs: {ffn_flops: 2hi, bytes_per_element: 2, weight_bytes_per_element: 1, exchange: fewest_hops}
strategies: {hybrid_regions: 3}
""",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the files above; the working folder is elsewhere."""
    for name, text in FILES.items():
        file = tmp_path / "tree" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return tmp_path / "tree"


@pytest.fixture
def scenario_file(tree: Path) -> Path:
    return tree / "scenarios" / "one.yaml"
