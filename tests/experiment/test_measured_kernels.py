"""Measured tables of GPU kernels: token counts by hand, splits, what is refused, fits of made-up kernels."""

import csv
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.config.files import find_kernels
from jaxmoe.experiment.inputs import OptionError
from jaxmoe.experiment.measured_kernels.calibration import (
    FOLDS,
    KernelFit,
    calibrate_tables,
    folds_of,
    intervals_of,
    pooled,
    repeats,
    series_of,
)
from jaxmoe.experiment.measured_kernels.kinds import KINDS
from jaxmoe.experiment.measured_kernels.prediction import predict
from jaxmoe.experiment.measured_kernels.scores import by_kind
from jaxmoe.experiment.measured_kernels.tables import read_folder, read_table, write_columns
from jaxmoe.experiment.measured_kernels.token_counts import _power_law, loads_of
from jaxmoe.experiment.measured_kernels.transfer import spread_rows, transfer_tables
from jaxmoe.experiment.measured_kernels.tuned_tiles import tiles_of
from jaxmoe.hardware.gpu.files import KernelFile, KernelFileError, KnownKernel, at_sheet, read_kernels
from jaxmoe.hardware.gpu.sheet import SHEETS, Sheet

SHEET = Sheet.of(*SHEETS["h100_sxm"])
NAMES = {"framework": "TRTLLM", "op_name": "gemm", "kernel_source": "torch_flow", "gemm_dtype": "bfloat16"}
SIZES, SHAPES = (1, 4, 16, 64, 256, 1024, 4096), [(n, k) for n in (512, 1024, 4096, 8192) for k in (1024, 2048, 7168)]


def milliseconds(m: int, n: int, k: int) -> float:
    """A made-up GPU: 5 us, and the longer of bytes at 2.5 TB/s and FLOPs at 600 TFLOP/s."""
    return 5e-3 + 1e3 * max(2 * (m * k + n * k + m * n) / 2.5e12, 2 * m * n * k / 6e14)


def products(**changed: object) -> list[dict[str, object]]:
    rows = [{**NAMES, "m": m, "n": n, "k": k, "latency": milliseconds(m, n, k)} for n, k in SHAPES for m in SIZES]
    return [{**row, **changed} for row in rows]


def written(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


# Token counts.


def test_balanced_choices_by_hand():
    # Four tokens of two choices among eight experts, four apart: 0 4, 1 5, 2 6, 3 7.
    loads = loads_of(4, 8, 2, 1, "balanced")
    assert (loads.touched, loads.slots, loads.heaviest, loads.tokens) == (8, 8, 1, 4)
    half = loads_of(4, 8, 2, 2, "balanced")  # the first rank has experts 0 to 3
    assert (half.touched, half.slots, half.tokens) == (4, 4, 4)
    # Two tokens are spread: tokens at 0 and 2, so that experts 0 4 and 2 6 are touched.
    assert loads_of(2, 8, 2, 1, "balanced").touched == 4


def test_remote_choices_that_are_clamped_fall_on_the_first_expert():
    # Each token has one choice on each of two ranks: the timed rank computes both of them.
    loads = loads_of(64, 8, 2, 2, "balanced", "clamped")
    assert (loads.tokens, loads.slots) == (64, 128)
    assert loads.heaviest == 16 + 64


def test_groups_bring_what_is_left_to_the_first_experts():
    # Token t chooses t + 32 j of 256: one expert in each of eight groups. The first four groups stay, and experts 0 to
    # 3, or those after them, fill up: the first of eight ranks computes 1 + 4 choices of each token.
    loads = loads_of(320, 256, 8, 8, "balanced", "grouped")
    assert loads.slots == 5 * 320
    assert loads_of(320, 256, 8, 2, "balanced", "grouped").slots == 8 * 320


@pytest.mark.parametrize("ranks", [1, 4, 8])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (37, 16, 4), (4096, 64, 6)])
def test_power_laws_keep_every_choice_and_time_the_fullest_rank(tokens, experts, top_k, ranks):
    loads = loads_of(tokens, experts, top_k, ranks, "power_law_1.2")
    assert tokens * top_k / ranks <= loads.slots + 1e-9
    assert loads.heaviest <= tokens
    if ranks == 1:
        assert loads.slots == tokens * top_k
    assert loads.slots >= loads_of(tokens, experts, top_k, ranks, "power_law_1.01").slots * 0.9


