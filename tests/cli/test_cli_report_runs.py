"""`jaxmoe report A B`: times of runs side by side, what they differ in, and one clear error for what is none."""

import json
import re

import pytest
from PIL import Image
from report_folders import write_evaluated, write_sweep


def change(folder, edit):
    """Edit the summary of a folder; gives the folder."""
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    edit(summary)
    path.write_text(json.dumps(summary))
    return folder


def write_simulated(folder, total_s):
    folder.mkdir(parents=True)
    runs = {"static": {"mean": {"total_s": total_s}, "limit": "compute"}}
    summary = {"command": "simulate", "scenario": {"name": "by hand"}, "runs": runs}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def pair(tmp_path):
    """Two runs: `tp` takes 14 and 28 µs under its best exchange, `ep` 12 in both."""

    def slower(summary):
        summary["scenario"]["hardware"]["link"]["bandwidth_GB_per_s"] = 20
        summary["scenario"]["model"] = {"top_k": 2}
        summary["strategies"]["tp"]["mean"]["best_total_s"] *= 2

    return write_evaluated(tmp_path / "near"), change(write_evaluated(tmp_path / "far"), slower)


def table_of(page, title):
    """Texts of head and rows of a table."""
    text = page.read_text(encoding="utf-8").split(f"<h3>{title}")[1].split("</table>")[0]
    head = re.findall(r'<button type="button">(.*?)</button>', text)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr><td.*?</tr>", text)]
    return head, rows


def refused(result, *expected):
    assert result.exit_code == 2, result.output
    assert result.stderr.count("error:") == 1
    assert "Traceback" not in result.stderr
    told = " ".join(result.stderr.split())
    for text in expected:
        assert text in told


def test_two_runs_have_a_column_each_and_their_ratio(run, pair):
    near, far = pair
    result = run("report", near, far)
    assert result.exit_code == 0, result.output
    page = near / "compared.html"
    assert result.stdout.strip() == str(page)
    head, rows = table_of(page, "Time of a layer under the best exchange")
    assert head == ["", "near", "far", "far: times as long as near"]
    assert [[name, *map(float, numbers)] for name, *numbers in rows] == [["tp", 14, 28, 2], ["ep", 12, 12, 1]]
    assert table_of(page, "The fastest of each run")[1] == [
        ["near", "ep", "12.00", "-", "-"],
        ["far", "ep", "12.00", "-", "-"],
    ]


def test_only_keys_that_differ_are_told(run, pair):
    near, far = pair
    assert run("report", near, far).exit_code == 0
    head, rows = table_of(near / "compared.html", "Keys that differ")
    assert head == ["key", "near", "far"]
    assert rows == [["hardware.link.bandwidth_GB_per_s", "10", "20"], ["model.top_k", "-", "2"]]
    assert "do not have the same layers" not in (near / "compared.html").read_text(encoding="utf-8")


def test_runs_of_other_layers_are_told(run, pair):
    change(pair[1], lambda summary: summary.update(layer_ids=[3]))
    assert run("report", *pair).exit_code == 0
    assert "do not have the same layers" in (pair[0] / "compared.html").read_text(encoding="utf-8")


def test_a_strategy_of_one_run_has_a_dash_in_the_other(run, pair):
    near, far = pair
    change(far, lambda summary: summary["strategies"]["ep"].update(comparable=False))
    change(near, lambda summary: summary["strategies"].update(tuned=summary["strategies"]["ep"]))
    assert run("report", near, far).exit_code == 0
    rows = {name: numbers for name, *numbers in table_of(near / "compared.html", "Time of a layer")[1]}
    assert rows["ep"] == ["12.00", "-", "-"]
    assert rows["tuned"] == ["12.00", "-", "-"]


def test_three_runs_of_one_name_are_told_apart(run, tmp_path):
    folders = [write_evaluated(tmp_path / name / "run") for name in "abc"]
    assert run("report", *folders, "--out", tmp_path / "page.html").exit_code == 0
    head, _ = table_of(tmp_path / "page.html", "Time of a layer")
    assert head[1:4] == ["a/run", "b/run", "c/run"]


def test_pictures_of_both_runs_stand_side_by_side(run, pair, tmp_path):
    for folder, colour in zip(pair, ("red", "blue"), strict=True):
        Image.new("RGB", (60, 40), colour).save(folder / "stages.png")
    Image.new("RGB", (60, 40)).save(pair[0] / "alone.png")
    assert run("report", *pair).exit_code == 0
    page = (pair[0] / "compared.html").read_text(encoding="utf-8")
    shown = re.findall(r'<figure id="([^"]+)" class="half"><a href="([^"]+)">', page)
    assert shown == [("picture-stages-0", "stages.png"), ("picture-stages-1", "../far/stages.png")]
    assert "alone" not in page  # a picture of one run has nothing beside it


def test_systems_are_compared_too(run, tmp_path):
    folders = [write_simulated(tmp_path / "one", 2e-4), write_simulated(tmp_path / "two", 1e-4)]
    assert run("report", *folders).exit_code == 0
    assert table_of(folders[0] / "compared.html", "Time of an iteration")[1] == [["static", "200.0", "100.0", "0.5000"]]


def test_what_cannot_be_compared_is_one_clear_error(run, pair, tmp_path):
    near, far = pair
    (empty := tmp_path / "empty").mkdir()
    refused(run("report", near, tmp_path / "none"), "there is no folder", "none")
    refused(run("report", near, empty), str(empty), "holds no summary.json")
    refused(run("report", near, near), "given twice")
    refused(run("report", near, write_simulated(tmp_path / "other", 1.0)), "other has systems", "near has strategies")
    refused(run("report", near, write_sweep(tmp_path / "swept")), "swept holds results of jaxmoe sweep")
    change(far, lambda summary: summary.pop("strategies"))
    refused(run("report", near, far), "is not as jaxmoe writes it", "strategies")
    assert not [*tmp_path.rglob("*.html")]
