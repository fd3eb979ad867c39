"""A scenario so small that every verb runs in moments, and a way to call the command line in process."""

from collections.abc import Callable
from pathlib import Path

import pytest
from small_plan import LAYERS, some_shares
from typer.testing import CliRunner, Result

from jaxmoe.cli.app import app
from jaxmoe.placement import Placement, write_plan

SCENARIO = """
hardware:
  mesh_shape: [2, 2]
  die: {compute_TFLOPs_per_s: 1}
  link: {bandwidth_GB_per_s: 10}
  router: {chunk_B: 64}
model: {hidden_size: 64, expert_size: 128, num_experts: 4, top_k: 2, moe_layer_ids: {first: 3, count: 2, step: 2}}
workload: {batch_tokens: 8, trace: {kind: synthetic, tokens: 64}}
evaluation: {batches: 5}
validation: {batches: 2}
tuning: {restarts: 2, steps: 2, refine_steps: 2, refine_chains: 1, refine_batches: 2, batches_per_step: 1}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "results" / "run"


@pytest.fixture
def run() -> Callable[..., Result]:
    """Calls `jaxmoe` with these arguments."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "mine.npz"
    write_plan(path, Placement(some_shares(), (2, 2), "sharded", LAYERS))
    return path
