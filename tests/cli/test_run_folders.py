"""One run at a time in a folder of results, and no mixture of the results of several."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
from typer import Exit

from jaxmoe.cli.session import session
from jaxmoe.errors import InputError
from jaxmoe.run_folders import RECORD, locked


def names(folder):
    return sorted(file.name for file in folder.iterdir())


@pytest.fixture
def write(out):
    """A command that writes these files, then its summary unless it is stopped."""

    def command(name, *files, stopped=None, **options):
        with session(out, False, name, **options) as (folder, _):
            for file in files:
                folder.target(file).write_text(name)
            if stopped is not None:
                raise stopped
            folder.write_json("summary.json", {"command": name})

    return command


def failure(capsys, ended):
    assert ended.value.exit_code == 2
    return capsys.readouterr().err


def test_the_summary_lists_the_files(write, out):
    write("plan show", "b.png", "a.png")
    assert (
        json.loads((out / "summary.json").read_text())["result_files"]
        == ["a.png", "b.png", "summary.json"]
        == names(out)
    )


def test_the_same_command_again_leaves_nothing_of_before(write, out):
    write("plan show", "a.png", "b.png")
    (out / "b.png.part").touch()  # of a crash
    (out / "notes.txt").touch()
    write("plan show", "b.png")
    assert names(out) == ["b.png", "notes.txt", "summary.json"]


def test_a_run_that_fails_before_its_first_file_leaves_results_alone(write, out):
    write("plan show", "a.png")
    with pytest.raises(Exit, match="2"):
        write("plan show", stopped=InputError("bad"))
    assert names(out) == ["a.png", "summary.json"]


def test_results_of_another_command_are_refused(write, out, capsys):
    write("tune", "plan.npz")
    with pytest.raises(Exit) as ended:
        write("evaluate", "loads.npz")
    assert f"{out} has results of jaxmoe tune, which" in failure(capsys, ended)
    assert names(out) == ["plan.npz", "summary.json"]


def test_files_of_the_user_are_refused(write, out, capsys):
    out.mkdir(parents=True)
    (out / "plan.npz").write_text("mine")
    with pytest.raises(Exit) as ended:
        write("tune", "plan.npz")
    assert "plan.npz is there, and no run has listed it; move it" in failure(capsys, ended)
    assert (out / "plan.npz").read_text() == "mine"
    (out / "summary.json").write_text('{"mine": 1}')
    with pytest.raises(Exit) as ended:
        write("tune", "other.npz")
    assert "summary.json is not of jaxmoe" in failure(capsys, ended)


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("loads.npz", "evaluate quickstart"),
        ("loads.npz", "tune quickstart"),
        ("plan.npz", "tune quickstart"),
        ("loads.npz", "network nmp_4x4 --traffic t.npz"),
        ("profile.csv", "network profile nmp_4x4"),
        ("machine.yaml", "calibrate nmp_4x4 --measured m.csv"),
        ("process.npz", "trace fit t.npz"),
        ("trace.npz", "trace synth qwen3-30b-a3b"),
        ("requests.csv", "serve served/qwen3-30b-a3b_rtxpro6000_2"),
        ("placement.json", "plan place l.npz --slots 8 --ranks 2 --to sglang"),
        ("placement.json", "plan advise l.npz --machine nmp_4x4 --model tiny --to sglang"),
        ("placement.npz", "plan place l.npz --slots 8 --ranks 2 --to plan --machine nmp_4x4 --model tiny"),
    ],
)
def test_files_of_the_user_are_refused_before_any_work(run, out, file, command):
    """Before what the command reads, which is not there."""
    out.mkdir(parents=True)
    (out / file).write_text("mine")
    result = run(*command.split(), "--out", out)
    assert result.exit_code == 2, result.output
    assert f"{out / file} is there, and no run has listed it" in result.stderr
    assert names(out) == [file]


def test_pages_about_earlier_results_go_with_them(write, out):
    write("tune", "plan.npz")
    for page in ("report.html", "compared.html"):
        (out / page).touch()
    with pytest.raises(Exit, match="2"):
        write("tune", stopped=InputError("bad"))
    assert "report.html" in names(out)
    write("tune", "plan.npz")
    assert names(out) == ["plan.npz", "summary.json"]
    (out / "report.html").touch()
    write("tune", "plan.npz", resumes=True)
    assert names(out) == ["plan.npz", "summary.json"]


def test_a_page_that_is_of_no_results_stays(write, out):
    out.mkdir(parents=True)
    (out / "report.html").touch()
    write("tune", "plan.npz")
    assert "report.html" in names(out)


def test_names_in_a_summary_lead_to_no_file_elsewhere(write, out):
    write("tune", "plan.npz")
    (out.parent / "mine.txt").touch()
    listed = {"command": "tune", "result_files": ["../mine.txt", "..", ".", "", "plan.npz"]}
    (out / "summary.json").write_text(json.dumps(listed))
    write("tune", "other.npz")
    assert (out.parent / "mine.txt").exists()
    assert names(out) == ["other.npz", "summary.json"]


def test_results_without_a_list_are_written_over(write, out):
    write("tune", "plan.npz")
    (out / "summary.json").write_text('{"command": "tune"}')
    write("tune", "plan.npz")
    assert names(out) == ["plan.npz", "summary.json"]


def test_a_run_that_was_stopped_can_be_run_again(write, out):
    with pytest.raises(Exit, match="130"):
        write("tune", "plan.npz", "a.png", stopped=KeyboardInterrupt())
    with pytest.raises(Exit, match="2"):  # fails before its first file
        write("tune", stopped=InputError("bad"))
    write("tune", "plan.npz")
    assert names(out) == ["plan.npz", "summary.json"]


def test_what_the_command_reads_stays(write, out):
    write("trace convert", "trace.npz")
    write("trace convert", "trace.json", given=[out / "trace.npz"])
    assert names(out) == ["summary.json", "trace.json", "trace.npz"]


def test_a_command_that_resumes_keeps_what_is_there(write, out):
    with pytest.raises(Exit, match="130"):
        write("sweep", "points", "manifest.json", stopped=KeyboardInterrupt(), resumes=True)
    write("sweep", "points", resumes=True)
    assert names(out) == ["manifest.json", "points", "summary.json"]
    assert json.loads((out / "summary.json").read_text())["result_files"] == names(out)


HOLDER = """
import sys, time
from pathlib import Path
from jaxmoe.cli.session import command_line, session
command_line.set("jaxmoe tune mine.yaml")
with session(Path(sys.argv[1]), False, "tune") as (folder, _):
    folder.target("plan.npz").touch()
    print("ready", flush=True)
    time.sleep(600)
