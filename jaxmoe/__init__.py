"""A differentiable, vectorised performance model of Mixture-of-Experts inference on meshes of chips."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import lazy_loader

__version__ = "0.1.0"
# What is named in `__init__.pyi` is imported when it is first used: the command line answers before JAX is loaded.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _keep_compiled_code() -> None:
    """Give Numba a folder of this process alone where neither the package nor the user's cache can be written.

    Without one it refuses to compile anything. A lasting one is set by NUMBA_CACHE_DIR.
    """
    own = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if "NUMBA_CACHE_DIR" in os.environ or any(_can_write(Path(folder)) for folder in (Path(__file__).parent, own)):
        return
    folder = tempfile.mkdtemp(prefix="jaxmoe-numba-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["NUMBA_CACHE_DIR"] = folder


def _can_write(folder: Path) -> bool:
    """Whether files can be made in a folder, which may first have to be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK)


_keep_compiled_code()
