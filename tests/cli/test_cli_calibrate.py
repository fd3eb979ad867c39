"""`jaxmoe calibrate` on made-up measurements: a machine, a table, a picture, and clear errors."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.cli.comparison_output import kernel_bytes_notes
from jaxmoe.config import load_hardware, load_scenario

MACHINE = "mesh_shape: [1, 2]\ndie: {compute_TFLOPs_per_s: 5}\nlink: {bandwidth_GB_per_s: 50, latency_ns: 100}\n"


def test_a_machine_is_written_with_what_was_fitted(run, tmp_path, out):
    machine, csv = tmp_path / "machine.yaml", tmp_path / "ping.csv"
    machine.write_text(MACHINE + "router: {switching: cut_through}\n")
    size = np.geomspace(1e3, 1e8, 40)
    lines = [f"0,1,{amount},{300e-9 + amount / 20e9}" for amount in size]
    csv.write_text("\n".join(["source,destination,bytes,seconds", *lines]))
    done = run("calibrate", machine, "--measured", csv, "--out", out)
    assert done.exit_code == 0, done.output
    link = load_hardware(out / "machine.yaml").link
    assert (round(link.bandwidth_GB_per_s, 2), round(link.latency_ns, 1)) == (20, 300)
    assert "die.compute_TFLOPs_per_s: nothing measured depends on it" in " ".join(done.output.split())
    summary = json.loads((out / "summary.json").read_text())
    assert summary["errors"]["after"]["held_out"]["ping"] < 1e-3 < 0.5 < summary["errors"]["before"]["seen"]["ping"]
    assert (out / "calibration.png").exists()

    again = run("calibrate", machine, "--measured", csv, "--measured", csv, "--out", out / "twice")
    assert (again.exit_code, (out / "twice").exists()) == (2, False)
    assert "two files have measurements of ping; join them" in " ".join(again.output.split())


NODE = "kind: switch\nnodes: 2\ndie: {compute_TFLOPs_per_s: 989}\nlink: {bandwidth_GB_per_s: 450}\n"


def experts(kernel: str = "moe_torch_flow_cutlass") -> dict[str, list]:
    """Columns of a made-up fused kernel: 20 us and the bytes of all experts at 2 TB/s, or FLOPs at 400 TFLOP/s."""
    rows = []
    for hidden, inner, experts in ((2048, 768, 128), (4096, 1536, 128), (7168, 2048, 256), (4096, 14336, 8)):
        for tokens in (1, 16, 256, 4096):
            touched = min(experts, 2 * tokens)
            seconds = 20e-6 + 3 * hidden * inner * max(2 * touched / 2e12, 4 * tokens / 4e14)
            rows.append((tokens, hidden, inner, 2, experts, 1, 1, "balanced", 1e3 * seconds))
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    columns = {
        name: list(part)
        for name, part in zip((*names, "distribution", "latency"), zip(*rows, strict=True), strict=True)
    }
    same = {"framework": "TRTLLM", "op_name": "moe", "kernel_source": kernel, "moe_dtype": "bfloat16"}
    return columns | {name: [value] * len(rows) for name, value in same.items()}


def gemms() -> dict[str, list]:
    """Products of 16 shapes at a tenth of the rate that an H100 has."""
    rows = [(m, n, 1024) for m in (16, 128, 1024, 8192) for n in (256, 512, 1024, 2048)]
    columns = {name: [row[at] for row in rows] for at, name in enumerate(("m", "n", "k"))}
    columns["latency"] = [1e3 * (5e-6 + 2 * m * n * k / 1e14) for m, n, k in rows]
    same = {"framework": "TRTLLM", "op_name": "gemm", "kernel_source": "cublas", "gemm_dtype": "bfloat16"}
    return columns | {name: [value] * len(rows) for name, value in same.items()}


def csv_of(folder: Path) -> Path:
    path = folder / "ping.csv"
    path.write_text("source,destination,bytes,seconds\n0,1,8,1e-6\n0,1,80,2e-6\n")
    return path


def test_kernels_of_a_folder_are_fitted_and_predict_a_table(run, tmp_path, out):
    import pyarrow as pa
    from pyarrow import parquet

    machine, folder = tmp_path / "machine.yaml", tmp_path / "h100_sxm" / "moe" / "trtllm"
    machine.write_text(NODE)
    folder.mkdir(parents=True)
    parquet.write_table(pa.table(experts()), folder / "moe_perf.parquet")
    done = run("calibrate", machine, "--measured", tmp_path / "h100_sxm", "--out", out)
    assert done.exit_code == 0, done.output
    (scores,) = json.loads((out / "summary.json").read_text())["errors"]
    assert (scores["kind"], scores["backend"], scores["rows"]) == ("moe", "trtllm", 16)
    assert (out / "kernels.csv").exists()
    assert (out / "calibration.png").exists()
    gemm = load_hardware(out / "machine.yaml").die.gemm
    assert (gemm.kind, gemm.backend, gemm.precision) == ("fitted", "trtllm", "bfloat16")

    found = out / "predicted.csv"
    done = run("calibrate", "predict", out / "machine.yaml", folder / "moe_perf.parquet", "--out", found)
    assert done.exit_code == 0, done.output
    header, first, *_ = found.read_text().splitlines()
    assert header.endswith("predicted_latency,predicted_low,predicted_high")
    told = dict(zip(header.split(","), first.split(","), strict=True))
    assert told["num_tokens"] == "1"
    assert told["framework"] == "TRTLLM"
    assert float(told["predicted_low"]) <= float(told["predicted_latency"]) <= float(told["predicted_high"])
    assert abs(float(told["predicted_latency"]) / float(told["latency"]) - 1) < 0.5

    # Another kind is measured: kernels of experts stay what they were.
    products = tmp_path / "later" / "h100_sxm" / "gemm" / "trtllm"
    products.mkdir(parents=True)
    parquet.write_table(pa.table(gemms()), products / "gemm_perf.parquet")
    done = run("calibrate", out / "machine.yaml", "--measured", tmp_path / "later" / "h100_sxm", "--out", out / "both")
    assert done.exit_code == 0, done.output
    kinds = {kernel["kind"]: kernel for kernel in json.loads((out / "both" / "kernels.json").read_text())["kernels"]}
    (before,) = json.loads((out / "kernels.json").read_text())["kernels"]
    assert [*kinds] == ["gemm", "moe"]
    assert kinds["moe"] == before
    assert load_hardware(out / "both" / "machine.yaml").die.gemm.path.endswith("kernels.json")

    parquet.write_table(pa.table(experts() | {"moe_dtype": ["fp8"] * 16}), tmp_path / "fp8.parquet")
    done = run("calibrate", "predict", out / "machine.yaml", tmp_path / "fp8.parquet", "--out", tmp_path / "no.csv")
    assert done.exit_code == 0, done.output
    assert "moe_dtype fp8, framework trtllm" in " ".join(done.output.split())
    assert "stands in, its interval may not hold" in " ".join(done.output.split())

    # A GPU that was hardly measured: half as fast as the data sheet's ratios say.
    other = tmp_path / "b200_sxm" / "moe" / "trtllm"
    other.mkdir(parents=True)
    slow = experts() | {"latency": [2 * each * 3.35 / 7.7 for each in experts()["latency"]]}
    parquet.write_table(pa.table(slow), other / "moe_perf.parquet")
    done = run(
        "calibrate",
        machine,
        "--measured",
        tmp_path / "b200_sxm",
        "--base",
        out / "machine.yaml",
        "--out",
        out / "moved",
    )
    assert done.exit_code == 0, done.output
    kernels = json.loads((out / "moved" / "kernels.json").read_text())
    assert kernels["system"] == "b200_sxm"
    done = run("calibrate", machine, "--measured", csv_of(tmp_path), "--base", machine, "--out", out / "no")
    assert done.exit_code == 2
    assert "--base: moves measured kernels, of which there is no folder" in " ".join(done.output.split())


def test_what_is_no_folder_of_kernels_is_one_message(run, tmp_path, out):
    machine = tmp_path / "machine.yaml"
    machine.write_text(NODE)
    (tmp_path / "z9").mkdir()
    done = run("calibrate", machine, "--measured", tmp_path / "z9", "--out", out)
    assert (done.exit_code, out.exists()) == (2, False)
    assert "the folder is named z9, expected one of h100_sxm" in " ".join(done.output.split())
    done = run("calibrate", "predict", machine, tmp_path / "rows.csv", "--out", tmp_path / "found.csv")
    assert done.exit_code == 2
    assert "has no fitted kernels at die.gemm; calibrate it with --measured FOLDER" in " ".join(done.output.split())


@pytest.mark.parametrize(("own", "noted"), [(2, False), (1, True)])
def test_a_kernel_of_other_bytes_than_the_model_s_is_noted(configs, own, noted):
    changed = ["hardware=h200_sxm_8", f"model.bytes.experts={own}"]
    notes = kernel_bytes_notes(load_scenario(configs / "scenarios" / "quickstart.yaml", changed))
    assert len(notes) == noted
    if noted:
        assert "experts in bfloat16, of 2 bytes a weight, but the model's have 1" in notes[0]
