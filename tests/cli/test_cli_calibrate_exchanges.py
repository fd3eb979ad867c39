"""`jaxmoe calibrate` and `calibrate predict` on made-up tables of DeepEP."""

import numpy as np

from jaxmoe.experiment.measured_kernels.tables import write_columns


def test_exchanges_of_a_folder_are_fitted_and_predict_a_table(run, tmp_path, out):
    sizes = [16, 64, 256, 1024, 4096, 16384]
    sent = [tokens * 8 * 7168 / 2 / 45e9 * 1e6 for tokens in sizes]
    columns = {"num_token": sizes, "dispatch_avg_t_us": [20 + each for each in sent]}
    columns |= {"combine_avg_t_us": [20 + 2 * each for each in sent], "op_name": ["ll"] * 6, "version": ["1"] * 6}
    same = {"node_num": 2, "hidden_size": 7168, "num_topk": 8, "num_experts": 256}
    columns |= {name: [value] * 6 for name, value in same.items()}
    table = tmp_path / "h100_sxm" / "wideep_deepep_ll_perf.parquet"
    table.parent.mkdir()
    write_columns(table, {name: np.array(values) for name, values in columns.items()})
    done = run("calibrate", "h100_sxm_8", "--measured", table.parent, "--out", out)
    assert done.exit_code == 0, done.output
    assert {"exchanges.csv", "kernels_deepep.json", "kernels.json"} <= {path.name for path in out.iterdir()}
    # With the fitted machine and with the one that ships; columns stay, and bounds hold what is predicted.
    for machine in (out / "machine.yaml", "h100_sxm_8"):
        done = run("calibrate", "predict", machine, table, "--out", out / "predicted.csv")
        assert done.exit_code == 0, done.output
        header, *_, last = (out / "predicted.csv").read_text().splitlines()
        told = dict(zip(header.split(","), last.split(","), strict=True))
        assert told["num_token"] == "16384"
        low, middle, high = (float(told[f"predicted_{bound}combine_avg_t_us"]) for bound in ("low_", "", "high_"))
        assert low <= middle <= high
        assert abs(middle / float(told["combine_avg_t_us"]) - 1) < 0.15
    # An H800 has links of 200 GB/s inside a node for an H100's 450, and the same network.
    done = run("calibrate", "predict", "h800_8", table, "--out", out / "h800.csv")
    assert done.exit_code == 0, done.output
    slower = dict(zip(header.split(","), (out / "h800.csv").read_text().splitlines()[-1].split(","), strict=True))
    assert middle < float(slower["predicted_combine_avg_t_us"]) < 450 / 200 * middle