def test_deepep_gives_each_expert_whole_blocks_of_rows():
    # 8 choices of 2,048 tokens: 16,384 of 256 experts. Even counts are not filled up: half a block each, of 32 experts.
    even = loads_of(2048, 256, 8, 8, "uniform", "blocks")
    assert (even.touched, even.slots, even.tiles[-1]) == (16, 2048, 16)
    # Each of the two experts of a rank has a block under a power law, though it has few choices.
    few = loads_of(128, 256, 8, 128, "power_law_1.2", "blocks")
    assert few.slots == few.touched * 128
    assert loads_of(128, 256, 8, 128, "power_law_1.2").slots < few.slots


@pytest.mark.parametrize("distribution", ["balanced", "power_law_1.2"])
def test_counts_are_as_of_single_tokens(distribution):
    # By hand: the choices of every token, one after the other.
    tokens, experts, top_k, ranks = 100, 16, 3, 4
    if distribution == "balanced":
        chosen = np.array([[(token + 6 * choice) % experts for choice in range(top_k)] for token in range(tokens)])
        draws = [chosen]
    else:
        draws = []
        for row in _power_law(tokens, experts, top_k, ranks, 1.2):
            flat = [expert for expert in sorted(range(experts), key=lambda e: (-row[e], e)) for _ in range(row[expert])]
            draws.append(np.array(flat).reshape(top_k, tokens).T)
    given = [(chosen < experts // ranks).any(axis=1).sum() for chosen in draws]
    loads = loads_of(tokens, experts, top_k, ranks, distribution, "clamped")
    assert loads.tokens == np.mean(given)
    assert loads.slots == np.mean(given) * top_k
    assert loads_of(tokens, experts, top_k, ranks, distribution).heaviest == np.mean(
        [np.bincount(chosen.ravel(), minlength=experts)[: experts // ranks].max() for chosen in draws]
    )


def test_an_unknown_distribution_is_refused():
    with pytest.raises(ValueError, match="zipf"):
        loads_of(4, 8, 2, 1, "zipf")


def test_tuned_tiles_are_told_by_gpu_kernel_and_cut():
    columns = {
        "num_experts": np.array([8, 8, 8]),
        "moe_ep_size": np.array([1, 1, 1]),
        "inter_size": np.array([14336, 14336, 14336]),
        "moe_tp_size": np.array([2, 1, 2]),
        "kernel_source": np.array(["sglang_fused_moe_triton"] * 2 + ["moe_torch_flow_cutlass"]),
        "moe_dtype": np.array(["bfloat16"] * 3),
        "device": np.array(["NVIDIA H100 80GB HBM3"] * 3),
    }
    assert tiles_of(columns).tolist() == ["tuned", "usual", ""]


# Splits.


def test_whole_shapes_are_held_out():
    rows = {"n": np.repeat([512, 1024, 2048, 4096, 8192], 4), "k": np.full(20, 1024), "m": np.tile([1, 2, 4, 8], 5)}
    folds = folds_of(KINDS["gemm"], rows)
    for n in (512, 1024, 2048, 4096, 8192):
        assert len(set(folds[rows["n"] == n])) == 1
    other = {name: np.concatenate([column, column]) for name, column in rows.items()}
    assert (folds_of(KINDS["gemm"], other)[:20] == folds).all()


def test_sizes_are_held_out_where_there_is_one_shape():
    rows = {"n": np.full(8, 512), "k": np.full(8, 1024), "m": np.arange(1, 9)}
    assert folds_of(KINDS["gemm"], rows).tolist() == [0, 1, 2, 3] * 2
    assert FOLDS == 4


def test_series_and_repeats():
    rows = {
        "n": np.array([1, 1, 2, 1]),
        "k": np.ones(4),
        "m": np.array([1, 2, 1, 2]),
        "gemm_dtype": np.array(["a"] * 4),
    }
    rows |= {"framework": np.array(["x"] * 4), "kernel_source": np.array(["y"] * 4)}
    series = series_of(KINDS["gemm"], rows)
    assert (series[0] == series[1] == series[3], series[0] == series[2]) == (True, False)
    assert repeats(KINDS["gemm"], rows).tolist() == [False, False, False, True]


def test_intervals_are_quantiles_of_decades_with_rows_enough():
    size = np.repeat([1.0, 10.0], [300, 20])
    ratio = np.concatenate([np.linspace(0.9, 1.1, 300), np.full(20, 2.0)])
    every, small = intervals_of(size, ratio, np.arange(320))
    assert small == (1.0, pytest.approx(0.91, abs=1e-3), pytest.approx(1.09, abs=1e-3))
    assert every[0] == 0
    assert every[2] == pytest.approx(2.0, abs=1e-2)
    # From three shapes, Student's t of two degrees of freedom is 2.92, of a normal 1.645; and the mean is off as well.
    _, few = intervals_of(size, ratio, np.arange(320) % 3)
    wider = 2.92 / 1.645 * (1 + 1 / 3) ** 0.5
    assert few == (1.0, pytest.approx(0.91**wider, abs=3e-3), pytest.approx(1.09**wider, abs=3e-3))


# Tables.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"latency": -1.0}, r"latency is -1 in row 1, and 84 rows are so; remove what is not above 0"),
        ({"latency": "fast"}, r"the column latency has a value that is no number"),
        ({"m": 0}, r"m is 0 in row 1"),
        ({"m": 1.5}, r"m is no whole number in row 1, and 84 rows are so"),
        ({"gemm_dtype": "fp3"}, r"gemm_dtype is 'fp3', expected one of bfloat16"),
    ],
)
def test_wrong_values_are_refused(tmp_path, changed, message):
    path = written(tmp_path / "gemm.csv", products(**changed))
    with pytest.raises(OptionError, match=message):
        read_table(path)


def test_copies_of_experts_are_refused(tmp_path):
    row = {"num_tokens": 4, "hidden_size": 64, "inter_size": 64, "topk": 2, "num_experts": 8, "moe_tp_size": 1}
    row |= {"moe_ep_size": 2, "moe_dtype": "bfloat16", "framework": "x", "op_name": "moe", "kernel_source": "y"}
    path = written(tmp_path / "moe.csv", [{**row, "distribution": "power_law_1.01_eplb", "latency": 1}])
    with pytest.raises(OptionError, match=r"distribution is 'power_law_1.01_eplb', expected balanced, uniform or"):
        read_table(path)


def test_missing_columns_are_named(tmp_path):
    rows = [{name: value for name, value in row.items() if name != "k"} for row in products()]
    with pytest.raises(OptionError, match="lacks k of a table of kind gemm; add what is missing"):
        read_table(written(tmp_path / "gemm.csv", rows))
    with pytest.raises(OptionError, match="has the columns a, which are of no kind that is known"):
        read_table(written(tmp_path / "odd.csv", [{"a": 1}]))


def test_a_folder_without_tables_and_a_file_that_is_none(tmp_path):
    with pytest.raises(OptionError, match="has no table of kernels; give a folder SYSTEM"):
        read_folder(tmp_path)
    path = tmp_path / "a.parquet"
    path.write_text("no")
    with pytest.raises(OptionError, match=r"cannot be read .*; give a Parquet or CSV file"):
        read_table(path)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_another_unit_is_noticed(tmp_path, factor):
    rows = [{**row, "latency": row["latency"] * factor} for row in products()]
    table = read_table(written(tmp_path / "gemm.csv", rows))
    with pytest.raises(OptionError, match="times as long as the data sheet says; latency has to be in ms"):
        calibrate_tables([table], SHEET, 0, lambda *_: None)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> KernelFit:
    """Products of the made-up GPU with 2 % of noise, of which one series is three times slow."""
    rng = np.random.default_rng(0)
    rows = [{**row, "latency": row["latency"] * np.exp(0.02 * rng.standard_normal())} for row in products()]
    rows = [{**row, "latency": row["latency"] * (3 if (row["n"], row["k"]) == (1024, 2048) else 1)} for row in rows]
    table = read_table(written(tmp_path_factory.mktemp("tables") / "gemm.csv", rows))
    assert len(list(pooled([table]))) == 1
    return calibrate_tables([table], SHEET, 0, lambda *_: None)[0]


def test_a_made_up_kernel_is_told_on_shapes_that_were_not_fitted(fitted):
    usual = np.isfinite(fitted.held_out) & ~fitted.slow
    off = np.abs(fitted.held_out / fitted.measured - 1)[usual]
    assert off.mean() < 0.12
    assert np.abs(fitted.roofline / fitted.measured - 1).mean() > 0.4
    slow = (fitted.rows["n"] == 1024) & (fitted.rows["k"] == 2048)
    assert (fitted.slow == slow).all()
    (scores,) = by_kind([fitted])
    assert (scores["backend"], scores["rows"], scores["slow"]) == ("trtllm", 84, 7)


def test_rows_are_predicted_with_an_interval(fitted, tmp_path):
    told = {"rows": 84}
    known = KnownKernel("gemm", dict(fitted.kernel), fitted.fitted, [(0.0, 0.9, 1.1)], told)
    file = KernelFile("h100_sxm", "made up", SHEET, (known,))
    rows = [{name: value for name, value in row.items() if name != "latency"} for row in products()]
    table = read_table(written(tmp_path / "gemm.csv", rows), timed=False)
    found = predict(table, file)
    assert found.upper == pytest.approx(1.1 * found.seconds)
    true = np.array([milliseconds(row["m"], row["n"], row["k"]) for row in rows]) * 1e-3
    usual = ~((table.columns["n"] == 1024) & (table.columns["k"] == 2048))
    assert np.abs(found.seconds / true - 1)[usual].mean() < 0.1

    # All fitted products were of whole tiles: what is of no whole one has no made-up price.
    odd = [{**NAMES, "m": 64, "n": 1000, "k": 1500}]
    (seconds,) = predict(read_table(written(tmp_path / "odd.csv", odd), timed=False), file).seconds
    assert seconds == pytest.approx(milliseconds(64, 1000, 1500) * 1e-3, rel=0.4)

    other = read_table(written(tmp_path / "other.csv", products(kernel_source="deepgemm")))
    (note,) = predict(other, file).notes
    assert "kernel_source deepgemm" in note
    assert "stands in, its interval may not hold" in note
    fp8 = predict(read_table(written(tmp_path / "fp8.csv", products(gemm_dtype="fp8"))), file)
    assert "gemm_dtype fp8" in fp8.notes[0]
    assert (fp8.seconds < found.seconds).all()  # half the bytes, twice the rate


def test_few_rows_move_the_kernel_of_another_gpu(fitted, tmp_path):
    # The same made-up GPU, but its tiles take twice as long and nobody measured more than 20 products of it.
    known = KnownKernel("gemm", dict(fitted.kernel), fitted.fitted, [(0.0, 0.9, 1.1)], {"rows": 84})
    base = KernelFile("h100_sxm", "made up", SHEET, (known,))
    rows = [{**row, "latency": 2 * milliseconds(row["m"], row["n"], row["k"])} for row in products()]
    (moved,) = transfer_tables([read_table(written(tmp_path / "gemm.csv", rows))], base, lambda *_: None)
    judged = np.isfinite(moved.held_out)
    assert judged.sum() == 84 - 20
    off = {name: np.median(np.abs(getattr(moved, name) / moved.measured - 1)[judged]) for name in ("base", "held_out")}
    assert off["base"] == pytest.approx(0.5, abs=0.05)  # by data sheet alone
    assert off["held_out"] < 0.15


def test_moved_rows_are_evenly_spaced_in_the_order_of_time():
    assert spread_rows(np.array([5.0, 1.0, 4.0, 2.0, 3.0]), 3).tolist() == [1, 4, 0]
    assert sorted(spread_rows(np.array([5.0, 1.0]), 20)) == [0, 1]


def test_another_data_sheet_moves_all_kernels(shipped):
    other = at_sheet(shipped, "h20_sxm")
    assert (other.system, float(other.sheet.bf16)) == ("h20_sxm", pytest.approx(148e12))
    assert other.source.endswith("at the data sheet of h20_sxm")
    assert at_sheet(shipped, None) is shipped
    with pytest.raises(KernelFileError, match="there is no data sheet of 'z9'; known are h100_sxm"):
        at_sheet(shipped, "z9")


# Tables of every kind, of shapes, heads, precisions and cuts that nobody measured.
OF = {"framework": "SGLang", "kernel_source": "new_kernel"}
HEADS = {"num_heads": 24, "num_key_value_heads": 3, "head_dim": 96, "window_size": 0, "kv_cache_dtype": "fp8"}
MLA = {"num_heads": 12, "kv_cache_dtype": "fp8"}
LAYER = {"hidden_size": 3000, "inter_size": 900, "topk": 5, "num_experts": 96, "moe_tp_size": 3, "moe_ep_size": 16}
LAYERS = [
    {**OF, **LAYER, "op_name": "moe", "moe_dtype": precision, "distribution": named}
    for precision in ("bfloat16", "int4_wo", "nvfp4")
    for named in ("balanced", "power_law_1.5")
]
DEEPSEEK = {**LAYER, "hidden_size": 7168, "inter_size": 2048, "topk": 8, "num_experts": 256, "moe_tp_size": 1}
WIDE = {**DEEPSEEK, "framework": "SGLang", "moe_dtype": "fp8_block", "kernel_source": "deepepmoe"}
INVENTED = {
    "gemm": ("m", [{**OF, "op_name": "gemm", "gemm_dtype": each, "n": 777, "k": 1001} for each in ("fp8", "nvfp4")]),
    "moe": ("num_tokens", LAYERS),
    "wide": (
        "num_tokens",
        [{**WIDE, "op_name": f"moe_{phase}", "distribution": "power_law_0.6"} for phase in ("context", "generation")],
    ),
    "context": (
        "isl",
        [{**OF, **HEADS, "op_name": "context_attention", "attn_dtype": "bfloat16", "batch_size": 3, "step": 0}],
    ),
    "generation": (
        "step",
        [{**OF, **HEADS, "op_name": "generation_attention", "attn_dtype": "fp8", "batch_size": 3, "isl": 1}],
    ),
    "mla_context": ("isl", [{**OF, **MLA, "op_name": "mla_context", "batch_size": 5, "step": 0}]),
    "mla_generation": ("step", [{**OF, **MLA, "op_name": "mla_generation", "batch_size": 5, "isl": 1}]),
    "mla_module": (
        "isl",
        [{**OF, **MLA, "op_name": "mla_context", "gemm_type": "fp8_block", "batch_size": 5, "step": 0}],
    ),
    "mla_generation_module": (
        "step",
        [{**OF, **MLA, "op_name": "mla_generation_module", "gemm_type": "nvfp4", "batch_size": 5, "isl": 1}],
    ),
    "nccl": (
        "message_size",
        [
            {"nccl_dtype": "half", "op_name": each, "kernel_source": "NCCL", "num_gpus": 6}
            for each in ("alltoall", "all_gather")
        ],
    ),
    "all_to_all": (
        "num_tokens",
        [
            {**OF, **LAYER, "op_name": f"alltoall_{each}", "moe_dtype": "fp8", "distribution": "balanced"}
            for each in ("prepare", "dispatch", "combine", "combine_low_precision")
        ],
    ),
    "all_reduce": ("message_size", [{**OF, "op_name": "all_reduce", "allreduce_dtype": "bfloat16", "num_gpus": 16}]),
}


@pytest.fixture(scope="module")
def shipped() -> KernelFile:
    return read_kernels(find_kernels("kernels/h200_sxm.json"))


@pytest.fixture(scope="module")
def of_a_domain() -> KernelFile:
    return read_kernels(find_kernels("kernels/gb200.json"))


@pytest.mark.parametrize("name", INVENTED)
def test_every_kind_is_predicted_on_what_nobody_measured(name, shipped, of_a_domain, tmp_path):
    size, rows = INVENTED[name]
    # SGLang's all-reduce, launched kernel by kernel, has a floor: measured, 1 MB takes 1.2 times as long as 256 bytes.
    sizes = (1, 3, 100, 5000, 2**27 if size == "message_size" else 524288)
    table = read_table(written(tmp_path / "rows.csv", [{**row, size: each} for row in rows for each in sizes]), False)
    found = predict(table, of_a_domain if name == "all_to_all" else shipped)
    assert np.isfinite(found.seconds).all()
    assert (found.lower > 0).all()
    assert (found.lower <= found.seconds).all()
    assert (found.seconds <= found.upper).all()
    told = found.seconds.reshape(len(rows), len(sizes))
    assert (np.diff(told) > -1e-3 * told[:, 1:]).all()  # more is never sooner
    assert (told[:, -1] > 1.3 * told[:, 0]).all()
    if "framework" in rows[0] and name != "wide":
        assert "stands in, its interval may not hold" in found.notes[0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"moe_ep_size": 7}, "num_experts is no multiple of moe_ep_size in row 1, and 6 rows are so"),
        ({"topk": 97}, "topk is above num_experts in row 1"),
        ({"distribution": "power_law_1.01_eplb"}, "distribution is 'power_law_1.01_eplb', expected balanced"),
    ],
)
def test_layers_that_no_rank_can_have_are_refused(changed, message, tmp_path):
    path = written(tmp_path / "moe.csv", [{**row, "num_tokens": 4, **changed} for row in LAYERS])
    with pytest.raises(OptionError, match=message):
        read_table(path, timed=False)


