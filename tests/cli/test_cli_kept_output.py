"""Tables as CSV and LaTeX, and the summary as JSON on standard output."""

import csv
import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml
from rich.table import Table

from jaxmoe.cli.comparison_output import new_table
from jaxmoe.cli.kept_output import as_csv, as_latex


def small_table() -> Table:
    table = new_table("mine & others [GB]", "strategy", ("weights", "least left\n(- not stated)"))
    table.add_column("exchange")
    table.add_row(r"a_b\[ray]", "1,234.5", "1.19x", "one in 2\ntwo_three in 1")
    table.add_row("[bold]tp[/]", "-", "0.10", "50 %, {~^}")
    return table


def test_csv_has_units_in_its_heads_and_plain_numbers():
    rows = list(csv.reader(as_csv(small_table()).splitlines()))
    assert rows == [
        ["strategy", "weights GB", "least left (- not stated) GB", "exchange"],
        ["a_b[ray]", "1234.5", "1.19", "one in 2; two_three in 1"],
        ["tp", "-", "0.10", "50 %, {~^}"],
    ]


def test_latex_has_rules_of_booktabs_and_escaped_names():
    text = as_latex(small_table())
    assert text.index(r"\toprule") < text.index("strategy &") < text.index(r"\midrule") < text.index(r"\bottomrule")
    assert r"\caption{mine \& others {[}GB{]}}" in text
    assert r"\begin{tabular}{lrrl}" in text
    assert r"a\_b{[}ray{]} & 1,234.5 & 1.19$\times$ & \begin{tabular}[c]{@{}l@{}}one in 2 \\ two\_three in 1" in text
    assert r"tp & - & 0.10 & 50 \%, \{\textasciitilde{}\textasciicircum{}\} \\" in text


def has_latex() -> bool:
    return bool(shutil.which("pdflatex") and shutil.which("kpsewhich")) and not subprocess.call(
        ["kpsewhich", "booktabs.sty"], stdout=subprocess.DEVNULL
    )


@pytest.mark.skipif(not has_latex(), reason="there is no LaTeX with booktabs")
def test_latex_compiles(tmp_path):
    (tmp_path / "tables.tex").write_text(as_latex(small_table()))
    head = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\\input{tables}\\end{document}"
    (tmp_path / "all.tex").write_text(head)
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "all.pdf").exists()


def test_json_alone_is_printed_and_tables_are_written(run, scenario, out, tmp_path):
    kept = ("--csv", tmp_path / "t.csv", "--latex", tmp_path / "t.tex", "--json")
    done = run("evaluate", scenario, "--layers", 3, *kept, "--out", out)
    assert done.exit_code == 0, done.output
    assert done.stdout == (out / "summary.json").read_text()
    told = json.loads(done.stdout)["strategies"]
    best = {row["strategy"]: row for row in csv.DictReader((tmp_path / "t.csv").open())}
    assert best.keys() == told.keys()
    (total,) = (head for head in best["tp"] if head.startswith("total "))
    unit = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3}[total.split()[1]]
    for name, row in best.items():
        if told[name]["comparable"]:
            assert float(row[total]) * unit == pytest.approx(told[name]["mean"]["best_total_s"], rel=1e-3)
    assert (tmp_path / "t.tex").read_text().count(r"\begin{table}") == len([*tmp_path.glob("t*.csv")]) == 2
    assert "limited by" not in done.stdout


@pytest.mark.usefixtures("rendered")
def test_pictures_are_pdf_too_and_the_same_bytes_again(run, scenario, out):
    found = []
    for more in (["--pdf"], ["--pdf"], []):
        done = run("evaluate", scenario, "--layers", 3, *more, "--out", out)
        assert done.exit_code == 0, done.output
        pictures = {path.stem for path in out.glob("*.png")}
        assert {path.stem for path in out.glob("*.pdf")} == (pictures if more else set())
        assert {*json.loads((out / "summary.json").read_text())["result_files"]} == {
            path.name for path in out.iterdir()
        }
        found.append({path.name: path.read_bytes() for path in out.glob("*.pdf")})
    assert found[0] == found[1]
    assert all(content.startswith(b"%PDF") for content in found[0].values())


@pytest.mark.parametrize("verb", ["simulate", "validate", "sweep", "tune"])
def test_every_verb_prints_its_summary(verb, run, scenario, out, tmp_path):
    given, more = scenario, ()
    if verb == "sweep":
        given = tmp_path / "study.yaml"
        given.write_text(yaml.safe_dump({"scenario": scenario.name, "axes": {"strategy": ["tp"]}}))
    if verb == "validate":
        more = ("--plan", "tp")
    if verb == "tune":
        more = ("--optimiser", "greedy", "--layers", 3)
    done = run(verb, given, *more, "--json", "--out", out)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["command"] == verb
    assert done.stdout == (out / "summary.json").read_text()


def test_the_shell_completes_verbs_and_options():
    for typed, wanted in (("jaxmoe ev", "evaluate"), ("jaxmoe plan ad", "advise"), ("jaxmoe tune --lat", "--latex")):
        words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_JAXMOE_COMPLETE": "complete_bash"}
        command = [sys.executable, "-c", "from jaxmoe.cli.app import app; app(prog_name='jaxmoe')"]
        done = subprocess.run(command, env=os.environ | words, capture_output=True, text=True)
        assert done.stdout.split() == [wanted], done.stderr


@pytest.mark.parametrize("option", ["--csv", "--latex"])
def test_a_file_that_cannot_be_written_is_told_before_any_work(option, run, scenario, out, tmp_path):
    for path, why in ((tmp_path, "it is a folder"), (tmp_path / "none" / "t", "there is no folder")):
        done = run("evaluate", scenario, option, path, "--out", out)
        assert done.exit_code == 2
        assert f"{option} is {path}" in done.stderr.replace("\n", "")
        assert why in done.stderr
        assert not out.exists()
