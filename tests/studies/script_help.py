"""What scripts print with `--help`: each in a process of its own, forked from one that has loaded what they need.

To load it takes a script seconds, and there are many. A process for each keeps what it imports and sets to itself.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

SERVER = """
import gc, importlib, json, os, pkgutil, runpy, sys, traceback
import matplotlib.pyplot
import jaxmoe

def run(script, folder):
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv[:] = [script, "--help"]
    sys.path[0] = os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for module in pkgutil.walk_packages(jaxmoe.__path__, "jaxmoe."):
    importlib.import_module(module.name)
gc.freeze()
for line in sys.stdin:
    if (child := os.fork()) == 0:
        code = run(*json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # to take apart all that was loaded takes longer than the rest
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Help(NamedTuple):
    """How a script ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class HelpServer:
    """Runs scripts with `--help`, each in an empty folder."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", SERVER]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def of(self, script: Path, folder: Path) -> Help:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([os.fspath(script), os.fspath(folder)]) + "\n")
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        return Help(code, *(folder.with_name(f"{folder.name}.{name}").read_text() for name in ("out", "err")))

    def close(self) -> None:
        self._server.communicate()
