"""Python's search for garbage, out of the way while modules are imported."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def none_to_collect() -> Iterator[None]:
    """What the block makes stays, so nothing is looked for in it, then or ever.

    Importing torch and transformers makes half a million objects; to look through them again and
    again takes a fifth of that time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
