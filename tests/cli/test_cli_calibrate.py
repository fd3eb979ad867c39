"""`jaxmoe calibrate` on made-up measurements: a machine, a table, a picture, and clear errors."""

import json

import numpy as np

from jaxmoe.config import load_hardware

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
