"""The command `jaxmoe`, also as `python -m jaxmoe`."""

import os
import sys

from jaxmoe.cli.early_end import INTERRUPTED


def main() -> None:
    """Run the command line of this process; Ctrl-C ends it also while it is loaded."""
    try:
        from jaxmoe.cli.app import main
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was written\n")
        os._exit(INTERRUPTED)
    main()


if __name__ == "__main__":
    main()
