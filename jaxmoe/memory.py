"""Memory of the machine: how much a run may take, and how much it took."""

import os
import re
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def device_memory() -> float:
    """Memory of the devices, or of the machine where they share its own, B."""
    import jax  # not loaded for commands that only tell what they took

    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_limit" in each for each in stats):
        return float(sum(each["bytes_limit"] for each in stats))
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def peak_memory() -> int:
    """The most memory that this process has had so far, B."""
    if _STATUS.exists():  # Linux; what getrusage tells there includes the process that started this one
        found = re.search(r"^VmHWM:\s*(\d+) kB$", _STATUS.read_text(), re.M)
        if found is not None:
            return int(found[1]) * 1024
    import resource  # not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
