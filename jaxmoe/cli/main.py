"""Entry of the command `jaxmoe`."""

import os
import sys

from jaxmoe.cli.app import app
from jaxmoe.cli.interrupts import INTERRUPTED


def main() -> None:
    """Run the command line of this process."""
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            # All files are closed by now. A compilation cut short can crash Python's own way out.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise
