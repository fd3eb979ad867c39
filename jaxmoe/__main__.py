"""The command `jaxmoe`, also as `python -m jaxmoe`."""

import gc
import os
import sys

from jaxmoe.cli.early_end import INTERRUPTED


def main() -> None:
    """Run the command line of this process; Ctrl-C ends it also while it is loaded."""
    # JAX traces into very many objects that stay, at all of which the garbage collector would look again and again.
    gc.set_threshold(50_000, 10, 10)
    try:
        from jaxmoe.cli.app import main
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was written\n")
        os._exit(INTERRUPTED)
    main()


if __name__ == "__main__":
    main()
