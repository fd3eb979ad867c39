"""Settings all tests share: a compilation cache kept between runs, and where the reference data is."""

import gc
import os
import signal
import threading
from collections.abc import Callable, Generator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import settings
from jax._src.interpreters import mlir

ROOT = Path(__file__).resolve().parents[1]

if version("jaxtyping") == "0.3.11":  # uses its inner parts, which may change
    import type_checks

    type_checks.install()  # before anything of jaxmoe is imported

SMALL_SCENARIO = """
hardware:
  mesh_shape: [2, 2]
  die: {compute_TFLOPs_per_s: 1}
  link: {bandwidth_GB_per_s: 10}
  router: {chunk_B: 64}
model: {hidden_size: 64, expert_size: 128, num_experts: 4, top_k: 2, moe_layer_ids: {first: 3, count: 2, step: 2}}
workload: {batch_tokens: 8, trace: {kind: synthetic, tokens: 64}}
costs: {bytes_per_element: 4, weight_bytes_per_element: 4}
evaluation: {batches: 5}
validation: {batches: 2}
tuning:
  {exchanges: [reduce_scatter, ring_both_ways, rings], restarts: 2, steps: 2, batches_per_step: 1,
   refine_steps: 2, refine_chains: 1, refine_batches: 2}
"""

jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
# Also what compiles in no time: tests compile thousands of such functions, and parallel workers many of them alike.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
# Where in the sources every operation stands takes a part of the time to compile it, and no test reads it.
jax.config.update("jax_traceback_in_locations_limit", 0)

# Tests compile far more than they run. The README's first command is compiled as for a user.
SOONER = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):  # an unknown flag ends the process
    SOONER += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


CONTEXT_USES = 200  # a context keeps the constants of all programs that were written in it


class _SharedContexts(threading.local):
    """Gives many programs one MLIR context: to make one takes twice as long as to write a small program in it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.left = make, 0

    def __call__(self) -> Any:
        if self.left == 0:
            self.context, self.left = self.make(), CONTEXT_USES
        self.left -= 1
        return self.context


if jax.__version_info__ < (0, 11):  # JAX's own, which may change
    mlir.make_ir_context = _SharedContexts(mlir.make_ir_context)

settings.register_profile("jaxmoe", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("jaxmoe")


def pytest_configure() -> None:
    """Before JAX has looked for devices; programs that tests start inherit it."""
    os.environ.setdefault("XLA_FLAGS", SOONER)
    # Numba keeps what it compiled whatever the level: a user's own must not be that of tests.
    os.environ.setdefault("NUMBA_OPT", "1")
    os.environ.setdefault("NUMBA_CACHE_DIR", str(ROOT / ".cache" / "numba"))


def pytest_sessionstart() -> None:
    """What users wait for to be compiled lightly is in tests not optimised at all; its own option overrides flags."""
    from jaxmoe import compiling  # not before jaxtyping looks at what is imported

    compiling.LIGHT.update(compiling.SOONER)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One more than there are cores: a fifth of the time a worker waits, for its disk or for programs it started."""
    return (yield) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Commands come last: what they need was compiled and kept by then, by the tests of its own."""
    items.sort(key=lambda item: "cli" in item.path.parts)


def pytest_collection_finish() -> None:
    """What is imported and collected stays until the end: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """Ctrl-C works in tests of it, also where they run in the background and were started with it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real traces and reference results beside the project; skips where it is absent."""
    folder = Path(os.environ.get("JAXMOE_SHARED", ROOT.parent / "shared"))
    if not (folder / "traces").is_dir():
        pytest.skip(f"needs the real traces and reference results, which are not at {folder}")
    return folder


@pytest.fixture(scope="session")
def configs() -> Path:
    """The project's own configuration files."""
    return ROOT / "configs"


@pytest.fixture(scope="session")
def kept_scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small scenario, for what many tests look at and none changes."""
    path = tmp_path_factory.mktemp("kept") / "small.yaml"
    path.write_text(SMALL_SCENARIO)
    return path


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """A scenario so small that every verb runs in moments."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL_SCENARIO)
    return path
