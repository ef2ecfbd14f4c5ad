"""One thread a worker: the networks here are so small that threads only get in each other's way."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
