"""Settings of the whole suite."""

import gc
import os

from hypothesis import settings

# Small operators on shared cores: more threads only wait for each other. Before torch is imported,
# and for the processes that tests start, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("suite", deadline=None)  # others may use the machine
settings.load_profile("suite")


def pytest_collection_finish() -> None:
    """What is imported by now stays, so the many full collections to come needn't walk it."""
    gc.freeze()
