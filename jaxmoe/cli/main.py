"""Entry of the command `jaxmoe`."""

import os
import sys

from jaxmoe.cli.app import app
from jaxmoe.cli.session import INTERRUPTED


def main() -> None:
    """Run the command line of this process."""
    # GPUs multiply float32 matrices with 10-bit mantissas unless told otherwise: an error of 1e-3.
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            # All files are closed by now. A compilation cut short can crash the shutdown of the interpreter.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise
