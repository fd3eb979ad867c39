"""Record golden files on purpose: `python -m tests.golden.record [NAME ...]`, of all cases or those named.

Run from the project's folder. README.md says when this may be done.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import conftest  # the settings under which tests compile, before JAX looks for devices

conftest.pytest_configure()

from . import case, cases, store  # noqa: E402


def main(names: list[str]) -> None:
    """Record the families of these names."""
    for family, known in cases.FAMILIES.items():
        if names and family not in names:
            continue
        arrays: store.Arrays = {}
        for name, one in known.items():
            begin = time.perf_counter()
            arrays |= store.named(case.recorded(one), f"{name}:")
            print(f"{family} {name}: {time.perf_counter() - begin:.1f} s", flush=True)
        path = store.write(family, arrays)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
