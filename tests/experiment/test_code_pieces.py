"""Which pieces of code count as run, and what changes them: a program of its own in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmoe.experiment.code_pieces import digests

OWN = """
LIMIT, UNUSED = 3, 4
OTHER = 5


class Shape:
    rows: "Field" = LIMIT
    def used(self):
        return self.rows
    def unused(self):
        return OTHER


class Field:
    pass


@staticmethod
def compiled(x):
    return x


def called(x):
    return compiled.__func__(x) + Shape().used()


def unused(x):
    return [each for each in x if OTHER]
"""
ASKED = """
import json, sys, threading
from pathlib import Path
from jaxmoe.experiment import code_pieces
import own
if "{how}" != "unwatched":
    code_pieces.watch()
if "{how}" == "stopped":
    code_pieces.stop()
thread = threading.Thread(target=own.called, args=(1,))
thread.start()
thread.join()
(ran,) = code_pieces.digests_of_what_ran([Path(own.__file__).parent]).values()
print(json.dumps(sorted(ran)))
"""


def ran(folder: Path, how: str = "watched") -> set[str]:
    script = f"import sys; sys.path.insert(0, {str(folder)!r})\n{ASKED.format(how=how)}"
    return set(json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    return folder


@pytest.fixture(scope="module")
def seen(folder):
    return ran(folder)


def gone(folder: Path, seen: set[str], old: str, new: str) -> bool:
    """Whether a piece that ran is no longer there after a change."""
    assert old in OWN
    path = folder / "changed.py"
    path.write_text(OWN.replace(old, new))
    return not seen <= digests([path])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT, UNUSED = 3", "LIMIT, UNUSED = 2"),
        ("= LIMIT\n", "= 7\n"),
        ("return x\n", "return 2 * x\n"),
        (" + ", " - "),
    ],
    ids=["a constant that a field names", "a field", "a decorated function that is named", "a function that ran"],
)
def test_what_ran_or_is_named_by_what_ran_counts(folder, seen, old, new):
    assert gone(folder, seen, old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("OTHER = 5", "OTHER = 6"),
        ("return OTHER", "return 2"),
        ("if OTHER]", "if x]"),
        ("class Field:\n    pass", "class Field:\n    x = 1"),
        ("def called(x):\n", 'def called(x):\n    """Words."""\n    # more words\n'),
    ],
    ids=["a constant that nobody names", "a method", "a function", "a type of a field", "words"],
)
def test_what_did_not_run_and_words_do_not_count(folder, seen, old, new):
    assert not gone(folder, seen, old, new)


def test_pieces_may_move(folder, seen):
    (folder / "moved.py").write_text("import os\n\n" + OWN.replace(OWN[OWN.index("@static") :], ""))
    (folder / "rest.py").write_text(OWN[OWN.index("@static") :])
    assert seen <= digests([folder / "moved.py", folder / "rest.py"])


@pytest.mark.parametrize("how", ["unwatched", "stopped"])
def test_all_counts_where_functions_were_not_watched(folder, how):
    assert ran(folder, how) == digests([folder / "own.py"])