"""


def test_another_process_is_named_and_taken_over_once_it_is_dead(write, out, capsys):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(out)], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(Exit) as ended:
            write("tune", "plan.npz")
        said = failure(capsys, ended)
        assert f"another run is writing to {out}: process {holder.pid} on " in said
        assert "jaxmoe tune mine.yaml; wait for it to end, or give another folder" in said
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert names(out) == [RECORD, "plan.npz"]
    write("tune", "a.png")
    assert names(out) == ["a.png", "summary.json"]


def test_a_record_that_was_cut_short_is_none(write, out):
    out.mkdir(parents=True)
    (out / RECORD).write_text('{"process": 1, "fi')
    write("tune", "a.png")
    assert names(out) == ["a.png", "summary.json"]


def test_a_lock_that_is_held_can_be_taken_again_within(tmp_path):
    with locked(tmp_path) as one, locked(tmp_path) as other:
        assert one is other
    assert names(tmp_path) == []
    with locked(tmp_path):
        shutil.rmtree(tmp_path)  # whoever removes the folder does no harm


def test_two_commands_in_one_folder(run, tmp_path, out):
    plan = tmp_path / "map.json"
    plan.write_text('{"physical_to_logical_map": [[0, 1], [1, 0]]}')
    given = (plan, "--ranks", 2, "--out", out)
    assert run("plan", "show", *given).exit_code == 0
    assert names(out) == ["slots.png", "summary.json"]
    result = run("plan", "convert", *given, "--to", "eplb")
    assert (result.exit_code, names(out)) == (2, ["slots.png", "summary.json"])
    assert "has results of jaxmoe plan show" in result.stderr
    assert run("plan", "show", *given).exit_code == 0


def test_a_run_that_was_killed_before_its_first_file_keeps_nobody_out(write, out):
    out.mkdir(parents=True, exist_ok=True)
    (out / RECORD).write_text(json.dumps({"command": "tune", "result_files": []}))
    write("plan show", "a.png")
    assert names(out) == ["a.png", "summary.json"]
