"""Every message names the place, the key path, the value and the remedy."""

from pathlib import Path

import pytest

from jaxmoe.config import ConfigError, load_hardware, load_scenario


def message(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_scenario(file, list(overrides))
    return str(caught.value)


# File, text in it, what it becomes, and what the message has to say.
BAD_FILES = {
    "negative": ("hardware/mine.yaml", "s: 50", "s: -50", ["link.bandwidth_GB_per_s is -50", "greater than 0", "GB/s"]),
    "tiny": ("hardware/mine.yaml", "s: 50", "s: 1e-40", ["link.bandwidth_GB_per_s is 1e-40", "at least 1e-12"]),
    "routing": (
        "hardware/mine.yaml",
        "[2, 3]",
        "[2, 3]\nrouting: zx",
        ['routing is "zx"', "'xy' or 'yx'", "directions"],
    ),
    "no die": (
        "hardware/mine.yaml",
        "die: {compute_TFLOPs_per_s: 5, memory_bandwidth_GB_per_s: 400, memory_capacity_GB: 8}",
        "",
        ["die is null (the default)", "the compute and memory of a node", "for example die: {", "jaxmoe network"],
    ),
    "zero": (
        "hardware/mine.yaml",
        "s: 50",
        "s: 0",
        ["link.bandwidth_GB_per_s is 0", "greater than 0", "for example 50"],
    ),
    "nan": ("hardware/mine.yaml", "s: 50", "s: .nan", ["link.bandwidth_GB_per_s is NaN", "finite", "for example 50"]),
    "infinite": ("hardware/mine.yaml", "s: 50", "s: .inf", ["link.bandwidth_GB_per_s is Infinity", "finite", "GB/s"]),
    "overflow": ("hardware/mine.yaml", "s: 50", "s: 1e999", ["link.bandwidth_GB_per_s is Infinity", "finite"]),
    "B/s": ("hardware/mine.yaml", "s: 50", "s: 50e9", ["link.bandwidth_GB_per_s is 50000000000.0", "at most 1e+09"]),
    "text": (
        "hardware/mine.yaml",
        "s: 50",
        "s: 50 GB/s",
        ['link.bandwidth_GB_per_s is "50 GB/s"', "expected a number"],
    ),
    "misspelt": (
        "hardware/mine.yaml",
        "  bandwidth_GB_per_s: 50",
        "  bandwith_GB_per_s: 50",
        ["link.bandwith_GB_per_s is not a known key", "50", "Did you mean bandwidth_GB_per_s?", "latency_ns"],
    ),
    "nothing like it": (
        "models/small.yaml",
        "top_k: 2",
        "top_k: 2\nzzz: 1",
        ["zzz is not", "Remove it", "hidden_size"],
    ),
    "missing": ("models/small.yaml", "top_k: 2", "", ["top_k is missing", "experts that a token chooses", "example 2"]),
    "boolean": ("models/small.yaml", "top_k: 2", "top_k: true", ["top_k is true", "expected a whole number"]),
    "fraction": ("models/small.yaml", "top_k: 2", "top_k: 2.5", ["top_k is 2.5", "expected a whole number"]),
    "too many": ("models/small.yaml", "top_k: 2", "top_k: 9", ["top_k is 9", "at most num_experts, 8", "Lower top_k"]),
    "on": ("scenarios/one.yaml", "fewest_hops", "on", ["costs.exchange is true", "expected text", "quote"]),
    "choice": (
        "scenarios/one.yaml",
        "fewest_hops",
        "near",
        ['costs.exchange is "near"', "lowest_host", "_split_tree", "rings_2x4", "Write one of them"],
    ),
    "gather": (
        "scenarios/one.yaml",
        "exchange",
        "gather",
        ['costs.gather is "fewest_hops"', "in place of gather", "Write exchange: fewest_hops"],
    ),
    "schedule": (
        "scenarios/one.yaml",
        "strategies",
        "schedule: pipelined\nstrategies",
        ['schedule is "pipelined"', "serial, overlap, pipelined(m), idle_links", "for example pipelined(2)"],
    ),
    "channel": (
        "hardware/mine.yaml",
        ", memory_bandwidth_GB_per_s: 400, memory_capacity_GB: 8}",
        "}\nmemory: [{name: hbm, bandwidth_GB_per_s: 9, nodes_per_channel: 4}]",
        ["memory.0.nodes_per_channel is 4", "a divisor of the 6 nodes", "Write one of 1, 2, 3, 6"],
    ),
    "memory twice": (
        "hardware/mine.yaml",
        "link:",
        "memory: [{name: hbm, bandwidth_GB_per_s: 9}]\nlink:",
        ["die.memory_bandwidth_GB_per_s is 400", "no value beside memory", "Remove it"],
    ),
    "level": (
        "hardware/mine.yaml",
        "link:",
        "memory: [{name: hbm}]\nlink:",
        ["memory.0.bandwidth_GB_per_s is missing", "one channel in GB/s"],
    ),
    "tile": (
        "hardware/mine.yaml",
        "{compute",
        "{gemm: {kind: tiled, tile_tokens: 0, tile_columns: 1}, compute",
        ["die.gemm.tile_tokens is 0", "at least 1"],
    ),
    "products": (
        "hardware/mine.yaml",
        "{compute",
        "{gemm: {kind: table}, compute",
        ['die.gemm.kind is "table"', "'tiled', 'measured'", "full rate"],
    ),
    "empty section": (
        "hardware/mine.yaml",
        "ports: {injection_GB_per_s: 120}",
        "ports:",
        ["ports is null", "a mapping"],
    ),
    "one side": ("hardware/mine.yaml", "[2, 3]", "[2]", ["mesh_shape is [2]", "two whole numbers", "[4, 8]"]),
    "side": ("hardware/mine.yaml", "[2, 3]", "[2, 65]", ["mesh_shape.1 is 65", "at most 64", "1 to 64"]),
    "one node": ("hardware/mine.yaml", "[2, 3]", "[1, 1]", ["mesh_shape is [1, 1]", "at least two nodes", "larger"]),
    "regions": (
        "scenarios/one.yaml",
        "regions: 3",
        "regions: 4",
        ["strategies.hybrid_regions is 4", "2x3", "1, 2, 3, 6"],
    ),
    "outside": ("hardware/mine.yaml", "to: [0, 2]", "to: [0, 3]", ["links.0.to is [0, 3]", "2x3 mesh", "y below 3"]),
    "no link": (
        "hardware/mine.yaml",
        "to: [0, 2]",
        "to: [1, 2]",
        ["links.0.to is [1, 2]", "neighbour of [0, 1]", "Name"],
    ),
    "twice": (
        "hardware/mine.yaml",
        "from: [1, 0], to: [0, 0]",
        "from: [0, 1], to: [0, 2]",
        ["links.1 is", "each direction of a link once"],
    ),
    "no ends": (
        "hardware/mine.yaml",
        "to: [0, 0], one_way: true",
        "one_way: true",
        ['links.1 is ["from"]', "from and to, or row, or column"],
    ),
    "no such column": (
        "hardware/mine.yaml",
        "from: [1, 0], to: [0, 0], one_way: true",
        "column: 3",
        ["links.1.column is 3", "a column of the 2x3 mesh", "below 3"],
    ),
    "a column one way": (
        "hardware/mine.yaml",
        "from: [1, 0], to: [0, 0], one_way: true",
        "column: 2, one_way: true",
        ["links.1.one_way is true", "false for a whole row or column"],
    ),
    "link and its row": (
        "hardware/mine.yaml",
        "from: [1, 0], to: [0, 0], one_way: true",
        "row: 0",
        ["links.1 is [[0, 1], [0, 2]]", "each direction of a link once"],
    ),
    "link key": (
        "hardware/mine.yaml",
        "latency_ns: 300",
        "latency: 3",
        ["links.1.latency is not", "Did you mean latency_ns?"],
    ),
    "no node": (
        "hardware/mine.yaml",
        "links:",
        "dies: [{nodes: [0, 6], compute_TFLOPs_per_s: 2}]\nlinks:",
        ["dies.0.nodes is 6", "below the 6 nodes", "Write 0 to 5"],
    ),
    "no row of dies": (
        "hardware/mine.yaml",
        "links:",
        "dies: [{row: 2, compute_TFLOPs_per_s: 2}]\nlinks:",
        ["dies.0.row is 2", "a row of the 2x3 mesh", "Write one below 2"],
    ),
    "dies of nothing": (
        "hardware/mine.yaml",
        "links:",
        "dies: [{compute_TFLOPs_per_s: 2}]\nlinks:",
        ["dies.0 is []", "nodes, or row, or column", "Write the numbers of these nodes"],
    ),
    "die of a row and by number": (
        "hardware/mine.yaml",
        "links:",
        "dies: [{row: 0, compute_TFLOPs_per_s: 2}, {nodes: [1], memory_capacity_GB: 2}]\nlinks:",
        ["dies.1.nodes is 1", "each node once", "Merge"],
    ),
    "die twice": (
        "hardware/mine.yaml",
        "links:",
        "dies: [{nodes: [0], compute_TFLOPs_per_s: 2}, {nodes: [1, 0], memory_capacity_GB: 2}]\nlinks:",
        ["dies.1.nodes is 0", "each node once", "Merge"],
    ),
    "die without a common number": (
        "hardware/mine.yaml",
        ", memory_capacity_GB: 8}",
        "}\ndies: [{nodes: [0], memory_capacity_GB: 2}]",
        ["dies.0.memory_capacity_GB is 2", "no value where die.memory_capacity_GB is null", "remove it"],
    ),
    "kind": (
        "workloads/plain.yaml",
        "synthetic",
        "random",
        ['trace.kind is "random"', "'file', 'synthetic'", "Write the trace as a mapping"],
    ),
    "kind of half a pair": (
        "workloads/plain.yaml",
        "kind: synthetic",
        'kind: "\\ud800"',
        ['trace.kind is "\\ud800"', "'file', 'synthetic'"],
    ),
    "no kind": (
        "workloads/plain.yaml",
        "kind: synthetic, ",
        "",
        ["trace is {", "a key 'kind'", "{kind: file, path: ..}"],
    ),
    "of that kind": (
        "workloads/plain.yaml",
        "skew",
        "skw",
        ["trace.skw is not", "0.001", "Did you mean skew?", "tokens"],
    ),
    "no path": (
        "workloads/plain.yaml",
        "synthetic, tokens: 256, skew: 1e-3",
        "file",
        ["trace.path is missing", "the path"],
    ),
    "no process": (
        "workloads/plain.yaml",
        "synthetic, tokens: 256, skew: 1e-3",
        "process",
        ["trace.path is missing", "the path of a process.npz", "fitted/process.npz"],
    ),
    "no preset": (
        "workloads/plain.yaml",
        "synthetic, tokens: 256, skew: 1e-3",
        "preset",
        ["trace.preset is missing", "the name of a preset", "deepseek-v3"],
    ),
    "skewed preset": (
        "workloads/plain.yaml",
        "synthetic",
        "preset, preset: kimi-k2",
        ["trace.skew is not", "Remove it", "kind, preset, tokens, seed"],
    ),
    "batch": ("workloads/plain.yaml", "s: 32", "s: 512", ["batch_tokens is 512", "at most trace.tokens, 256", "Lower"]),
    "batch of a preset": (
        "workloads/plain.yaml",
        "synthetic, tokens: 256, skew: 1e-3",
        "preset, preset: kimi-k2, tokens: 31",
        ["batch_tokens is 32", "at most trace.tokens, 31"],
    ),
    "same key": (
        "models/small.yaml",
        "top_k: 2",
        "top_k: 2\ntop_k: 4",
        ["line 6, column 1", "'top_k' is there twice", "keep one"],
    ),
    "key on": ("models/small.yaml", "top_k: 2", "on: 2", ["line 5, column 1", "'on' is not text", "quotes"]),
    "malformed": ("models/small.yaml", "top_k: 2", "top_k: [2", ["line 6, column ", "not valid YAML", "Correct"]),
    "tab": ("hardware/mine.yaml", "  latency_ns", "\tlatency_ns", ["line 6, column 1", "'\\t'", "Correct"]),
    "bad date": ("models/small.yaml", "top_k: 2", "top_k: 2024-13-45", ["not valid YAML", "month", "Correct"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_named_with_key_value_and_remedy(tree, scenario_file, case):
    name, old, new, needles = BAD_FILES[case]
    text = (tree / name).read_text()
    assert old in text
    (tree / name).write_text(text.replace(old, new, 1))
    said = message(scenario_file)
    assert said.startswith(str(tree / name))
    assert "\n" not in said
    for needle in needles:
        assert needle in said


BAD_OVERRIDES = {
    "hardware.link.bandwith_GB_per_s=1": ["hardware.link.bandwith_GB_per_s is not", "Did you mean bandwidth_GB_per_s?"],
    "hardware.lnk.latency_ns=1": ["hardware.lnk is not a known key", '{"latency_ns": 1}', "Did you mean link?"],
    "tunning.steps=1": ["tunning is not a known key", "Did you mean tuning?"],
    "hardware.link.latency_ns=-1": ["hardware.link.latency_ns is -1", "at least 0", "in ns", "leave the key out"],
    "costs.exchange=no": ["costs.exchange is false", "expected text", "YAML takes a bare on, off, yes and no"],
    "tuning.learning_rate=0": ["tuning.learning_rate is 0", "greater than 0", "0.05"],
    "tuning.max_temperature.stop=1": ["tuning.max_temperature.stop is 1", "at most start, 0.1", "raise start"],
    "tuning.exchanges=[rings, near]": ['tuning.exchanges.1 is "near"', "least_loaded", "Write one of them"],
    "tuning.exchanges=rings": ['tuning.exchanges is "rings"', "expected a list", "as a list of names"],
    "costs.dispatch_bytes_per_element=0": ["costs.dispatch_bytes_per_element is 0", "greater than 0", "in dispatch"],
    "costs.deciding.ns_per_choice=-1": ["costs.deciding.ns_per_choice is -1", "at least 0", "nanoseconds"],
    "costs.deciding={B_per_choice: 1}": ["costs.deciding.B_per_choice is not a known key", "B_per_token"],
    "costs.deciding=20": ["costs.deciding is 20", "expected a mapping", "or null for none"],
    "costs.metadata_bytes_per_choice=-1": ["costs.metadata_bytes_per_choice is -1", "at least 0"],
    "schedule=pipelined(0)": ['schedule is "pipelined(0)"', "pipelined(m)"],
    "schedule=pipelined(9999)": ['schedule is "pipelined(9999)"', "workload.batch_tokens", "Lower the number"],
    "tuning.seed=-1": ["tuning.seed is -1", "at least 0"],
    "seed=4294967296": ["seed is 4294967296", "less than 4.29497e+09"],
    "name=5": ["name is 5", "expected text", "a name for tables"],
    "hardware=mime": ["hardware is 'mime'", "Did you mean mine?", "hardware/mime.yaml"],
    "hardware=../hardware/mine": ["hardware is '../hardware/mine'", "Write one of mine"],
    "hardware.kind=tours": ['hardware.kind is "tours"', "one of 'mesh', 'wafers'", "'clusters', 'graph'"],
    "hardware.die=null": ["hardware.die is null", "the compute and memory of a node", "for example die: {"],
    "hardware=7": ["hardware is 7", "expected a mapping", "the name of a file in hardware/"],
    "hardware.mesh_shape.0=8": ["hardware.mesh_shape.0 cannot be set", "hardware.mesh_shape is [2, 3]", "as a whole"],
    "validation.batches=100": [
        "validation.batches is 100",
        "at most evaluation.batches, 64",
        "raise evaluation.batches",
    ],
    "workload.sampling=[1, 2": ["workload.sampling, line 1", "not valid YAML"],
    "workload.trace={kind: preset, preset: 7}": ["workload.trace.preset is 7", "the name of a preset"],
    "workload.trace={kind: file, kind: file}": ["workload.trace", "'kind' is there twice"],
    "seed": ["'seed' is not an override", "expected key.path=value", "for example --set"],
    "=3": ["'=3' is not an override", "for example --set"],
    "a..b=3": ["'a..b=3' is not an override", "for example --set"],
    "seed=": ["'seed=' is not an override", "for example --set"],
}


@pytest.mark.parametrize("override", BAD_OVERRIDES)
def test_a_bad_override_is_named(scenario_file, override):
    said = message(scenario_file, override)
    assert said.startswith("--set")
    for needle in BAD_OVERRIDES[override]:
        assert needle in said


def test_a_default_that_no_longer_fits_is_called_one(scenario_file):
    said = message(scenario_file, "evaluation.batches=1")
    assert said.startswith(f"{scenario_file}: validation.batches is 2 (the default); expected at most")


def test_an_unknown_reference_lists_what_there_is(tree, scenario_file):
    scenario_file.write_text(scenario_file.read_text().replace("model: small", "model: smal"))
    said = message(scenario_file)
    assert said.startswith(f"{scenario_file}: model is 'smal'; expected the name of a file in {tree / 'models'}")
    assert "Did you mean small?" in said


def test_a_reference_without_any_folder_says_where_to_make_one(tree, scenario_file):
    (tree / "workloads" / "plain.yaml").unlink()
    said = message(scenario_file)
    assert "workload is 'plain'" in said
    assert "Make workloads/plain.yaml, or write its content" in said


def test_a_missing_file_suggests_its_neighbours(scenario_file):
    assert message(scenario_file.with_name("ome.yaml")).endswith("ome.yaml: no such file. Did you mean one.yaml?")
    assert "YAML files there: one.yaml." in message(scenario_file.with_name("entirely-else"))
    assert "no folder" in message(scenario_file.parent / "nowhere" / "one.yaml")


@pytest.mark.parametrize(("text", "got"), [("", "empty"), ("- 1\n", "a list"), ("hello\n", "a str")])
def test_a_file_that_is_no_mapping(scenario_file, text, got):
    scenario_file.write_text(text)
    assert message(scenario_file).startswith(f"{scenario_file}: the file is {got}; expected a mapping. Write")


def test_a_folder_or_binary_file_cannot_be_read(tree, scenario_file):
    assert "cannot be read: Is a directory" in message(tree)
    scenario_file.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in message(scenario_file)


def test_a_file_of_the_working_folder_is_named_from_there(tree, monkeypatch):
    monkeypatch.chdir(tree)
    assert message(Path("scenarios/one.yaml"), "evaluation.batches=1").startswith("scenarios/one.yaml: ")


def test_several_mistakes_take_a_line_each_up_to_a_limit(tree):
    said = message(tree / "hardware" / "mine.yaml").splitlines()
    assert len(said) == 6
    assert "mesh_shape is not a known key" in said[0]
    assert said[-1] == "... and 4 more"


def test_a_hardware_file_alone_is_checked_alike(tree):
    with pytest.raises(ConfigError, match=r"^--set: die.compute_TFLOPs_per_s is 0; expected a number greater than 0"):
        load_hardware(tree / "hardware" / "mine.yaml", ["die.compute_TFLOPs_per_s=0"])