def test_an_operation_without_a_model_is_named(tmp_path):
    rows = [
        {**row, "message_size": 8, "op_name": name} for row in INVENTED["nccl"][1] for name in ("alltoall", "broadcast")
    ]
    with pytest.raises(OptionError, match="op_name is 'broadcast', expected one of all_reduce, all_gather"):
        read_table(written(tmp_path / "nccl.csv", rows), timed=False)
    rows = [{**row, "num_tokens": 8, "op_name": "scatter"} for row in LAYERS]
    with pytest.raises(OptionError, match="op_name is 'scatter', which has no model; leave the table out"):
        read_table(written(tmp_path / "scatter.csv", rows), timed=False)


def test_an_all_to_all_of_more_ranks_takes_no_less(of_a_domain, tmp_path):
    """All choices on ranks of their own from eight ranks on, so that 64 send little more than 32 do."""
    rows = [
        {**DEEPSEEK, "framework": "TRTLLM", "kernel_source": "NVLinkTwoSided", "moe_dtype": "nvfp4",
         "op_name": f"alltoall_{operation}", "distribution": "balanced", "num_tokens": 4096, "moe_ep_size": ranks}
        for operation in ("dispatch", "combine") for ranks in (8, 16, 32, 64)
    ]  # fmt: skip
    found = predict(read_table(written(tmp_path / "rows.csv", rows), False), of_a_domain)
    told = found.seconds.reshape(2, 4)
    assert not found.notes
    assert (np.diff(told) > 0).all()
    assert (told[:, 3] < 1.15 * told[:, 2]).all()


def test_columns_are_written_as_they_are_read(tmp_path):
    columns = {"a": np.array([1, 2]), "b": np.array(["x", "y"])}
    for name in ("rows.parquet", "rows.csv"):
        write_columns(tmp_path / name, columns)
    assert (tmp_path / "rows.csv").read_text().split() == ["a,b", "1,x", "2,y"]
    from pyarrow import parquet

    assert parquet.read_table(tmp_path / "rows.parquet").to_pydict() == {"a": [1, 2], "b": ["x", "y"]}
