"""Peak memory of this process."""

import resource
import sys


def peak_memory_mb() -> float:
    """Largest resident size so far, in MiB; of the whole process, so of every job a sweep ran in it before."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)
